"""The logical queue: one loop in front of all the partitions of a queue.

A plain object: nothing in it sleeps, awaits, starts a thread or reads a clock. Its owner calls `submit` for each
request, `tick(now)` whenever something was submitted or the instant that `tick` returned has come, runs the jobs
that `tick` leaves in `jobs`, and hands each back through `finish`. All requests that wait when a partition is free
share its next commit.

One loop a queue is enough by design: a turn costs microseconds an item. If one core ever is not, `LogicalQueue` is
the unit to have more of: each with partitions of its own, behind the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from heapq import heappop
from random import Random

from millpond.errors import Closed, DiskFull, InternalError, MillpondError, NotFound
from millpond.model import REQUEST_TIMEOUT_MS, QueueDefinition
from millpond.queue.claims import wake_readers
from millpond.queue.compaction import compact
from millpond.queue.draining import drain, is_removable, removable_at
from millpond.queue.holders import TokenPart, assign_tokens, seal_completes
from millpond.queue.lane import NEVER, CloseJob, Job, Lane, LoadJob, Outcome, Part, RelieveJob, Status, TurnJob
from millpond.queue.lease import ReleasePart, assign_leases, give_back
from millpond.queue.lifecycle import next_wake, run_lifecycle, shed_stale
from millpond.queue.operations import answer_stats, start_operation
from millpond.queue.pace import Pace
from millpond.queue.produce import assign_produces
from millpond.queue.requests import Arrive, Forget, GetItem, GetStats, Lease, Produce, Request, Tokens
from millpond.queue.settling import next_sweep, settle
from millpond.queue.state import QueueState, away, overtaken
from millpond.queue.transfer import assign_arrives, assign_forget, has_unsent, send_transfers, settle_transfer
from millpond.queue.watching import look_after_load, tell_endings
from millpond.store.base import StoreFull

RELIEVE_MS = 1_000  # how often a full disk is looked at
_OPEN = Status.OPEN  # a member of an enum takes long to look up


class LogicalQueue:
    def __init__(
        self,
        definition: QueueDefinition,
        lanes: list[Lane],
        meta: Lane,
        rng: Random,
        queue_exists: Callable[[str], bool],
        now: int,
        pace: Pace | None = None,
    ) -> None:
        self.state = QueueState(definition, lanes, meta, rng, queue_exists, now, pace or Pace())
        self.jobs: list[Job] = []
        self.closing = False
        self.deleting = False  # it will not be opened again
        self.removing: dict[int, dict[str, int]] = {}  # the totals of those gone from here, not yet from their store
        self._inbox: list[Request] = []
        self._settled: list[Arrive | Forget] = []
        self.now = now  # the latest instant it has seen, that on disk included

    # ---- what its owner calls -----------------------------------------------------------------------------

    def submit(self, request: Request, now: int) -> None:
        request.at = now if now > self.now else self.now
        if self.closing:
            request.fail(Closed("the queue is being closed; connect again and retry"))
        else:
            self._inbox.append(request)

    def settle(self, request: Arrive | Forget) -> None:
        """Another queue has answered what we sent it."""
        self._settled.append(request)

    def withdraw(self, request: Request) -> None:
        """The caller has gone. Who waits for an item is answered at once; a lease in a commit gives its items back."""
        request.gone = True
        if not isinstance(request, Lease):
            waiting = [reader for reader in self.state.readers if reader.request is request]
            for reader in waiting:
                self.state.readers.remove(reader)
                reader.resume(None)
            if isinstance(request, GetItem) and request.watch is not None:
                request.watch.resume(None)
        elif request.answered:
            give_back(self.state, request.value.runs if request.value else [])
        elif self.state.waiters.withdraw(request):
            request.answer([])

    def configure(self, definition: QueueDefinition) -> None:
        """New settings, for everything that happens from now on."""
        self.state.configure(definition)
        places = {one.partition: one for one in definition.partitions}
        self.removing = {index: totals for index, totals in self.removing.items() if index in places}
        for lane in self.state.everyone:
            lane.definition = places.get(lane.index, lane.definition)
            if lane.known:
                lane.partition.dedup_window = definition.settings.dedup_window_ms

    def add(self, lanes: list[Lane]) -> None:
        """Of partitions that are new: each takes part once it has been read, and nobody waits for that."""
        self.state.everyone += lanes

    def remove(self, index: int, now: int) -> Lane | None:
        """Let go of a partition that has nothing left; None if it cannot be now. Its store's close is a job."""
        lane = self.state.lanes.get(index)
        if lane is None or self.closing or not is_removable(self.state, lane, now):
            return None
        del self.state.lanes[index]
        self.state.everyone.remove(lane)
        lane.gone = True
        self.removing[index] = lane.partition.totals
        self._start(CloseJob(lane=lane))
        return lane

    @property
    def drained(self) -> list[int]:
        """Partitions that can be removed now; also those that are gone from here already."""
        state = self.state
        return [index for index in sorted(state.draining) if self._is_drained(index)] if state.draining else []

    def _is_drained(self, index: int) -> bool:
        lane = self.state.lanes.get(index)  # one that is not read yet is not there
        return index in self.removing or (lane is not None and is_removable(self.state, lane, self.now))

    def tick(self, now: int) -> int | None:
        """Do all that can be done now; returns when there will be more, None if only a request can tell."""
        now = self.now = self.state.now = now if now > self.now else self.now
        self._take(now)
        self.state.find_free()
        for lane in self.state.turning:
            lane.partition.begin(now)
        self._assign(now)
        self._apply(now)
        return self._next_wake(now)

    # ---- take ---------------------------------------------------------------------------------------------

    def _take(self, now: int) -> None:
        """Sort the waiting requests by where they will wait."""
        self._look_after_lanes(now)
        state = self.state
        if self._settled:
            settled, self._settled = self._settled, []
            for answered in settled:
                settle_transfer(state, answered, now)
        while state.sleepers and state.sleepers[0][0] <= now:
            heappop(state.sleepers)[2]()
        if state.watches.parked:
            for watch in state.watches.pop_due(now):
                watch.resume(None)
        if self._inbox:
            inbox, self._inbox = self._inbox, []
            self._sort(inbox, now)

    def _sort(self, inbox: list[Request], now: int) -> None:
        state = self.state
        of_queues = 0  # what queues ask of each other
        for request in inbox:
            if type(request) is Produce:
                state.produces.append(request)
            elif type(request) is Lease:
                if request.gone:
                    request.answer([])
                else:
                    state.waiters.park(request)
            elif isinstance(request, Tokens):
                assign_tokens(state, request)
            elif isinstance(request, Arrive):
                of_queues += 1
                state.arrives.append(request)
            elif isinstance(request, Forget):
                of_queues += 1
                assign_forget(state, request)
            elif isinstance(request, GetStats):
                answer_stats(state, request, now)
            else:
                start_operation(state, request)
        if len(inbox) > of_queues:
            state.pace.asked(now)

    def _look_after_lanes(self, now: int) -> None:
        for lane in self.state.everyone:
            if (
                lane.job is None
                and (lane.full or lane.status is not _OPEN)
                and lane.probe_at <= now
                and not self.closing
            ):
                if lane.status is not _OPEN:
                    self._start(lane.load_job(self.state.incarnation, self.state.settings.dedup_window_ms))
                else:
                    lane.probe_at = now + RELIEVE_MS
                    self._start(RelieveJob(lane=lane))

    # ---- assign -------------------------------------------------------------------------------------------

    def _assign(self, now: int) -> None:
        """Let each request change the memory of the lanes it concerns, in an order that is fair to leases in force.

        What their holders asked for comes before time takes leases away; what becomes ready by either, or is
        produced, can be leased in the same turn.
        """
        state = self.state
        state.carry_at = NEVER
        if state.unsettled or state.sweep_at <= now:
            settle(state, now)
        for lane in state.turning:
            if lane.waiting:
                self._apply_parts(lane, now)
        for lane in state.free:
            run_lifecycle(state, lane, now)
            if lane.index in state.draining:
                drain(state, lane, now)
            if has_unsent(lane):
                send_transfers(state, lane, now)
            if lane.partition.chunks.sparse:
                compact(lane)
        if state.arrives:
            assign_arrives(state, now)
        if state.produces:
            assign_produces(state, now)
        for lane in state.free:
            draft = lane.draft
            if draft.records or draft.requests or draft.chunks:
                timed = draft.chunks or not draft.plain
                lane.seal(state.settings)
                if timed:  # what waited for a lane may be due, or too late, already
                    run_lifecycle(state, lane, now)
        assign_leases(state, now)
        for lane in state.free:
            if lane.waiting:
                self._apply_late_parts(lane, now)
        if state.readers:
            wake_readers(state, now)

    def _apply_late_parts(self, lane: Lane, now: int) -> None:
        """Claims: of what is ready they get what no lease waits for."""
        late = [part for part in lane.waiting if part.late]
        if late:
            lane.waiting = [part for part in lane.waiting if not part.late]
            for part in late:
                part.apply(lane, now)
            lane.draft.parts += late

    def _apply_parts(self, lane: Lane, now: int) -> None:
        """What others asked of this lane. Completes gather until something else may look at what they end."""
        late = [part for part in lane.waiting if part.late] if self.state.making else []
        parts = [part for part in lane.waiting if not part.late] if late else lane.waiting
        lane.waiting = late
        if list(map(type, parts)).count(ReleasePart) > 1:  # the newest goes to the head first: all in their old order
            releases = [part for part in parts if type(part) is ReleasePart]
            others = [part for part in parts if type(part) is not ReleasePart]
            parts = [*others, *sorted(releases, key=lambda part: part.place, reverse=True)]
        for part in parts:
            if not isinstance(part, TokenPart):
                seal_completes(self.state, lane, now)
            part.apply(lane, now)
        seal_completes(self.state, lane, now)
        lane.draft.parts += parts

    # ---- apply --------------------------------------------------------------------------------------------

    def _apply(self, now: int) -> None:
        """Hand each lane its one batch; answer those who wait in vain."""
        for lane in self.state.turning:
            if lane.draft.endings:
                tell_endings(self.state, lane)
            job = lane.seal_turn(now, self.state.settings, self.state.journal_bytes)
            if job is None:
                continue
            if job.turn is None and not job.draft.reads:
                self._finish_parts(lane, job, now)  # nothing to read or write
            else:
                self._start(job)
        self._give_up(now)

    def _start(self, job: Job) -> None:
        job.lane.job = job
        self.jobs.append(job)

    def _give_up(self, now: int) -> None:
        state = self.state
        if state.waiters.parked:
            self._send_off(now)
        for lane in state.everyone:
            if lane.waiting and not lane.free:
                self._fail_late(lane, lane.waiting, now, issued=False)
            if lane.doubt is not None:
                self._fail_late(lane, lane.doubt.draft.parts, now, issued=lane.doubt.issued)
        if state.produces or state.arrives:
            for waiting in (state.produces, state.arrives):
                for request in [request for request in waiting if request.deadline <= now]:
                    waiting.remove(request)  # type: ignore[arg-type]
                    request.fail(away(self._culprit(), issued=False))

    def _send_off(self, now: int) -> None:
        """Leases whose wait is over."""
        state = self.state
        patience = REQUEST_TIMEOUT_MS if self._leasable_soon() else 0
        for lease in state.waiters.pop_due(now - patience):
            if not patience and any(lane.status == Status.OPEN for lane in state.lanes.values()):
                lease.answer([])
            else:
                lease.fail(away(self._culprit(), issued=False))

    def _leasable_soon(self) -> bool:
        """Whether a busy lane has items, or may have, that a lease whose wait is over should still get."""
        if self.state.definition.paused:
            return False
        return any(
            isinstance(lane.job, LoadJob) or (lane.job and lane.known and lane.partition.ready.count)
            for lane in self.state.lanes.values()
        )

    def _fail_late(self, lane: Lane, parts: list[Part], now: int, *, issued: bool) -> None:
        late = [part for part in parts if part.deadline() <= now]
        for part in late:
            parts.remove(part)
            part.fail(away(lane, issued=issued))
            if lane.doubt is not None and parts is lane.doubt.draft.parts:
                lane.given_up.append(part)

    def _culprit(self) -> Lane:
        """The lane that requests without one of their own wait for."""
        lanes = list(self.state.lanes.values())
        return next((lane for lane in lanes if lane.status != Status.OPEN), lanes[0])  # else one that is slow

    # ---- finish -------------------------------------------------------------------------------------------

    def finish(self, job: Job, now: int) -> None:
        """A job has ended: answer those who waited for it. A tick must follow."""
        now = self.now = now if now > self.now else self.now
        lane = job.lane
        if lane.job is not job:  # one from before a panic
            return
        lane.job = None
        self.state.unsettled = self.state.meta in self.state.everyone
        if isinstance(job, TurnJob):
            if job.error is None:
                lane.succeeded()
                if job.sizes:
                    lane.keep_read(job)
                self._finish_parts(lane, job, now)
            else:
                self._finish_failed(lane, job, now)
        elif isinstance(job, LoadJob):
            self._finish_load(lane, job, now)
            if lane.watched and lane.status == Status.OPEN:
                look_after_load(lane)
        elif isinstance(job, RelieveJob):
            if job.error is None and job.relieved:
                lane.full = False
        else:
            assert isinstance(job, CloseJob)
            lane.status = Status.CLOSED

    def _finish_parts(self, lane: Lane, job: TurnJob, now: int) -> None:
        for part in job.draft.parts:
            part.finish(lane, job, now)

    def _finish_failed(self, lane: Lane, job: TurnJob, now: int) -> None:
        """Set the lane aside with the turn in doubt; the next load tells how it ended."""
        assert job.error is not None
        again = lane.full and isinstance(job.error, StoreFull)
        lane.failed(job.error, now)
        if again:  # not even without produces: there is nothing left to try
            error = DiskFull("the disk is full, and nothing more can be written; make room, then send it again")
            parts, job.draft.parts = job.draft.parts, []
            for part in parts:
                if part.deadline() < NEVER:
                    part.fail(error)
                else:  # nobody waits for it, but it must be done once there is room
                    job.draft.parts.append(part)
            lane.probe_at = now + lane.probe_wait
        lane.doubt = job
        parts, job.draft.parts = job.draft.parts, []
        if not job.issued:  # nothing of it was written: what need not wait for this lane may go elsewhere
            lane.partition.dedup.disown(job.draft.names)
            lane.again(parts)
        else:
            for part in parts:
                (lane.given_up if part.leaves() else job.draft.parts).append(part)

    def _finish_load(self, lane: Lane, job: LoadJob, now: int) -> None:
        if job.error is not None:
            lane.failed(job.error, now)
            return
        lane.loaded(job)
        lane.partition.dedup_window = self.state.settings.dedup_window_ms  # it may have changed since the load began
        if lane is not self.state.meta:
            self.state.lanes[lane.index] = lane
        if lane.full:
            lane.probe_at = now + RELIEVE_MS
        if lane.partition.claims or lane.partition.staged:
            self.state.want_meta()
        if lane.partition.at > self.now:  # the clock is behind what is on disk: no time has passed by that
            self.state.opened_at += lane.partition.at - self.now
            self.now = lane.partition.at
        doubt, lane.doubt = lane.doubt, None
        given_up, lane.given_up = lane.given_up, []
        if doubt is None:
            lane.succeeded()
            return
        if job.outcome is Outcome.WRITTEN:
            self._finish_parts(lane, doubt, now)
            for part in given_up:
                part.finish_late(lane)
        elif job.outcome is Outcome.OVERTAKEN:
            parts = doubt.draft.parts
            for part in [part for part in parts if part.deadline() < NEVER]:
                part.fail(overtaken(lane))
            lane.again([part for part in parts if part.deadline() == NEVER])
        else:
            lane.again(doubt.draft.parts)

    def panic(self, error: Exception, now: int) -> None:
        """After an exception in the loop no memory is trusted: answer everyone, and load every lane again."""
        trouble = InternalError(f"millpond has a bug ({type(error).__name__}: {error}); please report it")
        state = self.state
        waiting: list[Request] = [*self._inbox, *state.produces, *state.arrives, *state.waiters.pop_all()]
        self._inbox, state.produces, state.arrives, state.sleepers = [], [], [], []
        for reader in state.readers:
            reader.stop(trouble)
        for watch in state.watches.pop_all():
            watch.stop(trouble)
        state.readers, state.making, state.taking, state.confirmed = [], set(), set(), {}
        for landing in list(state.landings):
            landing.stop(trouble)
        state.landings = {}
        self.jobs = []
        for lane in state.everyone:
            parts = [*lane.waiting, *lane.draft.parts]
            if isinstance(lane.job, TurnJob):
                parts += lane.job.draft.parts
            lane.waiting, lane.job, lane.doubt = [], None, None
            lane.failed(error, now)
            for part in parts:
                with suppress(Exception):  # it may be the one that is broken
                    part.fail(trouble)
        for request in waiting:
            if not request.answered:
                request.fail(trouble)

    # ---- waking and closing -------------------------------------------------------------------------------

    def _next_wake(self, now: int) -> int | None:
        state = self.state
        wakes: list[int] = []
        for lane in state.everyone:
            if lane.job is None and lane.status is _OPEN:
                if (at := next_wake(lane.partition)) is not None:
                    wakes.append(at)
                if lane.waiting or (lane.partition.chunks.sparse and not lane.compacting):
                    wakes.append(now)
                if has_unsent(lane):
                    wakes.append(max(now, lane.resend_at))
            if lane.job is None and (lane.full or lane.status is not _OPEN) and not self.closing:
                wakes.append(lane.probe_at)
            if lane.waiting and not lane.free:
                wakes += [part.deadline() for part in lane.waiting]
            if lane.doubt is not None:
                wakes += [part.deadline() for part in lane.doubt.draft.parts]
        if state.produces or state.arrives:
            wakes += [request.deadline for request in (*state.produces, *state.arrives)]
        if state.waiters.parked and (at := state.waiters.next_at()) is not None:
            wakes.append(at + REQUEST_TIMEOUT_MS if self._leasable_soon() else at)
        if state.sleepers:
            wakes.append(state.sleepers[0][0])
        if state.readers:
            wakes += [reader.until for reader in state.readers]
        if state.watches.parked and (at := state.watches.next_at()) is not None:
            wakes.append(at)
        if state.sweep_at < NEVER or state.carry_at < NEVER:
            wakes.append(min(state.sweep_at, state.carry_at))
        if state.draining:
            wakes += [at for at in self._removals() if at > now]
        if state.unsettled:  # a request has ended in this turn, and what it leaves is looked after in the next
            wakes.append(now)
        return min(wakes, default=None)

    @property
    def busy(self) -> bool:
        """Every lane is in the middle of a job: a tick could do nothing."""
        return None not in [lane.job for lane in self.state.everyone]  # asked with every request: no generator

    @property
    def idle(self) -> bool:
        """Nothing under way and nobody waiting: it can be unloaded until `sleeping_until`."""
        state = self.state
        return not (
            self._inbox or self._settled or self.jobs or self.removing
            or state.produces or state.arrives or state.outbox or state.carry_at < NEVER
            or state.waiters.parked or state.watches.parked or state.sleepers or state.readers or state.making
            or any(
                not lane.free or lane.waiting or lane.compacting or lane.full
                or lane.partition.moving or lane.partition.confirming or lane.partition.carried
                for lane in state.everyone
            )
        )  # fmt: skip

    def sleeping_until(self) -> int | None:
        """When an idle queue must be awake again, or earlier."""
        lanes = [lane for lane in self.state.lanes.values() if lane.known]
        wakes = [wake(lane.partition) for lane in lanes for wake in (next_wake, next_sweep)]
        return min((at for at in (*wakes, *self._removals()) if at is not None), default=None)

    def _removals(self) -> list[int]:
        """When partitions that are empty, and whose names others have, can be removed."""
        lanes = self.state.lanes.values()
        return [at for lane in lanes if lane.legacy is not None and (at := removable_at(self.state, lane)) is not None]

    def shed_stale_timers(self) -> None:
        """After this `sleeping_until` is exact: a sleeping queue should not be woken for nothing."""
        for lane in self.state.lanes.values():
            if lane.known:
                shed_stale(lane.partition)

    def close(self, now: int) -> None:
        """Take no more requests, answer those that wait, and leave a job for each lane that closes its store.

        To be called again after each finished job until `closed`: a commit under way is waited for.
        """
        self.closing = True
        error: MillpondError = Closed("the queue is being closed; connect again and retry")
        state = self.state
        for lease in state.waiters.pop_all():
            lease.answer([])
        sleepers, state.sleepers = state.sleepers, []
        for _, _, resume in sleepers:  # to their next step, which is refused below
            resume()
        for landing in list(state.landings):
            landing.stop(error)
        state.landings, state.sleepers = {}, []
        for reader in state.readers:
            reader.stop(error)
        state.readers = []
        for watch in state.watches.pop_all():
            watch.stop(self._gone() if self.deleting else error)
        for request in (*self._inbox, *state.produces, *state.arrives):
            request.fail(error)
        self._inbox, state.produces, state.arrives = [], [], []
        for lane in state.everyone:
            parts, lane.waiting = lane.waiting, []
            for part in parts:
                part.fail(error)
            doubt, lane.doubt = lane.doubt, None
            for part in doubt.draft.parts if doubt is not None else ():
                part.fail(away(lane, issued=True))
            if lane.job is None and lane.status != Status.CLOSED:
                self._start(lane.seal_close(now))

    def _gone(self) -> NotFound:
        name = self.state.definition.name
        return NotFound(f"queue {name!r} was deleted while this waited; the item is gone", queue=name)

    @property
    def closed(self) -> bool:
        return self.closing and all(lane.status == Status.CLOSED and lane.job is None for lane in self.state.everyone)
