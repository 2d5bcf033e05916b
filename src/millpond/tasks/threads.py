"""Plain tasks in threads of the worker: nothing to start for a job, and all of them see the same memory.

A thread cannot be ended from outside. When a task's time is over, or nobody wants it any more, `Interrupted` is raised
in it, which reaches Python code at its next step, and code that waits in a library when that returns. Until the task
has truly ended it keeps its slot and its lease, so no job ever runs twice at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Final

from millpond.api import Api
from millpond.tasks.calling import INTERRUPTED, Found, found_for, log, perform, timeout_of
from millpond.tasks.entries import Entry, Outcomes
from millpond.tasks.errors import Interrupted
from millpond.tasks.portal import Portal, end_wait
from millpond.tasks.unlocking import let_go_of_logging
from millpond.worker.executors import DEFERRED, Done, Outcome, Running, Why

FORCED_S: Final = 5.0  # for tasks to end once they were interrupted; then they are left behind, with the process


class Slot:
    """One thread, and the job that it has. Who interrupts the job holds the gate."""

    __slots__ = ("entry", "gate", "ident")

    def __init__(self, gate: threading.Lock) -> None:
        self.entry: Entry | None = None
        self.gate = gate
        self.ident = 0

    def leave(self) -> None:
        """The task has ended: an interruption that comes late finds nobody, and changes nothing."""
        while True:
            try:
                if (entry := self.entry) is not None:
                    with self.gate:
                        self.entry = None
                    if entry.timed_out or entry.notes.cancelled:
                        _raise_in(self.ident, None)  # one that was asked for and is not raised yet
                return
            except Interrupted:
                pass


class ThreadPool:
    """An Executor that takes a backlog. `slots` jobs at a time."""

    def __init__(self, app: Found, api: Api, slots: int) -> None:
        self._app = app
        self._api = api
        self._count = slots
        self._jobs: SimpleQueue[Entry | None] = SimpleQueue()
        self._gate = threading.Lock()  # which job a thread has, and whether it may be interrupted

    def accepts(self, job: Running) -> bool:
        found = found_for(self._app, job)
        return found is not None and not found.is_async

    async def start(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._portal = Portal(loop, self._api)
        self._app.connection.bind(self._portal)
        self._outcomes = outcomes = Outcomes(loop)
        jobs = self._jobs = SimpleQueue[Entry | None]()
        for number in range(self._count):
            name = f"millpond-task-{number}"
            threading.Thread(target=self._work, args=(Slot(self._gate), jobs, outcomes), name=name, daemon=True).start()

    async def stop(self, *, force: bool) -> None:
        """Tasks that do not end even by force keep their threads, and their leases: they end with the process."""
        if force:
            self._outcomes.end_all(self.end)
        if not await self._outcomes.idle(FORCED_S if force else None):
            log.warning("%d tasks do not end; they are left behind in their threads", self._outcomes.count)
        for _ in range(self._count):
            self._jobs.put(None)
        self._app.connection.unbind(self._portal)

    def run(self, job: Running, done: Done) -> None:
        job.own = entry = Entry(job, done, self._portal, timeout_of(self._app, job))
        self._outcomes.expect(entry)
        self._jobs.put(entry)

    def take_back(self) -> Sequence[Running]:
        entries: list[Entry] = []
        try:
            while (entry := self._jobs.get_nowait()) is not None:
                if not entry.over:
                    entries.append(entry)
        except Empty:
            pass
        self._outcomes.forget(entries)
        return [entry.job for entry in entries]

    def extended(self, job: Running) -> None:
        """The lease is the runner's: a thread need not know."""

    def end(self, job: Running, why: Why) -> None:
        entry: Entry = job.own
        entry.notes.cancelled = True
        with self._gate:
            waits = not entry.begun
            entry.begun = True
            if not waits:
                self._interrupt(entry)
        if waits:
            self._outcomes.put(entry, DEFERRED if why == "stopping" else INTERRUPTED)

    # ---- in the threads ---------------------------------------------------------------------------------------

    def _work(self, slot: Slot, jobs: SimpleQueue[Entry | None], outcomes: Outcomes) -> None:
        slot.ident = threading.get_ident()
        while (entry := jobs.get()) is not None:
            outcome = self._run(slot, entry)
            if outcome is not None:
                outcomes.put(entry, outcome)

    def _run(self, slot: Slot, entry: Entry) -> Outcome | None:
        """None: it was ended while it waited."""
        outcome: Outcome | None = None
        while True:
            try:
                if entry.running is None and not self._begin(slot, entry):
                    return None
                if outcome is None:
                    outcome = perform(self._app, entry.context(), entry.job.spec, slot.leave)
                slot.leave()
                if entry.timed_out or entry.notes.cancelled:
                    let_go_of_logging()
                return outcome
            except Interrupted:
                outcome = outcome or INTERRUPTED

    def _begin(self, slot: Slot, entry: Entry) -> bool:
        with self._gate:
            if entry.begun:
                return False
            entry.begun = True
            slot.entry = entry
            entry.running = slot
        entry.job.started_at = time.monotonic()
        if entry.timeout is not None:
            self._loop.call_soon_threadsafe(self._arm, entry)
        return True

    # ---- when time is over, on the runner's loop ----------------------------------------------------------------

    def _arm(self, entry: Entry) -> None:
        if not entry.over:
            entry.timer = self._loop.call_later(entry.timeout or 0, self._time_out, entry)

    def _time_out(self, entry: Entry) -> None:
        with self._gate:
            self._interrupt(entry, timed_out=True)

    def _interrupt(self, entry: Entry, timed_out: bool = False) -> None:
        """With the gate held: the thread has this job, or it has let go of it for good."""
        slot: Slot | None = entry.running
        if slot is not None and slot.entry is entry:
            entry.timed_out = entry.timed_out or timed_out
            _raise_in(slot.ident, Interrupted)
            end_wait(slot.ident)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """None takes back what was not raised yet."""
    wanted = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), wanted)
