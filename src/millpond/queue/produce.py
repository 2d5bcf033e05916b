"""Which partition a produce goes to."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millpond.errors import DiskFull, MillpondError
from millpond.history.format import Event, Record, are_plain
from millpond.model import Produced
from millpond.queue.lane import Lane, Part, TurnJob
from millpond.queue.names import Held, conflicts, known_request, names_of, plain_replies
from millpond.queue.requests import Produce
from millpond.queue.state import QueueState

TURN_BYTES_MAX = 16 << 20  # produced in one commit; more waits for the next, so that no turn takes seconds
DISK_FULL = "the disk is full, so nothing can be produced; complete items or make room, then send it again"

_encode_reply = msgspec.msgpack.Encoder().encode


class ProducePart(Part, msgspec.Struct, eq=False):
    queue: QueueState
    request: Produce
    replies: Sequence[Produced]

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        self.request.answer(self.replies)

    def again(self, lane: Lane) -> None:
        self.queue.produces.append(self.request)

    def fail(self, error: MillpondError) -> None:
        self.request.fail(error)

    def deadline(self) -> int:
        return self.request.deadline


def assign_produces(queue: QueueState, now: int) -> None:
    """Give each waiting produce to a lane, or leave it waiting."""
    waiting, queue.produces = queue.produces, []
    produced = 0
    only = queue.free[0] if len(queue.free) == 1 and queue.free[0].writable else None
    for request in waiting:
        if request.answered:
            continue
        try:
            if only is not None and request.request is None and not request.named:
                placed = _place_unnamed(queue, only, request)
            else:
                placed = _assign_produce(queue, request, now)
        except Held:
            placed = None
        except MillpondError as error:
            request.fail(error)
            continue
        if placed is None:
            queue.produces.append(request)
        else:
            produced += placed
    if produced:
        queue.rates.count("produced", produced, now)


def _assign_produce(queue: QueueState, request: Produce, now: int) -> int | None:
    """How many items it brings in; None if it has to wait."""
    if request.request is None and not request.named:
        lane = choose_writable(queue)
        return None if lane is None else _place_unnamed(queue, lane, request)
    if request.request is not None and (known := known_request(queue, request.request, now)) is not None:
        request.answer(known)
        return 0
    duplicates: dict[int, Produced | int] = {}
    replaced: list[tuple[Lane, int]] = []
    if request.named:
        duplicates, replaced = conflicts(queue, request, now)
    lane = replaced[0][0] if replaced else choose_writable(queue)
    if lane is None or not lane.free:
        return None
    if lane.full:
        raise DiskFull(DISK_FULL)
    if lane.draft.size and lane.draft.size + request.size > TURN_BYTES_MAX:
        return None
    for _, number in replaced:
        lane.partition.change(Event.REPLACED, str(lane.partition.states([number])[number]), number)
    return _place(queue, lane, request, duplicates)


def choose_writable(queue: QueueState) -> Lane | None:
    """The free lane with the fewest failures, then the fewest items."""
    lanes = [lane for lane in queue.free if lane.writable]
    if lanes:
        return min(lanes, key=produce_rank)
    there = [lane for lane in queue.lanes.values() if not lane.definition.read_only]
    if there and all(lane.full for lane in there):
        raise DiskFull(DISK_FULL)
    return None


def produce_rank(lane: Lane) -> tuple[int, int]:
    return lane.failures, lane.partition.live_count() + len(lane.draft.records)


def _place_unnamed(queue: QueueState, lane: Lane, request: Produce) -> int | None:
    """Most have nothing to be known by: they cannot have been there before."""
    size, records = lane.draft.size, request.records
    if size and size + request.size > TURN_BYTES_MAX:
        return None
    first = lane.add(records, request.size)
    lane.draft.parts.append(ProducePart(queue, request, _replies(lane, records, first)))
    return len(records)


def _place(queue: QueueState, lane: Lane, request: Produce, duplicates: dict[int, Produced | int]) -> int:
    records = request.records
    if duplicates:
        records = [record for index, record in enumerate(records) if index not in duplicates]
    first = lane.add(records, request.size) if records else 0
    replies: Sequence[Produced] = _replies(lane, records, first)
    if duplicates:
        replies = _merge(replies, duplicates, len(request.records))
    if request.named:
        for record in records:
            if type(record) is Record:
                lane.draft.names.update(names_of(record))
    if request.request is not None:
        plain = not duplicates and not request.named and are_plain(records)
        reply = None if plain else _encode_reply([(r.id, r.correlation_id, r.duplicate) for r in replies])
        lane.draft.requests.append((request.request, first, len(records), reply))
        lane.draft.names.add(request.request)
    lane.draft.parts.append(ProducePart(queue, request, replies))
    return len(records)


def _replies(lane: Lane, records: Sequence[bytes | Record], first: int) -> Sequence[Produced]:
    mint, created = lane.partition.mint, lane.partition.at
    if len(records) == 1 and type(records[0]) is bytes:
        return [Produced(f"{mint.id_prefix}{first}", mint.correlation_id(first, created))]
    if not records or are_plain(records):
        return plain_replies(mint, created, first, len(records))
    replies: list[Produced] = []
    for record, plain in zip(records, plain_replies(mint, created, first, len(records)), strict=True):
        if isinstance(record, Record):
            replies.append(Produced(record.id or plain.id, record.correlation_id or plain.correlation_id))
        else:
            replies.append(plain)
    return replies


def _merge(replies: Sequence[Produced], duplicates: dict[int, Produced | int], count: int) -> list[Produced]:
    """Put the duplicates in their places; an int is the index of an earlier item of the same request."""
    fresh = iter(replies)
    merged: list[Produced] = []
    for index in range(count):
        found = duplicates.get(index)
        if isinstance(found, int):
            first = merged[found]
            merged.append(Produced(first.id, first.correlation_id, True))
        else:
            merged.append(next(fresh) if found is None else found)
    return merged
