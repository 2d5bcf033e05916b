"""Claims: named sets of items over all partitions, for a batch reader that may come back for them after a crash.

The items are taken in each partition first; then one decision seals them as the claim, and until that they are nobody's
(`queue.settling` gives back what was never sealed). Completing and releasing are one decision too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec

from millpond.errors import (
    ClaimFinished,
    Conflict,
    Fenced,
    InvalidRequest,
    MillpondError,
    NotFound,
    Unavailable,
)
from millpond.history.format import Event, Record, decode_state, run_span
from millpond.model import (
    CLAIM_PAGE_BYTES,
    Claim,
    ClaimEnded,
    ClaimPart,
    ClaimRows,
    ClaimRun,
    Consumer,
    Item,
    ItemPage,
    Result,
    State,
    to_datetime,
)
from millpond.queue.decisions import ClaimMark, Decisions, Ending, split_number
from millpond.queue.drive import Late, Operation, Wait
from millpond.queue.lane import CHUNK_BYTES_MAX, Lane, Status, TurnJob
from millpond.queue.looking import at_rest, locate, refusal
from millpond.queue.partition import ERROR_PART, STATE_PART, VERSION_BITS
from millpond.queue.requests import (
    ClaimItems,
    EndClaim,
    JudgeClaim,
    JudgeItem,
    ListClaims,
    OpenConsumer,
    ReadClaim,
    Request,
)
from millpond.queue.settling import alone, claim_key, complete_in, release_in, slice_runs
from millpond.queue.state import QueueState

CHUNKS_MIN = CLAIM_PAGE_BYTES // CHUNK_BYTES_MAX  # read at a time, before it is known how large they are
CHUNKS_MAX = 2_000  # and at most: chunks of one item are small, but each is a look-up

FEW = 16  # neighbours of which more than so many are better off as a piece of their own

Mark = tuple[int, int, int, int, int | None]  # attempts, deliveries, the state's version, deadline, when it changed
Marks = dict[int, Mark]  # of items of which their record does not tell all


class Piece(msgspec.Struct):
    """Items of one chunk, in the order in which they are read: neighbours, or those that have a priority in common."""

    chunk: range
    numbers: range | list[int]
    created: int
    deadline: int

    def add(self, span: range) -> bool:
        """Whether these could be added: runs of one, as priorities make them, do not cost a piece each."""
        if len(span) > FEW or span.start < self.chunk.start or span.stop > self.chunk.stop:
            return False
        if isinstance(self.numbers, range):
            if len(self.numbers) > FEW:
                return False
            self.numbers = [*self.numbers]
        self.numbers += span
        return True


# ---- consumers --------------------------------------------------------------------------------------------


def _open_consumer(queue: QueueState, request: OpenConsumer) -> Operation:
    consumer, _ = yield queue.want_meta(), partial(_open, request)
    if isinstance(consumer, MillpondError):
        raise consumer
    return consumer


def _open(request: OpenConsumer, lane: Lane, now: int) -> Consumer | MillpondError:
    """Who comes with another past than the consumer's own fences nobody off. Its last claim may still be open."""
    name, consumers = request.consumer, lane.partition.decisions.consumers
    known = consumers.get(name)
    last = known.last_completed if known is not None else 0
    if request.after is not None and last not in (request.after - 1, request.after):
        return Conflict(
            f"consumer {name!r} has completed claim {last}, so it does not go on after {request.after}; go on from"
            " there, or use a new consumer",
            last_completed=last,
        )
    lane.partition.change(Event.CONSUMER_OPENED, name, known.epoch + 1 if known is not None else 1)
    return Consumer(consumer=name, epoch=consumers[name].epoch, last_completed=consumers[name].last_completed)


