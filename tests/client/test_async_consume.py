"""Loops over items on the event loop, and what several calls at once do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millpond import AsyncClient
from millpond.client.held import LEFT, AsyncHeldItem
from tests.client.scripted import reply, scripted
from tests.client.served import Served
from tests.client.test_consume import leased, results

Act = Callable[[AsyncClient], Awaitable[Any]]


def run(server: Served, act: Act) -> Any:
    async def main() -> Any:
        async with AsyncClient(server.url) as client:
            return await act(client)

    return asyncio.run(main())


def states(server: Served, queue: str) -> list[tuple[bytes, str, int, str | None]]:
    page = server.on_loop(server.pond.list_items(queue))
    return sorted((item.payload, str(item.state), item.attempts, item.last_error) for item in page.items)


def test_asking_for_the_next_item_completes_the_one_before(server: Served, queue: str) -> None:
    async def act(client: AsyncClient) -> list[tuple[bytes, int]]:
        await client.produce(queue, [b"1", b"2", b"3"])
        seen = []
        async for item in client.consume(queue, batch=2, idle_timeout=0):
            seen.append((item.payload, len((await client.list_items(queue)).items)))
        return seen

    assert run(server, act) == [(b"1", 3), (b"2", 2), (b"3", 1)]
    assert states(server, queue) == []


async def leave_by_break(client: AsyncClient, queue: str) -> None:
    async for _ in client.consume(queue, batch=2):
        break


async def leave_by_error(client: AsyncClient, queue: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT012
        async for _ in client.consume(queue, batch=2):
            raise ValueError("seen by nobody here")


async def leave_by_cancel(client: AsyncClient, queue: str) -> None:
    at_work = asyncio.Event()

    async def work() -> None:
        async for _ in client.consume(queue, batch=2):
            at_work.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await at_work.wait()
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_cancel])
def test_a_plain_loop_that_is_left_hands_its_item_back_as_a_failure(server: Served, queue: str, leave: Any) -> None:
    async def act(client: AsyncClient) -> None:
        await client.produce(queue, [b"ahead", b"in hand"][::-1])
        await leave(client, queue)

    run(server, act)  # closing the client waits for what was left
    assert states(server, queue) == [(b"ahead", "ready", 0, None), (b"in hand", "retrying", 1, LEFT)]


def test_a_loop_in_a_with_tells_the_error_or_gives_the_attempt_back(server: Served, queue: str) -> None:
    async def act(client: AsyncClient) -> None:
        await client.produce(queue, [b"1", b"2"])
        with pytest.raises(ValueError):  # noqa: PT012
            async with client.consume(queue) as items:
                async for _ in items:
                    raise ValueError("told")
        async with client.consume(queue) as items:
            async for _ in items:
                break

    run(server, act)
    assert states(server, queue) == [(b"1", "retrying", 1, "ValueError: told"), (b"2", "ready", 0, None)]


def test_a_handler_is_given_every_item_and_its_errors_are_the_items(server: Served, queue: str) -> None:
    async def handle(item: AsyncHeldItem) -> None:
        if item.payload == b"2":
            raise KeyError("two")

    async def act(client: AsyncClient) -> None:
        await client.produce(queue, [b"1", b"2", b"3"])
        await client.consume(queue, handle, idle_timeout=0)

    run(server, act)
    assert states(server, queue) == [(b"2", "retrying", 1, "KeyError: 'two'")]


def test_with_item_completes_by_word_and_retries_else(server: Served, queue: str) -> None:
    async def act(client: AsyncClient) -> None:
        await client.produce(queue, [b"1", b"2", b"3"])
        one, two, three = await client.lease(queue, batch=3)
        async with one:
            await one.write_state({"a": 1})
            await one.extend()
            await one.complete()
        async with two:
            pass
        with pytest.raises(ValueError):
            async with three:
                raise ValueError("no")

    run(server, act)
    assert states(server, queue) == [(b"2", "retrying", 1, LEFT), (b"3", "retrying", 1, "ValueError: no")]


def test_stop_ends_a_waiting_loop_at_once(server: Served, queue: str) -> None:
    async def act(client: AsyncClient) -> list[AsyncHeldItem]:
        consumer = client.consume(queue, wait="10m")

        async def consume() -> list[AsyncHeldItem]:
            return [item async for item in consumer]

        task = asyncio.create_task(consume())
        await asyncio.to_thread(server.until, lambda: server.listener.connections > 0)
        consumer.stop()
        return await task

    assert run(server, act) == []


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
