"""Tasks in a worker: plain ones in threads, async ones on a loop of their own."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from typing import Any

import pytest

import millpond
from millpond import AsyncPond
from millpond.model import LeasedItem
from millpond.tasks import Context, GiveUp, RetryLater, TaskCancelled, TaskFailed, current
from millpond.tasks.errors import Interrupted
from millpond.tasks.threads import _raise_in
from millpond.worker.executors import Outcome, Running
from millpond.worker.runner import Worker
from tests.tasks.working import run, working


class World:
    """An app, and what its tasks and the test tell each other."""

    def __init__(self) -> None:
        self.app = app = millpond.App(data=":memory:")
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.ends: list[str] = []

        @app.task(max_attempts=1)
        def wait() -> str:
            self.begun.release()
            try:
                while not self.go_on.is_set():
                    time.sleep(0.001)  # a step of its work: an interruption is heard between two, not in one long wait
            except Interrupted:
                self.ends.append("interrupted")
                raise
            return threading.current_thread().name

        @app.task(max_attempts=1)
        async def wait_async() -> str:
            self.begun.release()
            try:
                await asyncio.to_thread(self.go_on.wait)
            except asyncio.CancelledError:
                self.go_on.set()  # for the thread
                self.ends.append("cancelled")
                raise
            return threading.current_thread().name

        self.kinds: dict[str, Any] = {"plain": wait, "async": wait_async}

    async def has_begun(self) -> None:
        await asyncio.to_thread(self.begun.acquire)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(("kind", "thread"), [("plain", "millpond-task-"), ("async", "millpond-tasks")])
def test_no_task_runs_in_the_thread_of_the_worker(world: World, kind: str, thread: str) -> None:
    async def go() -> None:
        async with working(world.app):
            world.go_on.set()
            handle = await world.kinds[kind].enqueue_async()
            assert (await handle.result()).startswith(thread)

    run(go)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_task_over_its_time_fails_and_has_ended_by_then(world: World, kind: str) -> None:
    async def go() -> None:
        async with working(world.app):
            handle = await world.kinds[kind].options(timeout=0.05).enqueue_async()
            with pytest.raises(TaskFailed, match=r"timed out after 0\.05s"):
                await handle.result()
            assert len(world.ends) == 1

    run(go)


@pytest.mark.slow  # the worker hears of it at half of the lease's time
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_cancelled_task_is_ended(world: World, kind: str) -> None:
    async def go() -> None:
        async with working(world.app, lease_timeout="1s"):
            handle = await world.kinds[kind].enqueue_async()
            await world.has_begun()
            await handle.cancel()
            with pytest.raises(TaskCancelled):
                await handle.result()
            assert len(world.ends) == 1

    run(go)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_forced_stop_gives_the_attempt_back(world: World, kind: str) -> None:
    async def go() -> None:
        async with AsyncPond(":memory:") as pond:
            async with working(world.app, pond=pond) as worker:
                handles = [await world.kinds[kind].enqueue_async() for _ in range(2)]
                await world.has_begun()
                await world.has_begun()
                worker.force()
            found = [await pond.get_item("jobs", handle.id) for handle in handles]
            assert [(item.state, item.attempts) for item in found] == [("ready", 0), ("ready", 0)]
            assert len(world.ends) == 2

    run(go)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_no_more_tasks_run_at_a_time_than_there_are_slots(world: World, kind: str) -> None:
    async def go() -> None:
        async with working(world.app, slots=2) as worker:
            handles = await world.kinds[kind].enqueue_many_async([()] * 5)
            await world.has_begun()
            await world.has_begun()
            assert worker.running == 2
            assert not world.begun.acquire(blocking=False)
            world.go_on.set()
            for handle in handles:
                await handle.result()

    run(go)


def test_a_task_that_does_not_hear_keeps_its_slot_and_its_job(world: World) -> None:
    """A thread cannot be ended: until the task has, its job is nobody else's."""
    deaf, heard = threading.Event(), threading.Semaphore(0)

    @world.app.task(timeout=0.02, max_attempts=2)
    def stubborn() -> str:
        world.begun.release()
        while not deaf.is_set():
            try:
                time.sleep(0.001)
            except Interrupted:
                heard.release()
        return "done all the same"

    async def go() -> None:
        async with working(world.app, slots=1) as worker:
            handle = await stubborn.enqueue_async()
            await world.has_begun()
            await asyncio.to_thread(heard.acquire)
            assert (await handle.state(), worker.running) == ("processing", 1)
            deaf.set()
            assert await handle.result() == "done all the same"
            assert (await handle.job()).attempts == 1

    run(go)


