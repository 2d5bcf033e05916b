"""Rebalance as callers see it: planned, begun, followed, resumed; and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

import millpond
from millpond import NewItem, Pond
from millpond.clock import ManualClock
from millpond.errors import Conflict, InvalidRequest, NotFound
from millpond.model import PARTITION_NUMBER_MAX, Rebalance, StoreSettings
from millpond.service.manager import QueuesManager
from millpond.service.places import Places
from millpond.service.service import Service
from millpond.store.base import Registry, StoreFailed
from millpond.store.memory import MemoryRegistry, MemoryStores
from tests.service.test_stores import until

GRACE_MS = 300_000


@pytest.fixture
def pond(clock: ManualClock) -> Iterator[Pond]:
    with millpond.open(":memory:", clock=clock) as made:
        yield made


def told(pond: Pond, queue: str = "q") -> Rebalance:
    pond.stats(queue)  # a turn of the queue's loop
    found = pond.queue_info(queue).rebalance
    assert found is not None
    return found


def over(pond: Pond, queue: str = "q") -> Rebalance:
    """Waits until the queue's rebalance is done."""
    until(pond, lambda: told(pond, queue).status == "done")
    return told(pond, queue)


def empty_then_over(pond: Pond, clock: ManualClock) -> Rebalance:
    """The same for one whose old partitions have something in them: their grace begins when they are empty."""

    def is_empty() -> bool:
        clock.advance(1)  # what is left in them is carried at a pace
        found = told(pond)
        return found.status == "done" or found.removable_at is not None

    until(pond, is_empty)
    clock.advance(GRACE_MS)
    return over(pond)


def partitions(pond: Pond) -> list[int]:
    return [one.partition for one in pond.queue_info("q").partitions]


# ---- what it does -----------------------------------------------------------------------------------------


def test_more_partitions_are_there_at_once(pond: Pond) -> None:
    pond.create_queue("q")
    told = pond.rebalance("q", partitions=3)
    assert (told.status, told.added, told.removing, told.stores) == ("done", [1, 2], [], {"default": 3})
    for _ in range(9):
        pond.produce("q", ["x"])
    counts = [sum(one.counts.values()) for one in pond.stats("q").partitions]
    assert counts == [3, 3, 3]


def test_fewer_partitions_drain_and_are_removed(pond: Pond, clock: ManualClock) -> None:
    pond.create_queue("q", partitions=3)
    for number in range(6):
        pond.produce("q", [f"{number}"])
    told = pond.rebalance("q", partitions=1)
    assert (told.status, told.removing, told.removed, told.items) == ("running", [1, 2], [], {"ready": 4})
    leased = pond.lease("q", batch=10)
    assert sorted(item.text for item in leased) == list("012345")
    pond.complete(leased)
    running = pond.queue_info("q").rebalance
    assert running is not None
    assert running.removable_at is not None
    clock.advance(GRACE_MS)
    told = over(pond)
    assert (told.removed, told.items) == ([1, 2], {})
    assert partitions(pond) == [0]
    assert pond.stats("q").totals["completed"] == 6
    audit = [(entry.who, entry.detail) for entry in pond.audit("q").entries if entry.action.startswith("rebalance")]
    assert audit == [
        ("millpond", {"removed": 2, "partitions": 1}),
        ("millpond", {"removed": 1}),
        ("embedded", {"partitions": 1, "added": {}, "removing": {"1": "default", "2": "default"}}),
    ]


@pytest.mark.parametrize("state", [None, "ready"])
def test_a_list_over_several_pages_misses_nothing_if_a_rebalance_begins_in_its_middle(
    pond: Pond, state: str | None
) -> None:
    pond.create_queue("q", partitions=4)
    made = {pond.produce("q", ["x"])[0].id for _ in range(12)}
    page = pond.list_items("q", state=state, limit=7)
    found = {item.id for item in page.items}
    pond.rebalance("q", partitions=2)
    while page.next is not None:
        page = pond.list_items("q", state=state, limit=7, after=page.next)
        found |= {item.id for item in page.items}
    assert found == made


def test_nothing_to_do_says_so(pond: Pond) -> None:
    pond.create_queue("q", partitions=2)
    assert pond.rebalance("q").status == "unchanged"
    assert pond.rebalance("q", partitions=2).status == "unchanged"
    assert pond.queue_info("q").rebalance is None
    assert [entry.action for entry in pond.audit("q").entries] == ["create"]


