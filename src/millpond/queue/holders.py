"""What the holder of a lease may do with it: complete, retry, extend, write state. Each token is judged by itself."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.errors import LeaseLost, MillpondError, VersionConflict
from millpond.history.format import Event, run_of, runs_of
from millpond.model import DeadReason, ErrorInfo, Result, State, StateWritten, to_datetime
from millpond.queue.backoff import backoff_ms
from millpond.queue.lane import Lane, Lookup, Part, TurnJob
from millpond.queue.lifecycle import bury, end_leases
from millpond.queue.partition import ERROR_PART, RESULT_PART, STATE_PART, VERSION_BITS
from millpond.queue.requests import Complete, Extend, RetryItem, RetryItems, Tokens, WriteState
from millpond.queue.state import QueueState
from millpond.queue.tokens import Token

Entry = tuple[int, Token]  # the token's place in the request, and what it says

_BAD_TOKEN = Result(error=ErrorInfo("invalid", "not a lease token of this queue; use the one that came with the item"))
_LOST = ErrorInfo(LeaseLost.code, "the lease has ended: it ran out, or the item was handed on; do not act on the item")


class TokenPart(Part):
    """Those tokens of a request that belong to one lane."""

    __slots__ = ("_entries", "_lookups", "_queue", "_request", "_results")

    def __init__(self, queue: QueueState, request: Tokens, entries: list[Entry]) -> None:
        self._queue = queue
        self._request = request
        self._entries = entries
        self._results: dict[int, Result] = {}
        self._lookups: dict[int, tuple[Token, Lookup]] = {}

    def apply(self, lane: Lane, now: int) -> None:
        self._results, self._lookups = {}, {}
        request = self._request
        if isinstance(request, Complete):
            self._complete(lane, request, now)
        elif isinstance(request, RetryItems):
            self._retry(lane, request, now)
        elif isinstance(request, Extend):
            self._extend(lane, request, now)
        else:
            assert isinstance(request, WriteState)
            self._write_state(lane, request)

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        request = self._request
        for index, result in self._results.items():
            request.fill(index, result)
        for index, (token, lookup) in self._lookups.items():
            request.fill(index, self._ok(lane, token) if lookup.found else self._lost(lane, token))
        answer_when_filled(request)

    def fail(self, error: MillpondError) -> None:
        for index, _ in self._entries:
            self._request.fill(index, Result(error=ErrorInfo(error.code, error.message)))
        if isinstance(self._request, WriteState):
            self._request.fail(error)
        else:
            answer_when_filled(self._request)

    def deadline(self) -> int:
        return self._request.deadline

    def _held(self, lane: Lane) -> Iterable[tuple[int, Token, bool]]:
        """Each token and whether its delivery is in force. A request counts as of its arrival."""
        leased, at = lane.partition.leased, self._request.at
        for index, token in self._entries:
            lease = leased.get(token.number)
            yield index, token, lease is not None and lease.grant == token.grant and at < lease.deadline

    def _ok(self, lane: Lane, token: Token) -> Result:
        return Result(True, correlation_of(lane, token))

    def _lost(self, lane: Lane, token: Token) -> Result:
        return Result(False, correlation_of(lane, token), _LOST)

    # ---- complete -----------------------------------------------------------------------------------------

    def _complete(self, lane: Lane, request: Complete, now: int) -> None:
        partition, settings = lane.partition, self._queue.settings
        done: dict[int, Token] = {}
        results, at = self._results, request.at
        leased, mint = partition.leased, partition.mint
        prefix_of, prefix, prefix_created = mint.correlation_prefix, "", -1
        for index, token in self._entries:
            _, number, grant, created, own = token
            lease = leased.get(number)
            if lease is not None and lease.grant == grant and at < lease.deadline:
                done[number] = token
                if created != prefix_created:
                    prefix, prefix_created = prefix_of(created), created
                results[index] = Result(True, own or f"{prefix}{number:012x}")
            elif _may_have_ended(lane, token):
                lookup = Lookup(number, grant, now - settings.completed_grace_ms)
                lane.draft.lookups.append(lookup)
                self._lookups[index] = (token, lookup)
            else:
                results[index] = self._lost(lane, token)
        if not done:
            return
        keep_until = now + settings.completed_retention_ms if settings.completed_retention_ms else 0
        has_result = bool(keep_until) and request.result is not None
        if has_result:
            assert request.result is not None
            lane.draft.documents[next(iter(done)) << 2 | RESULT_PART] = request.result
        for client, pairs in _by_client(lane, done):
            partition.change(Event.COMPLETED, client, pairs, keep_until, has_result)
        self._queue.rates.count("completed", len(done), now)

    # ---- retry --------------------------------------------------------------------------------------------

    def _retry(self, lane: Lane, request: RetryItems, now: int) -> None:
        seen: set[int] = set()
        for index, token, held in self._held(lane):
            if not held or token.number in seen:
                self._results[index] = self._lost(lane, token)
                continue
            seen.add(token.number)
            self._results[index] = self._ok(lane, token)
            self._retry_item(lane, token.number, request.items[index], now)
        self._queue.rates.count("retried", len(seen), now)

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

    def _extend(self, lane: Lane, request: Extend, now: int) -> None:
        timeout = request.lease_timeout
        if timeout is None:
            timeout = self._queue.settings.lease_timeout_ms
        deadline = now + timeout
        until = to_datetime(deadline)
        numbers: dict[int, None] = {}
        for index, token, held in self._held(lane):
            if not held:
                self._results[index] = self._lost(lane, token)
                continue
            numbers[token.number] = None
            asked = token.number in lane.partition.cancel_asked
            self._results[index] = Result(True, correlation_of(lane, token), None, until, asked)
        if not numbers:
            return
        if timeout:
            lane.partition.change(Event.EXTENDED, deadline, runs_of(numbers))
        else:
            end_leases(self._queue, lane, list(numbers), now)

    # ---- state --------------------------------------------------------------------------------------------

    def _write_state(self, lane: Lane, request: WriteState) -> None:
        index, token, held = next(iter(self._held(lane)))
        correlation_id = correlation_of(lane, token)
        self._results[index] = Result(True, correlation_id)
        if not held:
            request.written = LeaseLost(_LOST.message, correlation_id=correlation_id)
            return
        version = lane.partition.documents.get(token.number, 0) >> VERSION_BITS
        if request.version != version:
            request.written = VersionConflict(
                f"the state document is at version {version}, not {request.version}; read it again",
                version=version,
                correlation_id=correlation_id,
            )
            return
        lane.draft.documents[token.number << 2 | STATE_PART] = request.document
        lane.partition.change(Event.STATE_WRITTEN, token.number, version + 1)
        request.written = StateWritten(version + 1, correlation_id, token.number in lane.partition.cancel_asked)


def assign_tokens(queue: QueueState, request: Tokens) -> None:
    """Hand each lane its tokens; what is no token is answered here."""
    read = queue.reader.read
    by_lane: dict[int, list[Entry]] = {}
    for index, text in enumerate(request.tokens):
        token = read(text)
        if token is None or token.partition not in queue.lanes:
            request.fill(index, _BAD_TOKEN)
        else:
            by_lane.setdefault(token.partition, []).append((index, token))
    for lane, entries in by_lane.items():
        queue.lanes[lane].waiting.append(TokenPart(queue, request, entries))
    answer_when_filled(request)


def answer_when_filled(request: Tokens) -> None:
    if request.missing or request.answered:
        return
    if not isinstance(request, WriteState):
        request.answer(request.results)
    elif request.written is None:
        request.fail(LeaseLost("not a lease token of this queue; use the one that came with the item"))
    elif isinstance(request.written, MillpondError):
        request.fail(request.written)
    else:
        request.answer(request.written)


def correlation_of(lane: Lane, token: Token) -> str:
    return token.correlation_id or lane.partition.mint.correlation_id(token.number, token.created)


def _may_have_ended(lane: Lane, token: Token) -> bool:
    """Whether the journal may know of its completion: an item that came back from a lease has tries."""
    partition, number = lane.partition, token.number
    if number in partition.finished:
        return True
    alive = (partition.leased, partition.tries, partition.waiting, partition.dead, partition.moving)
    return not any(number in column for column in alive)


def _by_client(lane: Lane, done: dict[int, Token]) -> list[tuple[str, list[int]]]:
    """Completed items as (client, [run, grant, run, grant, …])."""
    groups: dict[tuple[str, int], list[int]] = {}
    leased = lane.partition.leased
    for number in done:
        lease = leased[number]
        groups.setdefault((lease.client, lease.grant), []).append(number)
    clients: dict[str, list[int]] = {}
    for (client, grant), numbers in groups.items():
        pairs = clients.setdefault(client, [])
        for run in runs_of(numbers):
            pairs += (run, grant)
    return list(clients.items())


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
