"""Which partition a produce goes to, and from which ones a lease is filled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import msgspec

from millpond.errors import DiskFull, InvalidRequest, KeyConflict, MillpondError
from millpond.history.format import RUN_BITS, RUN_MAX, Event, Record, decode_state, numbers_of, run_of, runs_of
from millpond.model import Batch, DeadReason, LeasedFields, LeasedItem, Produced, State, to_datetime
from millpond.queue.dedup import Ended, id_digest, key_digest
from millpond.queue.lane import NEVER, Lane, Part, TurnJob
from millpond.queue.lifecycle import bury, end_leases
from millpond.queue.partition import ERROR_PART, STATE_PART, VERSION_BITS
from millpond.queue.requests import Lease, Produce
from millpond.queue.state import QueueState
from millpond.queue.tokens import ChunkGrant, Mint, read_id
from millpond.queue.waiters import share

TURN_BYTES_MAX = 16 << 20  # produced in one commit; more waits for the next, so that no turn takes seconds
_COUNT_MASK = RUN_MAX - 1
_DISK_FULL = "the disk is full, so nothing can be produced; complete items or make room, then send it again"

_encode_reply = msgspec.msgpack.Encoder().encode
_decode_reply = msgspec.msgpack.Decoder(list[tuple[str, str | None, bool]]).decode

# ---- produce ----------------------------------------------------------------------------------------------


class ProducePart(Part):
    __slots__ = ("_queue", "_replies", "_request")

    def __init__(self, queue: QueueState, request: Produce, replies: Sequence[Produced]) -> None:
        self._queue = queue
        self._request = request
        self._replies = replies

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        self._request.answer(self._replies)

    def again(self, lane: Lane) -> None:
        self._queue.produces.append(self._request)

    def fail(self, error: MillpondError) -> None:
        self._request.fail(error)

    def deadline(self) -> int:
        return self._request.deadline


class Held(Exception):
    """Whether a name is taken cannot be told yet: its partition is in the middle of a commit, or away."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane


def assign_produces(queue: QueueState, now: int) -> None:
    """Give each waiting produce to a lane, or leave it waiting."""
    waiting, queue.produces = queue.produces, []
    for request in waiting:
        if request.answered:
            continue
        try:
            placed = _assign_produce(queue, request, now)
        except Held:
            placed = False
        except MillpondError as error:
            request.fail(error)
            continue
        if not placed:
            queue.produces.append(request)


def _assign_produce(queue: QueueState, request: Produce, now: int) -> bool:
    if request.request is not None and (known := _known_request(queue, request.request, now)) is not None:
        request.answer(known)
        return True
    duplicates: dict[int, Produced | int] = {}
    replaced: list[tuple[Lane, int]] = []
    if request.named:
        duplicates, replaced = _conflicts(queue, request, now)
    lane = replaced[0][0] if replaced else choose_writable(queue)
    if lane is None or not lane.free:
        return False
    if lane.full:
        raise DiskFull(_DISK_FULL)
    if lane.draft.size and lane.draft.size + request.size > TURN_BYTES_MAX:
        return False
    for _, number in replaced:
        lane.partition.change(Event.REPLACED, str(lane.partition.states([number])[number]), number)
    _place(queue, lane, request, duplicates, now)
    return True


def choose_writable(queue: QueueState) -> Lane | None:
    """The free lane with the fewest failures, then the fewest items."""
    lanes = [lane for lane in queue.free if lane.writable]
    if lanes:
        return lanes[0] if len(lanes) == 1 else min(lanes, key=_produce_rank)
    if all(lane.full for lane in queue.lanes.values() if not lane.definition.read_only):
        raise DiskFull(_DISK_FULL)
    return None


def _produce_rank(lane: Lane) -> tuple[int, int]:
    return lane.failures, lane.partition.live_count() + len(lane.draft.records)


