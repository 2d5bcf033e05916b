"""Tokens in a running server: made, narrowed, revoked; leases, lists, jobs; the Host header; and what the log keeps."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpond.access.tokens_file import TokensFile
from millpond.clock import Clock
from tests.http.served import Reply, post, read_reply
from tests.http.streams import ARROW, stream
from tests.server.process import LOOPBACK, Server, command, serve, token, until

REVOKED_WITHIN_S = 5.0


class Guarded:
    """A server with two teams' queues, and the secrets of its tokens."""

    def __init__(self, server: Server, data: Path, secrets: dict[str, str]) -> None:
        self.server = server
        self.data = data
        self.secrets = secrets

    def ask(self, secret: str, call: str, **fields: Any) -> Reply:
        body = msgspec.json.encode(fields)
        return self.server.ask("POST", f"/v1/{call}", body, Authorization=f"Bearer {secret}")

    def must(self, secret: str, call: str, **fields: Any) -> Any:
        reply = self.ask(secret, call, **fields)
        assert reply.status == 200, reply
        return reply.value


@pytest.fixture(scope="module")
def guarded(data: Path) -> Iterator[Guarded]:
    """The first is made by the command line, as people do."""
    admin = token(data, "admin", "*", "--commands")
    file, now = TokensFile(data), Clock().now()
    secrets = {
        "consumer of red": file.create(now, role="consumer", queues=["red/*"]),
        "viewer of some": file.create(now, role="viewer", queues=["red/*", "zebra/*"]),
        "viewer of none": file.create(now, role="viewer", queues=["nothing/*"]),
        "producer": file.create(now, role="producer", queues=["*"]),
        "producer of jobs": file.create(now, role="producer", queues=["*"], commands=True),
        "operator": file.create(now, role="operator", queues=["*"]),
        "admin": file.create(now, role="admin", queues=["*"]),
    }
    with serve(data, "--allowed-hosts", "pond.example", "--log-level", "debug") as server:
        found = Guarded(server, data, {who: secret for who, (_, secret) in secrets.items()})
        for queue in ("red/q", "blue/q", "other"):
            found.must(admin, "queues.create", name=queue)
        server.token = admin
        yield found


# ---- leases and lists -------------------------------------------------------------------------------------


def leases(guarded: Guarded) -> dict[str, str]:
    found = {}
    for team in ("red", "blue"):
        guarded.server.must("queue.produce", queue=f"{team}/q", items=[{"text": "x"}])
        [item] = guarded.server.must("queue.lease", queue=f"{team}/q")["items"]
        found[team] = str(item["lease"])
    return found


def test_a_lease_without_its_queue_is_for_those_of_its_queue(guarded: Guarded) -> None:
    red = guarded.secrets["consumer of red"]
    held = leases(guarded)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("queue.complete", {"leases": [held["blue"]]}),
        ("queue.complete", {"leases": list(held.values())}),
        ("queue.extend", {"leases": [held["blue"]], "lease_timeout": "1m"}),
        ("queue.retry", {"items": [{"lease": held["blue"]}]}),
        ("queue.state", {"lease": held["blue"], "version": 0, "state_doc": 1}),
        ("queue.complete", {"leases": ["made-up"]}),
    ]
    for call, fields in refused:
        assert guarded.ask(red, call, **fields).status == 403, call
    assert guarded.must(red, "queue.complete", leases=[held["red"]])["results"][0]["ok"]


def test_naming_ones_own_queue_opens_no_other(guarded: Guarded) -> None:
    """By the lean path and by the application: the token decides, and it is of another queue."""
    red = guarded.secrets["consumer of red"]
    held = leases(guarded)
    for more in ({}, {"result": None}, {"result": 1}):
        [result] = guarded.must(red, "queue.complete", queue="red/q", leases=[held["blue"]], **more)["results"]
        assert result["error"]["code"] == "lease_lost"
    reply = guarded.ask(red, "queue.state", queue="red/q", lease=held["blue"], version=0, state_doc=1)
    assert (reply.status, reply.error["code"]) == (409, "lease_lost")
    assert guarded.server.must("queue.complete", leases=[held["blue"]])["results"][0]["ok"]


