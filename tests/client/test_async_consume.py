"""Loops of clients on the event loop: who keeps their leases. All else of loops is in tests/consuming."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from millpond import AsyncClient
from millpond.errors import InternalError
from tests.client.scripted import Scripted, refusal, reply, scripted, silent
from tests.client.served import Served
from tests.client.test_consume import leased, results


def test_the_lease_is_extended_while_the_body_runs() -> None:
    extended = results(ok=True, cancelled=True)

    async def act(url: str, came: Any) -> bool:
        seen = None
        async with AsyncClient(url) as client:
            async for item in client.consume("q", lease_timeout="100ms", idle_timeout=0):
                for _ in range(3):
                    assert await asyncio.to_thread(came.acquire, timeout=10)
                seen = item
        return seen is not None and seen.cancelled

    with scripted(leased(), extended, extended, results(ok=True), reply({"items": []})) as server:
        assert asyncio.run(act(server.url, server.came))
        assert [call for call, _ in server.requests].count("/v1/queue.extend") == 2


def test_a_client_serves_one_event_loop_after_the_other(server: Served, queue: str) -> None:
    client = AsyncClient(server.url)

    async def once() -> int:
        count = (await client.stats(queue)).counts["ready"]
        await client._core.pool.close()  # a loop that ends takes its connections along
        return count

    assert [asyncio.run(once()), asyncio.run(once())] == [0, 0]


# ---- callers that are cancelled ---------------------------------------------------------------------------


async def cancelled(work: Any, server: Scripted, requests: int) -> None:
    """Once the server has got so many of them."""
    task = asyncio.ensure_future(work)
    for _ in range(requests):
        assert await asyncio.to_thread(server.came.acquire, timeout=10)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


def test_a_loop_that_is_cancelled_while_it_completes_gives_its_item_back() -> None:
    async def act(server: Scripted) -> None:
        async with AsyncClient(server.url) as client:

            async def work() -> None:
                async with client.consume("q", lease_timeout="1m") as items:
                    async for _ in items:
                        pass

            await cancelled(work(), server, 2)
            assert len(client._keeper_of_leases()._watch) == 0

    with scripted(leased(), silent, results(ok=True)) as server:
        asyncio.run(act(server))
        assert server.requests[2] == ("/v1/queue.retry", DEFERRED)


DEFERRED = {"items": [{"lease": "t1", "intent": "defer"}], "queue": "q"}


def test_a_with_that_is_cancelled_while_it_ends_hands_its_item_back() -> None:
    async def act(server: Scripted) -> None:
        async with AsyncClient(server.url) as client:

            async def work() -> None:
                [item] = await client.lease("q")
                async with item:
                    raise ValueError("no")

            await cancelled(work(), server, 2)
            assert len(client._keeper_of_leases()._watch) == 0

    with scripted(leased(), silent, results(ok=True)) as server:
        asyncio.run(act(server))
        assert server.requests[2] == server.requests[1]


def test_nobody_keeps_an_item_whose_with_could_not_hand_it_back() -> None:
    async def act(url: str) -> int:
        async with AsyncClient(url) as client:
            [item] = await client.lease("q")
            with pytest.raises(InternalError):
                async with item:
                    raise ValueError("no")
            return len(client._keeper_of_leases()._watch)

    with scripted(leased(), refusal("internal", 500), results(ok=True)) as server:
        assert asyncio.run(act(server.url)) == 0
        assert server.requests[2] == server.requests[1]


def test_what_a_cancelled_lease_brings_is_given_back() -> None:
    goes_on = threading.Event()

    def slow(sock: socket.socket) -> bool:
        assert goes_on.wait(10)
        return leased()(sock)

    async def act(server: Scripted) -> None:
        async with AsyncClient(server.url) as client:
            await cancelled(client.lease("q"), server, 1)
            goes_on.set()

    with scripted(slow, results(ok=True)) as server:
        asyncio.run(act(server))
        assert server.requests[1:] == [("/v1/queue.retry", DEFERRED)]


def test_a_cancelled_wait_is_hung_up_and_what_came_before_that_is_given_back() -> None:
    def crossing(sock: socket.socket) -> bool:
        silent(sock)
        return leased()(sock)

    async def act(server: Scripted) -> None:
        async with AsyncClient(server.url) as client:
            await cancelled(client.lease("q", wait="1m"), server, 1)

    with scripted(crossing, results(ok=True)) as server:
        asyncio.run(act(server))
        assert server.requests[1:] == [("/v1/queue.retry", DEFERRED)]
