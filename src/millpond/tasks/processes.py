"""Plain tasks in processes of their own: as many cores as there are slots, and an end that no task can refuse.

Each process is a fresh Python that loads the app by its place; no function and no object of the worker is handed over.
When a task's time is over, or nobody wants it any more, it is interrupted, and after a moment killed with all that it
has started; another process takes the place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from millpond.api import Api
from millpond.errors import InvalidRequest
from millpond.tasks.calling import INTERRUPTED, Found, found_for, log, timeout_of
from millpond.tasks.connection import Where
from millpond.tasks.entries import Entry, Outcomes
from millpond.tasks.frames import Hello
from millpond.tasks.portal import Portal
from millpond.tasks.process import KEEP_S, Process
from millpond.worker.aside import aside
from millpond.worker.executors import DEFERRED, Done, Outcome, Running, Why
from millpond.worker.memory import resident_bytes
from millpond.worker.restarts import pause, remembered
from millpond.worker.supervision import LEFTOVER_PATIENCE
from millpond.worker.tree import end_leftovers, unsupervised

FORCED_S: Final = 8.0  # for tasks to end by force: their own grace, and some
AHEAD: Final = 16  # jobs that are sent to a process before it has ended the one in hand, if they are short
SHORT_S: Final = 0.002  # as short as that: then the way there and back counts
RSS_LOOK_S: Final = 0.1  # between looks at the memory of a process
UNSTARTED: Final = (InvalidRequest, OSError, RuntimeError)  # the last is asyncio's: there is no room for a thread
MOMENT_S: Final = 0.02  # behind a job that takes longer none waits: another process may be free, or what it waits for


class ProcessPool:
    """An Executor that takes a backlog. `slots` processes."""

    def __init__(
        self,
        app: Found,
        api: Api,
        slots: int,
        place: str,
        where: Where,
        process_jobs_max: int | None = None,
        process_rss_max: int | None = None,
    ) -> None:
        self._app = app
        self._api = api
        self._slots = slots
        self._hello = Hello(place, where, [])
        self._jobs_max = process_jobs_max
        self._rss_max = process_rss_max
        self._waiting: deque[Entry] = deque()
        self._processes: list[Process] = []
        self._crashes: list[float] = []
        self._average = SHORT_S  # seconds that a job takes
        self._look: asyncio.TimerHandle | None = None  # at what waits behind a long one
        self._keeping: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._successors: set[Process] = set()  # that have not loaded the app yet
        self._open = False  # processes that end are replaced

    def accepts(self, job: Running) -> bool:
        found = found_for(self._app, job)
        return found is not None and not found.is_async

    async def start(self) -> None:
        """Until all processes have loaded the app: one that cannot is told at once. What tasks have left whose worker
        was killed, and the watcher with it, is ended before.
        """
        if left := await aside(end_leftovers, unsupervised, LEFTOVER_PATIENCE):
            log.error("processes of jobs whose worker died could not be ended", extra={"pids": left})
        self._loop = loop = asyncio.get_running_loop()
        self._portal = Portal(loop, self._api)
        self._app.connection.bind(self._portal)
        self._outcomes = Outcomes(loop)
        self._waiting.clear()
        self._processes = [Process(self._hello, self._ended, self._gone) for _ in range(self._slots)]
        results = await asyncio.gather(*[process.start() for process in self._processes], return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await self.stop(force=True)
                raise result
        self._open = True
        self._keep()
        for process in list(self._processes):
            if process.gone is not None:
                self._gone(process, process.gone, (), ())

    async def stop(self, *, force: bool) -> None:
        if force:
            self._outcomes.end_all(self.end)
        if not await self._outcomes.idle(FORCED_S if force else None):
            log.warning("%d tasks do not end; their processes are killed", self._outcomes.count)
        self._open = False
        for timer in (self._look, self._keeping):
            if timer is not None:
                timer.cancel()
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*[process.close() for process in (*self._processes, *self._successors)])
        self._processes = []
        self._successors.clear()
        self._app.connection.unbind(self._portal)

    def run(self, job: Running, done: Done) -> None:
        job.own = entry = Entry(job, done, self._portal, timeout_of(self._app, job))
        self._outcomes.expect(entry)
        self._waiting.append(entry)
        self._fill()

    def take_back(self) -> Sequence[Running]:
        entries = [*(entry for process in self._processes for entry in process.take_back()), *self._waiting]
        self._waiting.clear()
        self._outcomes.forget(entries)
        return [entry.job for entry in entries]

    def extended(self, job: Running) -> None:
        """The lease is the runner's: it ends the job if that is lost."""
        entry: Entry = job.own
        if isinstance(entry.running, Process):
            entry.running.keep()

    def _keep(self) -> None:
        """For the case that this worker is stopped, or stuck: watchers then end what runs when its lease is over."""
        for process in self._processes:
            process.keep()
        self._keeping = self._loop.call_later(KEEP_S, self._keep)

    def end(self, job: Running, why: Why) -> None:
        """One that was sent to a process and has not begun never will."""
        entry: Entry = job.own
        entry.notes.cancelled = True
        if isinstance(entry.running, Process):
            self._take_from(entry.running)
        if entry in self._waiting:
            self._waiting.remove(entry)
            self._outcomes.tell(entry, DEFERRED if why == "stopping" else INTERRUPTED)
        elif isinstance(entry.running, Process):
            entry.running.end(entry, at_once=why == "lease_lost")
        if why != "stopping":  # then the others are ended too
            self._fill()

    # ---- jobs to processes ------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """One each first; more only where they are short."""
        depth = 0
        most = AHEAD if self._average < SHORT_S else 1
        while self._waiting and depth < most:
            depth += 1
            for process in self._processes:
                if self._waiting and process.count < depth and self._is_free(process):
                    process.put(self._waiting.popleft())
                    if most == 1:  # else it would cost more than the job
                        process.keep(after=0.0)
        if depth > 1 and self._look is None:
            self._look = self._loop.call_later(MOMENT_S, self._take_from_long)

    def _take_from_long(self) -> None:
        """What waits behind a job that is not short after all: another process may be free."""
        self._look = None
        behind = [process for process in self._processes if process.count > 1]
        for process in behind:
            if process.seconds >= MOMENT_S:
                self._take_from(process)
        if behind:
            self._look = self._loop.call_later(MOMENT_S, self._take_from_long)
        self._fill()

    def _take_from(self, process: Process) -> None:
        self._waiting.extendleft(reversed(process.take_back()))

    def _is_free(self, process: Process) -> bool:
        if process.silent and process.count:  # one is enough to see whether it takes any
            return False
        return process.ready and self._may_serve(process) and process.seconds < MOMENT_S

    def _may_serve(self, process: Process) -> bool:
        if process.spent:
            return False
        return self._jobs_max is None or process.served + process.count < self._jobs_max

    def _look_at_memory(self, process: Process) -> None:
        """Between jobs, but not for each of many."""
        now = self._loop.time()
        if self._rss_max is not None and process.pid is not None and now - process.looked_at >= RSS_LOOK_S:
            process.looked_at = now
            process.spent = resident_bytes(process.pid) > self._rss_max

    def _ended(self, process: Process, entry: Entry, outcome: Outcome, seconds: float) -> None:
        self._average += 0.1 * (seconds - self._average)
        if outcome.ok:
            self._crashes.clear()  # not all of them crash: those that do must not keep the others waiting
        self._outcomes.put(entry, outcome)
        self._look_at_memory(process)
        if not process.count and not self._may_serve(process):
            process.retire()
        self._fill()

    # ---- processes that end -----------------------------------------------------------------------------------

    def _gone(self, process: Process, how: str, of: Sequence[Entry], left: Sequence[Entry]) -> None:
        for entry in of:
            self._outcomes.put(entry, Outcome(ok=False, error=f"the process of the task died: {how}"))
        for entry in reversed(left):
            if entry.job.ending is None and not entry.timed_out:
                self._waiting.appendleft(entry)
            else:
                self._outcomes.put(entry, INTERRUPTED)
        if not self._open or process not in self._processes:
            return
        now = self._loop.time()
        if not process.wanted_to_end:
            log.warning("a process of the pool died: %s; another takes its place", how)
            self._crashes = [*remembered(self._crashes, now), now]
        wait = 0.0 if process.wanted_to_end else pause(self._crashes, now)
        task = self._loop.create_task(self._replace(process, wait))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        self._fill()

    async def _replace(self, old: Process, wait: float) -> None:
        while True:
            await asyncio.sleep(wait)
            try:
                process = await self._successor()
            except UNSTARTED as error:
                log.error("a process of the pool could not be started: %s", error)
                self._crashes.append(self._loop.time())
                wait = pause(self._crashes, self._loop.time())
            else:
                self._processes[self._processes.index(old)] = process
                self._successors.remove(process)
                self._fill()
                return

    async def _successor(self) -> Process:
        process = Process(self._hello, self._ended, self._gone)
        self._successors.add(process)
        try:
            await process.start()
        except UNSTARTED:
            await process.close()
            self._successors.remove(process)
            raise
        return process
