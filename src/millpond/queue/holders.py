"""What the holder of a lease may do with it: complete, retry, extend, write state. Each token is judged by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import ge

import msgspec

from millpond.errors import InvalidRequest, LeaseLost, MillpondError, VersionConflict
from millpond.history.format import RUN_BITS, RUN_MAX, Event, continues, numbers_of, run_of, run_span, runs_of
from millpond.model import (
    Batch,
    CompletedItems,
    DeadReason,
    ErrorInfo,
    Grant,
    LeasedItem,
    LeasedItems,
    LeaseLike,
    Result,
    State,
    StateWritten,
    are_items,
    to_datetime,
)
from millpond.queue.backoff import backoff_ms
from millpond.queue.lane import Lane, Lookup, Part, TurnJob, completes
from millpond.queue.leases import Lease
from millpond.queue.lifecycle import bury, end_leases, kept_until
from millpond.queue.partition import ERROR_PART, RESULT_PART, STATE_PART, VERSION_BITS
from millpond.queue.requests import Complete, Extend, RetryItem, RetryItems, Tokens, WriteState
from millpond.queue.state import QueueState
from millpond.queue.tokens import Mint, Token, is_token, lease_incarnation

_COUNT_MASK = RUN_MAX - 1
_COMPLETED = Event.COMPLETED  # a member of an enum takes long to look up
_FIRST = (0,)
_LOST = ErrorInfo(LeaseLost.code, "the lease has ended: it ran out, or the item was handed on; do not act on the item")


class TokenPart(Part, msgspec.Struct, eq=False):
    """Those tokens of a request that belong to one lane, and where in the request they stand."""

    _queue: QueueState
    _request: Tokens
    _indexes: Sequence[int]
    _tokens: list[Token]
    _results: Sequence[Result] = ()
    _lookups: Sequence[tuple[int, Lookup]] = ()

    def apply(self, lane: Lane, now: int) -> None:
        self._lookups = ()
        request = self._request
        if type(request) is Complete:
            self._results = self._complete(lane, request, now)
            return
        seal_completes(self._queue, lane, now)
        if isinstance(request, RetryItems):
            self._results = self._retry(lane, request, now)
        elif isinstance(request, Extend):
            self._results = self._extend(lane, request, now)
        else:
            assert isinstance(request, WriteState)
            self._results = self._write_state(lane, request)

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        if self._lookups:
            results = list(self._results)
            for place, lookup in self._lookups:
                if lookup.found:
                    results[place] = Result(True, correlation_of(lane, self._tokens[place]))
            self._results = results
        request = self._request
        if type(request) is Complete and len(self._indexes) == len(request.leases):  # all of it was asked of this lane
            if not request.answered:
                request.results = self._results
                request.answer(self._results)
            return
        request.fill(self._indexes, self._results)
        answer_when_filled(request)

    def fail(self, error: MillpondError) -> None:
        self._request.fill(self._indexes, [Result(error=ErrorInfo(error.code, error.message))] * len(self._indexes))
        if isinstance(self._request, WriteState):
            self._request.written = error
        answer_when_filled(self._request)

    def deadline(self) -> int:
        return self._request.deadline

    def _held(self, lane: Lane) -> Iterator[tuple[Token, bool]]:
        """Each token and whether its delivery is in force. A request counts as of its arrival."""
        leased, at = lane.partition.leased, max(self._request.at, lane.mark)
        for token in self._tokens:
            lease = leased.get(token[1])
            yield token, lease is not None and lease.grant == token[2] and at < lease.deadline

    # ---- complete -----------------------------------------------------------------------------------------

    def _complete(self, lane: Lane, request: Complete, now: int) -> Sequence[Result]:
        """Gather what is held, to be sealed into one event with the completes of others."""
        get, at = lane.partition.leased.get, request.at if request.at > lane.mark else lane.mark
        if len(self._tokens) == 1 and request.result is None:  # the usual case, without the lists
            _, number, grant, created, own = self._tokens[0]
            lease = get(number)
            if lease is not None and lease.grant == grant and at < lease.deadline:
                _gather(lane.draft.completed, lease, number)
                return [Result(True, own or lane.partition.mint.correlation_id(number, created))]
        done: list[tuple[Lease, list[int]]] = []
        current: Lease | None = None
        numbers: list[int] = []
        lost: dict[int, Result] = {}
        for place, token in enumerate(self._tokens):
            _, number, grant, _, _ = token
            lease = get(number)
            if lease is None or lease.grant != grant or lease.deadline <= at:
                lost[place] = self._not_held(lane, token, place, now)
                continue
            if lease is not current:
                current, numbers = lease, []
                done.append((lease, numbers))
            numbers.append(number)
        lane.draft.completed += [(lease, runs_of(numbers)) for lease, numbers in done]
        if request.result is not None and not lost:
            seal_completes(self._queue, lane, now, request.result)
        made = _completed(lane.partition.mint, self._tokens)
        return [lost.get(place, result) for place, result in enumerate(made)] if lost else made

    def _not_held(self, lane: Lane, token: Token, place: int, now: int) -> Result:
        """Lost, unless this turn or the journal has it that this very delivery was completed a moment ago."""
        gathered = (run for lease, runs in lane.draft.completed if lease.grant == token[2] for run in runs)
        if any(token[1] in run_span(run) for run in gathered) or completes(lane.partition.events, token[1], token[2]):
            return Result(True, correlation_of(lane, token))
        if _may_have_ended(lane, token):
            lookup = Lookup(token[1], token[2], now - self._queue.settings.completed_grace_ms)
            lane.draft.lookups.append(lookup)
            self._lookups = [*self._lookups, (place, lookup)]
        return _lost(lane, token)

    # ---- retry --------------------------------------------------------------------------------------------

    def _retry(self, lane: Lane, request: RetryItems, now: int) -> list[Result]:
        results: list[Result] = []
        retried = 0
        for index, (token, held) in zip(self._indexes, self._held(lane), strict=True):
            if not held:
                results.append(_lost(lane, token))
                continue
            results.append(Result(True, correlation_of(lane, token)))
            self._retry_item(lane, token[1], request.items[index], now)
            retried += 1
        self._queue.rates.count("retried", retried, now)
        return results

    def _retry_item(self, lane: Lane, number: int, item: RetryItem, now: int) -> None:
        queue, partition = self._queue, lane.partition
        if number in partition.cancel_asked:
            end_leases(queue, lane, [number], now)
            return
        if item.error is not None:
            lane.draft.documents[number << 2 | ERROR_PART] = item.error.encode()
        reason = _fatal(queue, lane, number, item, now)
        if reason is not None:
            bury(queue, lane, reason, State.LEASED, [run_of(number, 1)], now, item.error)
            return
        due = item.due
        if due is None and not item.deferred:
            due = now + backoff_ms(queue.settings.backoff, partition.attempts(number) + 1, queue.rng)
        due = due if due is not None and due > now else 0
        client = partition.leased[number].client
        partition.change(Event.RETRIED, client, number, due, item.deferred, item.error)

    # ---- extend -------------------------------------------------------------------------------------------

    def _extend(self, lane: Lane, request: Extend, now: int) -> list[Result]:
        timeout = request.lease_timeout
        if timeout is None:
            timeout = self._queue.settings.lease_timeout_ms
        deadline = now + timeout
        until = to_datetime(deadline)
        numbers: dict[int, None] = {}
        results: list[Result] = []
        for token, held in self._held(lane):
            if not held:
                results.append(_lost(lane, token))
                continue
            numbers[token[1]] = None
            asked = token[1] in lane.partition.cancel_asked
            results.append(Result(True, correlation_of(lane, token), None, until, asked))
        if numbers and timeout:
            lane.partition.change(Event.EXTENDED, deadline, runs_of(numbers))
        elif numbers:
            end_leases(self._queue, lane, list(numbers), now)
        return results

    # ---- state --------------------------------------------------------------------------------------------

    def _write_state(self, lane: Lane, request: WriteState) -> list[Result]:
        """The outcome goes into `request.written`; the result only says that there is one."""
        [(token, held)] = self._held(lane)
        number, correlation_id = token[1], correlation_of(lane, token)
        version = lane.partition.documents.get(number, 0) >> VERSION_BITS
        if not held:
            request.written = LeaseLost(_LOST.message, correlation_id=correlation_id)
        elif request.version != version:
            request.written = VersionConflict(
                f"the state document is at version {version}, not {request.version}; read it again",
                version=version,
                correlation_id=correlation_id,
            )
        else:
            lane.draft.documents[number << 2 | STATE_PART] = request.document
            lane.partition.change(Event.STATE_WRITTEN, number, version + 1)
            request.written = StateWritten(version + 1, correlation_id, number in lane.partition.cancel_asked)
        return [Result(True, correlation_id)]


class ItemsPart(TokenPart, eq=False):
    """What was leased together and is completed together: judged by the grant, not one by one."""

    _groups: list[tuple[int, list[int]]] = []  # grants and their runs
    _done: Sequence[Result] = ()  # if all are held

    def _complete(self, lane: Lane, request: Complete, now: int) -> Sequence[Result]:
        held = self._leases_held(lane)
        if held is None or request.result is not None:
            tokens = self._queue.reader.read_all(request.leases)
            self._tokens = [token for token in tokens if token is not None]
            assert len(self._tokens) == len(tokens), "they were read before"
            return super()._complete(lane, request, now)
        lane.draft.completed += held
        return self._done

    def _leases_held(self, lane: Lane) -> list[tuple[Lease, list[int]]] | None:
        """The lease in force of each group, with its runs; None if any item has lost it, or they differ."""
        whole = lane.partition.leased.whole
        at = self._request.at if self._request.at > lane.mark else lane.mark
        held: list[tuple[Lease, list[int]]] = []
        for grant, runs in self._groups:
            for run in runs:
                lease = whole(run >> RUN_BITS, (run & _COUNT_MASK) + 1)
                if lease is None or lease.grant != grant or lease.deadline <= at:
                    return None
                if not held or held[-1][0] is not lease:
                    held.append((lease, []))
                held[-1][1].append(run)
        return held


class ItemResults(Batch[Result]):
    """Of items that were handed back."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[LeaseLike]) -> None:
        self._items = items
        super().__init__(len(items))

    def _make(self) -> list[Result]:
        return [Result(True, item.correlation_id) for item in self._items if isinstance(item, LeasedItem)]


