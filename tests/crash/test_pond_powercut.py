"""Power cuts under the whole engine: what a caller was told is true afterwards, unless the queue is relaxed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import apsw
import pytest

import millpond
from millpond import AsyncPond
from millpond.clock import Clock, ManualClock
from millpond.errors import MillpondError
from millpond.service.manager import QueuesManager
from millpond.service.service import Service
from millpond.store.bulk import BULK_BYTES_MIN
from millpond.store.sqlite import SqliteStores
from millpond.store.sqlite_registry import SqliteRegistry
from millpond.store.turnlog import TURNS_BEFORE
from tests.crash.powercut import PowerCutDisk, power_cut_vfs

SEEDS = 12
PRODUCERS, CONSUMERS = 4, 2
RESERVE_BYTES = 4096


class SignallingDisk(PowerCutDisk):
    """Tells an event loop when its power is cut."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.loop = asyncio.get_running_loop()
        self.cut_off = asyncio.Event()

    def operate(self) -> None:
        try:
            super().operate()
        except apsw.IOError:
            self.loop.call_soon_threadsafe(self.cut_off.set)
            raise


class Told:
    def __init__(self) -> None:
        self.produced: set[str] = set()
        self.completing: set[str] = set()
        self.completed: set[str] = set()


async def produce(service: Service, told: Told, name: int) -> None:
    number = 0
    while True:
        texts = [f"{name}-{number}-{index}" for index in range(3)]
        await service.produce("q", texts)
        told.produced.update(texts)
        number += 1


async def consume(service: Service, told: Told) -> None:
    while True:
        items = await service.lease("q", batch=4, wait="15m")
        texts = {item.text for item in items}
        told.completing.update(texts)
        results = await service.complete(items)
        assert all(result.ok for result in results)
        told.completed.update(texts)


async def live(root: Path, durability: str, random: Random) -> tuple[SignallingDisk, Told]:
    """Works on that directory until the power is cut."""
    disk, told = SignallingDisk(root), Told()
    with power_cut_vfs(disk) as vfs:
        clock = ManualClock()  # no deadline comes: who waits for the dead disk waits until it is all over
        ways = {"bulk_bytes_min": random.choice([1, BULK_BYTES_MIN]), "turns_before": random.choice([0, TURNS_BEFORE])}
        stores = SqliteStores(root, vfs=vfs, reserve_bytes=RESERVE_BYTES, **ways)
        manager = QueuesManager(SqliteRegistry(root, vfs=vfs), {"default": stores}, clock, random)
        service = Service(manager, clock)
        await manager.open()
        await service.create_queue("q", durability=durability)
        disk.operations_left = random.randrange(1, 400)
        work = [asyncio.create_task(produce(service, told, number)) for number in range(PRODUCERS)]
        work += [asyncio.create_task(consume(service, told)) for _ in range(CONSUMERS)]
        await disk.cut_off.wait()
        for task in work:
            task.cancel()
        ends = await asyncio.gather(*work, return_exceptions=True)
        assert all(isinstance(end, MillpondError | asyncio.CancelledError) for end in ends)
        await manager.close()
    return disk, told


async def find(pond: AsyncPond) -> list[str]:
    page = await pond.list_items("q", limit=1_000)
    assert page.next is None
    return [item.payload.decode() for item in page.items]


async def lost(seed: int, durability: str, path: Path) -> int:
    """One life and its cut; returns how many acknowledged items or completes are gone."""
    random = Random(seed)
    before, after = path / "before", path / "after"
    for folder in (before, after):
        folder.mkdir(parents=True)
    disk, told = await live(before, durability, random)
    disk.cut(after, random)
    async with millpond.open_async(after, clock=Clock()) as pond:
        found = await find(pond)
    assert len(found) == len(set(found)), "something exists twice"
    missing = told.produced - told.completing - set(found)
    revived = told.completed & set(found)
    return len(missing) + len(revived)


@pytest.mark.parametrize("seed", range(SEEDS), ids=lambda seed: f"seed-{seed}-")
def test_what_a_caller_was_told_survives_a_power_cut(seed: int, tmp_path: Path) -> None:
    assert asyncio.run(lost(seed, "full", tmp_path)) == 0


def test_a_relaxed_queue_may_lose_what_was_told(tmp_path: Path) -> None:
    """Also shows that these cuts would find out an engine that answers too early."""

    def losses() -> Iterator[int]:
        for seed in range(SEEDS):
            yield asyncio.run(lost(seed, "relaxed", tmp_path / str(seed)))

    assert any(losses())
