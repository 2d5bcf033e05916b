"""A store that does not answer: whoever needs it waits, and nobody else does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond import AsyncPond, StoreSettings
from millpond.clock import ManualClock
from millpond.model import State
from millpond.queue.lane import STALL_MS
from millpond.service import manager
from millpond.service.manager import IDLE_MS
from millpond.store.base import Turn
from millpond.store.sqlite import SqliteStore
from tests.service.looks import until

PATIENCE_S = 30.0  # the machine may be busy


class Gate:
    """Commits to the store `slow` wait while it is closed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.arrived = threading.Semaphore(0)

    def close(self) -> None:
        self.opened.clear()

    def open(self) -> None:
        self.opened.set()

    async def reached(self) -> None:
        """A commit waits there."""
        assert await asyncio.to_thread(self.arrived.acquire, True, PATIENCE_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made, commit = Gate(), SqliteStore.commit

    def waiting(store: SqliteStore, turn: Turn) -> None:
        if "/slow/" in str(store._path) and not made.opened.is_set():
            made.arrived.release()
            made.opened.wait()
        commit(store, turn)

    monkeypatch.setattr(SqliteStore, "commit", waiting)
    yield made
    made.open()


class World:
    """Queues `slow` and `slow2` are in the store that does not answer, `asleep` in the data directory."""

    def __init__(self, pond: AsyncPond, clock: ManualClock, gate: Gate) -> None:
        self.pond = pond
        self.clock = clock
        self.gate = gate

    async def ready(self, queue: str) -> int:
        return (await self.pond.stats(queue)).counts[State.READY]

    async def others_go_on(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.pond.produce("asleep", ["it is woken"])
            await self.pond.pause("asleep")
            await self.pond.update_queue("other", lease_timeout="1m")
            await self.pond.delete_queue("other")


def run(folder: Path, gate: Gate, scenario: Any) -> None:
    clock = ManualClock()
    stores = [StoreSettings(name="slow", driver="sqlite", path=str(folder / "slow"))]

    async def whole() -> None:
        async with AsyncPond(folder / "data", clock=clock, stores=stores) as pond:
            for name in ("slow", "slow2"):
                await pond.create_queue(name, partitions=2)
                await until_open(pond, name)  # so that each gets its share
                for number in range(4):
                    await pond.produce(name, [str(number)])
            for name in ("asleep", "other"):
                await pond.create_queue(name)
            try:
                await scenario(World(pond, clock, gate))
            finally:
                gate.open()

    asyncio.run(whole())


async def until_open(pond: AsyncPond, name: str) -> None:
    async def is_open() -> bool:
        return all(one.status == "open" for one in (await pond.stats(name)).partitions)

    await until(is_open)


def spawn(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


def test_its_partitions_are_shown_as_stalled_until_it_answers(tmp_path: Path, gate: Gate) -> None:
    async def scenario(world: World) -> None:
        async def shown() -> list[tuple[str, str, str | None]]:
            stats = await world.pond.stats("slow")
            assert (await world.pond.queue_info("slow")).partitions == stats.partitions
            return [(one.store, one.status, one.error) for one in stats.partitions]

        gate.close()
        leasing = spawn(world.pond.lease("slow", batch=4))
        await gate.reached()
        world.clock.advance(STALL_MS)
        assert await shown() == [("default", "open", None), ("slow", "open", None)]
        world.clock.advance(1)
        assert await shown() == [("default", "open", None), ("slow", "stalled", "its store does not answer")]
        gate.open()
        await leasing
        assert await shown() == [("default", "open", None), ("slow", "open", None)]

    run(tmp_path, gate, scenario)


def test_deleting_a_queue_there_holds_up_no_other(tmp_path: Path, gate: Gate) -> None:
    async def scenario(world: World) -> None:
        gate.close()
        deleting = spawn(world.pond.delete_queue("slow", force=True))
        await gate.reached()
        again = spawn(world.pond.create_queue("slow", partitions=2))
        await world.others_go_on()
        world.pond._manager.sweep()
        assert not deleting.done()
        assert not again.done(), "the name is free once the old queue has gone"
        gate.open()
        await deleting
        assert (await again).partitions
        assert await world.pond.lease("slow") == []
        assert [entry.action for entry in (await world.pond.audit("slow")).entries] == ["create", "delete", "create"]

    run(tmp_path, gate, scenario)


def test_a_queue_there_that_goes_to_sleep_holds_up_no_other(tmp_path: Path, gate: Gate) -> None:
    async def scenario(world: World) -> None:
        gate.close()
        world.clock.advance(IDLE_MS + 1)
        world.pond._manager.sweep()
        await gate.reached()
        producing, changing = spawn(world.pond.produce("slow", ["4"])), spawn(world.pond.pause("slow"))
        moving = spawn(world.pond.rebalance("slow2", partitions=1))
        await world.others_go_on()
        assert not any(task.done() for task in (producing, changing, moving))
        gate.open()
        await producing
        assert (await changing).paused
        assert (await moving).removing
        await world.pond.resume("slow")
        assert await world.ready("slow") == 5

    run(tmp_path, gate, scenario)


def test_a_queue_there_that_has_to_make_room_holds_up_no_other(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World) -> None:
        gate.close()
        monkeypatch.setattr(manager, "ROOM_S", 0.01)
        world.pond._manager._partitions_max = 4
        await world.others_go_on()
        gate.open()
        for name in ("slow", "slow2"):
            assert await world.ready(name) == 4

    run(tmp_path, gate, scenario)


def test_all_queues_are_closed_side_by_side(tmp_path: Path, gate: Gate) -> None:
    async def scenario(world: World) -> None:
        gate.close()
        closing = spawn(world.pond.close())
        await gate.reached()
        await gate.reached()  # the second queue's, though the first one's has not ended
        gate.open()
        await closing

    run(tmp_path, gate, scenario)