def test_a_task_that_waits_for_another_hears_that_its_time_is_over(world: World) -> None:
    @world.app.task(timeout=0.05, max_attempts=1)
    def waits_for(other: str) -> Any:
        return world.app.handle(other).result()

    async def go() -> None:
        async with working(world.app):
            never = await world.kinds["plain"].options(delay="1h").enqueue_async()
            handle = await waits_for.enqueue_async(never.id)
            with pytest.raises(TaskFailed, match="timed out"):
                await handle.result()

    run(go)


def test_the_context_writes_the_state_and_the_progress(world: World) -> None:
    app = world.app

    @app.task(max_attempts=2)
    async def noted_async(context: Context) -> Any:
        if context.attempt == 1:
            await context.write_state_async({"step": 1})
            raise RetryLater(delay=0)
        return [context.state, context.max_attempts, context.attempt, current() is context]

    @app.task(max_attempts=2)
    def noted(context: Context) -> Any:
        context.progress(0.5)
        context.write_state({"step": 1})
        context.progress(1.0, note="late")
        world.begun.release()
        world.go_on.wait()
        return [context.state, context.max_attempts, context.fencing_token > 0]

    async def go() -> None:
        async with working(app):
            assert await (await noted_async.enqueue_async()).result() == [{"step": 1}, 2, 2, True]
            handle = await noted.enqueue_async()
            await world.has_begun()
            document = (await app.connection.portal.api.get_item("jobs", handle.id)).state_doc
            assert document["step"] == 1
            world.go_on.set()
            assert await handle.result() == [{"step": 1}, 2, True]

    run(go)


def test_tasks_enqueue_tasks_through_the_connection_of_the_worker(world: World) -> None:
    app = world.app

    @app.task
    def leaf(n: int) -> int:
        return n + 1

    @app.task
    def plain(n: int) -> int:
        return leaf.enqueue(n).result() + 1

    @app.task
    async def root(n: int) -> int:
        handle = await plain.enqueue_async(n)
        assert handle.correlation_id == current().correlation_id
        return await handle.result() + 1

    async def go() -> None:
        async with working(app, slots=3):
            assert await (await root.enqueue_async(1)).result() == 4

    run(go)


def test_consumers_get_the_items_of_their_queues(world: World) -> None:
    app = world.app

    @app.consumer("orders")
    def order(item: LeasedItem) -> str:
        if item.attempts == 1:
            raise ValueError("the first time it fails")
        return item.text

    @app.consumer("mail")
    async def mail(item: LeasedItem) -> str:
        return item.text

    async def go() -> None:
        async with working(app):
            api = app.connection.portal.api
            for queue in app.consumers:
                [produced] = await api.produce(queue, ["a"])
                assert await app.handle(produced.id, queue).on_loop.result() == "a"

    run(go)


