"""Items on their way between two queues: the dead to their dead queue, the redriven back.

A move takes three durable steps, each a turn of its own loop, so that a crash in between repeats and never loses
or doubles: the source marks the item (`died` or `moving`) and sends it; the target takes it in under the
transfer's name; the source lets go (`moved`) and tells the target, which forgets the name (`forgot`), and then so
does the source (`forgotten`). What a rebalance carries from one partition to another of the same queue goes the same
way (`carrying`, `adopted`, `left`), with the queue itself as the target; see `queue.draining`.
"""

from __future__ import annotations

from itertools import groupby, islice

import msgspec

from millpond.errors import MillpondError, NotFound
from millpond.history.format import RUN_BITS, RUN_MAX, Event, Record, Source, runs_of
from millpond.queue.dedup import id_digest, key_digest, transfer_digest, transfer_digests
from millpond.queue.lane import NEVER, Lane, Part, TurnJob
from millpond.queue.looking import unsettled_names
from millpond.queue.names import Held, id_taken, key_taken, names_of
from millpond.queue.partition import REASONS, Move, Partition, document_keys
from millpond.queue.produce import choose_writable
from millpond.queue.requests import Arrive, Carried, Forget, Transfer
from millpond.queue.state import QueueState
from millpond.queue.watching import follow

TRANSFER_BATCH = 500  # items a message: bounds the memory of a flood of dead letters
RESEND_MS = 1_000  # after a target that was away


# ---- the source -------------------------------------------------------------------------------------------


def send_transfers(queue: QueueState, lane: Lane, now: int) -> None:
    """Read and send what is to be moved and not yet on its way."""
    partition = lane.partition
    if now < lane.resend_at:
        return
    if len(partition.moving) > len(lane.sent):
        unsent = (number for number in partition.moving if number not in lane.sent)
        batch = list(islice(unsent, TRANSFER_BATCH))
        target = partition.moving[batch[0]].target
        batch = [number for number in batch if partition.moving[number].target == target]
        if queue.queue_exists(target):
            lane.sent.update(batch)
            for number in batch:
                lane.want(number, 1)
                lane.want_documents(number)
            lane.draft.parts.append(SendPart(queue, target, batch))
        else:
            partition.change(Event.KEPT, batch)
    if len(partition.carried) > len(lane.carrying):
        batch = list(islice((number for number in partition.carried if number not in lane.carrying), TRANSFER_BATCH))
        lane.carrying.update(batch)
        for run in runs_of(batch):
            first, count = run >> RUN_BITS, (run & (RUN_MAX - 1)) + 1
            lane.want(first, count)
            for number in partition.documents.within(first, count):
                lane.want_documents(number)
        lane.draft.parts.append(CarryPart(queue, queue.definition.name, batch))
    if len(partition.confirming) > len(lane.confirming):
        for target in set(partition.confirming.values()):
            names = [n for n, to in partition.confirming.items() if to == target and n not in lane.confirming]
            if names:
                lane.confirming.update(names)
                lane.draft.parts.append(ConfirmPart(queue, target or queue.definition.name, names))


def has_unsent(lane: Lane) -> bool:
    partition = lane.partition
    if not (partition.moving or partition.carried or partition.confirming):  # asked twice in every turn
        return False
    return (
        len(partition.moving) > len(lane.sent)
        or len(partition.carried) > len(lane.carrying)
        or len(partition.confirming) > len(lane.confirming)
    )


class SendPart(Part):
    __slots__ = ("_numbers", "_queue", "_target")

    def __init__(self, queue: QueueState, target: str, numbers: list[int]) -> None:
        self._queue = queue
        self._target = target
        self._numbers = numbers

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        numbers = [number for number in self._numbers if number in lane.sent]  # not after a load: they are found anew
        if numbers:
            transfers = [_transfer(self._queue, lane, job, number) for number in numbers]
            self._queue.outbox.append(Arrive(self._target, lane.index, numbers, transfers))

    def again(self, lane: Lane) -> None:
        """Found anew: the lane was loaded again and has nothing on its way."""

    def deadline(self) -> int:
        return NEVER


