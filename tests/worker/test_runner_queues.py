"""Several queues in one worker, workers beside each other, and queues that are away."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any, cast

import pytest

from millpond.api import Api
from millpond.embedded import AsyncPond
from millpond.errors import Forbidden
from millpond.jobs.queues import ensure_queue
from millpond.model import State
from millpond.worker.executors import DONE, Done, Running
from millpond.worker.runner import Worker
from tests.worker.fakes import (
    Away,
    BacklogExecutor,
    FakeExecutor,
    at_work,
    count_of,
    ended,
    lease_given_back,
    put,
    task,
    until,
    until_state,
)


def worker_on(api: Any, executor: FakeExecutor, *, slots: int = 1, **options: Any) -> Worker:
    return Worker(cast(Api, api), [executor], slots=slots, services=False, **options)


@pytest.mark.parametrize("slots", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_busy_queues_get_slots_by_their_weights(slots: int) -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            for queue in ("often", "seldom"):
                await put(pond, *[task() for _ in range(100)], queue=queue)
            executor = FakeExecutor()
            counts: Counter[str] = Counter()
            async with at_work(worker_on(pond, executor, slots=slots, queues={"often": 3, "seldom": 1})):
                for _ in range(80):
                    job = await executor.next()
                    counts[job.queue] += 1
                    executor.finish(job)
            assert counts["often"] == pytest.approx(60, abs=6)

    asyncio.run(go())


def test_an_empty_queue_takes_no_slot_from_the_others() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, *[task() for _ in range(50)], queue="busy")
            await ensure_queue(pond, "empty")
            executor = FakeExecutor(lambda job: DONE)
            over = await worker_on(pond, executor, slots=2, queues={"empty": 99, "busy": 1}, max_jobs=50).run(
                signals=False
            )
            assert over.finished == 50

    asyncio.run(go())


def test_a_queue_that_wakes_up_has_its_turn_among_busy_ones() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, *[task() for _ in range(100)], queue="busy")
            await ensure_queue(pond, "late")
            executor = FakeExecutor()
            async with at_work(worker_on(pond, executor, queues={"busy": 1, "late": 1})):
                for _ in range(50):
                    executor.finish(await executor.next())
                await put(pond, task(), queue="late")
                queues = set()
                for _ in range(20):
                    job = await executor.next()
                    queues.add(job.queue)
                    executor.finish(job)
                assert "late" in queues

    asyncio.run(go())


def test_a_full_worker_leaves_items_to_one_that_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.worker.crew.HOARD_S", 0.05)

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, *[task() for _ in range(2)], queue="a")
            await put(pond, *[task() for _ in range(2)], queue="b")
            executor = FakeExecutor()
            async with at_work(worker_on(pond, executor, queues={"a": 1, "b": 1}, lease_timeout=0.4)):
                job = await executor.next()
                other = {"a": "b", "b": "a"}[job.queue]
                await until(lambda: count_of(pond, other, State.READY), lambda count: count == 2)
                assert await lease_given_back(pond, 5, queue=other) == 2
                executor.finish(job)
                await executor.next()

    asyncio.run(go())


def test_a_worker_whose_executor_begins_nothing_for_a_while_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.worker.crew.HOARD_S", 0.05)

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            [first] = await put(pond, task())
            executor = BacklogExecutor()
            executor.begins = 0
            async with at_work(worker_on(pond, executor, lease_timeout=0.4)):
                await executor.next()
                await until(lambda: gone_from(executor), bool)
                executor.begins = 1
                executor.finish(await executor.next())
                await until_state(pond, first, "completed")

    async def gone_from(executor: BacklogExecutor) -> bool:
        return not executor.running

    asyncio.run(go())


def test_a_pond_that_is_away_is_asked_again_and_ends_are_told_when_it_is_back() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            first, second = await put(pond, task(), task())
            away = Away(pond)
            executor = FakeExecutor()
            async with at_work(worker_on(away, executor, lease_timeout=5)):
                job = await executor.next()
                away.away = None
                executor.finish(job)
                assert {await away.refused.get() for _ in range(4)} == {"complete", "lease"}
                away.away = set()
                await until_state(pond, first, "completed")
                assert (await executor.next()).item.id == second

    asyncio.run(go())


def test_force_does_not_wait_for_a_pond_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.worker.crew.SETTLE_S", 0.01)
    monkeypatch.setattr("millpond.worker.runner.FORCE_GRACE_S", 0.0)
    monkeypatch.setattr("millpond.worker.runner.RSS_LOOK_S", 0.01)

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, task())
            away = Away(pond)
            executor = FakeExecutor()
            worker = worker_on(away, executor)
            async with at_work(worker) as run:
                await executor.next()
                away.away = None
                worker.force()
                assert (await ended(run)).forced

    asyncio.run(go())


@pytest.mark.slow
def test_a_job_is_ended_when_its_lease_can_no_longer_be_kept() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, task())
            away = Away(pond)
            executor = FakeExecutor()
            async with at_work(worker_on(away, executor, lease_timeout=2)):  # a look, 125 ms, early at least
                job = await executor.next()
                away.away = {"extend", "lease"}
                assert await executor.next_ended() == (job, "lease_lost")
                assert asyncio.get_running_loop().time() <= job.deadline

    asyncio.run(go())


def test_a_lease_that_was_long_on_its_way_is_extended_before_its_job_begins() -> None:
    class Slow(Away):
        async def lease(self, *args: Any, **named: Any) -> Any:
            items = await self._pond.lease(*args, **named)
            await asyncio.sleep(0.25)
            return items

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, task())
            executor = FakeExecutor()
            async with at_work(worker_on(Slow(pond), executor, lease_timeout=0.4)):
                job = await executor.next()
                assert job.deadline - job.started_at > 0.2

    asyncio.run(go())


def test_an_executor_that_crashes_is_started_again_and_its_jobs_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.worker.restarts.PAUSE_MIN_S", 0.01)

    class Crashing(FakeExecutor):
        def run(self, job: Running, done: Done) -> None:
            if self.starts == 1:
                raise OSError("no more threads")
            super().run(job, done)

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            first, second = await put(pond, task(backoff_base=0), task())
            executor = Crashing(lambda job: DONE)
            async with at_work(worker_on(pond, executor)):
                for item_id in (first, second):
                    await until_state(pond, item_id, "completed")
            assert executor.starts == 2
            assert (await pond.get_item("jobs", first)).attempts == 2

    asyncio.run(go())


def test_an_executor_that_does_not_stop_is_tried_again_after_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millpond.worker.restarts.PAUSE_MIN_S", 0.01)

    class Stuck(FakeExecutor):
        def __init__(self) -> None:
            super().__init__(lambda job: DONE)
            self.stopped_at: list[float] = []

        def run(self, job: Running, done: Done) -> None:
            if self.starts == 1:
                raise OSError("no more threads")
            super().run(job, done)

        async def stop(self, *, force: bool) -> None:
            self.stopped_at.append(asyncio.get_running_loop().time())
            if len(self.stopped_at) <= 3:
                raise RuntimeError("it does not")
            await super().stop(force=force)

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            [item_id] = await put(pond, task(backoff_base=0))
            executor = Stuck()
            async with at_work(worker_on(pond, executor)):
                await until_state(pond, item_id, "completed")
            pauses = [later - earlier for earlier, later in pairwise(executor.stopped_at[:4])]
            assert all(pause >= least for pause, least in zip(pauses, [0.009, 0.019, 0.039], strict=True))

    asyncio.run(go())


def test_a_worker_that_may_not_lease_says_so_and_ends() -> None:
    class Closed(Away):
        async def lease(self, *args: Any, **named: Any) -> Any:
            raise Forbidden("not for this token; use another")

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await worker_on(Closed(pond), FakeExecutor()).run(signals=False)

    with pytest.raises(Forbidden):
        asyncio.run(go())


def test_a_queue_that_does_not_exist_is_made() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            executor = FakeExecutor()
            worker = worker_on(pond, executor, queues={"new": 1})
            async with at_work(worker) as run:
                await until(pond.list_queues, lambda page: bool(page.queues))
                await put(pond, task(), queue="new")
                executor.finish(await executor.next())
                worker.drain()
                assert (await ended(run)).finished == 1

    asyncio.run(go())