def _together(queue: QueueState, request: Complete) -> tuple[Lane, ItemsPart] | None:
    """All of them as one part; None if these are not all items, or all tokens of one grant, of one lane."""
    leases = request.leases
    indexes = range(len(leases))
    if type(leases) is list and set(map(type, leases)) == {str}:
        read = queue.reader.read_together(leases)
        if read is None or (lane := queue.lanes.get(read[0][0])) is None or not lane.known:
            return None
        (_, grant, created, _), numbers = read
        done = CompletedItems(lane.partition.mint.correlation_prefix(created), numbers)
        return lane, ItemsPart(queue, request, indexes, [], _groups=[(grant, runs_of(numbers))], _done=done)
    found = _groups(queue, leases)
    if found is None or (lane := queue.lanes.get(found[0])) is None:
        return None
    return lane, ItemsPart(queue, request, indexes, [], _groups=found[1], _done=ItemResults(leases))


def _groups(queue: QueueState, leases: Sequence[LeaseLike]) -> tuple[int, list[tuple[int, list[int]]]] | None:
    """Their partition, and the runs of each grant; None if these are not all items of one lane."""
    if isinstance(leases, LeasedItems):
        groups: list[tuple[Grant, list[int]]] = []
        for leased in leases.runs:
            if not groups or groups[-1][0] is not leased.grant:
                groups.append((leased.grant, []))
            groups[-1][1].append(run_of(leased.first, len(leased.payloads)))
    elif are_items(leases):
        groups = [(grant, runs_of(numbers)) for grant, numbers in _by_grant(leases)]  # type: ignore[arg-type]
    else:
        return None
    if not groups:
        return None
    incarnation, partition = queue.definition.incarnation, groups[0][0].partition
    granted: list[tuple[int, list[int]]] = []
    for grant, runs in groups:
        if grant.partition != partition or grant.incarnation != incarnation:
            return None
        granted.append((grant.turn, runs))
    return partition, granted


