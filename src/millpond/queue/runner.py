"""Runs a logical queue on an event loop: it owns the inbox, the clock and the commit threads.

The loop never waits for a disk: each partition's jobs run in a thread of its own, and what arrives meanwhile gathers
for the next turn. A store that does not block (memory) is run on the loop itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from millpond.clock import Clock
from millpond.doorbell import Doorbell
from millpond.errors import InternalError
from millpond.meters import EngineMeter
from millpond.model import QueueDefinition
from millpond.queue.lane import Job, Lane, LoadJob, Status, TurnJob
from millpond.queue.logical import LogicalQueue
from millpond.queue.readings import QueueLook, Totals
from millpond.queue.requests import Arrive, Forget, Request
from millpond.store.base import StoreFull

log = logging.getLogger("millpond.queue")
TIMER_MS_MAX = 3_600_000  # the event loop's clock and ours may drift apart: look again within the hour
PANIC_PAUSE_MS = 100  # so that a bug that repeats itself does not take the whole core


class CommitThread:
    """The thread of one partition's jobs, started with the first of them."""

    def __init__(self, name: str, finished: Callable[[Job, float], None]) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._finished = finished
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """To be called when its last job has ended: then it ends at once."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = perf_counter()
            job.run()
            self._finished(job, perf_counter() - began)


class Runner:
    def __init__(
        self,
        queue: LogicalQueue,
        clock: Clock,
        bell: Doorbell,
        send: Callable[[Runner, Arrive | Forget], None],
        meter: EngineMeter,
        totals_seen: Totals,
        drained: Callable[[Runner], None] = lambda runner: None,
    ) -> None:
        """`send` takes requests for other queues; their answers come back through `settle`.

        `drained` is told, again and again, while there are partitions to be removed.
        """
        self.queue = queue
        self.look = QueueLook(queue, totals_seen)
        self.last_used = clock.now()
        self.tried = asyncio.Event()  # set once every partition was read or could not be
        self._clock = clock
        self._bell = bell
        self._send = send
        self._drained = drained
        self._meter = meter
        self._moved: dict[int, int] = {}  # by partition: the sum of its totals when it last committed
        self._loop = asyncio.get_running_loop()
        self._threads: dict[int, CommitThread] = {}
        self._tick_asked = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._letting_go: dict[
            int, asyncio.Future[None]
        ] = {}  # partitions that are removed, until their store is closed
        self.unanswered: set[Request] = set()
        self.wake()

    def ask(self, request: Request) -> asyncio.Future[Any]:
        """Submit; the reply comes as the future's result. Whoever stops waiting for it must `withdraw`."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self.accept(request, partial(_deliver, future))
        return future

    def accept(self, request: Request, done: Callable[[Any], None]) -> Request:
        """Submit; `done` is called with the request once it is answered: no future and no task."""
        request.done = done
        request.runner = self
        self.unanswered.add(request)
        if self._tick_asked:  # those who come before the tick come at one instant
            self.queue.submit(request, self.last_used)
            return request
        self.last_used = now = self._clock.now()
        self.queue.submit(request, now)
        if self.queue.busy:
            self._set_timer(request.deadline, now)  # a store that never answers must not hold it for ever
        else:
            self.wake()
        return request

    def withdraw(self, request: Request) -> None:
        """The caller has gone: what it would have got goes back."""
        self.queue.withdraw(request)
        self.wake()

    def settle(self, request: Arrive | Forget) -> None:
        self.queue.settle(request)
        self.wake()

    def configure(self, definition: QueueDefinition) -> None:
        self.queue.configure(definition)
        self.wake()

    def add(self, lanes: list[Lane]) -> None:
        self.queue.add(lanes)
        self.wake()

    async def remove(self, index: int) -> bool:
        """Let go of a partition that has drained, and of its store; False: not now."""
        lane = self.queue.remove(index, now := self._clock.now())
        if lane is None:
            return index in self.queue.removing and index not in self._letting_go
        closed = self._letting_go[index] = self._loop.create_future()
        self._run_jobs(now)
        await closed
        thread = self._threads.pop(index, None)
        if thread is not None:
            thread.stop()
        return True

    def wake(self) -> None:
        """Tick once the event loop has handed over all that is there; not while every lane is busy anyway."""
        if not self._tick_asked and not self.queue.busy:
            self._tick_asked = True
            self._loop.call_soon(self._tick)

    def shut(self) -> None:
        """No more is taken, and everyone who waits is answered."""
        self._close_step()

    async def close(self) -> None:
        """Shut, and waits for commits under way."""
        self.shut()
        await self._closed
        for thread in self._threads.values():
            thread.stop()

    @property
    def dead_threads(self) -> int:
        """Commit threads that have ended though they should not have."""
        return 0 if self._closed.done() else sum(not thread.alive for thread in self._threads.values())

    def _tick(self) -> None:
        self._tick_asked = False
        if self.queue.closing:
            return
        try:
            wake_at = self.queue.tick(now := self._clock.now())
        except Exception as error:
            self._panic(error)
            return
        state = self.queue.state
        if state.outbox:
            outbox, state.outbox = state.outbox, []
            for request in outbox:
                self._send(self, request)
        self._set_timer(wake_at, now)
        if state.draining and self.queue.drained:
            self._drained(self)
        self._run_jobs(now)  # last: a commit thread that wakes up finds the interpreter free

    def _panic(self, error: Exception) -> None:
        """A bug of ours: say so to all who wait, and start again from what is on disk."""
        name = self.queue.state.definition.name
        log.error("queue %s failed; its partitions are loaded again", name, exc_info=error)
        now = self._clock.now()
        self._meter.panics += 1
        self.queue.panic(error, now)
        for request in list(self.unanswered):  # those that the queue had in its hands just then
            if not request.answered:
                request.fail(InternalError(f"millpond has a bug ({type(error).__name__}: {error}); please report it"))
        self._set_timer(now + PANIC_PAUSE_MS, now)
        if self.queue.closing:
            self._close_step()

    def _set_timer(self, wake_at: int | None, now: int) -> None:
        """A timer that is set for earlier stays: it wakes for nothing, and that is cheaper than setting it anew."""
        if wake_at is None or (self._timer is not None and now < self._timer_at <= wake_at):
            return
        self._drop_timer()
        self._timer_at = min(wake_at, now + TIMER_MS_MAX)
        self._timer = self._loop.call_later(max(0, self._timer_at - now) / 1000, self._ring)

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._tick()

    def _run_jobs(self, now: int) -> None:
        jobs, self.queue.jobs = self.queue.jobs, []
        for job in jobs:
            job.began_at = now
            if job.lane.store.blocking:
                self._thread(job.lane).put(job)
            else:
                began = perf_counter()
                job.run()
                self._loop.call_soon(self._finish, job, perf_counter() - began)

    def _thread(self, lane: Lane) -> CommitThread:
        thread = self._threads.get(lane.index)
        if thread is None:
            name = f"millpond-{self.queue.state.definition.name}-{lane.index}"
            thread = self._threads[lane.index] = CommitThread(name, self._finished)
        return thread

    def _finished(self, job: Job, seconds: float) -> None:
        """Called in the commit thread."""
        self._bell.ring(self._finish, job, seconds)

    def _finish(self, job: Job, seconds: float) -> None:
        try:
            self.queue.finish(job, self._clock.now())
            self._measure(job, seconds)
        except Exception as error:
            self._panic(error)
            return
        self._clock.at_least(self.queue.now)
        if job.lane.gone and (closed := self._letting_go.pop(job.lane.index, None)) is not None:
            closed.set_result(None)
        if not self.tried.is_set():
            self._see_whether_tried()
        if self.queue.closing:
            self._close_step()
        else:
            self.wake()

    def _measure(self, job: Job, seconds: float) -> None:
        """With every turn, so it must cost next to nothing."""
        lane = job.lane
        if job.error is not None:
            name = type(job).__name__.removesuffix("Job").lower()
            reason = "full" if isinstance(job.error, StoreFull) else "failed"
            self._meter.stores[lane.definition.store].fail(name, reason)
        elif isinstance(job, TurnJob):
            if job.turn is not None:
                moved = sum(lane.partition.totals.values())
                items = moved - self._moved[lane.index]
                self._moved[lane.index] = moved
                self._meter.stores[lane.definition.store].count(len(job.draft.parts), items, seconds)
        elif isinstance(job, LoadJob) and lane.known:
            self._moved[lane.index] = sum(lane.partition.totals.values())
            self.look.loaded(lane.index, lane.partition)

    def _see_whether_tried(self) -> None:
        if all(lane.status != Status.CLOSED for lane in self.queue.state.lanes.values()):
            self.tried.set()

    def _close_step(self) -> None:
        self.tried.set()
        self._drop_timer()
        self.queue.close(now := self._clock.now())
        self._run_jobs(now)
        if self.queue.closed and not self._closed.done():
            self._closed.set_result(None)


def _deliver(future: asyncio.Future[Any], request: Request) -> None:
    if future.done():
        return
    if request.error is not None:
        future.set_exception(request.error)
    else:
        future.set_result(request.value)