def _place(queue: QueueState, lane: Lane, request: Produce, duplicates: dict[int, Produced | int], now: int) -> None:
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
        plain = not duplicates and not request.named and all(type(r) is bytes for r in records)
        reply = None if plain else _encode_reply([(r.id, r.correlation_id, r.duplicate) for r in replies])
        lane.draft.requests.append((request.request, first, len(records), reply))
        lane.draft.names.add(request.request)
    queue.rates.count("produced", len(records), now)
    lane.draft.parts.append(ProducePart(queue, request, replies))


def _replies(lane: Lane, records: Sequence[bytes | Record], first: int) -> Sequence[Produced]:
    mint, created = lane.partition.mint, lane.partition.at
    if set(map(type, records)) <= {bytes}:
        return Batch(len(records), partial(_plain_replies, mint, created, first, len(records)))
    replies: list[Produced] = []
    for record, plain in zip(records, _plain_replies(mint, created, first, len(records)), strict=True):
        if isinstance(record, Record):
            replies.append(Produced(record.id or plain.id, record.correlation_id or plain.correlation_id))
        else:
            replies.append(plain)
    return replies


def _plain_replies(mint: Mint, created: int, first: int, count: int) -> list[Produced]:
    prefix, id_prefix = mint.correlation_prefix(created), mint.id_prefix
    return [Produced(f"{id_prefix}{n}", f"{prefix}{n:012x}") for n in range(first, first + count)]


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


# ---- names: keys, ids and requests ------------------------------------------------------------------------


def _known_request(queue: QueueState, name: bytes, now: int) -> list[Produced] | None:
    """The reply to a request that was carried out within the window."""
    window = queue.settings.dedup_window_ms
    for lane in queue.lanes.values():
        if not lane.known:
            if now - queue.opened_at < window:
                raise Held(lane)
            continue
        entry = lane.partition.dedup.requests.get(name, now, window)
        if name in lane.draft.names or (entry is not None and not lane.free):
            raise Held(lane)
        if entry is None:
            continue
        if entry.reply is not None:
            return [Produced(*reply) for reply in _decode_reply(entry.reply)]
        return _plain_replies(lane.partition.mint, entry.at, entry.first, entry.count)
    return None


def names_of(record: Record) -> list[bytes]:
    names = []
    if record.id is not None:
        names.append(id_digest(record.id))
    if record.key is not None:
        names.append(key_digest(record.key))
    return names


def _conflicts(
    queue: QueueState, request: Produce, now: int
) -> tuple[dict[int, Produced | int], list[tuple[Lane, int]]]:
    """Which items of the request exist already, and which existing ones it replaces."""
    duplicates: dict[int, Produced | int] = {}
    replaced: dict[tuple[int, int], tuple[Lane, int]] = {}
    mine: dict[bytes, int] = {}
    for index, record in enumerate(request.records):
        if type(record) is bytes:
            continue
        assert isinstance(record, Record)
        names = names_of(record)
        repeated = next((mine[name] for name in names if name in mine), None)
        if repeated is not None:
            if request.on_conflict != "ignore":
                raise KeyConflict(f"items {repeated} and {index} of the request have the same key; send it once")
            duplicates[index] = repeated
            continue
        mine.update(dict.fromkeys(names, index))
        if request.on_conflict == "replace":
            for lane, number in _to_replace(queue, record, names, now):
                replaced[lane.index, number] = (lane, number)
            continue
        found = _find(queue, record, names, now)
        if found is None:
            continue
        lane, number, ended = found
        if request.on_conflict == "reject":
            name = f"key {record.key!r}" if record.key is not None else f"id {record.id!r}"
            raise KeyConflict(f"{name} is taken by item {_id_of(lane, number, ended)}; use another", index=index)
        duplicates[index] = _duplicate(lane, number, ended)
    if len({lane.index for lane, _ in replaced.values()}) > 1:
        raise KeyConflict("the items to replace lie in different partitions; send one request for each item")
    return duplicates, list(replaced.values())


