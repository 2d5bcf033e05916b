"""Thousands of idle long polls at one server: what each costs, and that each is let go."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.http.served import post, read_reply
from tests.server.process import TIMEOUT_S, Server, serve, until

POLLS = 5_000
FILES = POLLS + 1_000  # of this process, and of the server
POLL_BYTES_MAX = 30 << 10
POLL = post("/v1/queue.lease", b'{"queue": "q", "wait": "15m"}', "Content-Type: application/json")
LONG_WAY = POLL.replace(b"Host", b"Expect: 100-continue\r\nHost")  # by the application, not by the lean protocol

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """Only of this process: the server is started with few, and raises its limit itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def polled(server: Server, poll: bytes = POLL) -> Iterator[list[socket.socket]]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        socks = [stack.enter_context(server.connect()) for _ in range(POLLS)]
        for sock in socks:
            sock.sendall(poll)
        server.until_parked("q", POLLS)
        yield socks


def warmed(server: Server) -> None:
    """What is allocated once is there: the queue, and the pools that a hundred connections need."""
    server.must("queues.create", name="q")
    server.must("queue.produce", queue="q", items=[{"text": "x"}])
    [item] = server.must("queue.lease", queue="q")["items"]
    server.must("queue.complete", queue="q", leases=[item["lease"]])
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(server.connect()).sendall(POLL)
        server.until_parked("q", 100)
    server.until_parked("q", 0)


@pytest.mark.parametrize("poll", [POLL, LONG_WAY], ids=["lean", "asgi"])
def test_idle_polls_are_cheap_and_gone_with_their_clients(poll: bytes, tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        warmed(server)
        files, memory = server.process.files(), server.process.memory()
        with polled(server, poll):
            each = (server.process.memory() - memory) / POLLS
            assert each < POLL_BYTES_MAX, f"{each / 1024:.1f} KiB"
            assert server.process.files() >= POLLS
        server.until_parked("q", 0)
        until(lambda: server.process.files() <= files, "the sockets to be closed")
        server.must("queue.produce", queue="q", items=[{"text": "x"}] * 10)
        stats = server.must("queue.stats", queue="q")
        assert (stats["counts"]["ready"], stats["counts"]["leased"]) == (10, 0)
        items = server.must("queue.lease", queue="q", batch=100)["items"]
        assert [item["attempts"] for item in items] == [1] * 10


def test_items_go_to_those_who_stay(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        warmed(server)
        with polled(server) as socks:
            for sock in socks[::2]:
                sock.close()
            server.until_parked("q", POLLS // 2)
            server.must("queue.produce", queue="q", items=[{"text": "x"}] * 1_000)
            server.until_parked("q", POLLS // 2 - 1_000)
            answered = [sock for sock in socks[1::2] if _is_answered(sock)]
            assert len(answered) == 1_000
            assert all(read_reply(sock).count(b'"lease"') == 1 for sock in answered)
            assert server.must("queue.stats", queue="q")["counts"]["leased"] == 1_000


def _is_answered(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        sock.settimeout(TIMEOUT_S)


def test_a_drain_answers_all_of_them(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        warmed(server)
        with polled(server) as socks:
            server.process.terminate()
            assert {read_reply(sock).partition(b"\r\n\r\n")[2] for sock in socks} == {b'{"items":[]}'}
            assert server.process.ended() == 0
