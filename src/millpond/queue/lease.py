"""From which partitions a lease is filled, and what its consumer gets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millpond.errors import MillpondError
from millpond.history.format import (
    RUN_BITS,
    RUN_MAX,
    Event,
    Payloads,
    Record,
    are_plain,
    decode_state,
    items_in,
    numbers_of,
    run_of,
    runs_of,
)
from millpond.model import DeadReason, LeasedFields, LeasedItems, LeasedRun, State, to_datetime
from millpond.queue.bodies import Records
from millpond.queue.lane import NEVER, Lane, Part, TurnJob
from millpond.queue.lifecycle import bury, end_leases
from millpond.queue.partition import ERROR_PART, STATE_PART, VERSION_BITS, document_keys
from millpond.queue.requests import Lease
from millpond.queue.state import QueueState
from millpond.queue.tokens import ChunkGrant
from millpond.queue.waiters import share

_COUNT_MASK = RUN_MAX - 1
_LEASED = Event.LEASED  # a member of an enum takes long to look up
_NOTHING_KNOWN: dict[int, LeasedFields] = {}


class LeasePart(Part, msgspec.Struct, eq=False):
    """One lane's items for a lease, as runs in order."""

    queue: QueueState
    request: Lease
    lane: Lane
    until: int  # of the lease
    runs: list[int]
    items: Sequence[LeasedRun] = ()

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        if self.request.gone:
            lane.waiting.append(ReleasePart(self.queue, self.runs, lane.partition.turn))
        else:
            self.items = leased_runs(lane, job, self.runs, self.until)
        self._settle()

    def again(self, lane: Lane) -> None:
        self._settle()

    def fail(self, error: MillpondError) -> None:
        """Its items went back when the partition was loaded again, or will when the lease runs out."""
        self.request.error = error
        self._settle()

    def leaves(self) -> bool:
        """A batch that other lanes share in does not wait for this one."""
        if len(self.request.items) < 2:
            return False
        self._settle()
        return True

    def finish_late(self, lane: Lane) -> None:
        lane.waiting.append(ReleasePart(self.queue, self.runs, lane.partition.turn))

    def deadline(self) -> int:
        return self.request.deadline

    def _settle(self) -> None:
        request = self.request
        request.parts -= 1
        if request.parts or request.answered:
            return
        parts, request.items = request.items, []
        runs: list[LeasedRun] = parts[0].items if len(parts) == 1 else [run for part in parts for run in part.items]
        if request.gone:
            give_back(self.queue, runs)
            request.error = None
            request.answer([])
        elif runs:
            request.error = None
            request.answer(LeasedItems(runs))
        elif request.error is not None:
            error, request.error = request.error, None
            request.fail(error)
        else:
            self.queue.waiters.park_again(request)


class ReleasePart(Part):
    """Items whose caller had gone before the reply: back to the head, the attempt given back."""

    __slots__ = ("_grant", "_queue", "_runs")

    def __init__(self, queue: QueueState, runs: list[int], grant: int) -> None:
        self._queue = queue
        self._runs = runs
        self._grant = grant

    @property
    def place(self) -> tuple[int, int]:
        """Orders the items of several leases as they stood before."""
        return self._grant, self._runs[0]

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


def give_back(queue: QueueState, leased: Sequence[LeasedRun]) -> None:
    """Items of a reply that was never delivered."""
    grants: dict[tuple[int, int], list[int]] = {}
    for run in leased:
        runs = grants.setdefault((run.grant.partition, run.grant.turn), [])
        runs.append(run_of(run.first, len(run.payloads)))
    for (partition, grant), runs in grants.items():
        if partition in queue.lanes:  # else it is gone, and with it all leases
            queue.lanes[partition].waiting.append(ReleasePart(queue, runs, grant))


def assign_leases(queue: QueueState, now: int) -> None:
    """Deal what is leasable in the free lanes to the waiters.

    Neighbours who want the same kind of lease are served in one event, and share it out in order.
    """
    if queue.definition.paused or not queue.waiters.parked:
        return
    lanes: list[Lane] = []
    total = 0
    for lane in queue.free:
        if count := lane.partition.ready.count:
            lanes.append(lane)
            total += count
    if not lanes:
        return
    leases = queue.waiters.first(total)
    shares = share(total, [lease.batch for lease in leases])
    queue.waiters.remove_first(len(leases))
    start = 0
    while start < len(leases):
        end = _end_of_alike(leases, start)
        first, count = leases[start], sum(shares[start:end])
        timeout = queue.settings.lease_timeout_ms if first.lease_timeout is None else first.lease_timeout
        taken = _take(lanes, count, first.client, now + timeout)
        _share_out(queue, leases[start:end], shares[start:end], taken, now + timeout)
        queue.rates.count("leased", count, now)
        start = end


def _end_of_alike(leases: list[Lease], start: int) -> int:
    """Where those end that want the same kind of lease."""
    client, timeout = leases[start].client, leases[start].lease_timeout
    for place in range(start + 1, len(leases)):
        lease = leases[place]
        if lease.client != client or lease.lease_timeout != timeout:
            return place
    return len(leases)


