"""Who can connect, what that demands, and which Host headers are answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.config.addresses import check_bind, host_names, is_local, only_local, read_address
from millpond.config.settings import Address, Config, Tls

NAMES = {"here": ["127.0.0.1", "::1"], "both": ["127.0.0.1", "192.0.2.1"], "far": ["192.0.2.1"]}


def resolver(name: str) -> list[str]:
    return NAMES.get(name, [])


def bound(*addresses: str, tls: bool = False, insecure: bool = False, hosts: tuple[str, ...] = ()) -> Config:
    return Config(
        data=Path("/pond"),
        bind=tuple(read_address(address, Path("/")) for address in addresses),
        tls=Tls(cert=Path("c"), key=Path("k")) if tls else Tls(),
        insecure_no_tls=insecure,
        allowed_hosts=hosts,
    )


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7410", Address("127.0.0.1", 7410)),
        ("127.0.0.1", Address("127.0.0.1", 7410)),
        ("LocalHost:0", Address("localhost", 0)),
        ("[::1]:80", Address("::1", 80)),
        ("[::]", Address("::", 7410)),
        ("queue.example.org:443", Address("queue.example.org", 443)),
        ("unix:/run/x.sock", Address(path="/run/x.sock")),
        ("unix:x.sock", Address(path="/base/x.sock")),
    ],
)
def test_addresses_are_read(text: str, address: Address) -> None:
    assert read_address(text, Path("/base")) == address


@pytest.mark.parametrize("text", ["127.0.0.1:7410", "[::1]:7410", "unix:/run/x.sock", "a.b:1"])
def test_an_address_is_shown_as_it_is_written(text: str) -> None:
    assert str(read_address(text, Path("/"))) == text


@pytest.mark.parametrize(
    "text",
    ["", "a b:1", "[::1", "[::1]x", "[127]:1", "a:", "a:-1", "a:1.5", "a:١", "-a:1", "unix:/a/", "unix:" + "x" * 108],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^is .*; "):
        read_address(text, Path("/"))


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("[::1]:1", True),
        ("[::ffff:127.0.0.1]:1", True),
        ("localhost:1", True),
        ("unix:/x", True),
        ("here:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("[::ffff:0.0.0.0]:1", False),
        ("192.168.1.1:1", False),
        ("both:1", False),
        ("far:1", False),
        ("unknown:1", False),
    ],
)
def test_local_is_what_only_this_machine_can_reach(text: str, local: bool) -> None:
    assert is_local(read_address(text, Path("/")), resolver) is local


@pytest.mark.parametrize("addresses", [["127.0.0.1:1"], ["unix:/x", "[::1]:1", "localhost:1"]])
def test_this_machine_needs_neither_tokens_nor_tls(addresses: list[str]) -> None:
    assert check_bind(bound(*addresses), False, resolver) == []
    assert only_local(bound(*addresses), resolver)


@pytest.mark.parametrize("address", ["0.0.0.0:7410", "[::]:7410", "far:7410", "both:7410"])
def test_other_machines_need_tokens_and_tls(address: str) -> None:
    def needs(config: Config, has_tokens: bool) -> list[str]:
        problems = check_bind(config, has_tokens, resolver)
        return [word for word in ("no tokens", "no TLS") if any(word in problem for problem in problems)]

    assert needs(bound(address), False) == ["no tokens", "no TLS"]
    assert needs(bound(address), True) == ["no TLS"]
    assert needs(bound(address, tls=True), False) == ["no tokens"]
    assert needs(bound(address, insecure=True), False) == ["no tokens"]
    assert needs(bound(address, tls=True), True) == []
    assert needs(bound("127.0.0.1:1", address), True) == ["no TLS"]
    assert needs(bound(address, insecure=True), True) == []
    assert not only_local(bound("127.0.0.1:1", address), resolver)


def test_a_refusal_says_what_to_do() -> None:
    tokens, tls = check_bind(bound("0.0.0.0:99"), False, resolver)
    assert "`millpond token create --role admin --queues '*' --data /pond`" in tokens
    assert "127.0.0.1:99" in tokens
    assert "tls.cert" in tls
    assert "--insecure-no-tls" in tls


def test_a_name_without_an_address_is_told() -> None:
    problems = check_bind(bound("unknown:1", tls=True), True, resolver)
    assert problems == ["bind names 'unknown', which has no address; check the name, or bind an address"]


def test_the_server_goes_by_its_own_names_and_those_it_is_given() -> None:
    config = bound("far:1", "[::1]:2", "unix:/x", hosts=("q.example.org",))
    assert host_names(config) == frozenset({"localhost", "far", "::1", "q.example.org"})
    assert host_names(bound("0.0.0.0:1", hosts=("q", "*"))) is None
