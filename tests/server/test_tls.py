"""TLS and mutual TLS, with real certificates at a real server."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from tests.server.process import Server, serve, token, until

SILENCE_S = 0.3  # how long a handshake may take at these servers


class Papers(NamedTuple):
    ours: trustme.CA
    others: trustme.CA
    clients: trustme.CA
    flags: list[str]


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    ours, others, clients = trustme.CA(), trustme.CA(), trustme.CA()
    clients.cert_pem.write_to_path(folder / "clients.pem")
    flags = [*certified(ours, folder), "--timeouts-header", str(SILENCE_S)]
    return Papers(ours, others, clients, flags)


def certified(ca: trustme.CA, folder: Path) -> list[str]:
    """Flags for a certificate of that authority, which is put there."""
    server = ca.issue_cert("127.0.0.1", "localhost")
    server.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "key.pem").chmod(0o600)
    for number, part in enumerate(server.cert_chain_pems):
        part.write_to_path(folder / "cert.pem", append=number > 0)
    return ["--tls-cert", f"{folder}/cert.pem", "--tls-key", f"{folder}/key.pem"]


@pytest.fixture(scope="module")
def secured(papers: Papers, data: Path) -> Iterator[Server]:
    with serve(data / "tls", *papers.flags) as server:
        yield server
        assert [one for one in server.process.log if one["level"] in ("warning", "error")] == []


@pytest.fixture(scope="module")
def mutual(papers: Papers, data: Path) -> Iterator[Server]:
    folder = Path(papers.flags[1]).parent
    secret = token(data / "mutual", "admin")
    with serve(data / "mutual", *papers.flags, "--tls-client-ca", f"{folder}/clients.pem") as server:
        server.token = secret
        yield server


def trusting(ca: trustme.CA, client: trustme.CA | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    if client is not None:
        client.issue_cert("worker@example.org").configure_cert(context)
    return context


@contextmanager
def shaken(server: Server, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with server.connect() as sock, context.wrap_socket(sock, server_hostname="127.0.0.1") as talking:
        yield talking


def until_closed(sock: socket.socket) -> bytes:
    told = b""
    try:
        while part := sock.recv(65536):
            told += part
    except ConnectionResetError:
        pass
    return told


# ---- TLS --------------------------------------------------------------------------------------------------


def test_calls_go_over_tls(secured: Server, papers: Papers) -> None:
    secured.tls = trusting(papers.ours)
    secured.must("queues.create", name="q")
    secured.must("queue.produce", queue="q", items=[{"text": "x" * 100_000}] * 50)
    items = secured.must("queue.lease", queue="q", batch=100)["items"]
    assert [item["text"] for item in items] == ["x" * 100_000] * 50
    assert secured.must("queue.complete", queue="q", leases=[item["lease"] for item in items])
    assert secured.ask("GET", "/health", Host="localhost").status == 200


def test_a_client_that_trusts_another_authority_does_not_talk(secured: Server, papers: Papers) -> None:
    with pytest.raises(ssl.SSLCertVerificationError), shaken(secured, trusting(papers.others)):
        pass


def test_old_protocols_are_not_spoken(secured: Server, papers: Papers) -> None:
    context = trusting(papers.ours)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with shaken(secured, context) as talking:
        assert talking.version() == "TLSv1.2"
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError), shaken(secured, context):
        pass


@pytest.mark.parametrize(
    "sent", [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\xff\xff" + b"\xff" * 5000]
)
def test_plain_text_is_cut_off(secured: Server, sent: bytes) -> None:
    with secured.connect() as sock:
        sock.sendall(sent)
        assert not until_closed(sock).startswith(b"HTTP")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_does_not_go_on_is_cut_off(secured: Server, sent: bytes) -> None:
    with secured.connect() as sock:
        sock.sendall(sent)
        assert until_closed(sock) == b""


@pytest.mark.slow
def test_a_certificate_that_was_renewed_is_used_after_a_signal(tmp_path: Path) -> None:
    first, second = trustme.CA(), trustme.CA()
    flags = certified(first, tmp_path)
    with serve(tmp_path / "data", *flags) as server, shaken(server, trusting(first)) as before:
        certified(second, tmp_path)
        server.process.signal(signal.SIGHUP)
        until(lambda: server.process.said("the certificate was read again"), "the new one")
        with shaken(server, trusting(second)):
            pass
        before.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert before.recv(100).startswith(b"HTTP/1.1 200"), "who was there stays"
        (tmp_path / "cert.pem").write_text("no certificate")
        server.process.signal(signal.SIGHUP)
        until(lambda: server.process.said("nothing has changed: tls.cert"), "the problem")
        with shaken(server, trusting(second)):
            pass


# ---- mutual TLS -------------------------------------------------------------------------------------------


def test_a_certificate_of_the_right_authority_and_a_token_are_both_asked_for(mutual: Server, papers: Papers) -> None:
    mutual.tls = trusting(papers.ours, papers.clients)
    assert mutual.call("queues.list").status == 200
    secret, mutual.token = mutual.token, None
    assert mutual.call("queues.list").status == 401
    mutual.token = secret


@pytest.mark.parametrize("whose", [None, "others", "ours"])
def test_without_the_right_certificate_nobody_gets_in(mutual: Server, papers: Papers, whose: str | None) -> None:
    """With TLS 1.3 the client learns of it by its first answer, which is none."""
    context = trusting(papers.ours, None if whose is None else getattr(papers, whose))
    told = b""
    with suppress(ssl.SSLError, ConnectionError), shaken(mutual, context) as talking:
        talking.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        told = talking.recv(100)
    assert told == b""


def test_other_machines_may_come_with_tls_and_tokens(papers: Papers, tmp_path: Path) -> None:
    secret = token(tmp_path, "viewer")
    with serve(tmp_path, *papers.flags, bind=("--bind", "0.0.0.0:0")) as server:
        server.tls, server.token = trusting(papers.ours), secret
        assert server.call("queues.list").status == 200
        server.token = None
        assert server.call("queues.list").status == 401
