"""Finds items by id, and shows them as they are: nothing is changed by looking."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from typing import Any

import msgspec

from millpond.errors import MillpondError, NotFound, Unavailable
from millpond.history.format import Record, decode_state
from millpond.model import REQUEST_TIMEOUT_MS, ErrorInfo, Item, Result, State, to_datetime
from millpond.queue.dedup import id_digest
from millpond.queue.drive import Landing, Step
from millpond.queue.lane import Lane, TurnJob
from millpond.queue.leases import Lease
from millpond.queue.names import has_own_id
from millpond.queue.partition import ERROR_PART, REASONS, RESULT_PART, STATE_PART, VERSION_BITS
from millpond.queue.state import QueueState
from millpond.queue.tokens import read_id


def locate(queue: QueueState, item_id: str) -> tuple[Lane, int] | None:
    """Where an id points; whether the item is still there the lane's turn tells."""
    name = id_digest(item_id)
    kept: tuple[Lane, int] | None = None
    for lane in queue.lanes.values():
        if lane.known and (number := lane.partition.dedup.live.get(name)) is not None:
            if number not in lane.partition.finished and number not in lane.partition.carried:
                return lane, number
            kept = lane, number  # it has ended, and another item may have its id by now; or it may be elsewhere by now
    if kept is not None:
        return kept
    if (away := next((lane for lane in queue.lanes.values() if not lane.known), None)) is not None:
        raise Unavailable(f"partition {away.index} is away and may hold the item; try again later")
    place = read_id(queue.incarnation, item_id)
    if place is None or place[0] not in queue.lanes:
        return None
    lane = queue.lanes[place[0]]
    return None if has_own_id(lane, place[1]) else (lane, place[1])


def settled(queue: QueueState, ids: Iterable[str]) -> Generator[Step, Any, None]:
    """Wait for turns under way that gave up one of these ids, or took one over: if they fail, the item is back."""
    names = [id_digest(item_id) for item_id in ids]
    while (lane := next((one for one in queue.lanes.values() if is_unsettled(one, names)), None)) is not None:
        yield lane, lambda lane, now: None


def is_unsettled(lane: Lane, names: Collection[bytes]) -> bool:
    """Whether a turn under way, or about to begin, gave up one of these names or took one over."""
    return any(not some.isdisjoint(names) for some in unsettled_names(lane))


def unsettled_names(lane: Lane) -> list[set[bytes]]:
    """Those names, of all turns that are not durable yet."""
    if not lane.known or (lane.free and not lane.partition.events):
        return []
    drafts = [lane.draft, *(turn.draft for turn in (lane.job, lane.doubt) if isinstance(turn, TurnJob))]
    return [lane.partition.dedup.uncommitted, *(draft.names for draft in drafts)]


def landed(queue: QueueState, lane: Lane, numbers: Collection[int]) -> Generator[Step, Any, None]:
    """Wait until these, which are carried to another partition, are there."""
    until = queue.now + REQUEST_TIMEOUT_MS
    while lane.known and not lane.partition.carried.keys().isdisjoint(numbers):
        if queue.now >= until:
            raise Unavailable("some items are on their way to a partition that does not answer; try again later")
        yield Landing(queue)


def at_rest(queue: QueueState, ids: Collection[str]) -> Generator[Step, Any, None]:
    """Wait until it can be told where each of these is: none is in a turn under way, or about to be elsewhere."""
    while True:
        yield from settled(queue, ids)
        places = [place for item_id in ids if (place := locate(queue, item_id)) is not None]
        on_their_way = [(lane, number) for lane, number in places if number in lane.partition.carried]
        if not on_their_way:
            return
        for lane, number in on_their_way:
            yield from landed(queue, lane, [number])


def no_item(item_id: str) -> NotFound:
    return NotFound(f"there is no item {item_id!r}; it may have been completed or removed", id=item_id)


