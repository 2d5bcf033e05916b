"""Transactions: items that are staged chunk by chunk, where nobody sees them, and published all at once.

The chunks lie in several partitions. Publishing is one decision, which says of each chunk whose copy counts;
what the partitions then do is in `queue.settling`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from millpond.errors import Conflict, DiskFull, InvalidRequest, MillpondError, NotFound, Unavailable
from millpond.history.format import Event, Record
from millpond.model import Published, Staged
from millpond.queue.drive import Landing, Operation
from millpond.queue.lane import Lane, Status
from millpond.queue.names import Held
from millpond.queue.produce import DISK_FULL, TURN_BYTES_MAX, produce_rank
from millpond.queue.requests import AbortStage, PublishStage, Request, StageItems
from millpond.queue.settling import Chosen, Shown, alone, drop_in, publish_in, txn_key
from millpond.queue.state import QueueState
from millpond.queue.tokens import read_id


def _stage(queue: QueueState, request: StageItems) -> Operation:
    _check_ids(queue, request)
    staged: Staged | MillpondError | None = None
    while staged is None:
        (published, _), _ = yield queue.want_meta(), partial(_look_up, request.txn)
        if published:  # a batch that is replayed: its items are in the queue
            return Staged(0)
        staged, _ = yield _lane_of(queue, request) or _writable(queue), partial(_stage_in, queue, request)
    if isinstance(staged, MillpondError):
        raise staged
    queue.unsettled = True  # it has to be swept some day
    return staged


def _check_ids(queue: QueueState, request: StageItems) -> None:
    if not request.named:
        return
    for own in [record.id for record in request.records if isinstance(record, Record) and record.id is not None]:
        if read_id(queue.incarnation, own) is not None:
            raise InvalidRequest(f"id {own!r} has the form of the ids that this queue assigns; choose another")


def _lane_of(queue: QueueState, request: StageItems) -> Lane | None:
    """Where the chunk is already: it is sent again."""
    lanes = (lane for lane in queue.lanes.values() if lane.known)
    return next((lane for lane in lanes if request.chunk in lane.partition.staged.get(request.txn, ())), None)


def _writable(queue: QueueState) -> Lane:
    lanes = [lane for lane in queue.lanes.values() if lane.writable]
    if not lanes and all(lane.definition.read_only for lane in queue.lanes.values()):
        raise Unavailable("the queue's new partitions are not there yet; try again in a moment")
    if not lanes:
        raise DiskFull(DISK_FULL)
    return min(lanes, key=_stage_rank)


def _stage_rank(lane: Lane) -> tuple[int, ...]:
    """As where produces go; but what is staged counts too, and who else is about to."""
    if not lane.known:
        return lane.status != Status.OPEN, lane.failures
    failures, items = produce_rank(lane)
    return lane.status != Status.OPEN, failures, len(lane.waiting), items + lane.partition.staged_count


def _stage_in(queue: QueueState, request: StageItems, lane: Lane, now: int) -> Staged | MillpondError | None:
    """None: the turn is full, or the transaction seems to be published by now; ask again."""
    if queue.meta.partition.decisions.is_published(request.txn):  # else what this lane has shown would come twice
        return None
    there = lane.partition.staged.get(request.txn, {}).get(request.chunk)
    if there is not None:
        return Staged(sum(piece.count for piece in there))
    if lane.definition.read_only:  # since a moment ago: another takes it
        return None
    if not lane.writable:
        return DiskFull(DISK_FULL)
    if lane.draft.staged_size and lane.draft.staged_size + request.size > TURN_BYTES_MAX:
        return None
    lane.stage(request.txn, request.chunk, request.records, request.size)
    return Staged(len(request.records))


# ---- publish and abort ------------------------------------------------------------------------------------


def _publish(queue: QueueState, request: PublishStage) -> Operation:
    return alone(queue, txn_key(request.txn), _publish_once(queue, request))


def _publish_once(queue: QueueState, request: PublishStage) -> Operation:
    meta, txn = queue.want_meta(), request.txn
    (again, chosen), _ = yield meta, partial(_look_up, txn)
    if not again:
        chosen = yield from _choose(queue, request)
        (again, chosen), _ = yield meta, partial(_decide, txn, chosen)
    items = duplicates = 0
    left = [queue.lanes[index] for index in sorted(set(chosen.values())) if index in queue.lanes]
    while left:
        outcomes = yield [(lane, partial(_publish_in, queue, txn, chosen)) for lane in left]
        shown = [outcome for outcome, _ in outcomes if not isinstance(outcome, Held)]
        items += sum(outcome.items for outcome in shown)
        duplicates += sum(outcome.duplicates for outcome in shown)
        left = [
            lane for lane, (outcome, _) in zip(left, outcomes, strict=True) if isinstance(outcome, Held) or outcome.more
        ]
        waits = {outcome.lane.index: outcome.lane for outcome, _ in outcomes if isinstance(outcome, Held)}
        if waits:
            yield [(lane, _nothing) for lane in waits.values() if not lane.gone]
        if any(isinstance(outcome, Held) and outcome.carried for outcome, _ in outcomes):
            yield Landing(queue)
    return Published(txn, items, duplicates, again)


def _look_up(txn: str, lane: Lane, now: int) -> tuple[bool, Chosen]:
    """Whether it is decided, and on what; nothing is left to do once the decision is settled."""
    decisions = lane.partition.decisions
    return decisions.is_published(txn), decisions.deciding.get(txn, {})


def _decide(txn: str, chosen: Chosen, lane: Lane, now: int) -> tuple[bool, Chosen]:
    """Publish it, unless a later one of its name was published meanwhile."""
    if lane.partition.decisions.is_published(txn):
        return True, {}
    lane.partition.change(Event.STAGE_DECIDED, txn, dict(chosen))
    return False, chosen


def _choose(queue: QueueState, request: PublishStage) -> Operation:
    lanes = [lane for lane in queue.lanes.values() if lane.status != Status.FAILED]
    some_away = len(lanes) < len(queue.lanes)
    held = yield [(lane, lambda lane, now: set(lane.partition.staged.get(request.txn, ()))) for lane in lanes]
    chosen: dict[str, int] = {}
    for lane, (chunks, _) in zip(lanes, held, strict=True):
        for chunk in chunks.intersection(request.chunks):
            chosen.setdefault(chunk, lane.index)
    missing = [chunk for chunk in request.chunks if chunk not in chosen]
    if missing and some_away:
        raise Unavailable(f"a partition is away and may hold chunk {missing[0]!r}; try again later")
    if missing:
        raise NotFound(
            f"chunk {missing[0]!r} of transaction {request.txn!r} is not staged, or no longer; stage it again, then"
            " publish",
            chunks=missing[:10],
        )
    return chosen


def _publish_in(queue: QueueState, txn: str, chosen: Chosen, lane: Lane, now: int) -> Shown | Held:
    try:
        return publish_in(queue, lane, txn, chosen, now)
    except Held as held:
        return held


def _nothing(lane: Lane, now: int) -> None:
    """Only to know that the lane is free, and what it has durable."""


def _abort(queue: QueueState, request: AbortStage) -> Operation:
    return alone(queue, txn_key(request.txn), _drop(queue, request))


def _drop(queue: QueueState, request: AbortStage) -> Operation:
    (published, _), _ = yield queue.want_meta(), partial(_look_up, request.txn)
    if published:
        raise Conflict(f"transaction {request.txn!r} was published; its items are in the queue and cannot be dropped")
    lanes = [lane for lane in queue.lanes.values() if lane.status != Status.FAILED]
    dropped = yield [(lane, lambda lane, now: drop_in(lane, request.txn)) for lane in lanes]
    return Staged(sum(items for items, _ in dropped))


STAGE_OPERATIONS: dict[type[Request], Callable[[QueueState, Any], Operation]] = {
    StageItems: _stage,
    PublishStage: _publish,
    AbortStage: _abort,
}
