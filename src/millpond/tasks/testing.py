"""Tasks in tests: no worker, no threads of tasks, and a clock that is moved by hand.

    with app.testing() as testing:
        handle = send.enqueue("a@b.c")
        assert handle.result() == "sent"             # runs what is due, in this thread
        testing.advance("10s")                       # retries, schedules and delays come due on the way

The queues are in memory, and are the ones of a real pond: attempts, backoff, keys, `after` and schedules are as they
are with a worker. Only timeouts of plain tasks are not kept. In tests that run on an event loop use `run_async`,
`advance_async` and the async calls of tasks; plain tasks are then in a thread, since they may block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Final

from millpond.clock import ManualClock
from millpond.durations import checked_seconds
from millpond.errors import InvalidRequest
from millpond.jobs.view import Job, job_of
from millpond.model import DURATION_MAX_MS, Duration, to_datetime
from millpond.tasks.calling import Found, perform, perform_async
from millpond.tasks.context import Context, current_or_none
from millpond.tasks.declared import declare
from millpond.tasks.notes import ItemNotes
from millpond.tasks.portal import OwnPortal
from millpond.tasks.testing_work import TestingWork
from millpond.worker.executors import Outcome, Running

RUNS_MAX: Final = 10_000  # jobs in one `run` or `advance`: more are tasks that enqueue themselves for ever


@contextmanager
def open_testing(app: Found, *, eager: bool) -> Iterator[Testing]:
    """Everything that `app` enqueues goes to a pond in memory, until the end of the `with`."""
    made = Testing(app, eager)
    app.connection.bind(made.portal)
    try:
        yield made
    finally:
        app.connection.unbind(made.portal)
        made.close()


class TestingPortal(OwnPortal):
    """Whoever waits for a result runs the tasks that are due first, in the waiting thread."""

    inline = True
    testing: Testing

    def settle(self) -> None:
        self.testing.run()

    async def settle_async(self) -> None:
        await self.testing.run_async()

    def enqueued(self) -> None:
        if self.testing.eager and current_or_none() is None:  # what a task enqueues comes after it
            self.testing.run()

    async def enqueued_async(self) -> None:
        if self.testing.eager and current_or_none() is None:
            await self.testing.run_async()


class Testing:
    """`eager`: what is due is run as soon as something is enqueued."""

    __test__ = False  # for pytest

    def __init__(self, app: Found, eager: bool) -> None:
        from millpond.embedded import AsyncPond

        self.clock = ManualClock()
        self.eager = eager
        self._app = app
        self._runners: list[asyncio.Runner] = []  # for async tasks in plain tests
        self.portal = TestingPortal(lambda: AsyncPond(":memory:", clock=self.clock))
        self.portal.testing = self
        self._work = TestingWork(app, self.clock)
        self.portal.call(lambda api: declare(api, app.schedules.values(), self.now))

    def close(self) -> None:
        for runner in self._runners:
            runner.close()
        self.portal.close()

    @property
    def now(self) -> datetime:
        return to_datetime(self.clock.now())

    def jobs(self, queue: str = "jobs") -> list[Job]:
        """All that are in the queue, whatever their state."""
        return [job_of(item, queue) for item in self.portal.call(lambda api: self._work.items(api, queue))]

    # ---- plain tests ------------------------------------------------------------------------------------------

    def run(self) -> int:
        """All that is due, and what follows from it; how many jobs that were."""
        _refuse_on_a_loop()
        count = 0
        while (job := self.portal.call(self._work.next)) is not None:
            count = _counted(count)
            outcome = self._perform(job)
            self.portal.call(partial(self._work.end, job=job, outcome=outcome))
        return count

    def advance(self, duration: Duration) -> int:
        """Lets time pass: each job runs at its own instant on the way."""
        target = self._after(duration)
        count = self.run()
        while (due := self.portal.call(self._work.next_due)) is not None and due <= target:
            self._move(due)
            count = _counted(count, self.run())
        self._move(target)
        return _counted(count, self.run())

    def _perform(self, job: Running) -> Outcome:
        if not self._work.is_async(job):
            return perform(self._app, self._context(job), job.spec)
        runner = self._runners.pop() if self._runners else asyncio.Runner()  # a task may wait for another
        try:
            return runner.run(self._perform_async(job))
        finally:
            self._runners.append(runner)

    # ---- tests on an event loop -------------------------------------------------------------------------------

    async def run_async(self) -> int:
        count = 0
        while (job := await self.portal.call_async(self._work.next)) is not None:
            count = _counted(count)
            outcome = await self._perform_any(job)
            await self.portal.call_async(partial(self._work.end, job=job, outcome=outcome))
        return count

    async def advance_async(self, duration: Duration) -> int:
        target = self._after(duration)
        count = await self.run_async()
        while (due := await self.portal.call_async(self._work.next_due)) is not None and due <= target:
            self._move(due)
            count = _counted(count, await self.run_async())
        self._move(target)
        return _counted(count, await self.run_async())

    async def _perform_any(self, job: Running) -> Outcome:
        if self._work.is_async(job):
            return await asyncio.create_task(self._perform_async(job))
        return await asyncio.to_thread(perform, self._app, self._context(job), job.spec)  # it may block

    async def _perform_async(self, job: Running) -> Outcome:
        context, limit = self._context(job), None if job.spec is None else job.spec.timeout
        attempt = asyncio.ensure_future(perform_async(self._app, context, job.spec))
        done, _ = await asyncio.wait([attempt], timeout=limit)
        if not done:
            attempt.cancel()
            await asyncio.wait([attempt])
            return Outcome(ok=False, error=f"timed out after {limit:g}s")
        return attempt.result()

    # ---- parts ------------------------------------------------------------------------------------------------

    def _context(self, job: Running) -> Context:
        notes = ItemNotes(job.item, job.queue, self.portal)
        return Context(job.item, job.queue, None if job.spec is None else job.spec.task, notes)

    def _after(self, duration: Duration) -> int:
        ms = round(checked_seconds(duration, "duration") * 1000)
        if ms > DURATION_MAX_MS:
            raise InvalidRequest(f"duration is {duration!r:.60}; use up to {DURATION_MAX_MS // 86_400_000} days")
        return self.clock.now() + ms

    def _move(self, instant: int) -> None:
        self.clock.advance(max(0, instant - self.clock.now()))


def _counted(count: int, more: int = 1) -> int:
    if count + more > RUNS_MAX:
        raise InvalidRequest(f"more than {RUNS_MAX} jobs ran; a task enqueues itself for ever, or advance less")
    return count + more


def _refuse_on_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise InvalidRequest("this test runs on an event loop; use run_async, advance_async and await the results")
