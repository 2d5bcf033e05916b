"""What a worker does beside its jobs: heartbeat, leash, schedules, links."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from millpond.api import Api
from millpond.embedded import AsyncPond
from millpond.errors import Forbidden, NotFound
from millpond.jobs import schedules, workers
from millpond.jobs.enqueue import enqueue
from millpond.jobs.held import link_of
from millpond.jobs.names import LINKS_QUEUE, SCHEDULES_QUEUE, WORKERS_QUEUE
from millpond.jobs.spec import JobSpec
from millpond.model import State
from millpond.worker import services
from millpond.worker.executors import DONE
from millpond.worker.runner import Worker
from millpond.worker.slots import Slots
from tests.worker.fakes import (
    Away,
    BacklogExecutor,
    FakeExecutor,
    at_work,
    count_of,
    ended,
    put,
    task,
    until,
    until_state,
)


def worker_on(api: Any, executor: FakeExecutor, **options: Any) -> Worker:
    return Worker(cast(Api, api), [executor], **options)


async def listed(pond: AsyncPond, **wanted: object) -> workers.WorkerInfo:
    async def look() -> list[workers.WorkerInfo]:
        found = await workers.list_workers(pond)
        return [info for info in found if all(getattr(info, name) == value for name, value in wanted.items())]

    [info] = await until(look, bool)
    return info


async def _names(pond: AsyncPond) -> list[str]:
    return [info.incarnation for info in await workers.list_workers(pond)]


async def _leash_is_there(pond: AsyncPond, incarnation: str) -> bool:
    try:
        return bool(await pond.get_item(WORKERS_QUEUE, workers.leash_id(incarnation)))
    except NotFound:
        return False


def test_a_worker_is_listed_with_what_it_runs_until_it_ends() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            [item_id] = await put(pond, task())
            executor = FakeExecutor()
            worker = worker_on(pond, executor, slots=2, name="my worker")
            async with at_work(worker) as run:
                job = await executor.next()
                info = await listed(pond)
                assert (info.incarnation, info.slots, info.queues) == (worker.incarnation, 2, {"jobs": 1})
                worker.drain()
                info = await listed(pond, status="draining")
                assert [one.id for one in info.running] == [item_id]
                executor.finish(job)
                await ended(run)
            assert await workers.list_workers(pond) == []

    asyncio.run(go())


def test_a_worker_is_listed_before_it_has_a_job() -> None:
    class Seen:
        """Notes who is listed when jobs are asked for."""

        def __init__(self, pond: AsyncPond) -> None:
            self._pond = pond
            self.listed: list[int] = []

        def __getattr__(self, name: str) -> Any:
            real = getattr(self._pond, name)

            async def lease(queue: str, **more: Any) -> Any:
                if queue == "jobs":
                    self.listed.append(len(await workers.list_workers(self._pond)))
                return await real(queue, **more)

            return lease if name == "lease" else real

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, task())
            executor, api = FakeExecutor(), Seen(pond)
            async with at_work(worker_on(api, executor)):
                executor.finish(await executor.next())
                assert api.listed[0] == 1

    asyncio.run(go())


@pytest.mark.parametrize("asked", [False, True], ids=["not asked to stop", "asked to stop"])
def test_a_worker_that_is_replaced_can_be_stopped_at_every_instant(asked: bool) -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            executor = FakeExecutor()
            worker = worker_on(pond, executor, max_jobs=1, recycles=True)
            async with at_work(worker) as run:
                await until(lambda: _leash_is_there(pond, worker.incarnation), bool)
                await put(pond, task())
                executor.finish(await executor.next())
                over = await ended(run)
            await listed(pond, incarnation=over.incarnation)
            if asked:
                assert await workers.ask_to_stop(pond, [over.incarnation]) == [over.incarnation]
            fresh = worker_on(pond, FakeExecutor(), replaces=over.incarnation)
            async with at_work(fresh) as run:
                if asked:
                    assert (await ended(run)).reason == "asked"
                else:
                    await until(lambda: _names(pond), lambda names: names == [fresh.incarnation])
                    assert not fresh.draining

    asyncio.run(go())


def test_a_heartbeat_on_its_way_does_not_take_back_the_farewell() -> None:
    """As at a server, which does what was asked of it also when the asker has turned away."""

    class Late:
        def __init__(self, pond: AsyncPond) -> None:
            self._pond = pond
            self.open, self.asked = asyncio.Event(), asyncio.Event()
            self.calls: list[asyncio.Task[Any]] = []

        def __getattr__(self, name: str) -> Any:
            real = getattr(self._pond, name)

            async def produce(queue: str, items: Any, **more: Any) -> Any:
                if b"draining" not in items[0].payload:
                    return await real(queue, items, **more)
                self.calls.append(asyncio.create_task(late(queue, items, **more)))
                return await asyncio.shield(self.calls[-1])

            async def late(*given: Any, **more: Any) -> Any:
                self.asked.set()
                await self.open.wait()
                return await real(*given, **more)

            return produce if name == "produce" else real

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            api, executor = Late(pond), FakeExecutor()
            worker = worker_on(api, executor)
            await put(pond, task())
            async with at_work(worker) as run:
                job = await executor.next()
                await listed(pond)
                worker.drain()
                await api.asked.wait()
                executor.finish(job)
                await until(lambda: count_of(pond, "jobs", "completed"), bool)
                asyncio.get_running_loop().call_later(0.05, api.open.set)
                await ended(run)
            await asyncio.gather(*api.calls)
            assert await workers.list_workers(pond) == []

    asyncio.run(go())


def test_a_worker_that_is_asked_to_stop_drains() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            worker = worker_on(pond, FakeExecutor())
            async with at_work(worker) as run:
                await until(lambda: workers.ask_to_stop(pond, [worker.incarnation]), bool)
                assert (await ended(run)).reason == "asked"

    asyncio.run(go())


def test_a_job_runs_when_the_one_that_it_waits_for_has_completed() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            first = await enqueue(pond, "jobs", JobSpec(task="first"))
            second = await enqueue(pond, "jobs", JobSpec(task="second", after=[first.id]))
            executor = FakeExecutor()
            async with at_work(worker_on(pond, executor)):
                job = await executor.next()
                assert job.item.id == first.id
                executor.finish(job)
                job = await executor.next()
                assert job.item.id == second.id
                executor.finish(job)
                await until_state(pond, second.id, "completed")

    asyncio.run(go())


def test_a_schedule_that_is_due_is_fired() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
            await schedules.add(pond, "hourly", JobSpec(task="report"), an_hour_ago, every="1h")
            executor = FakeExecutor()
            async with at_work(worker_on(pond, executor)):
                job = await executor.next()
                assert job.spec is not None
                assert (job.spec.task, job.spec.schedule) == ("report", "hourly")

    asyncio.run(go())


def test_links_in_hand_are_given_back_when_the_worker_ends() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            first = await enqueue(pond, "jobs", JobSpec(task="first"))
            await enqueue(pond, "jobs", JobSpec(task="second", after=[first.id]))
            executor = FakeExecutor()
            worker = worker_on(pond, executor)
            async with at_work(worker) as run:
                job = await executor.next()
                await until(lambda: count_of(pond, LINKS_QUEUE, "leased"), bool)
                worker.drain()
                executor.finish(job)
                await ended(run)
            assert await count_of(pond, LINKS_QUEUE, "leased") == 0

    asyncio.run(go())


def test_links_to_what_a_worker_finishes_while_it_drains_are_followed() -> None:
    """There may be no other worker before the job is forgotten."""

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            first = await enqueue(pond, "jobs", JobSpec(task="first"))
            executor = FakeExecutor()
            worker = worker_on(pond, executor)
            async with at_work(worker) as run:
                job = await executor.next()
                worker.drain()
                await listed(pond, status="draining")
                second = await enqueue(pond, "jobs", JobSpec(task="second", after=[first.id]))
                await until(lambda: count_of(pond, LINKS_QUEUE, "leased"), bool)
                executor.finish(job)
                await ended(run)
            waiting = await pond.get_item("jobs", second.id)
            link = await link_of(pond, "jobs", waiting)
            noted = link is not None and link.state_doc == {"done": [f"jobs/{first.id}"]}
            assert noted or waiting.state == State.READY

    asyncio.run(go())


def test_services_that_the_token_does_not_allow_are_left_to_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and tried again after minutes."""
    caplog.set_level("INFO")
    assert services.REFUSED_S >= 60
    monkeypatch.setattr(services, "REFUSED_S", 0.001)
    calls = iter(range(5))

    async def step() -> None:
        if next(calls, None) is None:
            raise asyncio.CancelledError
        raise Forbidden("not for this token; use another")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(services.again_and_again("test", step))
    assert [one.levelname for one in caplog.records if one.name == "millpond.worker"] == ["INFO"]


