"""Queues that nobody asks for sleep, cost nothing, and wake in time."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import AsyncPond, NewItem
from millpond.clock import ManualClock
from millpond.history.format import Event, decode_entry
from millpond.model import AuditEntry, PartitionDefinition, QueueDefinition, QueueSettings
from millpond.service import manager
from millpond.service.manager import IDLE_MS, QueuesManager
from millpond.store.base import StoreFailed
from millpond.store.sqlite import SqliteStores
from millpond.store.sqlite_registry import SqliteRegistry
from tests.service.looks import files_open_below, loaded, threads, until, until_parked_async

QUEUES = 10_000
HOUR_MS = 3_600_000


def fill_registry(directory: Path, names: Sequence[str]) -> None:
    """As that many creates would, in one commit."""
    registry = SqliteRegistry(directory)
    registry.load()
    registry.put(
        [
            QueueDefinition(
                name=name,
                incarnation="".join("abcdefghij"[int(digit)] for digit in f"{number:08}"),
                settings=QueueSettings(),
                partitions=(PartitionDefinition(partition=0),),
                created_at=0,
                updated_at=0,
            )
            for number, name in enumerate(names)
        ]
    )
    registry.close()


async def swept(pond: AsyncPond, clock: ManualClock, left: set[str]) -> None:
    """Time passes until idle queues are unloaded; these are left."""
    clock.advance(IDLE_MS + 1)
    pond._manager.sweep()

    async def done() -> bool:
        return await loaded(pond) == left and not pond._manager._settling

    await until(done)


async def create_mortal(pond: AsyncPond) -> None:
    """A queue whose items die with their first lease, and the queue that they go to."""
    await pond.create_queue("letters")
    await pond.create_queue("mortal", dead_queue="letters", max_attempts=1, lease_timeout="1h")


# ---- many queues ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_ten_thousand_queues_only_the_busy_cost_anything(tmp_path: Path, clock: ManualClock) -> None:
    names = [f"team{number % 100}/q{number}" for number in range(QUEUES)]
    busy = {f"team{number}/q{number}" for number in range(10)}
    fill_registry(tmp_path, names)

    async def scenario() -> None:
        threads_before = threads()
        async with AsyncPond(tmp_path, clock=clock) as pond:
            assert await loaded(pond) == set()
            files_at_rest, threads_at_rest = files_open_below(tmp_path), threads() - threads_before
            assert len(files_at_rest) <= 3  # the lock, the registry and its log
            assert len(threads_at_rest) == 1  # the registry's
            assert not (tmp_path / "queues").exists()
            for name in busy:
                await pond.produce(name, ["x"])
            assert await loaded(pond) == busy
            assert len(files_open_below(tmp_path / "queues")) <= 4 * len(busy)  # a file, its log, and what they need
            assert len(list((tmp_path / "queues").iterdir())) == len(busy)
            assert len(threads() - threads_before) == 1 + len(busy)
            await swept(pond, clock, left=set())
            assert sorted(files_open_below(tmp_path)) == sorted(files_at_rest)
            assert threads() - threads_before == threads_at_rest
            for name in busy:
                assert [item.text for item in await pond.lease(name)] == ["x"]

    asyncio.run(scenario())


def test_ten_thousand_queues_are_listed_without_waking_any(tmp_path: Path) -> None:
    names = [f"q{number:05}" for number in range(QUEUES)]
    fill_registry(tmp_path, names)
    with millpond.open(tmp_path) as pond:
        seen: list[str] = []
        after: str | None = ""
        while after is not None:
            page = pond.list_queues(after=after, limit=1_000)
            seen += [queue.name for queue in page.queues]
            after = page.next
        assert seen == names
        assert files_open_below(tmp_path / "queues") == []


# ---- more queues than files -------------------------------------------------------------------------------


@pytest.fixture
def room_for_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 1_000))  # half for the application, four a partition


@pytest.mark.usefixtures("room_for_five")
def test_the_least_recently_used_queues_make_room_for_others(tmp_path: Path, clock: ManualClock) -> None:
    async def scenario() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            for number in range(12):
                clock.advance(1)
                await pond.create_queue(f"q{number}")
                await pond.produce(f"q{number}", [f"{number}"])
                await pond.stats("q0")
                assert len(files_open_below(tmp_path / "queues")) <= 15
            assert await loaded(pond) == {"q0", "q8", "q9", "q10", "q11"}
            await pond.create_queue("wide", partitions=3)
            await pond.stats("wide")
            assert await loaded(pond) == {"q0", "q11", "wide"}
            for number in range(12):
                assert [item.text for item in await pond.lease(f"q{number}")] == [f"{number}"]

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.usefixtures("room_for_five")
def test_many_queues_that_are_asked_at_once_are_all_served(tmp_path: Path, clock: ManualClock) -> None:
    names = [f"q{number}" for number in range(20)]
    fill_registry(tmp_path, names)

    async def scenario() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await asyncio.gather(*(pond.produce(name, ["x"]) for name in names))
            stats = await asyncio.gather(*(pond.stats(name) for name in names))
            assert [one.counts["ready"] for one in stats] == [1] * 20
            await asyncio.gather(*(pond.clear(name) for name in names))
            await asyncio.gather(*(pond.delete_queue(name) for name in names))
            assert (await pond.list_queues()).queues == []

    asyncio.run(scenario())


@pytest.mark.usefixtures("room_for_five")
def test_busy_queues_stay_beyond_the_limit_until_they_are_idle(tmp_path: Path, clock: ManualClock) -> None:
    names = [f"q{number}" for number in range(8)]
    fill_registry(tmp_path, names)

    async def scenario() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            waiting = [asyncio.create_task(pond.lease(name, wait="15m")) for name in names]
            for name in names:
                await until_parked_async(pond, name)
            pond._manager.sweep()
            assert await loaded(pond) == set(names)
            for name in names:
                await pond.produce(name, ["x"])
            assert [item.text for items in await asyncio.gather(*waiting) for item in items] == ["x"] * 8
            pond._manager.sweep()

            async def room() -> bool:
                return len(await loaded(pond)) == 5

            await until(room)

    asyncio.run(scenario())


def test_queues_that_were_awake_in_a_crash_are_woken_a_few_at_a_time(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {f"q{number}" for number in range(20)}
    crashed = tmp_path / "crashed"
    woken: list[str] = []
    together: list[int] = []
    start = QueuesManager._start

    def spying(queues: QueuesManager, definition: QueueDefinition) -> None:
        start(queues, definition)
        woken.append(definition.name)
        together.append(len(queues._runners))

    async def first() -> None:
        async with AsyncPond(tmp_path / "data", clock=clock) as pond:
            for name in names:
                await pond.create_queue(name)
                await pond.stats(name)
            shutil.copytree(tmp_path / "data", crashed)

    async def second() -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 1_000))
        monkeypatch.setattr(manager, "WAKES_MAX", 2)
        monkeypatch.setattr(QueuesManager, "_start", spying)
        async with AsyncPond(crashed, clock=clock) as pond:

            async def all_woken() -> bool:
                return set(woken) == names and not pond._manager._tasks

            await until(all_woken)
        assert len(woken) == len(names)
        assert max(together) == 5

    asyncio.run(first())
    asyncio.run(second())


@pytest.mark.usefixtures("room_for_five")
def test_queues_that_had_to_make_room_act_in_time(tmp_path: Path, clock: ManualClock) -> None:
    async def scenario() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await pond.create_queue("letters")
            for number in range(12):
                await pond.create_queue(f"q{number}", dead_queue="letters", max_attempts=1, lease_timeout="1h")
                await pond.produce(f"q{number}", [f"{number}"])
                await pond.lease(f"q{number}")
            clock.advance(HOUR_MS)
            for name in list(pond._manager._alarms):
                pond._manager._ring(name, clock.now())
            for name in await loaded(pond):
                await pond.stats(name)
            letters: set[str] = set()
            while len(letters) < 12:
                letters |= {item.text for item in await pond.lease("letters", batch=12, wait="15m")}

    asyncio.run(scenario())


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """This process can open so many files and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(opened.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)