def _to_replace(queue: QueueState, record: Record, names: list[bytes], now: int) -> Iterator[tuple[Lane, int]]:
    """The live items that have any of these names: id and key may be those of two."""
    for name in names:
        found = _find(queue, record, [name], now)
        if found is None or found[2] is not None:
            continue
        lane, number, _ = found
        state = lane.partition.states([number]).get(number)
        if state not in (State.READY, State.SCHEDULED, State.RETRYING):
            raise KeyConflict(f"item {_id_of(lane, number, None)} is {state} and cannot be replaced; try again later")
        yield lane, number


def _find(queue: QueueState, record: Record, names: list[bytes], now: int) -> tuple[Lane, int, Ended | None] | None:
    """The live or else lately ended item that has one of these names. Held if that cannot be told now."""
    window = queue.settings.dedup_window_ms
    lately: tuple[Lane, int, Ended] | None = None
    for lane in queue.lanes.values():
        if not lane.known:
            raise Held(lane)
        dedup, finished = lane.partition.dedup, lane.partition.finished
        for name in names:
            number = dedup.live.get(name)
            if number in finished:
                number = None
            ended = dedup.ended.get(name, now, window) if number is None else None
            if name in lane.draft.names or name in dedup.uncommitted or (not lane.free and (number or ended)):
                raise Held(lane)
            if number is not None:
                return lane, number, None
            if ended is not None:
                lately = lane, ended.number, ended
    return lately or _find_assigned(queue, record)


def _find_assigned(queue: QueueState, record: Record) -> tuple[Lane, int, None] | None:
    """Whether a producer's own id is one that this queue gave to another item."""
    place = read_id(queue.incarnation, record.id) if record.id is not None else None
    if place is None:
        return None
    lane = queue.lanes.get(place[0])
    if lane is not None and not lane.free:
        raise Held(lane)
    if lane is None or place[1] >= lane.partition.next_number:
        raise InvalidRequest(f"id {record.id!r} has the form of the ids that this queue assigns; choose another")
    if place[1] in lane.partition.states([place[1]]) and not _has_own_id(lane, place[1]):
        return lane, place[1], None
    return None


def _has_own_id(lane: Lane, number: int) -> bool:
    return not lane.partition.dedup.names.get(number, "\n").startswith("\n")


def id_taken(queue: QueueState, item_id: str, now: int) -> bool:
    """For items that come back under their old id."""
    try:
        return _is_taken(_find(queue, Record(id=item_id), [id_digest(item_id)], now))
    except InvalidRequest:
        return True


def key_taken(queue: QueueState, key: str, now: int) -> bool:
    return _is_taken(_find(queue, Record(key=key), [key_digest(key)], now))


def _is_taken(found: tuple[Lane, int, Ended | None] | None) -> bool:
    """What an item that left for its dead queue has left behind is its own to come back to."""
    return found is not None and not (found[2] is not None and found[2].moved)


def _duplicate(lane: Lane, number: int, ended: Ended | None) -> Produced:
    created = ended.created if ended is not None else lane.partition.chunks.created_of(number)
    name = ended.name if ended is not None else lane.partition.dedup.names.get(number)
    own_id, _, own_correlation = (name or "\n").partition("\n")
    mint = lane.partition.mint
    return Produced(own_id or mint.id(number), own_correlation or mint.correlation_id(number, created), True)


def _id_of(lane: Lane, number: int, ended: Ended | None) -> str:
    return _duplicate(lane, number, ended).id


# ---- lease ------------------------------------------------------------------------------------------------