@pytest.mark.slow  # a hundred jobs, each of some milliseconds
def test_a_storm_of_interruptions_never_reaches_another_task(world: World) -> None:
    """Time limits that end just with the tasks: each job has one end, and the threads live on."""

    @world.app.task(max_attempts=1)
    def brief(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    async def go() -> None:
        async with working(world.app, slots=2):
            jobs = brief.options(timeout=0.002)
            handles = await jobs.enqueue_many_async([(0.0015 + n % 10 / 10_000,) for n in range(100)])
            ends = await asyncio.gather(*[handle.result() for handle in handles], return_exceptions=True)
            assert {type(end) for end in ends} <= {type(None), TaskFailed}
            assert all("timed out after 0.002s" in str(end) for end in ends if end is not None)
            world.go_on.set()
            await (await world.kinds["plain"].enqueue_async()).result()

    run(go)


def test_a_task_that_is_interrupted_while_it_logs_does_not_keep_the_others_from_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: None)
    interrupted = asyncio.Event()

    def raise_in(thread: int, error: type[BaseException] | None) -> None:
        _raise_in(thread, error)
        interrupted.set()

    monkeypatch.setattr("millpond.tasks.threads._raise_in", raise_in)

    @world.app.task(max_attempts=1, timeout=0.05)
    def logs() -> None:
        handler.handle(logging.makeLogRecord({}))

    async def go() -> None:
        async with working(world.app):
            handler.acquire()  # so it waits for this lock when it is interrupted
            handle = await logs.enqueue_async()
            await interrupted.wait()
            handler.release()
            with pytest.raises(TaskFailed, match="timed out"):
                await handle.result()
            assert handler.lock is not None
            assert handler.lock.acquire(blocking=False)
            handler.release()

    run(go)


@pytest.mark.parametrize("how", ["swallows", "blocks"])
def test_an_async_task_that_returns_after_its_time_has_failed(world: World, how: str) -> None:
    @world.app.task(max_attempts=1, timeout=0.05)
    async def late() -> str:
        if how == "blocks":
            time.sleep(0.06)  # noqa: ASYNC251 - which is what a task must not do
        else:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
        return "done all the same"

    async def go() -> None:
        async with working(world.app):
            with pytest.raises(TaskFailed, match=r"timed out after 0\.05s"):
                await (await late.enqueue_async()).result()

    run(go)


@pytest.mark.parametrize("awaited", [True, False])
def test_what_an_async_task_began_may_exit_and_the_others_go_on(world: World, awaited: bool) -> None:
    async def leave() -> None:
        sys.exit(3)

    @world.app.task(max_attempts=1)
    async def begins() -> str:
        begun = asyncio.create_task(leave())
        await asyncio.wait([begun])
        if awaited:
            await begun
        return str(begun.exception())

    async def go() -> None:
        async with working(world.app):
            other = await world.kinds["async"].enqueue_async()
            await world.has_begun()
            handle = await begins.enqueue_async()
            if awaited:
                with pytest.raises(TaskFailed, match="SystemExit: 3"):
                    await handle.result()
            else:
                assert await handle.result() == "3"
            world.go_on.set()
            assert await other.result() == "millpond-tasks"

    run(go)


def test_an_async_task_cannot_block_the_loop_by_waiting_for_another(world: World) -> None:
    @world.app.task(max_attempts=1)
    async def one() -> int:
        return 1

    @world.app.task(max_attempts=1)
    async def waits(blocking: bool) -> int:
        handle = one.enqueue()
        return handle.result() if blocking else await handle

    async def go() -> None:
        async with working(world.app):
            with pytest.raises(TaskFailed, match="write `await handle` instead"):
                await (await waits.enqueue_async(True)).result()
            assert await (await waits.enqueue_async(False)).result() == 1

    run(go)


def test_a_result_that_cannot_be_kept_is_the_end_of_the_job(world: World) -> None:
    @world.app.task
    def odd() -> Any:
        return {"mean": [1.5, float("-inf")]}

    @world.app.task(encoding="msgpack")
    def nan(given: float) -> Any:
        return given

    @world.app.task
    def big() -> int:
        return 2**70

    async def go() -> None:
        async with working(world.app):
            for handle, word in [
                (await odd.enqueue_async(), "it has -Infinity, which is no JSON number"),
                (await nan.enqueue_async(float("nan")), "it has NaN"),
                (await big.enqueue_async(), "a whole number beyond 64 bits; return it as text"),
            ]:
                with pytest.raises(TaskFailed, match=word):
                    await handle.result()
                assert (await handle.job()).attempts == 1

    run(go)


