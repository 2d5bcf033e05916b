"""How long leases are is the queue's matter: it may change, and clocks may differ."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta, tzinfo
from typing import Any

import pytest

from millpond import AsyncPond, Item, Pond
from millpond.consuming import watch
from millpond.consuming.held import HeldItem
from tests.consuming.conftest import AsyncOpen

pytestmark = pytest.mark.slow  # leases are extended in real time
SHORT = "2s"  # a busy machine must not lose one


@pytest.fixture(autouse=True)
def measured_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MEASURE_S", 0.05)


def until_extended(pond: Pond, queue: str, item: HeldItem, times: int = 2) -> None:
    seen = {item.lease_deadline}
    while len(seen) <= times:
        seen.add(deadline_of(pond.get_item(queue, item.id)))


def deadline_of(item: Item) -> datetime:
    assert item.state == "leased"
    assert item.lease_deadline is not None
    return item.lease_deadline


def test_a_loop_keeps_leases_that_became_shorter(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1", b"2"])
    with pond.consume(queue) as items:
        next(items)
        pond.update_queue(queue, lease_timeout=SHORT)
        until_extended(pond, queue, next(items))


def test_a_lease_that_an_extension_made_shorter_is_kept(pond: Pond, queue: str) -> None:
    pond.update_queue(queue, lease_timeout="4s")
    pond.produce(queue, [b"x"])
    [item] = pond.lease(queue)
    with item:
        until_extended(pond, queue, item, 1)
        pond.update_queue(queue, lease_timeout=SHORT)
        until_extended(pond, queue, item, 3)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_wrong_clock_does_not_lose_leases(
    pond: Pond, queue: str, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    skew(monkeypatch, hours)
    pond.update_queue(queue, lease_timeout=SHORT)
    pond.produce(queue, [b"x"])
    [item] = pond.lease(queue)
    with item:
        until_extended(pond, queue, item)
        item.complete()


def test_a_wrong_clock_does_not_lose_leases_on_the_event_loop(
    opened_async: AsyncOpen, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skew(monkeypatch, -1)

    async def act(pond: AsyncPond) -> None:
        await pond.update_queue(queue, lease_timeout=SHORT)
        await pond.produce(queue, [b"x"])
        [item] = await pond.lease(queue)
        async with item:
            seen = {item.lease_deadline}
            while len(seen) < 3:
                seen.add(deadline_of(await pond.get_item(queue, item.id)))
            await item.complete()

    async def main() -> None:
        async with opened_async() as pond:
            await act(pond)

    asyncio.run(main())


def skew(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + timedelta(hours=hours)

    monkeypatch.setattr(watch, "datetime", Wrong)


def test_the_leases_of_a_deleted_queue_are_let_go(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"x"])
    [item] = pond.lease(queue)
    with item:
        pond.delete_queue(queue, force=True)
        end = time.monotonic() + 10
        while not item.lost:
            assert time.monotonic() < end
            pond.list_queues()
        item.hand.finished = True  # there is nothing left to hand back