class LeasePart(Part):
    """One lane's items for a lease, as runs in order."""

    __slots__ = ("_deadline", "_queue", "_request", "items", "lane", "runs")

    def __init__(self, queue: QueueState, request: Lease, lane: Lane, deadline: int) -> None:
        self._queue = queue
        self._request = request
        self._deadline = deadline
        self.lane = lane
        self.runs: list[int] = []
        self.items: list[LeasedItem] = []

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        if self._request.gone:
            lane.waiting.append(ReleasePart(self._queue, self.runs, lane.partition.turn))
        else:
            self.items = leased_items(lane, job, self.runs, self._deadline)
        self._settle()

    def again(self, lane: Lane) -> None:
        self._settle()

    def fail(self, error: MillpondError) -> None:
        """Its items went back when the partition was loaded again, or will when the lease runs out."""
        self._request.error = error
        self._settle()

    def leaves(self) -> bool:
        """A batch that other lanes share in does not wait for this one."""
        if len(self._request.items) < 2:
            return False
        self._settle()
        return True

    def finish_late(self, lane: Lane) -> None:
        lane.waiting.append(ReleasePart(self._queue, self.runs, lane.partition.turn))

    def deadline(self) -> int:
        return self._request.deadline

    def _settle(self) -> None:
        request = self._request
        request.parts -= 1
        if request.parts or request.answered:
            return
        items = [item for part in request.items for item in part.items]
        request.items = []
        if request.gone:
            give_back(self._queue, items)
            request.error = None
            request.answer([])
        elif items:
            request.error = None
            request.answer(items)
        elif request.error is not None:
            error, request.error = request.error, None
            request.fail(error)
        else:
            self._queue.waiters.park_again(request)


class ReleasePart(Part):
    """Items whose caller had gone before the reply: back to the head, the attempt given back."""

    __slots__ = ("_grant", "_queue", "_runs")

    def __init__(self, queue: QueueState, runs: list[int], grant: int) -> None:
        self._queue = queue
        self._runs = runs
        self._grant = grant

    def apply(self, lane: Lane, now: int) -> None:
        leased, asked = lane.partition.leased, lane.partition.cancel_asked
        runs = []
        for run in self._runs:
            first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            held = [n for n in range(first, first + count) if n in leased and leased[n].grant == self._grant]
            if len(held) == count:
                runs.append(run)
            else:
                runs += [run_of(number, 1) for number in held]
        if asked and (cancelled := [n for n in numbers_of(runs) if n in asked]):
            end_leases(self._queue, lane, cancelled, now)
            runs = runs_of(n for n in numbers_of(runs) if n in leased)
        if runs:
            lane.partition.change(Event.RELEASED, runs)
            expired = [n for n in numbers_of(runs) if lane.partition.expire_deadline(n) <= now]
            if expired:
                bury(self._queue, lane, DeadReason.EXPIRED, State.READY, runs_of(expired), now)

    def deadline(self) -> int:
        return NEVER


def give_back(queue: QueueState, items: Sequence[LeasedItem]) -> None:
    """Items of a reply that was never delivered."""
    grants: dict[tuple[int, int], list[int]] = {}
    for item in items:
        [token] = queue.reader.read_all([item])
        assert token is not None
        partition, number, grant, _, _ = token
        grants.setdefault((partition, grant), []).append(number)
    for (partition, grant), numbers in grants.items():
        queue.lanes[partition].waiting.append(ReleasePart(queue, runs_of(numbers), grant))


def assign_leases(queue: QueueState, now: int) -> None:
    """Deal what is leasable in the free lanes to the waiters.

    Neighbours who want the same kind of lease are served in one event, and share it out in order.
    """
    if queue.definition.paused or not len(queue.waiters):
        return
    lanes = [lane for lane in queue.free if lane.partition.ready.count]
    if not lanes:
        return
    total = sum(lane.partition.ready.count for lane in lanes)
    leases = queue.waiters.first(total)
    shares = share(total, [lease.batch for lease in leases])
    queue.waiters.remove_first(len(leases))
    dealt = zip(leases, shares, strict=True)
    for (client, timeout), group in groupby(dealt, key=lambda deal: (deal[0].client, deal[0].lease_timeout)):
        alike = list(group)
        count = sum(share for _, share in alike)
        deadline = now + (timeout if timeout is not None else queue.settings.lease_timeout_ms)
        _share_out(queue, alike, _take(lanes, count, client, deadline), deadline)
        queue.rates.count("leased", count, now)