@pytest.mark.parametrize("left", range(3))
def test_who_runs_out_of_files_is_told_to_raise_the_limit(left: int, tmp_path: Path) -> None:
    store = SqliteStores(tmp_path).open("abcdefgh", 0, "full")
    store.recover()
    store.close()
    with files_left(left), pytest.raises(StoreFailed, match=r"; raise `ulimit -n`, or use fewer queues at a time$"):
        store.recover()
    store.recover()
    store.close()


# ---- falling asleep ---------------------------------------------------------------------------------------


def test_a_queue_in_use_is_not_unloaded(tmp_path: Path, clock: ManualClock) -> None:
    async def scenario() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            for name in ("used", "waited for", "due soon", "idle"):
                await pond.create_queue(name.replace(" ", "-"))
            waiting = asyncio.create_task(pond.lease("waited-for", wait="15m"))
            await pond.produce("due-soon", [NewItem(payload="x", delay=2 * IDLE_MS / 1000)])
            for name in ("used", "idle", "waited-for"):
                await pond.stats(name)
            clock.advance(IDLE_MS)
            await pond.stats("used")
            await swept_past(pond, clock)
            assert await loaded(pond) == {"used", "waited-for", "due-soon"}
            await pond.produce("waited-for", ["x"])
            assert [item.text for item in await waiting] == ["x"]

    async def swept_past(pond: AsyncPond, clock: ManualClock) -> None:
        clock.advance(1)
        pond._manager.sweep()

        async def asleep() -> bool:
            return "idle" not in await loaded(pond)

        await until(asleep)

    asyncio.run(scenario())