def test_what_a_head_was_allowed_once_opens_nothing_else_to_it(guarded: Guarded) -> None:
    """The heads of these requests are the same to the byte: who may do what is remembered by them."""
    consumer, producer = guarded.secrets["consumer of red"], guarded.secrets["producer"]
    job = '"kind": "command", "text": ""'
    plain = '"text": "' + "x" * (len(job) - len('"text": ""')) + '"'
    asked = [
        (consumer, "queue.lease", '{"queue": "red/q"}', 200),
        (consumer, "queue.lease", '{"queue": "other"}', 403),
        (consumer, "queue.lease", '{"queue": "red/q"}', 200),
        (producer, "queue.produce", f'{{"queue": "other", "items": [{{{plain}}}]}}', 200),
        (producer, "queue.produce", f'{{"queue": "other", "items": [{{{job}}}]}}', 403),
    ]
    with guarded.server.connect() as sock:
        for secret, call, body, status in asked * 2:
            headers = "Content-Type: application/json", f"Authorization: Bearer {secret}"
            sock.sendall(post(f"/v1/{call}", body.encode(), *headers))
            assert int(read_reply(sock).split()[1]) == status, (call, body)


def test_lists_are_of_ones_own_queues_and_tell_no_other_names(guarded: Guarded) -> None:
    viewer = guarded.secrets["viewer of some"]
    for number in range(30):
        guarded.server.must("queues.create", name=f"hidden/{number:02}")
    for name in ("red/r", "zebra/z"):
        guarded.server.must("queues.create", name=name)
    assert [queue["name"] for queue in guarded.must(viewer, "queues.list")["queues"]] == ["red/q", "red/r", "zebra/z"]
    seen, after = [], ""
    while True:
        page = guarded.must(viewer, "queues.list", limit=1, after=after)
        assert "hidden" not in json.dumps(page)
        seen += [queue["name"] for queue in page["queues"]]
        if "next" not in page:
            break
        after = page["next"]
    assert seen == ["red/q", "red/r", "zebra/z"]
    nobody = guarded.secrets["viewer of none"]
    assert guarded.must(nobody, "queues.list", limit=1) == {"queues": []}


# ---- jobs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["command", "task"])
@pytest.mark.parametrize("way", ["lean", "asgi"])
def test_jobs_are_for_tokens_that_say_so(guarded: Guarded, kind: str, way: str) -> None:
    """`Expect` takes the long way."""
    plain, special = guarded.secrets["producer"], guarded.secrets["producer of jobs"]
    extra = {} if way == "lean" else {"Expect": "100-continue"}
    for body in (
        msgspec.json.encode({"queue": "red/q", "items": [{"text": "x"}, {"text": "rm -r /", "kind": kind}]}),
        b'{"queue": "red/q", "items": [{"text": "x", "kind": "email", "kind": "%b"}]}' % kind.encode(),
        b'{"queue": "red/q", "items": [{"text": "x", "k\\u0069nd": "%b"}]}' % kind.encode(),
    ):
        statuses = [
            guarded.server.ask("POST", "/v1/queue.produce", body, Authorization=f"Bearer {secret}", **extra).status
            for secret in (plain, special)
        ]
        assert statuses == [403, 200]
    staged = {"queue": "red/q", "txn": "t", "chunk": "c", "items": [{"text": "x", "kind": kind}]}
    assert [guarded.ask(secret, "queue.stage", **staged).status for secret in (plain, special)] == [403, 200]
    path, body = "/v1/queue.stage?queue=red/q&txn=t&chunk=d", stream(payload=["x", "y"], kind=[None, kind])
    statuses = [
        guarded.server.ask("POST", path, body, Authorization=f"Bearer {secret}", Content_Type=ARROW, **extra).status
        for secret in (plain, special)
    ]
    assert statuses == [403, 200]


# ---- revoking ---------------------------------------------------------------------------------------------