def test_a_dry_run_changes_nothing(pond: Pond) -> None:
    pond.create_queue("q", partitions=2)
    told = pond.rebalance("q", partitions=5, dry_run=True)
    assert (told.status, told.added, told.stores) == ("planned", [2, 3, 4], {"default": 5})
    assert partitions(pond) == [0, 1]


def test_numbers_of_partitions_are_not_used_again(pond: Pond, clock: ManualClock) -> None:
    pond.create_queue("q", partitions=2)
    pond.rebalance("q", partitions=1)
    clock.advance(GRACE_MS)
    over(pond)
    assert pond.rebalance("q", partitions=2).added == [2]
    assert partitions(pond) == [0, 2]


def test_another_one_can_follow_when_the_first_is_done(pond: Pond, clock: ManualClock) -> None:
    pond.create_queue("q", partitions=4)
    for count in (2, 3, 1):
        pond.rebalance("q", partitions=count)
        clock.advance(GRACE_MS)
        over(pond)
        assert len(partitions(pond)) == count


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 1_001, 1_000_000, "3", 2.0, True, [2]])
def test_a_wrong_number_of_partitions_is_refused(pond: Pond, count: Any) -> None:
    pond.create_queue("q")
    with pytest.raises(InvalidRequest, match="partitions"):
        pond.rebalance("q", partitions=count)
    assert partitions(pond) == [0]


def test_an_unknown_queue_is_refused(pond: Pond) -> None:
    with pytest.raises(NotFound, match="no queue 'q'"):
        pond.rebalance("q", partitions=2)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_second_one_is_refused_with_the_status_of_the_first(pond: Pond, dry_run: bool) -> None:
    pond.create_queue("q", partitions=2)
    for item in ("a", "b"):  # one in each
        pond.produce("q", [item])
    pond.rebalance("q", partitions=1)
    with pytest.raises(
        Conflict, match="being rebalanced already, with 0 of 1 old partitions removed and 1 items left"
    ) as refused:
        pond.rebalance("q", partitions=5, dry_run=dry_run)
    assert refused.value.details["rebalance"]["status"] == "running"
    assert refused.value.details["rebalance"]["removing"] == [1]


def test_numbers_that_are_used_up_are_refused(pond: Pond, monkeypatch: pytest.MonkeyPatch) -> None:
    pond.create_queue("q")
    monkeypatch.setattr("millpond.service.rebalance.PARTITION_NUMBER_MAX", 3)
    assert PARTITION_NUMBER_MAX > 3
    pond.rebalance("q", partitions=4)
    with pytest.raises(InvalidRequest, match="used up"):
        pond.rebalance("q", partitions=5)


# ---- deletes and restarts ---------------------------------------------------------------------------------


def test_a_queue_can_be_deleted_in_the_middle(tmp_path: Path) -> None:
    with millpond.open(tmp_path) as pond:
        pond.create_queue("q", partitions=2)
        pond.produce("q", ["a"])
        pond.rebalance("q", partitions=1)
        pond.delete_queue("q", force=True)
        assert not list((tmp_path / "queues").glob("*/*.db"))
        pond.create_queue("q")
        assert pond.queue_info("q").rebalance is None


def test_it_goes_on_after_a_restart(tmp_path: Path, clock: ManualClock) -> None:
    with millpond.open(tmp_path, clock=clock) as pond:
        pond.create_queue("q", partitions=3)
        later = pond.produce("q", [NewItem(payload="later", delay="1d")])[0].id
        for _ in range(3):
            pond.produce("q", ["x"])
        pond.rebalance("q", partitions=1)
    with millpond.open(tmp_path, clock=clock) as pond:
        found = pond.queue_info("q").rebalance
        assert found is not None
        assert found.status == "running"
        left = 3
        while left:
            left -= len(pond.complete(pond.lease("q", batch=5, wait="20s")))
        empty_then_over(pond, clock)
        assert partitions(pond) == [0]
        assert pond.get_item("q", later).payload == b"later"
        [folder] = (tmp_path / "queues").iterdir()
        assert not (folder / "1.db").exists()
        assert not (folder / "2.db").exists()


