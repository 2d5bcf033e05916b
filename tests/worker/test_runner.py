"""The worker's own logic, on an executor whose jobs end when the test says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millpond.clock import ManualClock
from millpond.embedded import AsyncPond
from millpond.errors import InvalidRequest
from millpond.jobs.spec import JobSpec, encode
from millpond.model import NewItem, State, to_datetime
from millpond.worker.executors import DONE, Outcome, Running
from millpond.worker.hooks import Hooks
from millpond.worker.runner import Ended, Worker
from tests.worker.fakes import (
    BacklogExecutor,
    FakeExecutor,
    at_work,
    ended,
    lease_given_back,
    put,
    task,
    until,
    until_state,
)


def worker_on(pond: AsyncPond, executor: FakeExecutor, *, slots: int = 1, **options: object) -> Worker:
    return Worker(pond, [executor], slots=slots, services=False, **options)  # type: ignore[arg-type]


def _argument(job: Running) -> object:
    assert job.spec is not None
    return job.spec.args[0]


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_every_job_is_run_once_and_completed_with_its_result(store: str, tmp_path: Path) -> None:
    async def go() -> None:
        async with AsyncPond(":memory:" if store == "memory" else tmp_path) as pond:
            ids = await put(pond, *[task(args=[n]) for n in range(300)])
            executor = FakeExecutor(lambda job: Outcome(ok=True, result=_argument(job)))
            worker = worker_on(pond, executor, slots=3, max_jobs=300)
            assert await worker.run(signals=False) == Ended(
                incarnation=worker.incarnation, reason="max_jobs", forced=False, finished=300
            )
            assert (await pond.stats("jobs")).counts[State.COMPLETED] == 300
            assert (await pond.get_item("jobs", ids[7])).result == 7
            assert executor.begun.qsize() == 300
            assert executor.most <= 3
            assert executor.stops == [False]

    asyncio.run(go())


def test_a_failed_job_waits_for_as_long_as_its_spec_says() -> None:
    async def go() -> None:
        clock = ManualClock()
        async with AsyncPond(":memory:", clock=clock) as pond:
            [item_id] = await put(pond, task(backoff_base=3))
            executor = FakeExecutor(lambda job: Outcome(ok=False, error="no luck"))
            async with at_work(worker_on(pond, executor)):
                await executor.next()
                item = await until_state(pond, item_id, "retrying")
                assert item.last_error == "no luck"
                assert item.enqueue_at == to_datetime(clock.now() + 3_000)
                clock.advance(3_000)
                await pond.stats("jobs")  # a look at the clock
                assert (await executor.next()).item.attempts == 2
                item = await until_state(pond, item_id, "retrying")
                assert item.enqueue_at == to_datetime(clock.now() + 9_000)

    asyncio.run(go())


def test_what_can_never_be_run_dies_at_once_and_the_rest_is_left_to_other_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go() -> None:
        clock = ManualClock()
        async with AsyncPond(":memory:", clock=clock) as pond:
            unreadable, mixed, unknown, command, plain = await put(
                pond,
                NewItem(payload=b"{", kind="task"),
                NewItem(payload=encode(JobSpec(command="true")), kind="task"),
                task("unknown"),
                NewItem(payload=encode(JobSpec(command="true")), kind="command"),
                NewItem(payload=b"{}", kind="orders"),
            )
            executor = FakeExecutor()
            async with at_work(worker_on(pond, executor)):
                for item_id, word in [(unreadable, "not a job"), (mixed, "holds a command")]:
                    item = await until_state(pond, item_id, "dead")
                    assert item.dead_reason == "rejected"
                    assert word in item.last_error
                for item_id, word in [(unknown, "no task 'unknown'"), (command, "commands"), (plain, "'orders'")]:
                    item = await until_state(pond, item_id, "scheduled")
                    assert word in item.last_error
                    assert (item.attempts, item.deliveries) == (0, 1)
                    assert item.enqueue_at == to_datetime(clock.now() + 1_000)
                clock.advance(1_000)  # each time it is put off for longer
                later = to_datetime(clock.now() + 2_000)
                await until(lambda: pond.get_item("jobs", unknown), lambda item: item.enqueue_at == later)
                said = [one.getMessage() for one in caplog.records if "left to other workers" in one.getMessage()]
                assert len(said) == len(set(said)) == 3
            assert executor.begun.empty()

    asyncio.run(go())


def test_a_drain_finishes_what_runs_and_gives_back_the_rest_with_its_attempt() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            ids = await put(pond, *[task() for _ in range(3)])
            executor = FakeExecutor()
            worker = worker_on(pond, executor, slots=2)
            async with at_work(worker) as run:
                first, second = await executor.next(), await executor.next()
                worker.drain()
                executor.finish(first)
                assert await lease_given_back(pond, 5) == 1
                assert not run.done()
                executor.finish(second)
                over = await ended(run)
            assert (over.reason, over.finished, over.left) == ("stopped", 2, 0)
            third = await pond.get_item("jobs", ids[2])
            assert (third.state, third.attempts) == (State.READY, 0)

    asyncio.run(go())


def test_force_ends_what_runs_and_gives_back_its_attempt() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            [item_id] = await put(pond, task())
            executor = FakeExecutor()
            worker = worker_on(pond, executor)
            async with at_work(worker) as run:
                job = await executor.next()
                worker.force()
                assert await executor.next_ended() == (job, "stopping")
                over = await ended(run)
            assert (over.forced, over.left) == (True, 0)
            item = await pond.get_item("jobs", item_id)
            assert (item.state, item.attempts) == (State.READY, 0)

    asyncio.run(go())


def test_what_does_not_end_by_force_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, task())
            executor = FakeExecutor()
            executor.stubborn = True
            worker = worker_on(pond, executor)
            async with at_work(worker) as run:
                await executor.next()
                worker.force()
                assert (await ended(run)).left == 1

    monkeypatch.setattr("millpond.worker.runner.FORCE_GRACE_S", 0.0)
    monkeypatch.setattr("millpond.worker.runner.RSS_LOOK_S", 0.01)
    asyncio.run(go())


def test_a_cancelled_job_is_ended_and_stays_cancelled() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            [item_id] = await put(pond, task())
            executor = FakeExecutor()
            async with at_work(worker_on(pond, executor, lease_timeout=1.0)):
                job = await executor.next()
                await pond.cancel("jobs", [item_id])
                assert await executor.next_ended() == (job, "cancelled")
                await until_state(pond, item_id, "cancelled")

    asyncio.run(go())


def test_a_lease_is_extended_while_its_job_runs() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, task())
            executor = FakeExecutor()
            async with at_work(worker_on(pond, executor, lease_timeout=0.2)):
                job = await executor.next()
                asked_for = job.deadline
                for _ in range(2):
                    assert await asyncio.wait_for(executor.extensions.get(), 5) is job
                    assert job.deadline > asked_for
                    asked_for = job.deadline

    asyncio.run(go())


def test_a_job_whose_lease_is_lost_is_ended_and_not_reported() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            [item_id] = await put(pond, task())
            executor = FakeExecutor()
            async with at_work(worker_on(pond, executor, lease_timeout=0.4)):
                job = await executor.next()
                await pond.retry([job.item])  # by somebody who has its token
                assert await executor.next_ended() == (job, "lease_lost")
                item = await until_state(pond, item_id, "retrying")
                assert item.last_error is None

    asyncio.run(go())


def test_after_so_many_jobs_it_asks_to_be_replaced() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, *[task() for _ in range(9)])
            executor = FakeExecutor(lambda job: DONE)
            over = await worker_on(pond, executor, slots=4, max_jobs=5).run(signals=False)
            assert (over.reason, over.recycle, over.finished) == ("max_jobs", True, 5)
            assert (await pond.stats("jobs")).counts[State.READY] == 4

    asyncio.run(go())


def test_a_worker_that_may_run_so_many_jobs_leases_no_more_than_those() -> None:
    """The others would go to the tail of the queue for it, again and again."""

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            ids = await put(pond, *[task() for _ in range(900)])
            executor = FakeExecutor(lambda job: DONE)
            await worker_on(pond, executor, slots=4, max_jobs=450).run(signals=False)
            leased = [(await pond.get_item("jobs", item_id)).deliveries for item_id in ids]
            assert leased == [1] * 450 + [0] * 450

    asyncio.run(go())


def test_with_too_much_memory_it_asks_to_be_replaced_after_a_job_at_the_earliest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millpond.worker.runner.RSS_LOOK_S", 0.01)

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            executor = FakeExecutor()
            async with at_work(worker_on(pond, executor, max_rss=1)) as run:
                await put(pond, task())
                executor.finish(await executor.next())
                over = await ended(run)
            assert (over.reason, over.recycle, over.finished) == ("max_rss", True, 1)

    asyncio.run(go())


def test_an_executor_that_takes_a_backlog_gets_more_than_there_are_slots_once_jobs_are_short() -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, *[task() for _ in range(500)])
            executor = BacklogExecutor()
            worker = worker_on(pond, executor)
            async with at_work(worker) as run:
                for _ in range(100):
                    executor.finish(await executor.next())
                    await asyncio.sleep(0)
                assert executor.most > 1
                worker.drain()
                while executor.running:
                    executor.finish(next(iter(executor.running)))
                    await asyncio.sleep(0)
                over = await ended(run)
            counts = (await pond.stats("jobs")).counts
            assert counts[State.COMPLETED] == over.finished
            assert counts[State.READY] == 500 - over.finished

    asyncio.run(go())


def test_hooks_see_every_job_and_never_break_the_worker() -> None:
    seen: list[str] = []

    def failing(job: Running) -> None:
        seen.append("job start")
        raise RuntimeError("not my day")

    async def on_end(job: Running, outcome: Outcome) -> None:
        seen.append(f"job end {outcome.ok}")

    hooks = Hooks(
        on_start=lambda worker: seen.append("start"),
        on_stop=lambda worker, reason: seen.append(f"stop {reason}"),
        on_error=lambda job, outcome: seen.append(f"error {outcome.error}"),
        on_job_start=failing,
        on_job_end=[on_end],
    )

    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await put(pond, task())
            executor = FakeExecutor(lambda job: Outcome(ok=False, error="bad"))
            await worker_on(pond, executor, max_jobs=1, hooks=hooks).run(signals=False)

    asyncio.run(go())
    assert seen == ["start", "job start", "job end False", "error bad", "stop max_jobs"]


@pytest.mark.parametrize(
    "wrong",
    [{"slots": 0}, {"queues": {"jobs": 0}}, {"lease_timeout": 0.01}, {"max_jobs": 0}, {"max_rss": -1}],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            await worker_on(pond, FakeExecutor(), **wrong).run(signals=False)  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest, match="; use"):
        asyncio.run(go())
