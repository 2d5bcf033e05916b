"""Loops of clients on the event loop: who keeps their leases. All else of loops is in tests/consuming."""

from __future__ import annotations

import asyncio
from typing import Any

from millpond import AsyncClient
from tests.client.scripted import reply, scripted
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