def _fenced(decisions: Decisions, claim_id: str, epoch: int | None) -> MillpondError | None:
    """Why a claim may not be touched with this epoch. An operator comes without one."""
    numbered = split_number(claim_id)
    known = decisions.consumers.get(numbered[0]) if numbered is not None else None
    if epoch is None:
        return None
    if numbered is None:
        return InvalidRequest(
            f"claim {claim_id!r} is no consumer's, so it has no epoch; leave the epoch out, or name it consumer:number"
        )
    if known is None:
        return InvalidRequest(f"consumer {numbered[0]!r} is not known here; open it, and use the epoch that it gets")
    if epoch > known.epoch:
        return Fenced(
            f"consumer {numbered[0]!r} has come to epoch {known.epoch}, not {epoch}, which is of another queue, or of"
            " data that are gone; open it again",
            epoch=known.epoch,
        )
    if epoch != known.epoch:
        return Fenced(
            f"consumer {numbered[0]!r} was opened again (epoch {known.epoch}, not {epoch}): another run reads it now;"
            " stop this one, or give each its own consumer",
            epoch=known.epoch,
        )
    return None


# ---- claim ------------------------------------------------------------------------------------------------


def _claim(queue: QueueState, request: ClaimItems) -> Operation:
    found, _ = yield queue.want_meta(), partial(_find, request)
    if isinstance(found, MillpondError):
        raise found
    if found is not None:
        return found
    return (yield from alone(queue, claim_key(request.claim_id), _make(queue, request)))


def _find(request: ClaimItems, lane: Lane, now: int) -> Claim | MillpondError | None:
    """The claim if it was made, or why it cannot be; None if it can."""
    decisions, claim_id = lane.partition.decisions, request.claim_id
    if (error := _fenced(decisions, claim_id, request.epoch) or _unfit(decisions, request)) is not None:
        return error
    claim = decisions.claims.get(claim_id)
    if claim is None:
        return None
    if claim.ending == Ending.RELEASED:
        return Unavailable(f"claim {claim_id!r} is being released; ask again in a moment")
    return _shown(decisions, claim)


def _unfit(decisions: Decisions, request: ClaimItems) -> MillpondError | None:
    """What is wrong with the name."""
    claim_id, numbered = request.claim_id, split_number(request.claim_id)
    if decisions.is_finished(claim_id):
        return ClaimFinished(f"claim {claim_id!r} was completed; claim the next items under another name")
    if numbered is None:
        return None
    consumer, number = numbered
    known = decisions.consumers.get(consumer)
    if known is None or request.epoch is None:
        return InvalidRequest(
            f"claim {claim_id!r} is named as one of consumer {consumer!r}; open the consumer first and send its epoch,"
            " or choose a name that does not end in a number"
        )
    if number != known.last_completed + 1:
        return Conflict(
            f"consumer {consumer!r} has completed claim {known.last_completed}, so the next is"
            f" {known.last_completed + 1}, not {number}; go on from there, or use a new consumer",
            last_completed=known.last_completed,
        )
    return None


def _make(queue: QueueState, request: ClaimItems) -> Operation:
    nonce = queue.rng.randbytes(8)
    queue.taking.add(nonce)
    try:
        return (yield from _take_and_seal(queue, request, nonce))
    finally:
        queue.taking.discard(nonce)


def _take_and_seal(queue: QueueState, request: ClaimItems, nonce: bytes) -> Operation:
    taken = yield from _gather(queue, request, nonce)
    if taken and request.max_bytes is not None:
        taken = yield from _cut(queue, taken, nonce, request.max_bytes)
    if not taken:
        return Claim(claim_id=request.claim_id, items=0)
    parts = _parts(taken, request.parts)
    sealed, _ = yield queue.meta, partial(_seal, request, nonce, parts)
    if isinstance(sealed, MillpondError):
        yield [(lane, lambda lane, now: release_in(queue, lane, nonce, now)) for lane, _ in taken]
        raise sealed
    return sealed