def _by_grant(items: Sequence[LeasedItem]) -> list[tuple[Grant, list[int]]]:
    """Nothing, if one of them does not know its grant."""
    first = items[0].grant
    together = [item.number for item in items if item.grant is first]
    if first is not None and len(together) == len(items):
        return [(first, together)]
    groups: dict[int, tuple[Grant, list[int]]] = {}
    for item in items:
        if item.grant is None:
            return []
        groups.setdefault(id(item.grant), (item.grant, []))[1].append(item.number)
    return list(groups.values())


def assign_tokens(queue: QueueState, request: Tokens) -> None:
    """Hand each lane its tokens; what is no token is answered here."""
    leases = request.leases
    if type(leases) is list and len(leases) == 1 and type(leases[0]) is str:  # the usual case
        token = queue.reader.read(leases[0])
        if token is not None and (lane := queue.lanes.get(token[0])) is not None:
            lane.waiting.append(TokenPart(queue, request, _FIRST, [token]))
            return
    if isinstance(request, Complete) and (together := _together(queue, request)) is not None:
        lane, part = together
        lane.waiting.append(part)
        return
    tokens = queue.reader.read_all(request.leases)
    by_lane: dict[int, tuple[list[int], list[Token]]] = {}
    for index, token in enumerate(tokens):
        if token is None or token[0] not in queue.lanes:
            error = foreign(request.leases[index], queue.incarnation) if token is None else _LOST
            request.fill([index], [Result(error=error)])
            continue
        if token[0] not in by_lane:
            by_lane[token[0]] = ([], [])
        indexes, mine = by_lane[token[0]]
        indexes.append(index)
        mine.append(token)
    for partition, (indexes, mine) in by_lane.items():
        queue.lanes[partition].waiting.append(TokenPart(queue, request, indexes, mine))
    answer_when_filled(request)