def test_hooks_of_an_app_are_called_by_its_worker(world: World) -> None:
    app, seen = world.app, list[str]()

    @app.on_start
    def started(worker: Worker) -> None:
        seen.append(f"start {worker.slots}")

    @app.on_stop
    async def stopped(worker: Worker, reason: str) -> None:
        seen.append(f"stop {reason}")

    @app.on_job_start
    def begun(job: Running) -> None:
        seen.append(f"begin {job.queue}")

    @app.on_job_end
    def ended(job: Running, outcome: Outcome) -> None:
        seen.append(f"end {outcome.ok}")

    app.on_error(lambda job, outcome: seen.append(f"error {outcome.error.splitlines()[0]}"))

    @app.task(max_attempts=1)
    def fails() -> None:
        raise ValueError("no")

    async def go() -> None:
        async with working(app):
            with pytest.raises(TaskFailed):
                await (await fails.enqueue_async()).result()

    run(go)
    assert seen == ["start 2", "begin jobs", "end False", "error ValueError: no", "stop stopped"]


def test_the_last_progress_of_an_attempt_that_fails_is_kept(world: World) -> None:
    app = world.app

    @app.task(max_attempts=1)
    def stumbles(context: Context) -> None:
        context.progress(1, 4, "row 1")
        context.write_state({"loaded": 1})  # after that the first is written, or on its way
        context.progress(3, 4, "row 3")
        raise ValueError("no")

    async def go() -> None:
        async with working(app):
            handle = await stumbles.enqueue_async()
            with pytest.raises(TaskFailed):
                await handle.result()
            progress = (await app.connection.portal.api.get_item("jobs", handle.id)).state_doc["progress"]
            assert progress == {"fraction": 0.75, "done": 3, "total": 4, "note": "row 3"}

    run(go)


def test_a_plain_task_that_runs_an_event_loop_of_its_own_is_interrupted_in_a_callback_too() -> None:
    app = millpond.App(data=":memory:")

    def callback() -> None:
        while True:
            time.sleep(0.001)

    async def wait_for_ever() -> None:
        asyncio.get_running_loop().call_soon(callback)
        await asyncio.Event().wait()

    @app.task(max_attempts=1, timeout=0.2)
    def plain() -> None:
        asyncio.run(wait_for_ever())

    async def go() -> None:
        async with working(app, slots=1):
            handle = await plain.enqueue_async()
            with pytest.raises(TaskFailed, match=r"timed out after 0\.2s"):
                await handle.result(timeout=10)

    run(go)


class Unseen(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise ValueError(name)


class Speechless(GiveUp):
    def __str__(self) -> str:
        raise ValueError("no words")


class Later(RetryLater):
    def __init__(self) -> None:
        """Without the words of its class."""


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unseen(), r"max_attempts\): Unseen; to tell it failed with ValueError"),
        (Speechless(), r"rejected\): <exception str\(\) failed>"),
        (Later(), "no error given"),
        (ValueError("x" * 1_000_000), r"x{1000}x*\n  at .*test_pools.py:\d+ in "),
    ],
    ids=["unseen", "speechless", "later", "long"],
)
def test_an_error_that_cannot_be_told_as_it_is_ends_no_thread(kind: str, error: Exception, said: str) -> None:
    app = millpond.App(data=":memory:")

    @app.task(max_attempts=1)
    def fail(well: bool) -> None:
        if not well:
            raise error

    @app.task(max_attempts=1)
    async def fail_async(well: bool) -> None:
        fail(well)

    task: Any = {"plain": fail, "async": fail_async}[kind]

    async def go() -> None:
        async with working(app, slots=1):
            for _ in range(2):
                handle = await task.enqueue_async(False)
                with pytest.raises(TaskFailed, match=said):
                    await handle.result(timeout=10)
            assert await (await task.enqueue_async(True)).result(timeout=10) is None

    run(go)


def test_a_handler_of_the_log_that_raises_ends_no_thread() -> None:
    app = millpond.App(data=":memory:")

    @app.task(max_attempts=1)
    def fail() -> None:
        raise ValueError("mine")

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no log")

    async def go() -> None:
        async with working(app, slots=1):
            for _ in range(2):
                handle = await fail.enqueue_async()
                with pytest.raises(TaskFailed, match="ValueError: mine"):
                    await handle.result(timeout=10)

    logger, broken = logging.getLogger("millpond.tasks"), Broken()
    logger.addHandler(broken)
    try:
        run(go)
    finally:
        logger.removeHandler(broken)
