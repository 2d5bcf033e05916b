"""After all kinds of traffic the server holds what it held before: tasks, sockets, memory."""

from __future__ import annotations

import asyncio
import gc
import os
import socket

import pytest

from millpond.http.app import Limits
from millpond.http.lean import LeanCycle
from millpond.model import LeasedItems
from millpond.queue.requests import Lease
from tests.http.served import Served, post, read_reply, serve
from tests.http.streams import ARROW, stream

JSON = "Content-Type: application/json"
STREAM = stream(payload=[b"x"] * 1_000)
ROUNDS = 30

REQUESTS = [
    post("/v1/queues.list", b"{}", JSON),
    post("/v1/queue.produce", b'{"queue": "q", "items": [{"text": "x"}]}', JSON),
    post("/v1/queue.lease", b'{"queue": "q"}', JSON),
    post("/v1/queue.lease", b'{"queue": "none", "wait": "1s"}', JSON),
    post("/v1/queue.complete", b'{"leases": ["x"]}', JSON),
    post("/v1/claim.read", b'{"queue": "q", "claim_id": "none"}', JSON),
    post("/v1/items.list", b'{"queue": "q"}', JSON, f"Accept: {ARROW}"),
    post("/v1/queue.stage?queue=q&txn=t&chunk=c", STREAM, f"Content-Type: {ARROW}"),
    post("/v1/queue.stage?queue=q&txn=t&chunk=c", STREAM[:-9], f"Content-Type: {ARROW}"),
    post("/v1/nothing", b"{}", JSON),
    post("/v1/queues.list", b"{", JSON),
    post("/v1/queues.list", b"[" * 5_000, JSON),
    post("/v1/queues.list", b"{}", "Content-Type: text/plain"),
    b"GET /docs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
]


def one_round(served: Served) -> None:
    for request in REQUESTS:
        with served.connect() as sock:
            sock.sendall(request)
            assert b" 5" not in read_reply(sock)[:13]
    for request in (
        post("/v1/queue.lease", b'{"queue": "idle", "wait": "10m"}', JSON),
        post("/v1/queue.claim", b'{"queue": "idle", "claim_id": "c", "wait": "10m"}', JSON),
        post("/v1/queue.subscribe", b'{"queue": "idle"}', JSON),
        REQUESTS[1][:-5],
        b"POST /v1/queue.pro",
    ):
        with served.connect() as sock:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass


def held(served: Served) -> tuple[int, int, int]:
    """Tasks, file descriptors and objects, once everything that was let go is gone."""

    async def count() -> tuple[int, int]:
        while len(served.app.parked) or len(served.app.streams) or len(asyncio.all_tasks()) > 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        gc.collect()
        return len(asyncio.all_tasks()), len(gc.get_objects())

    tasks, objects = served.on_loop(count())
    return tasks, len(os.listdir("/proc/self/fd")), objects


def test_an_answered_hot_call_leaves_nothing_for_the_collector() -> None:
    """What only the collector can free costs more than the call."""

    def cycles() -> int:
        return sum(type(one) in (LeanCycle, Lease, LeasedItems) for one in gc.get_objects())

    with serve() as served, served.connect() as sock:
        served.must("queues.create", name="q")
        gc.collect()
        gc.disable()
        try:
            before = cycles()
            for _ in range(20):
                for request in REQUESTS[1:3]:
                    sock.sendall(request)
                    assert b" 200 " in read_reply(sock)[:13]
            assert cycles() - before < 10
        finally:
            gc.enable()


@pytest.mark.slow
def test_nothing_is_left_behind_by_any_kind_of_client() -> None:
    with serve(limits=Limits(keep_alive_s=0.01)) as served:
        served.must("queues.create", name="q", lease_timeout="1ms", max_attempts=1, dead="delete")
        served.must("queues.create", name="idle")
        for _ in range(3):  # caches fill
            one_round(served)
        before = held(served)
        for _ in range(ROUNDS):
            one_round(served)
        after = held(served)
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 10 * ROUNDS, "objects grow with requests"
