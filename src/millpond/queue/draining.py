"""Empties the partitions that a rebalance removes: what consumers do not take goes to the others.

Ready items drain through consumers; leases, claims and transactions are waited for. What waits for its time, is dead or
kept is carried over under its id, by the steps of `queue.transfer`. Once nothing is left, the partition's names (keys
and ids in their window, requests that were carried out, transfers that were taken in) are entrusted to another. It can
be removed when nobody can come for the completion of one of its items any more, or for the end of its journal.

All of it can be done again: a crash in between repeats a step, and never loses or doubles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from millpond.errors import DiskFull, MillpondError
from millpond.history.format import Event, runs_of
from millpond.model import State
from millpond.queue.lane import NEVER, Lane, Part, Status, TurnJob
from millpond.queue.partition import Partition
from millpond.queue.produce import choose_writable
from millpond.queue.state import QueueState

CARRY_BATCH = 200  # items on their way at a time: they are in memory, with their payloads
NAMES_BATCH = 5_000  # entrusted in one turn: a hundredth of a second

Names = tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], list[bytes]]  # ended, requests, arrivals


class Legacy:
    """The names of an empty partition that are yet to be entrusted, in batches."""

    def __init__(self, batches: Iterable[Names]) -> None:
        self.left = list(batches)
        self.under_way = 0

    @property
    def is_settled(self) -> bool:
        return not self.left and not self.under_way


class EntrustPart(Part):
    """One batch, in the turn of the partition that takes it over."""

    __slots__ = ("_batch", "_legacy")

    def __init__(self, legacy: Legacy, batch: Names) -> None:
        self._legacy = legacy
        self._batch = batch
        legacy.under_way += 1

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        self._legacy.under_way -= 1

    def again(self, lane: Lane) -> None:
        self._legacy.under_way -= 1
        self._legacy.left.append(self._batch)

    def fail(self, error: MillpondError) -> None:
        self._legacy.under_way -= 1
        self._legacy.left.append(self._batch)

    def deadline(self) -> int:
        return NEVER


def drain(queue: QueueState, lane: Lane, now: int) -> None:
    """A step, in a free lane that is to be removed; now, or at the pace of all of them."""
    if queue.carry_at < NEVER or not _has_more(lane):  # another of them waits for its time already
        return
    if (at := queue.pace.next_at(now)) > now:
        queue.carry_at = at
    elif (target := _writable(queue)) is not None:
        is_empty = lane.partition.is_empty()
        queue.pace.begin(_entrust(lane, target, now) if is_empty else _carry(lane.partition), now)


def _writable(queue: QueueState) -> Lane | None:
    try:
        return choose_writable(queue)
    except DiskFull:
        return None


def _has_more(lane: Lane) -> bool:
    partition = lane.partition
    if len(partition.carried) >= CARRY_BATCH:
        return False
    resting = len(partition.waiting) + len(partition.dead) + len(partition.finished)
    if resting > len(partition.carried) or _has_letters(partition):
        return True
    has_names = lane.legacy is None or bool(lane.legacy.left)
    is_durable = not lane.waiting and not partition.events  # what made it empty
    return has_names and is_durable and partition.is_empty()


def _has_letters(partition: Partition) -> bool:
    """In a dead queue, which nobody consumes."""
    return bool(partition.ready.count and partition.totals.get("letters"))


def _carry(partition: Partition) -> int:
    """Set more of them on their way; returns how many."""
    before = len(partition.carried)
    room = CARRY_BATCH - before
    for column, plain, odd in partition.resting:
        if room > 0 and column:
            left = (one for one in column.items() if one[0] not in partition.carried and one[0] not in partition.moving)
            by_state: dict[State, list[int]] = {}
            for number, value in sorted(islice(left, room)):
                by_state.setdefault(odd if value & 1 else plain, []).append(number)
                room -= 1
            for state, numbers in by_state.items():
                partition.change(Event.CARRYING, str(state), runs_of(numbers))
    if room > 0 and _has_letters(partition):
        partition.change(Event.CARRYING, str(State.READY), partition.ready.peek(room))
    return len(partition.carried) - before


def _entrust(lane: Lane, target: Lane, now: int) -> int:
    """A batch of its names; returns how many items would have cost as much."""
    if lane.legacy is None:
        lane.legacy = Legacy(_batches(lane.partition, now))
    legacy: Legacy = lane.legacy
    if not legacy.left:
        return 0
    batch = legacy.left.pop()
    target.partition.change(Event.ENTRUSTED, lane.index, *batch)
    target.draft.parts.append(EntrustPart(legacy, batch))
    return CARRY_BATCH


def _batches(partition: Partition, now: int) -> Iterator[Names]:
    dedup, window = partition.dedup, partition.dedup_window
    ended = [
        (name, one.at, one.number, one.created, one.name, one.moved, one.partition)
        for name, one in dedup.ended.dump(now, window).items()
    ]
    requests = [
        (name, one.at, one.first, one.count, one.reply, one.partition)
        for name, one in dedup.requests.dump(now, window).items()
    ]
    arrivals = list(dedup.arrivals)
    for start in range(0, max(len(ended), len(requests), len(arrivals)), NAMES_BATCH):
        end = start + NAMES_BATCH
        yield ended[start:end], requests[start:end], arrivals[start:end]


# ---- when it is over --------------------------------------------------------------------------------------


def removable_at(queue: QueueState, lane: Lane) -> int | None:
    """When an empty lane may be removed: until then a complete that is sent again finds its row here, and who exports
    the journal finds all of it.
    """
    if lane.index not in queue.draining or not lane.known or not lane.partition.is_empty():
        return None
    return lane.changed_at + queue.settings.completed_grace_ms


def is_removable(queue: QueueState, lane: Lane, now: int) -> bool:
    return (
        lane.legacy is not None
        and lane.legacy.is_settled
        and lane.status is Status.OPEN
        and lane.job is None
        and not lane.waiting
        and (at := removable_at(queue, lane)) is not None
        and at <= now
    )