def _take(lanes: list[Lane], count: int, client: str, deadline: int) -> deque[tuple[Lane, int]]:
    """Lease the next `count` items; lanes with none left are struck off."""
    taken: deque[tuple[Lane, int]] = deque()
    while count:
        lane = lanes[0] if len(lanes) == 1 else min(lanes, key=_lease_rank)
        runs = lane.partition.ready.peek(count)
        lane.partition.change(Event.LEASED, client, deadline, runs)
        for run in runs:
            items = (run & _COUNT_MASK) + 1
            count -= items
            _want(lane, run >> RUN_BITS, items)
            taken.append((lane, run))
        if not lane.partition.ready.count:
            lanes.remove(lane)
    return taken


def _share_out(
    queue: QueueState, leases: list[tuple[Lease, int]], taken: deque[tuple[Lane, int]], deadline: int
) -> None:
    """Cut what was taken into the waiters' shares, a part for each lane that a share touches."""
    for lease, count in leases:
        part: LeasePart | None = None
        while count:
            lane, run = taken.popleft()
            first, items = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            if items > count:
                taken.appendleft((lane, run_of(first + count, items - count)))
                run, items = run_of(first, count), count
            if part is None or part.lane is not lane:
                part = LeasePart(queue, lease, lane, deadline)
                lease.items.append(part)
                lease.parts += 1
                lane.draft.parts.append(part)
            part.runs.append(run)
            count -= items


def _lease_rank(lane: Lane) -> tuple[bool, int, int]:
    """Read-only lanes first (they must drain), then the best head priority, then the fullest."""
    ready = lane.partition.ready
    return not lane.definition.read_only, ready.head_priority() or 0, -ready.count


def _want(lane: Lane, first: int, count: int) -> None:
    lane.want(first, count)
    documents = lane.partition.documents
    if documents:
        for number in range(first, first + count):
            if number in documents:
                lane.want_documents(number)


def leased_items(lane: Lane, job: TurnJob, runs: list[int], deadline: int) -> list[LeasedItem]:
    partition = lane.partition
    tries, documents = partition.tries, partition.documents
    items: list[LeasedItem] = []
    for run in runs:
        first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
        for chunk, low, high, created in partition.chunks.pieces(first, count):
            records = job.records[chunk][low - chunk : high - chunk]
            grant = ChunkGrant(partition.incarnation, lane.index, partition.turn, created, deadline, partition.mint)
            items += [
                LeasedItem(record, number, grant)
                if type(record) is bytes and number not in tries and number not in documents
                else _leased_item(lane, job, number, grant)
                for number, record in enumerate(records, low)
            ]
    return items


def _leased_item(lane: Lane, job: TurnJob, number: int, grant: ChunkGrant) -> LeasedItem:
    partition, mint, record = lane.partition, lane.partition.mint, lane.record(job, number)
    created = grant.created
    error = job.documents.get(number << 2 | ERROR_PART)
    state = job.documents.get(number << 2 | STATE_PART)
    source = record.source
    fields = LeasedFields(
        id=record.id or mint.id(number),
        lease=mint.token(number, partition.turn, created, record.correlation_id),
        payload=record.payload,
        correlation_id=record.correlation_id or mint.correlation_id(number, created),
        attempts=partition.attempts(number) + 1,
        deliveries=partition.deliveries(number) + 1,
        fencing_token=partition.turn,
        lease_deadline=to_datetime(grant.deadline),
        created_at=to_datetime(created),
        kind=record.kind,
        encoding=record.encoding,
        reference=record.reference,
        priority=record.priority,
        key=record.key,
        state_doc=decode_state(state),
        state_version=partition.documents.get(number, 0) >> VERSION_BITS,
        last_error=None if error is None else error.decode(),
        dead_reason=source.reason if source else None,
        source_queue=source.queue if source else None,
        source_id=source.id if source else None,
        source_attempts=source.attempts if source else None,
    )
    return LeasedItem(record.payload, number, grant, fields)
