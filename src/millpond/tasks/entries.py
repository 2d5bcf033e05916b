"""What pools keep of each job, and how outcomes come back to the runner's loop: many at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from millpond.tasks.context import Context
from millpond.tasks.notes import ItemNotes
from millpond.tasks.portal import Portal
from millpond.worker.executors import DEFERRED, Done, Outcome, Running, Why


class Entry:
    """One job in a pool. `begun` and `over` change once, under the pool's rules."""

    __slots__ = ("begun", "done", "job", "limit", "notes", "over", "running", "timed_out", "timeout", "timer")

    def __init__(self, job: Running, done: Done, portal: Portal, timeout: float | None) -> None:
        self.job = job
        self.done = done
        self.timeout = timeout
        self.notes = ItemNotes(job.item, job.queue, portal)
        self.begun = False
        self.over = False
        self.timed_out = False
        self.timer: asyncio.TimerHandle | None = None  # on the runner's loop
        self.limit: asyncio.TimerHandle | None = None  # on the tasks' loop
        self.running: Any = None  # the thread's slot, or the loop's task

    def context(self) -> Context:
        job = self.job
        return Context(job.item, job.queue, None if job.spec is None else job.spec.task, self.notes)

    def outcome(self, outcome: Outcome) -> Outcome:
        """A task that ended well just in time has ended well."""
        if outcome.ok or outcome.dead:
            return outcome
        if self.timed_out:
            return Outcome(ok=False, error=f"timed out after {self.timeout:g}s")
        return DEFERRED if self.job.ending == "stopping" else outcome


class Outcomes:
    """The jobs of a pool, and their ends: from other threads to the runner's loop, many in one turn of it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ended: deque[tuple[Entry, Outcome]] = deque()
        self._asked = False
        self._entries: dict[Entry, None] = {}
        self._last: set[asyncio.Task[None]] = set()
        self._idle: asyncio.Future[None] | None = None

    @property
    def count(self) -> int:
        return len(self._entries)

    def expect(self, entry: Entry) -> None:
        self._entries[entry] = None

    def forget(self, entries: Iterable[Entry]) -> None:
        """They were taken back."""
        for entry in entries:
            entry.over = True
            del self._entries[entry]
        self._look()

    def put(self, entry: Entry, outcome: Outcome) -> None:
        """From any thread."""
        self._ended.append((entry, outcome))
        if not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._asked = False
        while self._ended:
            self.tell(*self._ended.popleft())

    def tell(self, entry: Entry, outcome: Outcome) -> None:
        """On the loop; once an entry, whoever comes first."""
        if entry.over:
            return
        entry.over = True
        if entry.timer is not None:
            entry.timer.cancel()
        entry.notes.ended()
        outcome = entry.outcome(outcome)
        last = None if outcome.ok or entry.job.ending is not None else entry.notes.last()
        if last is None:
            self._finish(entry, outcome)
        else:
            task = self._loop.create_task(last)  # how far it came: the next attempt may not come as far
            self._last.add(task)
            task.add_done_callback(self._last.discard)
            task.add_done_callback(lambda _: self._finish(entry, outcome))

    def _finish(self, entry: Entry, outcome: Outcome) -> None:
        del self._entries[entry]
        entry.done(entry.job, outcome)
        if not self._entries:
            self._look()

    def end_all(self, end: Callable[[Running, Why], None]) -> None:
        for entry in list(self._entries):
            entry.job.ending = entry.job.ending or "stopping"
            end(entry.job, entry.job.ending)

    async def idle(self, patience: float | None = None) -> bool:
        """Whether all have ended within the time."""
        if self._entries:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=patience)
        return not self._entries

    def _look(self) -> None:
        if self._idle is not None and not self._entries and not self._idle.done():
            self._idle.set_result(None)