def _gather(queue: QueueState, request: ClaimItems, nonce: bytes) -> Operation:
    """Take items, as many as there are; wait for the first. Returns the lanes with how many each gave."""
    unread = [lane for lane in queue.lanes.values() if lane.status == Status.CLOSED]
    if unread:
        yield [(lane, lambda lane, now: None) for lane in unread]
    while True:
        plan = _plan(queue, request.max_items)
        if plan:
            counts = yield [Late(lane, partial(_take, queue, request, nonce, count)) for lane, count in plan.items()]
            taken = [(lane, count) for lane, (count, _) in zip(plan, counts, strict=True) if count]
            if taken:
                return taken
        elif queue.now >= request.until:
            return []
        else:
            yield Wait(request.until)


def _plan(queue: QueueState, items: int) -> dict[Lane, int]:
    """From which lanes to take how many: those that leases would get, so a better priority elsewhere goes first."""
    plan: dict[Lane, int] = {}
    if queue.definition.paused:
        return plan
    lanes = [lane for lane in queue.lanes.values() if lane.status == Status.OPEN and lane.partition.ready.count]
    ready = [(lane, priority, count) for lane in lanes for priority, count in lane.partition.ready.counts().items()]
    for lane, _, count in sorted(ready, key=_claim_rank):
        if items:
            plan[lane] = plan.get(lane, 0) + min(items, count)
            items -= min(items, count)
    return plan


def _claim_rank(ready: tuple[Lane, int, int]) -> tuple[bool, int, int]:
    """As `lease_rank`, of the items of one priority in a lane."""
    lane, priority, count = ready
    return not lane.definition.read_only, priority, -count


def _take(queue: QueueState, request: ClaimItems, nonce: bytes, count: int, lane: Lane, now: int) -> int:
    if queue.definition.paused:
        return 0
    left, ready = count, lane.partition.ready
    while left and ready.count:
        runs = ready.peek(left)
        lane.partition.change(Event.CLAIMED, nonce, request.claim_id, request.owner, runs)
        left -= sum(len(run_span(run)) for run in runs)
    return count - left


def _cut(queue: QueueState, taken: list[tuple[Lane, int]], nonce: bytes, room: int) -> Operation:
    """Give back what goes beyond so many bytes; the first item stays, whatever its size."""
    kept: list[tuple[Lane, int]] = []
    for lane, count in taken:
        keep = 0
        while room > 0 and keep < count:
            (pieces, _), job = yield lane, partial(_want, nonce, keep, count - keep, CHUNKS_MIN)
            for size in _sizes(job, pieces):
                room -= size
                if room < 0 and (keep or kept):
                    break
                keep += 1
        if keep < count:
            yield lane, partial(_release_tail, queue, nonce, keep)
        if keep:
            kept.append((lane, keep))
    return kept


def _sizes(job: TurnJob, pieces: Sequence[Piece]) -> Iterator[int]:
    for piece in pieces:
        for record in _records(job, piece):
            yield len(record.payload if isinstance(record, Record) else record or b"")


def _release_tail(queue: QueueState, nonce: bytes, keep: int, lane: Lane, now: int) -> int:
    return release_in(queue, lane, nonce, now, keep)