def test_a_queue_of_a_service_that_the_token_may_not_make_is_not_asked_for_again_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    class Narrow(Away):
        async def lease(self, queue: str, **options: Any) -> Any:
            return await self._pond.lease(queue, **options)

        async def create_queue(self, name: str, **settings: Any) -> Any:
            if name in (SCHEDULES_QUEUE, LINKS_QUEUE):
                self.refused.put_nowait(name)
                raise Forbidden("not for this token; use another")
            return await self._pond.create_queue(name, **settings)

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            narrow: Any = Narrow(pond)
            async with at_work(worker_on(narrow, FakeExecutor())):
                assert {await narrow.refused.get() for _ in range(2)} == {SCHEDULES_QUEUE, LINKS_QUEUE}
                await listed(pond)
            assert narrow.refused.empty()

    asyncio.run(go())
    told = [one for one in caplog.records if "token does not allow" in one.getMessage()]
    assert [one.levelname for one in told] == ["INFO", "INFO"]


def test_services_go_on_when_the_pond_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.consuming.pauses.PAUSE_MAX_S", 0.01)

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, task())
            away = Away(pond)
            away.away = None
            executor = FakeExecutor(lambda job: DONE)
            async with at_work(worker_on(away, executor)):
                for _ in range(20):
                    await away.refused.get()
                away.away = set()
                await executor.next()
                await listed(pond)

    asyncio.run(go())