def test_a_revoked_token_ends_within_seconds_also_for_those_who_wait(guarded: Guarded) -> None:
    """A long poll, a stream and a busy connection are open when it is revoked, by the command line."""
    guarded.server.must("queues.create", name="watched", lease_timeout="10m")
    secret = guarded.secrets["operator"]
    header = f"Authorization: Bearer {secret}"
    json_type = "Content-Type: application/json"
    with ThreadPoolExecutor() as threads, guarded.server.connect() as stream, guarded.server.connect() as busy:
        polls = [
            threads.submit(guarded.server.ask, "POST", "/v1/queue.lease", body, Authorization=f"Bearer {secret}", **way)
            for body in [b'{"queue": "watched", "wait": "10m"}']
            for way in ({}, {"Expect": "100-continue"})
        ]
        stream.sendall(post("/v1/queue.subscribe", b'{"queue": "watched"}', json_type, header, "Connection: close"))
        guarded.server.until_parked("watched", 3)
        subprocess.run(
            [sys.executable, "-m", "millpond.cli", "token", "revoke", secret, "--data", str(guarded.data)],
            check=True,
            capture_output=True,
        )
        revoked_at = time.monotonic()

        def is_out() -> bool:
            busy.sendall(post("/v1/queue.stats", b'{"queue": "watched"}', json_type, header))
            return b" 401 " in read_reply(busy)[:20]

        until(is_out, "the token to be void")
        assert time.monotonic() - revoked_at < REVOKED_WITHIN_S
        guarded.server.must("queue.produce", queue="watched", items=[{"text": "secret"}] * 10)
        assert [poll.result().status for poll in polls] == [401, 401]
        told = b""
        while part := stream.recv(65536):
            told += part
        assert b"unauthorized" in told
        assert b'"secret"' not in told
    until(lambda: guarded.server.must("queue.stats", queue="watched")["counts"]["ready"] == 10, "the items to be back")


@pytest.mark.slow
def test_a_stream_of_a_revoked_token_keeps_its_items_no_longer_than_the_token_counts(guarded: Guarded) -> None:
    tokens = TokensFile(guarded.data)
    token, secret = tokens.create(Clock().now(), role="consumer", queues=["held"])
    guarded.server.must("queues.create", name="held", lease_timeout="10m")
    guarded.server.must("queue.produce", queue="held", items=[{"text": "x"}] * 2)
    until(lambda: guarded.ask(secret, "queue.stats", queue="held").status == 403, "the token to be seen")
    counts = partial(guarded.server.must, "queue.stats", queue="held")
    with guarded.server.connect() as stream:
        headers = ["Content-Type: application/json", f"Authorization: Bearer {secret}"]
        stream.sendall(post("/v1/queue.subscribe", b'{"queue": "held", "prefetch": 2}', *headers))
        until(lambda: counts()["counts"]["leased"] == 2, "the items to be sent")
        tokens.revoke(token.id, Clock().now())
        revoked_at = time.monotonic()
        until(lambda: counts()["counts"]["ready"] == 2, "the items to be back")
    assert time.monotonic() - revoked_at < REVOKED_WITHIN_S


@pytest.mark.slow
def test_a_token_expires_while_the_server_runs(guarded: Guarded) -> None:
    _, secret = TokensFile(guarded.data).create(Clock().now(), role="producer", queues=["*"], expire_timeout_ms=2_000)
    until(lambda: guarded.ask(secret, "queue.stats", queue="other").status == 403, "the token to be seen")
    assert guarded.must(secret, "queue.produce", queue="other", items=[{"text": "x"}])
    until(
        lambda: guarded.ask(secret, "queue.produce", queue="other", items=[{"text": "x"}]).status == 401, "its expiry"
    )
    assert "has expired" in guarded.ask(secret, "queue.produce", queue="other", items=[]).error["message"]


# ---- hosts and logs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["queue.produce", "queues.list"])
def test_a_rebound_name_is_turned_away_with_or_without_a_token(guarded: Guarded, call: str) -> None:
    def status(*headers: str) -> bytes:
        request = post(f"/v1/{call}", b"{}", "Content-Type: application/json").replace(b"Host: 127.0.0.1\r\n", b"")
        with guarded.server.connect() as sock:
            sock.sendall(request.replace(b"\r\n", "".join(f"\r\n{one}" for one in headers).encode() + b"\r\n", 1))
            return read_reply(sock).split()[1]

    allowed = f"Authorization: Bearer {guarded.server.token}"
    for host in ("Host: evil.example", "Host: pond.example.evil.example", "Host: localhost@evil.example", "X: y"):
        assert status(host) == status(host, allowed) == b"403"
    assert status("Host: evil.example", "Host: localhost") in (b"400", b"403")
    for host in ("Host: pond.example", "Host: localhost:1", "Host: 127.0.0.1", "Host: [::1]:7410"):
        assert status(host) == b"401"
        assert status(host, allowed) in (b"200", b"400")