def _parts(taken: list[tuple[Lane, int]], wanted: int) -> list[tuple[int, int, int]]:
    """Parts of about the same size; none spans two partitions."""
    size = -(-sum(count for _, count in taken) // wanted)
    return [(lane.index, start, min(size, count - start)) for lane, count in taken for start in range(0, count, size)]


def _seal(
    request: ClaimItems, nonce: bytes, parts: list[tuple[int, int, int]], lane: Lane, now: int
) -> Claim | MillpondError:
    found = _find(request, lane, now)  # the consumer may have been opened again meanwhile
    if found is not None:
        return found if isinstance(found, MillpondError) else Conflict(f"claim {request.claim_id!r} exists already")
    lane.partition.change(Event.CLAIM_SEALED, nonce, request.claim_id, request.owner, request.epoch, parts)
    decisions = lane.partition.decisions
    return _shown(decisions, decisions.claims[request.claim_id])


def _shown(decisions: Decisions, claim: ClaimMark) -> Claim:
    """With the newest epoch of its consumer, which is what reading it takes now."""
    numbered = decisions.consumer_of(claim.claim_id)
    return Claim(
        claim_id=claim.claim_id,
        items=claim.items,
        parts=[ClaimPart(place, count) for place, (_, _, count) in enumerate(claim.parts)],
        owner=claim.owner,
        epoch=None if numbered is None else decisions.consumers[numbered[0]].epoch,
        created_at=to_datetime(claim.at),
        status=_STATUS[claim.ending],
    )


_STATUS: dict[int, Any] = {Ending.OPEN: "open", Ending.COMPLETED: "completing", Ending.RELEASED: "releasing"}


def _list_claims(queue: QueueState, request: ListClaims) -> Operation:
    claims, _ = yield queue.want_meta(), _show_all
    return claims


def _show_all(lane: Lane, now: int) -> list[Claim]:
    decisions = lane.partition.decisions
    return [_shown(decisions, claim) for claim in decisions.claims.values()]


# ---- read -------------------------------------------------------------------------------------------------


def _read_claim(queue: QueueState, request: ReadClaim) -> Operation:
    claim, _ = yield queue.want_meta(), partial(_open_claim, request.claim_id, request.epoch)
    if isinstance(claim, MillpondError):
        raise claim
    if request.part >= len(claim.parts):
        raise InvalidRequest(f"claim {claim.claim_id!r} has {len(claim.parts)} parts, from 0 on, and no {request.part}")
    partition, start, count = claim.parts[request.part]
    lane = queue.lanes.get(partition)
    runs: list[ClaimRun] = []
    at, end, size, chunks = request.after, min(count, request.after + request.limit), 0, CHUNKS_MIN
    while at < end and size < CLAIM_PAGE_BYTES:
        if lane is None or lane.gone:  # so is what was claimed there
            raise _no_claim(claim.claim_id)
        (pieces, marks), job = yield lane, partial(_want, claim.nonce, start + at, end - at, chunks)
        if not pieces:
            raise _no_claim(claim.claim_id)
        read = [run_of_piece(queue, lane, job, piece, marks) for piece in pieces]
        runs += read
        at += sum(len(run.payloads) for run in read)
        size += sum(sum(map(len, run.payloads)) for run in read)
        chunks = min(CHUNKS_MAX, max(CHUNKS_MIN, CLAIM_PAGE_BYTES * len(runs) // (size + 1)))
    return ItemPage(ClaimRows(runs), str(at) if at < count else None)


def _open_claim(claim_id: str, epoch: int | None, lane: Lane, now: int) -> ClaimMark | MillpondError:
    decisions = lane.partition.decisions
    if (error := _fenced(decisions, claim_id, epoch)) is not None:
        return error
    if decisions.is_finished(claim_id):
        return ClaimFinished(f"claim {claim_id!r} was completed: its items are done and gone")
    claim = decisions.claims.get(claim_id)
    return claim if claim is not None and claim.ending == Ending.OPEN else _no_claim(claim_id)


def _no_claim(claim_id: str) -> NotFound:
    return NotFound(
        f"there is no claim {claim_id!r}; it was released, and its items are back in the queue, or it was never made",
        claim_id=claim_id,
    )


def _want(nonce: bytes, start: int, count: int, chunks: int, lane: Lane, now: int) -> tuple[list[Piece], Marks]:
    """The next of a claim's items, of at most so many chunks; nothing if the claim has gone."""
    hold = lane.partition.claims.get(nonce)
    return want_runs(slice_runs(hold.runs, start, start + count) if hold is not None else (), chunks, lane)


def want_runs(runs: Iterable[int], chunks: int, lane: Lane) -> tuple[list[Piece], Marks]:
    """Of at most so many chunks; their records will be there when the turn is done."""
    held, pieces = lane.partition.chunks, list[Piece]()
    marks: Marks = {}
    for run in runs:
        span = run_span(run)
        if pieces and pieces[-1].add(span):
            continue
        for chunk, low, high, created in islice(held.pieces(span.start, len(span)), chunks - len(pieces)):
            pieces.append(Piece(held.span(chunk), range(low, high), created, held.deadline_of(low)))
        if not pieces or pieces[-1].numbers[-1] != span[-1]:  # no room for all of it
            break
    for piece in pieces:
        lane.want(piece.numbers[0], 1)
        marks.update(_marks(lane, piece.numbers))
    return pieces, marks


def _marks(lane: Lane, numbers: range | list[int]) -> Marks:
    """What the records do not tell."""
    partition, marks = lane.partition, {}
    low, high = (numbers[0], numbers[-1]) if isinstance(numbers, range) else (min(numbers), max(numbers))
    columns = partition.tries, partition.documents, partition.expiries, partition.changed
    found = {number for column in columns for number in column.within(low, high - low + 1)}
    for number in found.intersection(numbers) if found else ():
        lane.want_documents(number)
        version = partition.documents.get(number, 0) >> VERSION_BITS
        deadline, changed = partition.expire_deadline(number), partition.changed.get(number)
        marks[number] = (*partition.tried(number), version, deadline, changed)
    return marks


def run_of_piece(
    queue: QueueState, lane: Lane, job: TurnJob, piece: Piece, marks: Marks, state: State = State.CLAIMED
) -> ClaimRun:
    records = _records(job, piece)
    run = ClaimRun(
        mint=lane.partition.mint,
        partition=lane.index,
        numbers=piece.numbers,
        created=piece.created,
        deadline=piece.deadline,
        max_attempts=queue.settings.max_attempts,
        payloads=records,  # type: ignore[arg-type]
        known={},
        state=state,
    )
    kinds = set(map(type, records))
    if kinds != {bytes}:
        full: list[Any] = records if kinds == {Record} else list(map(_full, records))
        run.records, run.payloads = full, list(map(_payload_of, full))
    if marks:
        pairs = zip(piece.numbers, records, strict=True)
        run.known = {n: _marked(run, job, n, _full(record), marks[n]) for n, record in pairs if n in marks}
    return run


def _records(job: TurnJob, piece: Piece) -> list[bytes | Record | None]:
    body, first, numbers = job.records[piece.chunk.start], piece.chunk.start, piece.numbers
    if isinstance(numbers, range):
        return body[numbers.start - first : numbers.stop - first]
    return [body[number - first] for number in numbers]


_payload_of = attrgetter("payload")


def _full(record: bytes | Record | None) -> Record:
    assert record is not None, "a live item has a record"
    return record if isinstance(record, Record) else Record(record)


def _marked(run: ClaimRun, job: TurnJob, number: int, record: Record, mark: Mark) -> Item:
    item = run.full(number, record)
    item.attempts, item.deliveries, item.state_version, deadline, changed = mark
    item.expire_deadline = to_datetime(deadline)
    if changed is not None:
        item.updated_at = to_datetime(changed)
    item.state_doc = decode_state(job.documents.get(number << 2 | STATE_PART))
    error = job.documents.get(number << 2 | ERROR_PART)
    item.last_error = None if error is None else error.decode()
    return item


# ---- verdicts ---------------------------------------------------------------------------------------------


def _judge(queue: QueueState, request: JudgeClaim) -> Operation:
    claim, _ = yield queue.want_meta(), partial(_open_claim, request.claim_id, request.epoch)
    if isinstance(claim, MillpondError):
        raise claim
    yield from at_rest(queue, [verdict.id for verdict in request.verdicts])
    results: dict[int, Result] = {}
    by_lane: dict[int, dict[int, tuple[int, JudgeItem]]] = {}
    for place, verdict in enumerate(request.verdicts):
        results[place] = refusal(_not_claimed(verdict.id, claim))
        if (found := locate(queue, verdict.id)) is not None:
            by_lane.setdefault(found[0].index, {})[place] = found[1], verdict
    for index, verdicts in by_lane.items():
        if index in queue.lanes:  # else it is gone, and what was claimed in it
            judged, _ = yield queue.lanes[index], partial(_judge_in, claim, verdicts)
            results.update(judged)
    return [results[place] for place in range(len(request.verdicts))]


def _judge_in(claim: ClaimMark, verdicts: dict[int, tuple[int, JudgeItem]], lane: Lane, now: int) -> dict[int, Result]:
    results: dict[int, Result] = {}
    noted: list[tuple[int, bool, int | None, str | None]] = []
    for place, (number, verdict) in verdicts.items():
        hold = lane.partition.claimed.get(number)
        if hold is None or hold.nonce != claim.nonce:
            results[place] = refusal(_not_claimed(verdict.id, claim))
            continue
        noted.append((number, verdict.dead, verdict.delay, verdict.error))
        results[place] = Result(True)
    if noted:
        lane.partition.change(Event.JUDGED, claim.nonce, noted)
    return results


def _not_claimed(item_id: str, claim: ClaimMark) -> NotFound:
    return NotFound(f"item {item_id!r} is not in claim {claim.claim_id!r}; a verdict is given on what was read from it")


# ---- complete and release ---------------------------------------------------------------------------------


def _end_claim(queue: QueueState, request: EndClaim) -> Operation:
    return alone(queue, claim_key(request.claim_id), _end(queue, request))


def _end(queue: QueueState, request: EndClaim) -> Operation:
    claim, _ = yield queue.want_meta(), partial(_decide, request)
    if isinstance(claim, MillpondError):
        raise claim
    if claim is None:
        return ClaimEnded(request.claim_id, 0)
    lanes = [queue.lanes[index] for index in sorted(claim.partitions) if index in queue.lanes]
    outcomes = yield [(lane, partial(_end_in, queue, request, claim.nonce)) for lane in lanes]
    done, retried, dead = map(sum, zip((0, 0, 0), *(outcome for outcome, _ in outcomes), strict=True))
    return ClaimEnded(request.claim_id, done, retried, dead)


def _decide(request: EndClaim, lane: Lane, now: int) -> ClaimMark | MillpondError | None:
    """The claim whose end is decided; None if it was completed long ago, which is as good."""
    decisions, claim_id = lane.partition.decisions, request.claim_id
    if (error := _fenced(decisions, claim_id, request.epoch)) is not None:
        return error
    claim = decisions.claims.get(claim_id)
    ending = Ending.COMPLETED if request.completed else Ending.RELEASED
    if decisions.is_finished(claim_id) and not request.completed:
        return ClaimFinished(f"claim {claim_id!r} was completed, and cannot be released any more")
    if claim is None:
        return None if decisions.is_finished(claim_id) else _no_claim(claim_id)
    if claim.ending == Ending.OPEN:
        lane.partition.change(Event.CLAIM_ENDING, claim_id, ending)
    return claim if claim.ending == ending else _no_claim(claim_id)


def _end_in(queue: QueueState, request: EndClaim, nonce: bytes, lane: Lane, now: int) -> tuple[int, int, int]:
    if request.completed:
        return complete_in(queue, lane, nonce, now)
    return release_in(queue, lane, nonce, now), 0, 0


# ---- waiting ----------------------------------------------------------------------------------------------


def wake_readers(queue: QueueState, now: int) -> None:
    """Claims that wait for an item go on when one is ready that no lease wanted, or when their time is over."""
    ready = not queue.definition.paused and any(lane.partition.ready.count for lane in queue.free)
    readers, queue.readers = queue.readers, []
    for reader in readers:
        if ready or reader.until <= now:
            reader.resume(None)
        else:
            queue.readers.append(reader)


CLAIM_OPERATIONS: dict[type[Request], Callable[[QueueState, Any], Operation]] = {
    OpenConsumer: _open_consumer,
    ClaimItems: _claim,
    ReadClaim: _read_claim,
    JudgeClaim: _judge,
    EndClaim: _end_claim,
    ListClaims: _list_claims,
}
