"""Async tasks, all on one event loop in a thread of its own: a task that blocks it blocks tasks, never the worker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import uvloop

from millpond.api import Api
from millpond.tasks.calling import INTERRUPTED, Found, found_for, log, perform_async, timeout_of
from millpond.tasks.entries import Entry, Outcomes
from millpond.tasks.portal import Portal
from millpond.worker.executors import DEFERRED, Done, Outcome, Running, Why

FORCED_S: Final = 5.0  # for tasks to end once they were cancelled; then they are left behind, with the process


class LoopPool:
    """An Executor that takes a backlog. `slots` jobs at a time."""

    def __init__(self, app: Found, api: Api, slots: int) -> None:
        self._app = app
        self._api = api
        self._slots = slots
        self._waiting: deque[Entry] = deque()  # both loops take from it: a job is whose pop it is
        self._asked = False
        self._busy = 0

    def accepts(self, job: Running) -> bool:
        found = found_for(self._app, job)
        return found is not None and bool(found.is_async)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._portal = Portal(loop, self._api)
        self._app.connection.bind(self._portal)
        self._outcomes = Outcomes(loop)
        self._waiting.clear()
        self._asked, self._busy = False, 0
        self._stopped = False
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._work, args=(self._loop,), name="millpond-tasks", daemon=True)
        self._thread.start()

    async def stop(self, *, force: bool) -> None:
        if force:
            self._outcomes.end_all(self.end)
        if await self._outcomes.idle(FORCED_S if force else None):
            self._loop.call_soon_threadsafe(self._stop)
            await asyncio.to_thread(self._thread.join, FORCED_S)
        else:
            log.warning("%d async tasks do not end; they are left behind on their loop", self._outcomes.count)
        self._app.connection.unbind(self._portal)

    def run(self, job: Running, done: Done) -> None:
        job.own = entry = Entry(job, done, self._portal, timeout_of(self._app, job))
        self._outcomes.expect(entry)
        self._waiting.append(entry)
        if not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self._take)

    def take_back(self) -> Sequence[Running]:
        entries: list[Entry] = []
        try:
            while True:
                entries.append(self._waiting.pop())
        except IndexError:
            pass
        self._outcomes.forget(entries)
        return [entry.job for entry in entries]

    def extended(self, job: Running) -> None:
        """The lease is the runner's."""

    def end(self, job: Running, why: Why) -> None:
        entry: Entry = job.own
        entry.notes.cancelled = True
        try:
            self._waiting.remove(entry)
        except ValueError:
            self._loop.call_soon_threadsafe(self._cancel, entry)
        else:
            self._outcomes.tell(entry, DEFERRED if why == "stopping" else INTERRUPTED)

    # ---- on the tasks' loop -----------------------------------------------------------------------------------

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while not self._stopped:
                self._run_loop(loop)
            left = asyncio.all_tasks(loop)  # what tasks began and did not wait for
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until it is stopped, or something that a task began exits: that ends nobody but itself."""
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            log.error("something that an async task began has exited: %r; the others go on", error)

    def _stop(self) -> None:
        self._stopped = True
        self._loop.stop()

    def _take(self) -> None:
        self._asked = False
        while self._busy < self._slots:
            try:
                entry = self._waiting.popleft()
            except IndexError:
                return
            self._begin(entry)

    def _begin(self, entry: Entry) -> None:
        self._busy += 1
        entry.job.started_at = time.monotonic()
        entry.running = self._loop.create_task(self._run(entry))
        if entry.timeout is not None:
            entry.limit = self._loop.call_later(entry.timeout, self._time_out, entry)

    async def _run(self, entry: Entry) -> None:
        outcome: Outcome = INTERRUPTED
        try:
            outcome = await perform_async(self._app, entry.context(), entry.job.spec)
        finally:
            if entry.limit is not None:
                entry.limit.cancel()
                outcome = self._in_time(entry, outcome)
            self._busy -= 1
            self._outcomes.put(entry, outcome)
            self._take()

    def _in_time(self, entry: Entry, outcome: Outcome) -> Outcome:
        """One that did not hear that its time was over, or kept the loop from telling it, has failed all the same."""
        if time.monotonic() - entry.job.started_at >= (entry.timeout or 0):
            entry.timed_out = True
        return INTERRUPTED if entry.timed_out and not outcome.dead else outcome

    def _time_out(self, entry: Entry) -> None:
        entry.timed_out = True
        entry.running.cancel()

    def _cancel(self, entry: Entry) -> None:
        """After the first step of the task, which must not be left out: it tells the end."""
        self._loop.call_soon(entry.running.cancel)