class CarryPart(SendPart):
    """The same within the queue."""

    __slots__ = ()

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        numbers = [number for number in self._numbers if number in lane.carrying]
        if numbers:
            transfers = _carried(lane, job, numbers)
            self._queue.outbox.append(Arrive(self._target, lane.index, numbers, transfers))


class ConfirmPart(Part):
    """Tells the target to forget, but only once it is durable that the items are let go of here."""

    __slots__ = ("_names", "_queue", "_target")

    def __init__(self, queue: QueueState, target: str, names: list[bytes]) -> None:
        self._queue = queue
        self._target = target
        self._names = names

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        self._queue.outbox.append(Forget(self._target, lane.index, self._names))

    def again(self, lane: Lane) -> None:
        """Found anew, as above."""

    def deadline(self) -> int:
        return NEVER


def _transfer(queue: QueueState, lane: Lane, job: TurnJob, number: int) -> Transfer:
    partition, record = lane.partition, lane.record(job, number)
    move = partition.moving[number]
    created = partition.chunks.created_of(number)
    item_id = record.id or partition.mint.id(number)
    correlation_id = record.correlation_id or partition.mint.correlation_id(number, created)
    parts = {part: job.documents[number << 2 | part] for part in range(3) if number << 2 | part in job.documents}
    if move.redrive:
        assert record.source is not None
        source, wanted = record.source, record.source.id
        moved = _copy(record, correlation_id, source.key, source.max_attempts)
        moved.source = Source(queue.definition.name, wanted, source.attempts, source.reason)
    else:
        wanted = None
        moved = _copy(record, correlation_id, None, -1)
        reason = REASONS[partition.dead[number] & 0xFF]
        attempts = partition.attempts(number)
        moved.source = Source(queue.definition.name, item_id, attempts, reason, record.key, record.max_attempts, True)
    name = transfer_digest(partition.incarnation, partition.index, number, move.turn)
    fence = partition.fence + partition.turn
    return Transfer(name, moved, wanted, partition.documents.get(number, 0), parts, fence)


def _carried(lane: Lane, job: TurnJob, numbers: list[int]) -> list[Transfer]:
    """The same items, for another partition."""
    partition, fence = lane.partition, lane.partition.fence + lane.partition.turn
    moves = [(number, partition.carried[number]) for number in numbers]
    names = iter(transfer_digests(partition.incarnation, partition.index, moves))
    transfers = []
    for run in runs_of(numbers):
        for chunk, low, high, created in partition.chunks.pieces(run >> RUN_BITS, (run & (RUN_MAX - 1)) + 1):
            deadline = partition.chunks.deadline_of(chunk)
            correlation = partition.mint.correlation_prefix(created)
            for number, record in enumerate(job.records[chunk][low - chunk : high - chunk], low):
                assert record is not None, "a live item has a record"
                moved = _own(partition, number, record if isinstance(record, Record) else Record(record), correlation)
                state, value = partition.standing(number)
                tries, changed = partition.tries.get(number, 0), partition.changed.get(number, 0)
                carried = Carried(created, deadline, str(state), value, tries, changed)
                documents = partition.documents.get(number, 0)
                keys = document_keys(number, documents) if documents else ()  # the turn may have read others
                parts = {key & 3: job.documents[key] for key in keys}
                transfers.append(Transfer(next(names), moved, None, documents, parts, fence, carried))
    return transfers


def _own(partition: Partition, number: int, record: Record, correlation: str) -> Record:
    """Names that followed from its place are its own in another."""
    return msgspec.structs.replace(
        record,
        id=record.id or partition.mint.id(number),
        correlation_id=record.correlation_id or f"{correlation}{number:012x}",
        expire_deadline=partition.expiries.get(number, 0),
    )


def _copy(record: Record, correlation_id: str, key: str | None, max_attempts: int) -> Record:
    """The same item in another queue: what belongs to its time in this one is left behind."""
    return msgspec.structs.replace(
        record,
        id=None,
        key=key,
        enqueue_at=0,
        max_attempts=max_attempts,
        expire_deadline=0,
        correlation_id=correlation_id,
    )