def foreign(lease: LeaseLike, incarnation: str = "") -> ErrorInfo:
    """Why a lease means nothing to the queue of this incarnation: it is of another, perhaps one gone, or mangled."""
    if isinstance(lease, LeasedItem) or (is_token(lease) and lease_incarnation(lease) != incarnation):
        return ErrorInfo(LeaseLost.code, "the lease is of another queue, or of one that was deleted; drop the item")
    return ErrorInfo(InvalidRequest.code, "not a lease token; use the one that came with the item")


def answer_when_filled(request: Tokens) -> None:
    if request.filled < len(request.leases) or request.answered:
        return
    if not isinstance(request, WriteState):
        request.answer(request.results)
    elif request.written is None:
        [refused] = request.results
        assert refused.error is not None
        refusal = LeaseLost if refused.error.code == LeaseLost.code else InvalidRequest
        request.fail(refusal(refused.error.message))
    elif isinstance(request.written, MillpondError):
        request.fail(request.written)
    else:
        request.answer(request.written)


def _gather(completed: list[tuple[Lease, list[int]]], lease: Lease, number: int) -> None:
    """As a run of its own, or as one more of the last: who leased side by side mostly completes so."""
    if completed:
        last, runs = completed[-1]
        run = runs[-1]
        count = (run & _COUNT_MASK) + 1
        if last is lease and (run >> RUN_BITS) + count == number and count < RUN_MAX:
            runs[-1] = run + 1
            return
    completed.append((lease, [number << RUN_BITS]))