def test_the_log_keeps_no_secrets_and_no_payloads(guarded: Guarded) -> None:
    """Whatever is wrong with a request that has them in it."""
    secret, payload = guarded.secrets["admin"], "very-private-payload"
    hidden = msgspec.json.encode({"queue": "other", "items": [{"text": payload}]})
    bearer = f"Authorization: Bearer {secret}"
    json_type = "Content-Type: application/json"
    for request in (
        post("/v1/queue.produce", hidden, json_type, bearer),
        post("/v1/queue.produce", hidden[:-3], json_type, bearer),
        post("/v1/queue.produce", hidden.replace(b"text", b"txet"), json_type, bearer),
        post("/v1/queue.produce", hidden, "Content-Type: text/plain", bearer),
        post("/v1/queue.produce", hidden, json_type, f"Authorization: Basic {secret}"),
        post(f"/v1/{secret}?token={secret}", hidden, json_type),
        post("/v1/queue.produce", hidden, json_type, bearer, "X: " + payload * 10_000),
        post("/v1/queue.produce", hidden, json_type, bearer, f"X-Correlation-Id: {secret}"),
        bearer.encode() + b"\r\n\r\n" + hidden,
        hidden,
    ):
        with guarded.server.connect() as sock:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            read_reply(sock)
    guarded.must(secret, "queue.lease", queue="other", batch=100)
    told = "".join(guarded.server.process.lines)
    assert secret[12:] not in told
    assert payload not in told


def test_nobody_speaks_with_anothers_token_however_a_request_is_cut(guarded: Guarded) -> None:
    """Heads that were seen are remembered: by all of their bytes, or not at all."""
    bearer = f"Authorization: Bearer {guarded.server.token}"
    body = b'{"queue": "other", "items": [{"text": "x"}]}'
    request = post("/v1/queue.produce", body, "Content-Type: application/json", bearer)
    head_bytes = len(request) - len(body)
    for cut in (*range(1, 8), head_bytes - 4, head_bytes - 1, head_bytes, head_bytes + 1):
        with guarded.server.connect() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(request[:cut])
            guarded.server.ask("GET", "/health")  # by then it was read
            sock.sendall(request[cut:])
            assert b" 200 " in read_reply(sock)[:20]
        for sent in (request[:3] + body, request[:4] + body, body, b"POST " + body, b"\r\n\r\n" + body):
            with guarded.server.connect() as sock:
                sock.sendall(sent)
                assert b" 200 " not in read_reply(sock)[:20], (cut, sent)


@pytest.mark.slow
def test_tokens_are_asked_for_from_the_first_one_on(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        assert server.call("queues.list").status == 200
        secret = token(tmp_path, "viewer")
        until(lambda: server.call("queues.list").status == 401, "the token to be seen")
        server.token = secret
        assert server.call("queues.list").status == 200
        (tmp_path / "tokens.json").unlink()
        until(lambda: server.call("queues.list").status == 401, "the file's going to be seen")


@pytest.mark.slow
@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0"])
def test_other_machines_need_tokens_and_tls_or_a_word(tmp_path: Path, bind: str) -> None:
    def told(*flags: str) -> str:
        with command("serve", "--data", str(tmp_path), "--bind", bind, *LOOPBACK, *flags) as process:
            assert process.ended() == 2
            return "".join(process.lines)

    assert "there are no tokens" in told("--insecure-no-tls")
    TokensFile(tmp_path).create(Clock().now() - 2, role="admin", queues=["*"], expire_timeout_ms=1)
    assert "there are no tokens" in told("--insecure-no-tls")  # one that has expired is none
    token(tmp_path, "admin")
    assert "there is no TLS" in told()
    try:
        with serve(tmp_path, "--insecure-no-tls", bind=("--bind", bind)) as server:
            assert server.call("queues.list").status == 401
    except OSError:  # a machine without IPv6
        assert bind.startswith("[")