def test_requests_that_come_while_a_queue_falls_asleep_are_served(tmp_path: Path, clock: ManualClock) -> None:
    async def scenario() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await pond.create_queue("q", partitions=3)
            for round_ in range(20):
                await pond.produce("q", [f"before {round_}"])
                clock.advance(IDLE_MS + 1)
                pond._manager.sweep()
                for _ in range(round_):
                    await asyncio.sleep(0)
                await pond.produce("q", [f"after {round_}"])
            assert (await pond.stats("q")).counts["ready"] == 40

    asyncio.run(scenario())


def test_a_queue_wakes_with_its_settings_and_items(tmp_path: Path, clock: ManualClock) -> None:
    async def scenario() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await pond.create_queue("q", max_attempts=1, lease_timeout="1h")
            await pond.produce("q", ["a", "b"])
            [held] = await pond.lease("q")
            await swept(pond, clock, left=set())
            await pond.update_queue("q", reference="changed asleep")
            await pond.pause("q")
            assert await loaded(pond) == set()
            assert await pond.lease("q") == []
            info = await pond.queue_info("q")
            assert (info.reference, info.paused, info.partitions[0].counts["ready"]) == ("changed asleep", True, 1)
            await swept(pond, clock, left=set())
            assert [result.ok for result in await pond.complete([held.lease])] == [True]

    asyncio.run(scenario())


# ---- waking -----------------------------------------------------------------------------------------------


def kinds_in_journal(directory: Path, incarnation: str) -> list[Event]:
    store = SqliteStores(directory).open(incarnation, 0, "full")
    store.recover()
    rows = store.journal(0, 1_000)
    store.close()
    return [Event(event[0]) for row in rows for event in decode_entry(row.events).events]


def test_a_lease_that_ran_out_while_all_was_closed_is_acted_on_at_open(tmp_path: Path, clock: ManualClock) -> None:
    async def first() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await create_mortal(pond)
            await pond.produce("mortal", ["x"])
            await pond.lease("mortal")

    async def second() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            [letter] = await pond.lease("letters", wait="15m")
            assert (letter.text, letter.source_queue, letter.dead_reason) == ("x", "mortal", "max_attempts")

    asyncio.run(first())
    clock.advance(HOUR_MS)
    asyncio.run(second())


def test_a_lease_that_has_not_run_out_wakes_nobody(tmp_path: Path, clock: ManualClock) -> None:
    async def first() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await create_mortal(pond)
            await pond.produce("mortal", ["x"])
            await pond.lease("mortal")

    async def second() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            pond._manager._ring("mortal", clock.now() + 1)  # an alarm that rings too early
            await pond.stats("letters")
            assert await loaded(pond) == {"letters"}
            assert not any((await pond.stats("letters")).counts.values())

    asyncio.run(first())
    clock.advance(HOUR_MS - 1)
    asyncio.run(second())


def test_an_alarm_wakes_a_queue_that_was_unloaded(tmp_path: Path, clock: ManualClock) -> None:
    async def scenario() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await create_mortal(pond)
            await pond.produce("mortal", ["x"])
            await pond.lease("mortal")
            await swept(pond, clock, left=set())
            [(name, alarm)] = pond._manager._alarms.items()
            assert name == "mortal"
            wait = alarm.when() - asyncio.get_running_loop().time()
            assert 0 < wait <= HOUR_MS / 1000 - IDLE_MS / 1000
            clock.advance(HOUR_MS - IDLE_MS - 1)
            pond._manager._ring("mortal", clock.now())
            [letter] = await pond.lease("letters", wait="15m")
            assert letter.text == "x"

    asyncio.run(scenario())


def test_an_item_that_falls_due_while_its_queue_sleeps_becomes_ready(tmp_path: Path, clock: ManualClock) -> None:
    incarnation = ""

    async def first() -> None:
        nonlocal incarnation
        async with AsyncPond(tmp_path, clock=clock) as pond:
            incarnation = (await pond.create_queue("q")).incarnation
            await pond.produce("q", [NewItem(payload="x", delay="1h")])

    async def second(due: bool) -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            if not due:
                assert await loaded(pond) == set()
                return

            async def woken() -> bool:
                page = await pond.list_queues()
                return page.queues[0].partitions[0].counts.get("ready") == 1

            await until(woken)

    asyncio.run(first())
    clock.advance(HOUR_MS - 1)
    asyncio.run(second(due=False))
    assert Event.DUE not in kinds_in_journal(tmp_path, incarnation)
    clock.advance(1)
    asyncio.run(second(due=True))
    assert kinds_in_journal(tmp_path, incarnation).count(Event.DUE) == 1


