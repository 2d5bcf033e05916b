"""Runs commands: each in the hands of a supervisor, a small process of its own, one for each slot.

The commands are shell commands (`/bin/sh -c`). Exit code 0 is success; another, a signal, a command that there is not,
and a timeout are failures. See `supervisor.py` for who ends what when somebody dies.

Only on Linux is all ended that a command started. On macOS it is its process group; what begins a session of its own is
left there. A program that runs as another user (sudo) cannot be ended: the worker's log names it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final

from millpond.worker import tree
from millpond.worker.aside import aside
from millpond.worker.capture import HEAD_BYTES
from millpond.worker.endings import lost, no_room, outcome_of, problem_of
from millpond.worker.executors import DEFERRED, Done, Outcome, Running, Why
from millpond.worker.logs import Logs, incarnation_in, shelf_of
from millpond.worker.orders import Order, Report
from millpond.worker.strays import end_strays
from millpond.worker.supervised import Line, Supervisors
from millpond.worker.supervision import LEFTOVER_PATIENCE, REFUSED_PATIENCE

GRACE: Final = 5.0  # seconds between SIGTERM and SIGKILL
STUCK: Final = 3.0  # seconds after which a supervisor that should have ended a command is taken for stuck, and killed
PREPARING: Final = LEFTOVER_PATIENCE + REFUSED_PATIENCE + STUCK  # the longest that one takes beside command and grace
ENDED_MAX: Final = 10_000  # items whose last end is remembered: as many as may wait for their next attempt

log = logging.getLogger("millpond.worker")


class Attempt:
    """A job in this executor. It has a line while it runs."""

    __slots__ = ("done", "job", "line", "number", "stuck")

    def __init__(self, job: Running, done: Done, number: int) -> None:
        self.job = job
        self.done = done
        self.number = number
        self.line: Line | None = None
        self.stuck: asyncio.TimerHandle | None = None


class CommandExecutor:
    """`slots` commands at a time; more wait their turn. `head_bytes` of a command's output are kept, and its end."""

    def __init__(self, logs: Logs, *, slots: int = 1, grace: float = GRACE, head_bytes: int = HEAD_BYTES) -> None:
        self._logs = logs
        self._slots = slots
        self._grace = grace
        self._head_bytes = head_bytes
        self._host = socket.gethostname()
        self._numbers = 0
        self._waiting: deque[Attempt] = deque()
        self._running: set[Attempt] = set()
        self._free: list[Line] = []
        self.supervisors: Supervisors | None = None
        self._older: list[Supervisors] = []  # whose wardens have died
        self._ended: dict[tuple[str, str, str], int] = {}  # by names of an item: its last delivery that failed here
        self._chores: set[asyncio.Task[None]] = set()
        self._quiet = asyncio.Event()  # nothing runs, and nothing waits

    def accepts(self, job: Running) -> bool:
        return job.spec is not None and job.spec.command is not None

    # ---- life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises InvalidRequest if there is no place for logs."""
        self._logs.prepare()
        await aside(end_strays)
        left = await aside(tree.end_leftovers, tree.unsupervised, LEFTOVER_PATIENCE)
        if left:
            log.error("processes of jobs whose worker died could not be ended", extra={"pids": left})
        self._warden()

    async def stop(self, *, force: bool) -> None:
        if force:
            for attempt in [*self._waiting, *self._running]:
                self.end(attempt.job, "stopping")
        while self._waiting or self._running:
            self._quiet.clear()
            await self._quiet.wait()
        await asyncio.sleep(0)  # for those that are told in the next turn
        supervisors, self.supervisors, self._older, self._free = [*self._older, self.supervisors], None, [], []
        for each in supervisors:
            if each is not None:
                await each.close()

    def _warden(self) -> Supervisors:
        if self.supervisors is None or not self.supervisors.is_alive:
            if self.supervisors is not None:
                log.error("the warden of the supervisors was killed; another is started")
                self._older = [each for each in self._older if each.has_lines] + [self.supervisors]
            self.supervisors = Supervisors(self._heard, self._lost, self._unborn)
        return self.supervisors

    # ---- jobs -------------------------------------------------------------------------------------------------

    def run(self, job: Running, done: Done) -> None:
        self._numbers += 1
        job.own = attempt = Attempt(job, done, self._numbers)
        self._waiting.append(attempt)
        self._fill()

    def extended(self, job: Running) -> None:
        attempt: Attempt = job.own
        if attempt.line is not None:
            attempt.line.extend(attempt.number, job.deadline)

    def end(self, job: Running, why: Why) -> None:
        attempt: Attempt = job.own
        if attempt.line is not None:
            grace = 0.0 if why == "lease_lost" else self._grace
            attempt.line.end(attempt.number, why, grace)
            self._watch(attempt, grace + STUCK)
        elif attempt in self._waiting:
            self._waiting.remove(attempt)
            asyncio.get_running_loop().call_soon(self._finish, attempt, DEFERRED)

    def take_back(self) -> Sequence[Running]:
        jobs = [attempt.job for attempt in self._waiting]
        self._waiting.clear()
        return jobs

    # ---- from the line to supervisors, and to their ends --------------------------------------------------------

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            attempt = self._waiting.popleft()
            line = self._free_line()
            if line is None:
                asyncio.get_running_loop().call_soon(self._finish, attempt, no_room("no supervisor for it"))
                continue
            attempt.line = line
            line.busy = attempt
            self._running.add(attempt)
            attempt.job.started_at = asyncio.get_running_loop().time()
            order = self._order(attempt)
            line.run(order)
            if order.timeout is not None:
                self._watch(attempt, order.timeout + self._grace + PREPARING)

    def _free_line(self) -> Line | None:
        while self._free:
            if (line := self._free.pop()).is_open:
                return line
        try:
            return self._warden().open()
        except OSError as error:
            log.error("a supervisor could not be started: %s", error)
            return None

    def _order(self, attempt: Attempt) -> Order:
        job, item, spec = attempt.job, attempt.job.item, attempt.job.spec
        assert spec is not None, "it was accepted"
        assert spec.command is not None, "it was accepted"
        own = {
            "MILLPOND_ITEM_ID": item.id,
            "MILLPOND_QUEUE": job.queue,
            "MILLPOND_ATTEMPT": str(item.attempts),
            "MILLPOND_FENCING_TOKEN": str(item.fencing_token),
            "MILLPOND_CORRELATION_ID": item.correlation_id,
        }
        return Order(
            number=attempt.number,
            command=spec.command,
            environment=spec.env | own,
            cwd=spec.cwd,
            timeout=spec.timeout,
            deadline=job.deadline,
            grace=self._grace,
            folder=self._logs.folder_name(shelf_of(job.queue, incarnation_in(item.lease)), item.id),
            attempt=item.attempts,
            head_bytes=self._head_bytes,
            names=_names(job) if self._may_have_left(job) else None,
        )

    def _may_have_left(self, job: Running) -> bool:
        """Whether processes of an earlier delivery may be there. Not if that one ended here: to look takes a while."""
        deliveries = job.item.deliveries
        return deliveries > 1 and self._ended.get(_names(job)) != deliveries - 1

    def _note_end(self, job: Running) -> None:
        self._ended[_names(job)] = job.item.deliveries
        while len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def _heard(self, line: Line, report: Report) -> None:
        attempt: Attempt | None = line.busy
        if attempt is None or attempt.number != report.number:
            return
        line.busy = None
        if not report.left:  # else that supervisor goes, with what it could not end
            self._free.append(line)
        self._running.discard(attempt)
        self._fill()  # the supervisor is kept busy first
        self._warn(attempt.job, report)
        spec = attempt.job.spec
        outcome = outcome_of(report, None if spec is None else spec.timeout, self._host)
        if not (outcome.ok or report.left):
            self._note_end(attempt.job)
        self._finish(attempt, outcome)

    def _finish(self, attempt: Attempt, outcome: Outcome) -> None:
        if attempt.stuck is not None:
            attempt.stuck.cancel()
        attempt.line = None
        attempt.done(attempt.job, outcome)
        if not self._running and not self._waiting:
            self._quiet.set()

    def _warn(self, job: Running, report: Report) -> None:
        problem = problem_of(report)
        if problem is not None:
            log.warning("a command: %s", problem, extra={"queue": job.queue, "id": job.item.id})

    # ---- supervisors that die or hang -----------------------------------------------------------------------------

    def _lost(self, line: Line, clean: bool) -> None:
        attempt: Attempt = line.busy
        log.error("a supervisor was killed", extra={"queue": attempt.job.queue, "id": attempt.job.item.id})
        task = asyncio.get_running_loop().create_task(self._clear_up(attempt, clean))
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    def _unborn(self, line: Line) -> None:
        attempt: Attempt = line.busy
        log.error("a supervisor could not be started: the system has no room for it")
        self._running.discard(attempt)
        self._fill()
        self._finish(attempt, no_room("no supervisor for it"))

    async def _clear_up(self, attempt: Attempt, clean: bool) -> None:
        """Its slot is free only when nothing of it is left."""
        if not clean:
            await aside(tree.end_leftovers, tree.of_item(*_names(attempt.job)), LEFTOVER_PATIENCE)
        self._running.discard(attempt)
        self._fill()
        self._finish(attempt, lost())

    def _watch(self, attempt: Attempt, patience: float) -> None:
        """The earliest counts."""
        at = asyncio.get_running_loop().time() + patience
        if attempt.stuck is not None:
            if attempt.stuck.when() <= at:
                return
            attempt.stuck.cancel()
        attempt.stuck = asyncio.get_running_loop().call_at(at, self._kill_stuck, attempt)

    def _kill_stuck(self, attempt: Attempt) -> None:
        for supervisors in (self.supervisors, *self._older):
            if attempt.line is not None and supervisors is not None:
                supervisors.kill(attempt.line)


def _names(job: Running) -> tuple[str, str, str]:
    return job.queue, job.item.id, job.item.correlation_id