def seal_completes(queue: QueueState, lane: Lane, now: int, result: bytes | None = None) -> None:
    """Make one event of the completes gathered so far; `result` belongs to the last of the items.

    Called before anything else may look at the leases they end.
    """
    done, lane.draft.completed = lane.draft.completed, []
    if not done:
        return
    until = kept_until(queue, now)
    finisher = -1
    if result is not None:
        last = run_span(done[-1][1][-1])[-1]
        if until:
            finisher = last
            lane.draft.documents[finisher << 2 | RESULT_PART] = result
        else:  # whoever waits for the item to end is told all the same
            lane.draft.results[last] = result
    leased = lane.partition.leased
    before = len(leased)
    for client, pairs in _pairs(done).items():
        lane.partition.change(_COMPLETED, client, pairs, until, finisher)
    queue.rates.count("completed", before - len(leased), now)


def _pairs(done: list[tuple[Lease, list[int]]]) -> dict[str, list[int]]:
    """Run, grant, run, grant, … of each client, neighbours as one run; what was given twice counts once."""
    if len(done) > 1 or len(done[0][1]) > 1:
        ordered = sorted([run for _, runs in done for run in runs])  # a run is ordered by its first number
        lasts = [(run >> RUN_BITS) + (run & _COUNT_MASK) for run in ordered]
        if any(map(ge, lasts, [run >> RUN_BITS for run in ordered[1:]])):
            done = _distinct(done)
    clients: dict[str, list[int]] = {}
    for lease, runs in done:
        pairs = clients.setdefault(lease.client, [])
        for run in runs:
            if pairs and pairs[-1] == lease.grant and continues(pairs[-2], run):
                pairs[-2] += (run & _COUNT_MASK) + 1
            else:
                pairs += (run, lease.grant)
    return clients


def _distinct(done: list[tuple[Lease, list[int]]]) -> list[tuple[Lease, list[int]]]:
    leases = {number: lease for lease, runs in done for number in numbers_of(runs)}
    return [(lease, [run_of(number, 1)]) for number, lease in leases.items()]


def correlation_of(lane: Lane, token: Token) -> str:
    return token[4] or lane.partition.mint.correlation_id(token[1], token[3])


def _completed(mint: Mint, tokens: list[Token]) -> list[Result]:
    created = tokens[0][3]
    if {token[3:] for token in tokens} == {(created, None)}:  # leased together, and plain
        prefix = mint.correlation_prefix(created)
        return [Result(True, prefix + token[1].to_bytes(6, "big").hex()) for token in tokens]
    return [Result(True, own or mint.correlation_id(number, created)) for _, number, _, created, own in tokens]


def _lost(lane: Lane, token: Token) -> Result:
    return Result(False, correlation_of(lane, token), _LOST)


def _may_have_ended(lane: Lane, token: Token) -> bool:
    """Whether the journal may know of its completion: an item that came back from a lease has tries."""
    partition, number = lane.partition, token[1]
    if number in partition.finished:
        return True
    alive = (partition.leased, partition.tries, partition.waiting, partition.dead, partition.moving)
    return not any(number in column for column in alive)


def _fatal(queue: QueueState, lane: Lane, number: int, item: RetryItem, now: int) -> DeadReason | None:
    """Why the item may not be tried again."""
    partition = lane.partition
    if item.dead:
        return DeadReason.REJECTED
    limit = partition.limits.get(number, queue.settings.max_attempts)
    if not item.deferred and limit and partition.attempts(number) + 1 >= limit:
        return DeadReason.MAX_ATTEMPTS
    if partition.expire_deadline(number) <= now:
        return DeadReason.EXPIRED
    return None
