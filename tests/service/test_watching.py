"""Looks that wait for an item to end, through the engine as callers have it: tasks, threads, ends of all kinds."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

import millpond
from millpond import AsyncPond, Item, NewItem
from millpond.errors import Closed, NotFound
from tests.service.looks import until


async def until_watched(pond: AsyncPond, count: int) -> None:
    async def watched() -> bool:
        runner = pond._manager.awake("q")
        return runner is not None and len(runner.queue.state.watches) == count

    await until(watched)


def test_a_look_is_answered_as_its_item_ends(path: str) -> None:
    async def scenario() -> None:
        async with AsyncPond(path) as pond:
            await pond.create_queue("q")
            made = await pond.produce("q", ["0", "1"])
            waiting = [asyncio.create_task(pond.get_item("q", one.id, wait="15m")) for one in (*made, made[0])]
            await until_watched(pond, 3)
            [item] = await pond.lease("q")
            await pond.complete([item], result={"answer": 42})
            for looked in (await waiting[0], await waiting[2]):
                assert (looked.state, looked.payload, looked.result) == ("completed", b"0", {"answer": 42})
            await until_watched(pond, 1)
            await pond.cancel("q", [made[1].id])
            assert (await waiting[1]).state == "cancelled"
            await until_watched(pond, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["cancel", "delete", "close"])
def test_a_look_ends_with_its_caller_its_queue_and_the_engine(path: str, end: str) -> None:
    async def scenario() -> None:
        async with AsyncPond(path) as pond:
            await pond.create_queue("q")
            await pond.produce("q", [NewItem(id="mine")])
            waiting = asyncio.create_task(pond.get_item("q", "mine", wait="15m"))
            await until_watched(pond, 1)
            if end == "cancel":
                waiting.cancel()
            elif end == "delete":
                await pond.delete_queue("q", force=True)
            else:
                await pond.close()
            with pytest.raises({"cancel": asyncio.CancelledError, "delete": NotFound, "close": Closed}[end]):
                await waiting
            if end == "cancel":
                await until_watched(pond, 0)

    asyncio.run(scenario())


def test_a_thread_waits_for_its_item(path: str) -> None:
    with millpond.open(path) as pond, ThreadPoolExecutor(1) as pool:
        pond.create_queue("q", completed_retention="1h")
        [made] = pond.produce("q", ["x"])
        waiting = pool.submit(pond.get_item, "q", made.id, wait="60s")
        pond.complete(pond.lease("q"), result="done")
        item: Item = waiting.result()
        assert (item.state, item.result, item.ended_at) == ("completed", "done", item.updated_at)


def test_a_payload_that_is_not_text_says_so() -> None:
    with millpond.open(":memory:") as pond:
        pond.create_queue("q")
        pond.produce("q", [b"\xff\x00"])
        [item] = pond.lease("q")
        with pytest.raises(ValueError, match="use `payload`") as caught:
            _ = item.text
        assert type(caught.value) is ValueError
