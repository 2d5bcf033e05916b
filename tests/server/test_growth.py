"""After thousands of abuses a server holds what it held before: sockets, threads, tasks, memory."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.http.served import Served, read_reply
from tests.http.served import serve as serve_here
from tests.server.abuse import ABUSES, Abuse, prepare, reset
from tests.server.process import Server, serve, until

ROUNDS = 40  # of all abuses: some thousands
GROWTH_BYTES_MAX = 12 << 20  # of the process, however many came: an allocator does not give all back


def abused(sock: socket.socket, abuse: Abuse, end: int) -> None:
    with suppress(OSError):
        sock.sendall(abuse.sent)
        if end == 0 and not abuse.unfinished:
            read_reply(sock)
        elif end == 1:
            reset(sock)
        elif end == 2:
            sock.shutdown(socket.SHUT_WR)
    sock.close()


def one_round(server: Server | Served, rng: Random) -> None:
    for abuse in rng.sample(ABUSES, len(ABUSES)):
        abused(server.connect(), abuse, rng.randrange(4))


@pytest.mark.slow
def test_a_server_does_not_grow_with_abuse(tmp_path: Path) -> None:
    rng = Random(1)
    with serve(tmp_path) as server:
        prepare(server)
        rest = server.process.files()
        for _ in range(3):  # caches and pools fill
            one_round(server, rng)
        until(lambda: server.process.files() <= rest, "the sockets to be closed")
        threads, memory = server.process.threads(), server.process.memory()
        for _ in range(ROUNDS):
            one_round(server, rng)
        until(lambda: server.process.files() <= rest, "the sockets to be closed")
        server.until_parked("idle", 0)
        assert server.process.threads() <= threads
        assert server.process.memory() - memory < GROWTH_BYTES_MAX
        scraped = server.ask("GET", "/metrics").body.decode()
        assert "\nmillpond_http_connections 1.0" in scraped
        assert [one["message"] for one in server.process.log if one["level"] != "info"] == []


@pytest.mark.slow
def test_no_task_and_no_object_is_left_of_them() -> None:
    """In this process, where tasks can be counted."""
    rng = Random(0)

    def count(served: Served) -> tuple[int, int]:
        async def counted() -> tuple[int, int]:
            while served.listener.connections or len(asyncio.all_tasks()) > 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
            gc.collect()
            return len(asyncio.all_tasks()), len(gc.get_objects())

        return served.on_loop(counted())

    with serve_here() as served:
        prepare(served)
        for _ in range(3):
            one_round(served, rng)
        tasks, objects = count(served)
        rounds = 5
        for _ in range(rounds):
            one_round(served, rng)
        after = count(served)
    assert after[0] == tasks
    assert after[1] - objects < len(ABUSES) * rounds, "objects grow with requests"
