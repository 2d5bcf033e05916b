"""Several requests on one connection at once: answers come in order, whichever way each of them goes."""

from __future__ import annotations

import socket

import msgspec
import pytest

from millpond.http.protocol import ConnectionLimits
from tests.http.served import Served, post, read_reply, serve

JSON = "Content-Type: application/json"


def call(name: str, body: object) -> bytes:
    return post(f"/v1/{name}", msgspec.json.encode(body), JSON)


def replies(sock: socket.socket, count: int) -> list[bytes]:
    data = b""
    found: list[bytes] = []
    while len(found) < count:
        head, end, rest = data.partition(b"\r\n\r\n")
        if end:
            [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            size = int(length.partition(b":")[2])
            if len(rest) >= size:
                found.append(rest[:size])
                data = rest[size:]
                continue
        part = sock.recv(65536)
        assert part, f"closed after {found}"
        data += part
    return found


def test_lean_and_other_calls_are_answered_in_order(server: Served, queue: str) -> None:
    requests = []
    for number in range(20):
        requests.append(call("queue.produce", {"queue": queue, "items": [{"text": str(number)}]}))
        requests.append(call("queue.stats", {"queue": queue}))
        requests.append(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        requests.append(call("queue.lease", {"queue": queue}))
    with server.connect() as sock:
        sock.sendall(b"".join(requests))
        answers = replies(sock, len(requests))
    for number in range(20):
        produced, stats, health, leased = answers[4 * number : 4 * number + 4]
        assert b"correlation_id" in produced
        assert msgspec.json.decode(stats)["counts"]["ready"] == 1
        assert b'"ok"' in health
        assert [item["text"] for item in msgspec.json.decode(leased)["items"]] == [str(number)]


def test_calls_that_come_round_and_round_are_told_apart(server: Served, queue: str) -> None:
    """Their heads are known by then; some are the beginning of others."""
    produce = call("queue.produce", {"queue": queue, "items": [{"text": "a"}]})
    lease = call("queue.lease", {"queue": queue})
    long = call("queue.lease", {"queue": queue, "batch": 1})
    named = post("/v1/queue.lease", msgspec.json.encode({"queue": queue}), JSON, "X-Correlation-Id: mine")
    with server.connect() as sock:
        for requests in ([produce, lease], [produce, long], [produce, named], [produce, produce, lease, lease]) * 3:
            for _ in range(3):
                answers = []
                for request in requests:
                    sock.sendall(request)
                    answers += replies(sock, 1)
                made = [msgspec.json.decode(answer)["items"] for answer in answers]
                assert [len(items) for items in made] == [1] * len(requests)
                leased = [items[0]["id"] for items in made if "lease" in items[0]]
                assert leased == [items[0]["id"] for items in made if "lease" not in items[0]]


@pytest.mark.parametrize("behind", ["queue.lease", "queue.stats"])
def test_a_client_that_leaves_with_a_request_behind_its_poll_is_seen_to_go(
    server: Served, queue: str, behind: str
) -> None:
    with server.connect() as sock:
        sock.sendall(call("queue.lease", {"queue": queue, "wait": "10m"}) + call(behind, {"queue": queue}))
        server.until_parked()
    server.until(lambda: not len(server.app.parked))
    server.must("queue.produce", queue=queue, items=[{"text": "x"}])
    [item] = server.must("queue.lease", queue=queue)["items"]
    assert item["attempts"] == 1


def flood(sock: socket.socket, request: bytes) -> int:
    """Sends until nothing more is taken."""
    sent = 0
    while sent < 200 << 20:
        try:
            sent += sock.send(request)
        except (TimeoutError, ConnectionError):
            break
    return sent


@pytest.mark.slow
def test_a_flood_behind_a_poll_is_not_read_without_end_and_ends_the_poll() -> None:
    with serve(bounds=ConnectionLimits(stall_timeout_s=0.0)) as served:
        served.must("queues.create", name="q")
        request = call("queue.produce", {"queue": "q", "items": [{"text": "x" * 60_000}]})
        with served.connect() as sock:
            sock.sendall(call("queue.lease", {"queue": "q", "wait": "10m"}))
            served.until_parked()
            sock.settimeout(0.05)
            assert flood(sock, request) < 50 << 20
        served.until(lambda: not len(served.app.parked))


def test_a_request_in_pieces_is_one_request(server: Served, queue: str) -> None:
    request = call("queue.produce", {"queue": queue, "items": [{"text": "x" * 3_000}]})
    with server.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(request), 97):
            sock.sendall(request[start : start + 97])
        assert b"200 OK" in read_reply(sock)


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8"])
def test_what_is_no_request_is_refused_behind_the_reply_to_the_one_before_it(
    server: Served, queue: str, kind: str
) -> None:
    produce = msgspec.json.encode({"queue": queue, "items": [{"text": "x"}]})
    with server.connect() as sock:
        sock.sendall(post("/v1/queue.produce", produce, f"Content-Type: {kind}") + b"\x00 no request\r\n\r\n")
        produced, refused = replies(sock, 2)
        assert sock.recv(1) == b""
    assert b"correlation_id" in produced
    assert b"this is not HTTP" in refused


@pytest.mark.slow
def test_noise_behind_a_poll_ends_it(server: Served, queue: str) -> None:
    with server.connect() as sock:
        sock.sendall(call("queue.lease", {"queue": queue, "wait": "10m"}) + b"\x00 no request\r\n\r\n")
        server.until_parked()
        assert sock.recv(1) == b""
    server.until(lambda: not len(server.app.parked))


def test_what_is_wrong_in_its_own_body_is_told_so(server: Served) -> None:
    head = (
        b"POST /v1/queue.produce HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for kind in (b"application/json", b"application/json; charset=utf-8"):
        assert server.raw(head % kind + b'5\r\n{"que\r\nno size\r\n').startswith(b"HTTP/1.1 400")