class Seen(msgspec.Struct):
    """An item as it was when it was looked at: by the time its record is read, this very turn may have ended it."""

    number: int
    state: State
    chunk: int
    created: int
    expire_deadline: int
    attempts: int
    deliveries: int
    max_attempts: int | None
    documents: int  # as in the partition's column
    lease: Lease | None
    due: int | None
    died: int | None
    kept: int | None
    updated: int
    ended: int | None
    cancel_asked: bool

    def document(self, job: TurnJob, part: int) -> bytes | None:
        """What the turn has read of it; others may have looked at the item when it had other documents."""
        return job.documents.get(self.number << 2 | part) if self.documents >> part & 1 else None

    def record(self, job: TurnJob) -> Record:
        record = job.records[self.chunk][self.number - self.chunk]
        assert record is not None, "a live item has a record"
        return record if isinstance(record, Record) else Record(record)


def look(lane: Lane, numbers: Iterable[int]) -> dict[int, Seen]:
    seen: dict[int, Seen] = {}
    partition = lane.partition
    for number, state in partition.states(numbers).items():
        lane.want(number, 1)
        lane.want_documents(number)
        lease = partition.leased.get(number)
        attempts, deliveries = partition.tried(number)
        created, changed = partition.chunks.created_of(number), partition.changed.get(number)
        died, kept = partition.dead.get(number), partition.finished.get(number)
        ended = died >> 8 if died is not None else changed if kept is not None else None
        seen[number] = Seen(
            number=number,
            state=state,
            chunk=partition.chunks.first_of(number),
            created=created,
            expire_deadline=partition.expire_deadline(number),
            attempts=attempts + (lease is not None),
            deliveries=deliveries + (lease is not None),
            max_attempts=partition.limits.get(number),
            documents=partition.documents.get(number, 0),
            lease=lease,
            due=partition.waiting.get(number),
            died=died,
            kept=kept,
            updated=ended or (lease.at if lease is not None else 0) or changed or created,
            ended=ended,
            cancel_asked=number in partition.cancel_asked,
        )
    return seen


def show(queue: QueueState, lane: Lane, job: TurnJob, seen: Seen) -> Item:
    mint, record, number = lane.partition.mint, seen.record(job), seen.number
    lease, due, died, kept = seen.lease, seen.due, seen.died, seen.kept
    error = seen.document(job, ERROR_PART)
    source = record.source
    reason = REASONS[died & 0xFF] if died is not None else source.reason if source else None
    return Item(
        id=record.id or mint.id(number),
        state=seen.state,
        partition=lane.index,
        payload=record.payload,
        correlation_id=record.correlation_id or mint.correlation_id(number, seen.created),
        created_at=to_datetime(seen.created),
        expire_deadline=to_datetime(seen.expire_deadline),
        attempts=seen.attempts,
        deliveries=seen.deliveries,
        fencing_token=lease.fencing_token if lease else 0,
        max_attempts=queue.settings.max_attempts if seen.max_attempts is None else seen.max_attempts,
        key=record.key,
        kind=record.kind,
        encoding=record.encoding,
        reference=record.reference,
        priority=record.priority,
        enqueue_at=to_datetime(due >> 1) if due is not None else None,
        lease_deadline=to_datetime(lease.deadline) if lease else None,
        client_id=lease.client or None if lease else None,
        cancel_asked=seen.cancel_asked,
        updated_at=to_datetime(seen.updated),
        ended_at=None if seen.ended is None else to_datetime(seen.ended),
        keep_until=None if kept is None else to_datetime(kept >> 1),
        state_doc=decode_state(seen.document(job, STATE_PART)),
        state_version=seen.documents >> VERSION_BITS,
        result=decode_state(seen.document(job, RESULT_PART)),
        last_error=None if error is None else error.decode(),
        dead_reason=reason,
        source_queue=source.queue if source else None,
        source_id=source.id if source else None,
        source_attempts=source.attempts if source else None,
    )


def refusal(error: MillpondError, correlation_id: str | None = None) -> Result:
    return Result(False, correlation_id, ErrorInfo(error.code, error.message))