def test_a_queue_that_sleeps_is_woken_to_drain(tmp_path: Path, clock: ManualClock) -> None:
    with millpond.open(tmp_path, clock=clock) as pond:
        pond.create_queue("q", partitions=2)
    clock.advance(GRACE_MS)
    with millpond.open(tmp_path, clock=clock) as pond:
        assert not pond.list_queues().queues[0].loaded
        pond.rebalance("q", partitions=1)
        over(pond)
        assert partitions(pond) == [0]


# ---- several stores ---------------------------------------------------------------------------------------


class Engine:
    """An engine in memory with stores that can be changed, and break."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry: Registry = MemoryRegistry()
        self.stores = {"default": MemoryStores(), "fast": MemoryStores()}

    @asynccontextmanager
    async def open(self, *affinities: tuple[str, float]) -> AsyncIterator[tuple[Service, QueuesManager]]:
        places = Places(self.stores, _settings(*affinities))
        manager = QueuesManager(self.registry, places, self.clock, Random(0))
        await manager.open()
        try:
            yield Service(manager, self.clock), manager
        finally:
            await manager.close()


def _settings(*affinities: tuple[str, float]) -> list[StoreSettings]:
    drivers = {"default": "", "fast": "memory"}
    return [StoreSettings(name=name, driver=drivers[name], affinity=share) for name, share in affinities]


async def _over(service: Service) -> Rebalance:
    """One that is never over ends with the test's timeout."""
    while True:
        await service.stats("q")  # a turn of the engine's loop
        found = (await service.queue_info("q")).rebalance
        assert found is not None
        if found.status == "done":
            return found


def run(test: Callable[[Engine], Awaitable[None]]) -> None:
    async def whole() -> None:
        await test(Engine())

    asyncio.run(whole())


def test_partitions_go_onto_a_new_store_and_off_an_old_one() -> None:
    async def test(engine: Engine) -> None:
        async with engine.open(("default", 1.0), ("fast", 0.0)) as (service, manager):
            await service.create_queue("q", partitions=4)
            made = [(await service.produce("q", [f"{n}"]))[0].id for n in range(8)]
            await manager.change_stores(_settings(("default", 1.0), ("fast", 1.0)))
            half = await service.rebalance("q")
            assert (half.stores, half.removing, half.added) == ({"default": 2, "fast": 2}, [2, 3], [4, 5])
            ids = {item.id for item in await service.lease("q", batch=8)}
            assert ids == set(made)
            await manager.change_stores(_settings(("default", 0.0), ("fast", 1.0)))
            with pytest.raises(Conflict):
                await service.rebalance("q")
            engine.clock.advance(100_000)  # the leases run out
            await service.complete(await service.lease("q", batch=8))
            engine.clock.advance(GRACE_MS)
            await _over(service)
            await service.rebalance("q")
            engine.clock.advance(GRACE_MS)
            done = await _over(service)
            assert done.stores == {"fast": 4}
            assert {one.store for one in (await service.queue_info("q")).partitions} == {"fast"}

    run(test)


def test_all_affinities_zero_are_refused() -> None:
    async def test(engine: Engine) -> None:
        async with engine.open(("default", 1.0), ("fast", 1.0)) as (service, manager):
            await service.create_queue("q")
            await manager.change_stores(_settings(("default", 0.0), ("fast", 0.0)))
            with pytest.raises(InvalidRequest, match="affinity"):
                await service.rebalance("q")

    run(test)


def test_what_cannot_be_removed_from_its_store_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.service.rebalance.AGAIN_S", 0.0)

    async def test(engine: Engine) -> None:
        async with engine.open(("default", 1.0)) as (service, _):
            await service.create_queue("q", partitions=2)
            destroy, failures = engine.stores["default"].destroy, [StoreFailed("it is stuck")] * 2

            def failing(*arguments: Any) -> None:
                if failures:
                    raise failures.pop()
                destroy(*arguments)

            monkeypatch.setattr(engine.stores["default"], "destroy", failing)
            for item in ("a", "b"):  # one in each
                await service.produce("q", [item])
            await service.complete(await service.lease("q", batch=2))
            await service.rebalance("q", partitions=1)
            engine.clock.advance(GRACE_MS)
            await service.produce("q", ["x"])
            await _over(service)
            assert (await service.stats("q")).totals["completed"] == 2
            failed = [entry for entry in (await service.audit("q")).entries if entry.error is not None]
            assert [entry.detail["attempt"] for entry in failed] == [2, 1]
            assert all("it is stuck" in str(entry.error) for entry in failed)

    run(test)