def settle_transfer(queue: QueueState, request: Arrive | Forget, now: int) -> None:
    """The target has answered."""
    lane = queue.lanes.get(request.partition)
    if lane is None:
        return
    gone, is_own = isinstance(request.error, NotFound), request.target == queue.definition.name
    if request.error is not None and not (gone and isinstance(request, Forget)):
        lane.resend_at = now + RESEND_MS
        if isinstance(request, Arrive):
            (lane.carrying if is_own else lane.sent).difference_update(request.numbers)
        else:
            lane.confirming.difference_update(request.names)
    elif isinstance(request, Arrive):
        lane.waiting.append(LeftPart(queue, request) if is_own else MovedPart(request))
    else:
        lane.waiting.append(ForgottenPart(request))


class MovedPart(Part):
    """The target has the items: let go of them here."""

    __slots__ = ("_request",)

    def __init__(self, request: Arrive) -> None:
        self._request = request

    def apply(self, lane: Lane, now: int) -> None:
        partition = lane.partition
        numbers, names = [], []
        for number, transfer in zip(self._request.numbers, self._request.transfers, strict=True):
            move = partition.moving.get(number)
            if move is not None and transfer.name == _name(lane, number, move):
                numbers.append(number)
                names.append(transfer.name)
        if numbers:
            partition.change(Event.MOVED, numbers, names, self._request.target)

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        lane.sent.difference_update(self._request.numbers)

    def deadline(self) -> int:
        return NEVER


class LeftPart(MovedPart):
    """Another partition has the items."""

    __slots__ = ("_queue",)

    def apply(self, lane: Lane, now: int) -> None:
        partition = lane.partition
        sent = zip(self._request.numbers, self._request.transfers, strict=True)
        left = {number: transfer.name for number, transfer in sent if number in partition.carried}
        if left:
            partition.change(Event.LEFT, list(left), list(left.values()))

    def __init__(self, queue: QueueState, request: Arrive) -> None:
        super().__init__(request)
        self._queue = queue

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        lane.carrying.difference_update(self._request.numbers)
        for landing in list(self._queue.landings):
            landing.wake()


class ForgottenPart(Part):
    __slots__ = ("_request",)

    def __init__(self, request: Forget) -> None:
        self._request = request

    def apply(self, lane: Lane, now: int) -> None:
        lane.partition.change(Event.FORGOTTEN, self._request.names)

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        lane.confirming.difference_update(self._request.names)

    def deadline(self) -> int:
        return NEVER


def _name(lane: Lane, number: int, move: Move) -> bytes:
    return transfer_digest(lane.partition.incarnation, lane.index, number, move.turn)


# ---- the target -------------------------------------------------------------------------------------------


class ArrivePart(Part):
    __slots__ = ("_queue", "_request")

    def __init__(self, queue: QueueState, request: Arrive) -> None:
        self._queue = queue
        self._request = request

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        self._request.answer(None)

    def again(self, lane: Lane) -> None:
        self._queue.arrives.append(self._request)

    def fail(self, error: MillpondError) -> None:
        self._request.fail(error)

    def deadline(self) -> int:
        return self._request.deadline


def assign_arrives(queue: QueueState, now: int) -> None:
    waiting, queue.arrives = queue.arrives, []
    waiting.sort(key=_comes_from_elsewhere)  # what is adopted has its numbers before anything is produced
    for request in waiting:
        try:
            arrived = _arrived(queue, {transfer.name for transfer in request.left})
            request.left = missing = [transfer for transfer in request.left if transfer.name not in arrived]
            lane = choose_writable(queue)
            if not missing:
                request.answer(None)
            elif lane is None:
                queue.arrives.append(request)
            else:
                if _comes_from_elsewhere(request):
                    _take_in(queue, lane, missing, now)
                else:
                    _adopt(queue, lane, request, missing)
                lane.draft.parts.append(ArrivePart(queue, request))
        except Held:
            queue.arrives.append(request)
        except MillpondError as error:
            request.fail(error)


def _comes_from_elsewhere(request: Arrive) -> bool:
    return any(transfer.carried is None for transfer in request.left)


