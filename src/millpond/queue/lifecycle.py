"""What time does to items, run in every free lane at the start of its turn.

Each function does what is due at `now`; `next_wake` tells when there is more. Order matters: leases that ended
and items that fell due are ready before those past their deadline are buried.
"""

from __future__ import annotations

from collections.abc import Sequence

from millpond.history.format import RUN_BITS, Event, numbers_of, run_span, runs_of
from millpond.model import DeadReason, State
from millpond.queue.lane import Lane
from millpond.queue.partition import DELETE, KEEP, MOVE, REASONS, Partition
from millpond.queue.state import QueueState
from millpond.queue.timers import NEVER, RUN_MASK, STALE_SLACK


def run_lifecycle(queue: QueueState, lane: Lane, now: int) -> None:
    partition = lane.partition
    for timers in partition.timers:
        if timers.count > STALE_SLACK:
            partition.shed_stale_timers()
            break
    if partition.lease_timers.next_at <= now:
        _end_due_leases(queue, lane, now)
    if partition.due_timers.next_at <= now:
        _wake_due(lane, now)
    if (deadline := partition.chunks.next_deadline()) is not None and deadline <= now:
        _expire_chunks(queue, lane, now)
    if partition.expiry_timers.next_at <= now:
        _expire_items(queue, lane, now)
    if partition.finish_timers.next_at <= now:
        _purge(lane, now)


def next_wake(partition: Partition) -> int | None:
    """When this partition next wants to run. An entry may be stale: waking for nothing is harmless."""
    at = partition.chunks.next_deadline() or NEVER
    for timers in partition.timers:
        if timers.next_at < at:
            at = timers.next_at
    return at if at < NEVER else None


def shed_stale(partition: Partition) -> None:
    """After this `next_wake` is exact."""
    partition.set_timers()
    partition.chunks.shed_stale()


# ---- leases -----------------------------------------------------------------------------------------------


def _end_due_leases(queue: QueueState, lane: Lane, now: int) -> None:
    partition = lane.partition
    leased = partition.leased
    ended: list[int] = []
    for number in numbers_of(partition.lease_timers.pop_due(now)):
        lease = leased.get(number)
        if lease is not None and lease.deadline <= now:
            ended.append(number)
    end_leases(queue, lane, list(dict.fromkeys(ended)), now)


def end_leases(queue: QueueState, lane: Lane, numbers: list[int], now: int) -> None:
    """These leases are over without a word from their holders: the attempt counts."""
    partition, settings = lane.partition, queue.settings
    back: list[int] = []
    cancelled: list[int] = []
    dead: dict[DeadReason, list[int]] = {}
    for number in numbers:
        limit = partition.limits.get(number, settings.max_attempts)
        if number in partition.cancel_asked:
            cancelled.append(number)
        elif limit and partition.attempts(number) + 1 >= limit:
            dead.setdefault(DeadReason.MAX_ATTEMPTS, []).append(number)
        elif partition.expire_deadline(number) <= now:
            dead.setdefault(DeadReason.EXPIRED, []).append(number)
        else:
            back.append(number)
    if back:
        partition.change(Event.LEASE_EXPIRED, runs_of(back))
    if cancelled:
        partition.change(Event.CANCELLED, str(State.LEASED), runs_of(cancelled), kept_until(queue, now))
    for reason, dying in dead.items():
        bury(queue, lane, reason, State.LEASED, runs_of(dying), now)


# ---- schedules and backoffs -------------------------------------------------------------------------------


def _wake_due(lane: Lane, now: int) -> None:
    partition = lane.partition
    waiting = partition.waiting
    due: list[int] = []
    for entry in partition.due_timers.pop_entries(now):
        number = (entry & RUN_MASK) >> RUN_BITS
        if waiting.get(number, NEVER) >> 1 == entry >> 64:  # else it is of an earlier wait of the same item
            due.append(number)
    if partition.carried:  # its time comes where it is going
        due = [number for number in due if number not in partition.carried]
    if due:
        partition.change(Event.DUE, list(dict.fromkeys(due)))


# ---- deadlines --------------------------------------------------------------------------------------------


def _expire_chunks(queue: QueueState, lane: Lane, now: int) -> None:
    """Bury what is left of chunks past their deadline; a live lease, and an item with its own, are left alone."""
    partition = lane.partition
    for first in partition.chunks.pop_expired(now):
        mortal: dict[State, list[int]] = {}
        count = len(partition.chunks.span(first))
        own, aside = set(partition.expiries.within(first, count)), partition.set_aside(first, count)
        for number in partition.chunks.live_numbers(first):
            if number in own or number in partition.carried:
                continue
            if number not in aside:
                state = State.READY
            elif (due := partition.waiting.get(number)) is not None:
                state = State.RETRYING if due & 1 else State.SCHEDULED
            else:
                continue
            mortal.setdefault(state, []).append(number)
        for state, numbers in mortal.items():
            bury(queue, lane, DeadReason.EXPIRED, state, runs_of(numbers), now)


def _expire_items(queue: QueueState, lane: Lane, now: int) -> None:
    partition = lane.partition
    due = [n for n in numbers_of(partition.expiry_timers.pop_due(now)) if partition.expiries.get(n, now + 1) <= now]
    mortal = (State.READY, State.SCHEDULED, State.RETRYING)
    by_state: dict[State, list[int]] = {}
    for number, state in partition.states(dict.fromkeys(due)).items():
        if state in mortal and number not in partition.carried:
            by_state.setdefault(state, []).append(number)
    for state, numbers in by_state.items():
        bury(queue, lane, DeadReason.EXPIRED, state, runs_of(sorted(numbers)), now)


def _purge(lane: Lane, now: int) -> None:
    """Completed and cancelled items whose retention is over."""
    partition = lane.partition
    finished = partition.finished
    over = [n for n in numbers_of(partition.finish_timers.pop_due(now)) if finished.get(n, NEVER) >> 1 <= now]
    over = [number for number in over if number not in partition.carried]
    if over:
        partition.change(Event.PURGED, runs_of(dict.fromkeys(over)))


# ---- death ------------------------------------------------------------------------------------------------


def bury(
    queue: QueueState, lane: Lane, reason: DeadReason, state: State, runs: Sequence[int], now: int,
    error: str | None = None,
) -> None:  # fmt: skip
    """To the dead queue if there is one, else kept or deleted as the queue says."""
    settings = queue.settings
    fate = DELETE if settings.dead == "delete" else KEEP
    target = None
    if settings.dead_queue is not None:
        fate, target = MOVE, settings.dead_queue
    lane.partition.change(Event.DIED, REASONS.index(reason), str(state), list(runs), fate, target, error)
    queue.rates.count("dead", sum(len(run_span(run)) for run in runs), now)


def kept_until(queue: QueueState, now: int) -> int:
    """Until when an ended item is kept; 0 is not at all."""
    retention = queue.settings.completed_retention_ms
    return now + retention if retention else 0