def _take(lanes: list[Lane], count: int, client: str, deadline: int) -> list[tuple[Lane, list[int]]]:
    """Lease the next `count` items; lanes with none left are struck off."""
    taken: list[tuple[Lane, list[int]]] = []
    while count:
        lane = lanes[0] if len(lanes) == 1 else min(lanes, key=lease_rank)
        runs = lane.partition.ready.peek(count)
        lane.partition.change(_LEASED, client, deadline, runs)
        lane.want_all(runs)
        _want_documents(lane, runs)
        taken.append((lane, runs))
        count -= items_in(runs)
        if not lane.partition.ready.count:
            lanes.remove(lane)
    return taken


def _share_out(
    queue: QueueState, leases: list[Lease], shares: list[int], taken: list[tuple[Lane, list[int]]], deadline: int
) -> None:
    """Cut what was taken into the waiters' shares, a part for each lane that a share touches."""
    if len(leases) == 1:
        for lane, runs in taken:
            _part_of(queue, leases[0], lane, deadline).runs += runs
        return
    rest = ((lane, run) for lane, runs in taken for run in runs)
    lane, first, left = taken[0][0], 0, 0
    for lease, count in zip(leases, shares, strict=True):
        while count:
            if not left:
                lane, run = next(rest)
                first, left = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            items = left if left < count else count
            _part_of(queue, lease, lane, deadline).runs.append(first << RUN_BITS | (items - 1))
            first += items
            left -= items
            count -= items


def _part_of(queue: QueueState, lease: Lease, lane: Lane, deadline: int) -> LeasePart:
    """The lease's last part, if it is of this lane, or a new one."""
    part: LeasePart | None = lease.items[-1] if lease.items else None
    if part is not None and part.lane is lane:
        return part
    part = LeasePart(queue, lease, lane, deadline, [])
    lease.items.append(part)
    lease.parts += 1
    lane.draft.parts.append(part)
    return part


def lease_rank(lane: Lane) -> tuple[bool, int, int]:
    """Read-only lanes first (they must drain), then the best head priority, then the fullest."""
    ready = lane.partition.ready
    return not lane.definition.read_only, ready.head_priority() or 0, -ready.count


def _want_documents(lane: Lane, runs: list[int]) -> None:
    documents = lane.partition.documents
    for number in documents.within_all(runs):
        lane.draft.document_wants += document_keys(number, documents.get(number, 0))


def leased_runs(lane: Lane, job: TurnJob, runs: list[int], deadline: int) -> list[LeasedRun]:
    """What the consumer gets: of plain items the payloads, the rest follows from the grant; of others all there is."""
    partition = lane.partition
    marked = {*partition.tries.within_all(runs), *partition.documents.within_all(runs)}
    if not marked and len(runs) == 1 and not runs[0] & _COUNT_MASK:  # a single item, mostly a plain one
        first = runs[0] >> RUN_BITS
        chunk, created = partition.chunks.place_of(first)
        record = job.records[chunk][first - chunk]
        if type(record) is bytes:
            return [LeasedRun(_chunk_grant(lane, job, created, deadline), first, [record], _NOTHING_KNOWN)]
    leased: list[LeasedRun] = []
    for chunk, low, high, created in partition.chunks.pieces_of(runs):
        whole = job.records[chunk]
        records = whole[low - chunk : high - chunk]
        grant = _chunk_grant(lane, job, created, deadline)
        known: dict[int, LeasedFields] = {}
        plain = type(whole) is Payloads or are_plain(records)
        if not plain or (marked and not marked.isdisjoint(range(low, high))):
            known = _known(lane, job, records, low, grant, marked)
            records = [known[n].payload if n in known else record for n, record in enumerate(records, low)]
        leased.append(LeasedRun(grant, low, records, known))  # type: ignore[arg-type]
    return leased


def _chunk_grant(lane: Lane, job: TurnJob, created: int, deadline: int) -> ChunkGrant:
    """One for all of a turn that are alike: what they share is worked out once."""
    grant: ChunkGrant | None = job.grants.get((created, deadline))
    if grant is None:
        partition = lane.partition
        grant = job.grants[created, deadline] = ChunkGrant(
            partition.incarnation, lane.index, partition.turn, created, deadline, partition.fence, partition.mint
        )
    return grant


def _known(
    lane: Lane, job: TurnJob, records: Records, first: int, grant: ChunkGrant, marked: set[int]
) -> dict[int, LeasedFields]:
    return {
        number: _leased_fields(lane, job, number, _full(record), grant)
        for number, record in enumerate(records, first)
        if type(record) is not bytes or number in marked
    }


def _full(record: bytes | Record | None) -> Record:
    assert record is not None, "a live item has a record"
    return record if isinstance(record, Record) else Record(record)


def _leased_fields(lane: Lane, job: TurnJob, number: int, record: Record, grant: ChunkGrant) -> LeasedFields:
    partition, mint = lane.partition, lane.partition.mint
    created = grant.created
    attempts, deliveries = partition.tried(number)
    error = job.documents.get(number << 2 | ERROR_PART)
    state = job.documents.get(number << 2 | STATE_PART)
    source = record.source
    return LeasedFields(
        id=record.id or mint.id(number),
        lease=mint.token(number, partition.turn, created, record.correlation_id),
        payload=record.payload,
        correlation_id=record.correlation_id or mint.correlation_id(number, created),
        attempts=attempts + 1,
        deliveries=deliveries + 1,
        fencing_token=partition.fence + partition.turn,
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
