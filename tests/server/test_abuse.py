"""Bad input at the socket of a real server: a 4xx or 503 in the shape of errors, or a close. Never a hang."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.http.served import post, read_reply
from tests.server.abuse import ABUSES, ASGI, HEAD, ITEM, JSON, LEAN, Abuse, prepare, reset, status_of
from tests.server.process import Server, serve, until

FLOOD_BYTES = 100 << 20
SHORT_S = 0.2  # every timeout of the impatient server; it looks once a second


@pytest.fixture(scope="module")
def bare(data: Path) -> Iterator[Server]:
    """With the queues that the abuses name. Nothing that they do is worth a word in the log."""
    with serve(data / "bare") as server:
        prepare(server)
        yield server
        assert [one["message"] for one in server.process.log if one["level"] != "info"] == []


@pytest.fixture(scope="module")
def impatient(data: Path) -> Iterator[Server]:
    flags = [part for name in ("header", "body", "keep-alive") for part in (f"--timeouts-{name}", str(SHORT_S))]
    with serve(data / "impatient", *flags) as server:
        server.must("queues.create", name="q")
        yield server


def answer(sock: socket.socket, sent: bytes) -> bytes:
    """One reply, or nothing where the connection was closed; sending may come to an end before all is sent."""
    with suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(sent)
    with suppress(ConnectionResetError):
        return read_reply(sock)
    return b""


def is_open(sock: socket.socket) -> bool:
    """Whether the other side has not closed it. What it says meanwhile is read and forgotten."""
    try:
        while select.select([sock], [], [], 0)[0]:
            if not sock.recv(65536):
                return False
    except ConnectionResetError:
        return False
    return True


# ---- each by itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("abuse", [one for one in ABUSES if not one.unfinished], ids=lambda abuse: abuse.name)
def test_what_is_wrong_is_refused_in_the_shape_of_errors(bare: Server, abuse: Abuse) -> None:
    with bare.connect() as sock:
        status = status_of(answer(sock, abuse.sent))
    assert status is None or status in abuse.statuses
    assert bare.ask("GET", "/health").status == 200


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)
    until(lambda: not is_open(sock), "the server to close")


@pytest.mark.parametrize("end", [reset, socket.socket.close, half_close])
def test_who_leaves_in_the_middle_of_it_is_let_go(bare: Server, end: Callable[[socket.socket], None]) -> None:
    before = bare.process.files()
    for abuse in ABUSES:
        with bare.connect() as sock, suppress(OSError):  # it may be over before we are
            sock.sendall(abuse.sent)
            end(sock)
    until(lambda: bare.process.files() <= before, "the sockets to be closed")
    bare.until_parked("idle", 0)


# ---- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [LEAN, ASGI], ids=["lean", "asgi"])
@pytest.mark.parametrize("way", ["length", "chunks"])
def test_a_body_of_100_mb_is_413_and_costs_little_memory(bare: Server, start: bytes, way: str) -> None:
    before = bare.process.memory()
    part = b" " * (1 << 20)
    header = b"Content-Length: %d\r\n\r\n" % FLOOD_BYTES if way == "length" else b"Transfer-Encoding: chunked\r\n\r\n"
    with bare.connect() as sock, ThreadPoolExecutor(1) as threads:
        reply = threads.submit(read_reply, sock)
        with suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(start + header)
            for _ in range(FLOOD_BYTES >> 20):
                sock.sendall(part if way == "length" else b"100000\r\n" + part + b"\r\n")
        assert status_of(reply.result()) == 413
    assert bare.process.memory() - before < 70 << 20  # the limit of a body is 16 MiB, and it may be there thrice


def test_what_waits_behind_a_poll_waits_in_the_socket(bare: Server) -> None:
    """Until the poll is over; a client that sends more than its system holds for it is not read."""
    before = bare.process.memory()
    body = b'{"queue": "q", "items": [{"text": "%b"}]}' % (b"x" * (12 << 20))
    with bare.connect(timeout=0.5) as sock:
        sock.sendall(post("/v1/queue.lease", b'{"queue": "idle", "wait": "10m"}', JSON))
        with pytest.raises(TimeoutError):
            sock.sendall(post("/v1/queue.produce", body, JSON) * 2)
        assert bare.process.memory() - before < 20 << 20


def test_a_million_tiny_headers_are_cut_short(bare: Server) -> None:
    before = bare.process.memory()
    with bare.connect() as sock:
        assert status_of(answer(sock, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1_000_000)) in (431, None)
    assert bare.process.memory() - before < 10 << 20


def test_headers_within_the_limit_are_taken_in_any_number_of_pieces(bare: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 30_000 + b"\r\nY: " + b"b" * 30_000
    with bare.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(head), 999):
            sock.sendall(head[begin : begin + 999])
        sock.sendall(b"\r\n\r\n")
        assert status_of(read_reply(sock)) == 200


def test_a_large_body_is_not_counted_as_the_next_ones_head(bare: Server) -> None:
    body = ITEM.replace(b'"x"', b'"%b"' % (b"x" * 200_000))
    request = post("/v1/queue.produce", body, JSON)
    with bare.connect() as sock:
        sock.sendall(request + request[:20])
        assert status_of(read_reply(sock)) == 200
        sock.sendall(request[20:])
        assert status_of(read_reply(sock)) == 200


def test_trailers_are_not_headers(bare: Server) -> None:
    """What a proxy would have looked at must not come in by the back door."""
    for start in (LEAN, ASGI):
        chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(ITEM), ITEM)
        with bare.connect() as sock:
            sent = start.replace(b"Host: localhost\r\n", b"") + chunks + b"Host: localhost\r\n\r\n"
            assert status_of(answer(sock, sent)) in (400, 403)
        with bare.connect() as sock:
            assert status_of(answer(sock, LEAN + chunks + b"X-Checksum: 5\r\n\r\n")) == 200


def test_chunked_bodies_are_read_whole(bare: Server) -> None:
    bare.must("queues.create", name="chunks")
    body = ITEM.replace(b'"q"', b'"chunks"')
    chunks = b"".join(b"1;ext=1\r\n%c\r\n" % byte for byte in body)
    with bare.connect() as sock:
        sent = LEAN + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        for begin in range(0, len(sent), 100):
            sock.sendall(sent[begin : begin + 100])
        assert status_of(read_reply(sock)) == 200
    [item] = bare.must("queue.lease", queue="chunks")["items"]
    assert item["text"] == "x"


def test_what_follows_an_upgrade_that_is_not_made_is_answered_too(bare: Server) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"
    with bare.connect() as sock:
        sock.sendall(asked * 3)
        told = b""
        while told.count(b"HTTP/1.1 200") < 3:
            told += sock.recv(65536)


# ---- slowly -----------------------------------------------------------------------------------------------


DRIPS = {
    "a head": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"a", 408),
    "headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X: a\r\n", 408),
    "a request line": (b"G", b"E", None),
    "blank lines": (b"", b"\r\n", None),
    "a body, lean": (LEAN + b"Content-Length: 100000\r\n\r\n", b" ", 408),
    "a body, asgi": (ASGI + b"Content-Length: 100000\r\n\r\n", b" ", 408),
    "no body, lean": (LEAN + b"Content-Length: 100000\r\n\r\n", b"", 408),
    "no body, asgi": (ASGI + b"Content-Length: 100000\r\n\r\n", b"", 408),
    "chunks, lean": (LEAN + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", 408),
    "chunks, asgi": (ASGI + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", 408),
    "trailers": (ASGI + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: a\r\n", 408),
    "a body that was refused": (HEAD % b"nothing" + b"Content-Length: 100000\r\n\r\n", b" ", 404),
    "a body for a page": (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n", b" ", 200),
    "nothing": (b"", b"", None),
    "nothing more": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"", 200),
}


@pytest.mark.slow
def test_whoever_drips_is_cut_off(impatient: Server) -> None:
    """All at once, a piece whenever the server has had time to look around."""
    socks = {name: impatient.connect() for name in DRIPS}
    told = dict.fromkeys(DRIPS, b"")
    try:
        for name, sock in socks.items():
            sock.sendall(DRIPS[name][0])
        left, give_up_at = set(DRIPS), time.monotonic() + 20 * SHORT_S + 6
        while left:
            assert time.monotonic() < give_up_at, f"still there: {left}"
            for name in sorted(left):
                try:
                    socks[name].sendall(DRIPS[name][1])
                except (BrokenPipeError, ConnectionResetError):
                    left.discard(name)
                    continue
                if select.select([socks[name]], [], [], SHORT_S / 10 / len(DRIPS))[0]:
                    try:
                        part = socks[name].recv(65536)
                    except ConnectionResetError:
                        part = b""
                    told[name] += part
                    if not part:
                        left.discard(name)
    finally:
        for sock in socks.values():
            sock.close()
    for name, (_, _, status) in DRIPS.items():
        found = None if not told[name] else int(told[name].split()[1])
        assert found in ((status,) if status in (200, 404) else (status, None, 400)), (name, told[name])


@pytest.mark.slow
def test_a_poll_is_not_taken_for_idle(impatient: Server) -> None:
    with impatient.connect() as sock:
        sock.sendall(post("/v1/queue.lease", b'{"queue": "q", "wait": "1500ms"}', JSON))
        assert status_of(read_reply(sock)) == 200


# ---- number -----------------------------------------------------------------------------------------------


def test_connections_over_the_limit_are_503_with_a_time_to_come_back(tmp_path: Path) -> None:
    with serve(tmp_path, "--limits-connections", "5", "--limits-parked-leases", "2") as server:
        server.must("queues.create", name="q")
        held = [server.connect() for _ in range(5)]
        for sock in held:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status_of(read_reply(sock)) == 200
        for _ in range(20):
            with server.connect() as sock:
                reply = answer(sock, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status_of(reply) in (503, None)
            assert not reply or b"\r\nretry-after: 1\r\n" in reply
        poll = post("/v1/queue.lease", b'{"queue": "q", "wait": "1m"}', JSON)
        for sock in held[:2]:
            sock.sendall(poll)
        held[3].sendall(post("/v1/queue.stats", b'{"queue": "q"}', JSON))
        read_reply(held[3])

        def over() -> bool:
            held[4].sendall(post("/v1/queue.stats", b'{"queue": "q"}', JSON))
            return b'"waiters":2' in read_reply(held[4])

        until(over, "two to be parked")
        held[2].sendall(poll)
        reply = read_reply(held[2])
        assert (status_of(reply), b"\r\nretry-after: 5\r\n" in reply) == (429, True)
        for sock in held:
            sock.close()
        until(lambda: server.ask("GET", "/health").status == 200, "a place")