def test_the_list_is_true_soon_after_a_job_begins_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "LOOK_S", 0.01)

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            executor = FakeExecutor()
            async with at_work(worker_on(pond, executor, slots=2)):
                await listed(pond, running_count=0)
                ids = await put(pond, task(), task())
                jobs = [await executor.next(), await executor.next()]
                info = await listed(pond, running_count=2)
                assert sorted(one.id for one in info.running) == sorted(ids)
                executor.finish(jobs[0])
                await listed(pond, running_count=1)
                executor.finish(jobs[1])
                await listed(pond, running_count=0, done=2)

    asyncio.run(go())


def test_what_waits_in_a_backlog_is_not_counted_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "ahead", 2)

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            executor = BacklogExecutor()
            worker = worker_on(pond, executor, slots=1)
            async with at_work(worker):
                await put(pond, task(), task(), task())
                for _ in range(3):
                    await executor.next()
                assert services.Services(worker).info().running_count == 1

    asyncio.run(go())


def test_a_worker_that_cannot_say_goodbye_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(services, "GOODBYE_S", 0.01)

    async def silent(*_: object) -> None:
        await asyncio.Event().wait()

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            monkeypatch.setattr(workers, "farewell", silent)
            worker = worker_on(pond, FakeExecutor())
            async with at_work(worker) as run:
                await listed(pond)
                worker.drain()
                await ended(run)

    asyncio.run(go())
    assert "could not say that it has gone: no answer in 0.01 s" in caplog.text