def test_an_item_that_expires_while_its_queue_sleeps_dies(tmp_path: Path, clock: ManualClock) -> None:
    async def first() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await create_mortal(pond)
            await pond.produce("mortal", [NewItem(payload="x", expire_timeout="1h")])

    async def second() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            [letter] = await pond.lease("letters", wait="15m")
            assert (letter.text, letter.dead_reason) == ("x", "expired")

    asyncio.run(first())
    clock.advance(HOUR_MS)
    asyncio.run(second())


def test_queues_with_nothing_to_do_sleep_on_for_ever(tmp_path: Path, clock: ManualClock) -> None:
    async def scenario(do: Callable[[AsyncPond], Any]) -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await do(pond)

    async def use(pond: AsyncPond) -> None:
        await pond.create_queue("q")
        await pond.produce("q", ["x"])
        await pond.complete(await pond.lease("q"))

    async def look(pond: AsyncPond) -> None:
        await pond.create_queue("other")
        await pond.stats("other")
        assert await loaded(pond) == {"other"}

    asyncio.run(scenario(use))
    clock.advance(365 * 24 * HOUR_MS)
    asyncio.run(scenario(look))


# ---- after a crash ----------------------------------------------------------------------------------------


def test_queues_that_were_awake_in_a_crash_are_woken_at_open(tmp_path: Path, clock: ManualClock) -> None:
    crashed = tmp_path / "crashed"

    async def first() -> None:
        async with AsyncPond(tmp_path / "data", clock=clock) as pond:
            await create_mortal(pond)
            for name in ("asleep", "awake"):
                await pond.create_queue(name)
                await pond.produce(name, ["x"])
            await swept(pond, clock, left=set())
            await pond.produce("mortal", ["x"])
            await pond.lease("mortal")
            await pond.stats("awake")
            shutil.copytree(tmp_path / "data", crashed)  # what a crash at this moment would leave

    async def second(died: bool) -> None:
        directory = shutil.copytree(crashed, tmp_path / f"died {died}")  # a clean close would leave nothing to wake for
        async with AsyncPond(directory, clock=clock) as pond:
            if died:
                [letter] = await pond.lease("letters", wait="15m")
                assert letter.text == "x"

            async def woken() -> bool:
                return {"awake", "mortal"} <= await loaded(pond)

            await until(woken)
            assert "asleep" not in await loaded(pond)

    asyncio.run(first())
    asyncio.run(second(died=False))
    clock.advance(HOUR_MS)
    asyncio.run(second(died=True))


# ---- when the registry fails ------------------------------------------------------------------------------


def test_a_queue_that_could_not_be_woken_is_tried_again(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([StoreFailed("no"), StoreFailed("no")])
    put = SqliteRegistry.put

    def failing(
        registry: SqliteRegistry, definitions: Sequence[QueueDefinition], entries: Sequence[AuditEntry]
    ) -> None:
        for failure in failures:
            raise failure
        put(registry, definitions, entries)

    async def first() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await create_mortal(pond)
            await pond.produce("mortal", [NewItem(payload="x", expire_timeout="1h")])

    async def second() -> None:
        monkeypatch.setattr(manager, "WAKE_AGAIN_MS", 0)
        monkeypatch.setattr(SqliteRegistry, "put", failing)
        async with AsyncPond(tmp_path, clock=clock) as pond:

            async def arrived() -> bool:
                return "letters" in await loaded(pond)

            await until(arrived)
            [letter] = await pond.lease("letters", wait="15m")
            assert letter.text == "x"

    asyncio.run(first())
    clock.advance(HOUR_MS)
    asyncio.run(second())
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_a_queue_whose_sleep_cannot_be_noted_still_wakes(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise StoreFailed("no")

    async def scenario() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            await create_mortal(pond)
            await pond.produce("mortal", ["x"])
            await pond.lease("mortal")
            with monkeypatch.context() as patch:
                patch.setattr(SqliteRegistry, "put", failing)
                await swept(pond, clock, left=set())
            clock.advance(HOUR_MS)
            pond._manager._ring("mortal", clock.now())
            [letter] = await pond.lease("letters", wait="15m")
            assert letter.text == "x"

    asyncio.run(scenario())
    assert "the registry of queues fails" in caplog.text