def _adopt(queue: QueueState, lane: Lane, request: Arrive, transfers: list[Transfer]) -> None:
    """Those of one chunk as one chunk again."""
    old = queue.lanes[request.partition]
    numbers = {transfer.name: number for transfer, number in zip(request.transfers, request.numbers, strict=True)}
    for (created, deadline), group in groupby(transfers, key=_chunk_of):
        alike = list(group)
        items = []
        for transfer in alike:
            own = transfer.carried
            assert own is not None
            state = (own.state, own.value, own.tries, own.changed)
            items.append((transfer.name, *state, transfer.documents, transfer.fence))
            lane.draft.names.add(transfer.name)
        first = lane.adopt([transfer.record for transfer in alike], items, created, deadline)
        for number, transfer in enumerate(alike, first):
            if old.watched:
                follow(old, numbers[transfer.name], lane, number)
            for part, document in transfer.parts.items():
                lane.draft.documents[number << 2 | part] = document


def _chunk_of(transfer: Transfer) -> tuple[int, int]:
    assert transfer.carried is not None
    return transfer.carried.created, transfer.carried.deadline


def _arrived(queue: QueueState, names: set[bytes]) -> set[bytes]:
    """Those of these transfers that were taken in."""
    found: set[bytes] = set()
    for lane in queue.lanes.values():
        if not lane.known or not lane.draft.names.isdisjoint(names):
            raise Held(lane)
        there = lane.partition.dedup.arrivals.keys() & names
        if there and not lane.free:
            raise Held(lane)
        found |= there
    return found


def _take_in(queue: QueueState, lane: Lane, transfers: list[Transfer], now: int) -> None:
    records: list[bytes | Record] = []
    names: set[bytes] = set()
    size = 0
    for transfer in transfers:
        record = transfer.record
        wanted, key = transfer.wanted_id, record.key
        if wanted is not None and id_digest(wanted) not in names and not id_taken(queue, wanted, now):
            record = msgspec.structs.replace(record, id=wanted, source=None)
        if key is not None and (key_digest(key) in names or key_taken(queue, key, now)):
            record = msgspec.structs.replace(record, key=None)
        records.append(record)
        names.update(names_of(record))
        size += len(record.payload)
    lane.draft.names.update(names)
    first = lane.add(records, size)
    queue.rates.count("produced", len(records), now)
    for number, transfer in enumerate(transfers, first):
        for part, document in transfer.parts.items():
            lane.draft.documents[number << 2 | part] = document
        lane.draft.arrivals.append((transfer.name, number, transfer.documents, transfer.fence))
        lane.draft.names.add(transfer.name)


def counts_of(queue: QueueState, lane: Lane) -> dict[str, int]:
    """The lane's items by state, without those that another has durably: they are let go of in a moment."""
    counts, partition = lane.partition.counts(), lane.partition
    digests = transfer_digests(partition.incarnation, lane.index, partition.carried.items())
    names = dict(zip(digests, partition.carried, strict=True))
    others = [other for other in queue.lanes.values() if names and other.known and other is not lane]
    for other in others:
        there = names.keys() & other.partition.dedup.arrivals.keys()
        landed = [names[name] for name in there.difference(*unsettled_names(other))]
        for state in partition.states(landed).values():
            counts[state] -= 1
    return counts


class ForgetPart(Part):
    __slots__ = ("_names", "_request")

    def __init__(self, request: Forget, names: list[bytes]) -> None:
        self._request = request
        self._names = names

    def apply(self, lane: Lane, now: int) -> None:
        names = [name for name in self._names if name in lane.partition.dedup.arrivals]
        if names:
            lane.partition.change(Event.FORGOT, names)

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        self._request.missing -= 1
        if not self._request.missing and not self._request.answered:
            self._request.answer(None)

    def fail(self, error: MillpondError) -> None:
        if not self._request.answered:
            self._request.fail(error)

    def deadline(self) -> int:
        return self._request.deadline


def assign_forget(queue: QueueState, request: Forget) -> None:
    """Any lane may hold the names; each says what it knows. A second copy that still waits must not come after it."""
    forgotten = set(request.names)
    for arrive in queue.arrives:
        arrive.left = [transfer for transfer in arrive.left if transfer.name not in forgotten]
    request.missing = len(queue.lanes)
    for lane in queue.lanes.values():
        lane.waiting.append(ForgetPart(request, request.names))
