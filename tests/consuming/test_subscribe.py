"""Subscriptions: a few unfinished items at a time, finished in any order, and given back when the loop is left."""

from __future__ import annotations

import asyncio
import threading

import pytest

from millpond import Pond
from millpond.consuming.held import HeldItem
from millpond.errors import InvalidRequest, NotFound
from tests.consuming.conftest import AsyncOpen
from tests.consuming.test_consume import until_count


def test_no_more_than_prefetch_are_unfinished(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"%d" % number for number in range(5)])
    with pond.subscribe(queue, prefetch=2) as items:
        one, two = next(items), next(items)
        assert pond.stats(queue).counts["leased"] == 2
        third: list[HeldItem] = []
        thread = threading.Thread(target=lambda: third.append(next(items)))
        thread.start()
        two.complete()
        thread.join(10)
        assert [item.payload for item in third] == [b"2"]
        one.retry("no")
        assert next(items).payload == b"3"
    until_count(pond, queue, "leased", 0)
    assert pond.stats(queue).counts["ready"] == 3


def test_a_loop_that_is_left_gives_back_what_is_unfinished_and_the_attempts(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1", b"2", b"3"])
    for item in pond.subscribe(queue):
        item.complete()
        break
    until_count(pond, queue, "ready", 2)
    assert {item.attempts for item in pond.list_items(queue).items} == {0}


def test_with_item_completes_only_by_word(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1", b"2"])
    with pond.subscribe(queue, prefetch=1) as items:
        with next(items) as one:
            one.complete()
        with next(items):
            pass
    [left] = pond.list_items(queue).items
    assert (left.payload, left.state) == (b"2", "retrying")


def test_leases_are_kept_and_a_lost_one_frees_its_place(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1", b"2"])
    with pond.subscribe(queue, prefetch=1, lease_timeout="200ms") as items:
        item = next(items)
        while (now := pond.get_item(queue, item.id).lease_deadline) is None or now <= item.lease_deadline:
            pass
        pond.clear(queue, ["ready"])
        pond.extend([item.lease], queue=queue, lease_timeout=0)  # by another hand: back to the queue
        assert next(items).id == item.id


@pytest.mark.parametrize("prefetch", [0, 1_001])
def test_a_prefetch_out_of_bounds_is_refused(pond: Pond, queue: str, prefetch: int) -> None:
    with pytest.raises(InvalidRequest):
        next(pond.subscribe(queue, prefetch=prefetch))


def test_a_subscription_to_no_queue_fails(pond: Pond) -> None:
    with pytest.raises(NotFound):
        next(pond.subscribe("nowhere"))


def test_on_the_event_loop_too(opened_async: AsyncOpen, queue: str) -> None:
    async def main() -> dict[str, int]:
        async with opened_async() as pond:
            await pond.produce(queue, [b"1", b"2", b"3", b"4"])
            async with pond.subscribe(queue, prefetch=2) as items:
                one, two = await anext(items), await anext(items)
                third = asyncio.ensure_future(anext(items))
                await two.complete()
                assert (await third).payload == b"3"
                async with one:
                    await one.complete()
            while (await pond.stats(queue)).counts["leased"]:
                pass
            async for item in pond.subscribe(queue):
                await item.complete()
                break
            while (await pond.stats(queue)).counts["leased"]:
                pass
            return (await pond.stats(queue)).counts

    assert asyncio.run(main())["ready"] == 1
