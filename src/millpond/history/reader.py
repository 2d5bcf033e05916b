"""Reads a partition's journal as history: every change of state of every item, once, in order.

`decode_entry` brings rows of older versions up to date, so this module knows only the newest. A reader that begins
in the middle tells what the rows tell: of items produced before it began it does not know their own ids and
correlation ids (the derived id stands in), their attempts, or what they waited for.
"""

from __future__ import annotations

import enum
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from millpond.history.format import TRIES_BITS, Event, Record, decode_entry, decode_meta, numbers_of, run_of
from millpond.model import DeadReason, State
from millpond.store.base import JournalRow, Store

PAGE_ROWS = 500  # rows asked of the store at a time: some hundred KB

_REASONS = list(DeadReason)
_DELETE = 1  # the fate of a dead item that is not kept; see queue.partition
_CHUNKS_SLACK = 1_024  # chunks that have gone, before the list of the others is made anew
_HELD = (State.LEASED, State.CLAIMED)  # an attempt is under way


class Why(enum.StrEnum):
    """What made an item change its state."""

    PRODUCED = "produced"
    ARRIVED = "arrived"  # produced by a move: a dead letter, or a redriven item
    PUBLISHED = "published"  # produced by a transaction that was staged before
    LEASED = "leased"
    COMPLETED = "completed"
    FAILURE = "failure"  # retried, the attempt counts
    DEFER = "defer"  # retried, the attempt does not count
    LEASE_EXPIRED = "lease_expired"
    RELEASED = "released"  # its consumer had gone before the item reached it
    DUE = "due"  # its schedule or its backoff is over
    MAX_ATTEMPTS = "max_attempts"  # this and the next two: died of it
    EXPIRED = "expired"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    CLEARED = "cleared"
    REPLACED = "replaced"  # another item with its key or id took its place
    REDRIVEN = "redriven"  # back to life in place, or set on its way back out of a dead queue
    RETENTION = "retention"  # it had ended, and was kept long enough
    MOVED = "moved"  # the other queue, or partition, has it
    KEPT = "kept"  # it was to be moved back to a queue that has gone
    CLAIMED = "claimed"
    CLAIM_RELEASED = "claim_released"
    ADOPTED = "adopted"  # from a partition that is drained: the queue had it before


class Names(Protocol):
    """Derives the names of items that have none of their own; `queue.tokens.Mint` is one."""

    def id(self, number: int) -> str: ...

    def correlation_id(self, number: int, created: int) -> str: ...


class Transition(msgspec.Struct, frozen=True, gc=False):
    """One change of state. `from_state` None: the item is new, or the reader began too late to know.

    `to_state` None: removed. A completed, cancelled or deleted dead item that is not kept ends without that.
    `who` is the client of the lease, "" where it is the engine or nobody gave a name. `attempt` is the one that
    begins or ends here, of which a defer or a release gives the count back.
    """

    item_id: str
    partition: int
    number: int
    at: int
    from_state: State | None
    to_state: State | None
    who: str
    why: str
    turn: int
    attempt: int | None = None
    correlation_id: str | None = None


class _Chunk:
    __slots__ = ("count", "created", "live")

    def __init__(self, created: int, count: int, live: int) -> None:
        self.created = created
        self.count = count
        self.live = live


class Reader:
    """Reads the rows of one partition in order, and remembers of live items what later rows do not repeat."""

    def __init__(self, partition: int, names: Names) -> None:
        self._partition = partition
        self._names = names
        self._own: dict[int, tuple[str | None, str | None]] = {}  # own id, own correlation id
        self._attempts: dict[int, int] = {}  # those that are over, where there are any
        self._waits: dict[int, State] = {}  # of waiting and of kept items, which state it is
        self._redriving: set[int] = set()  # on their way back out of a dead queue
        self._chunks: dict[int, _Chunk] = {}  # what was produced before our eyes
        self._firsts: list[int] = []
        self._row = JournalRow(0, 0, b"")
        self._readers: dict[int, Callable[..., Iterator[Transition]]] = {
            Event.PRODUCED: self._produced,
            Event.LEASED: self._leased,
            Event.COMPLETED: self._completed,
            Event.RETRIED: self._retried,
            Event.LEASE_EXPIRED: self._lease_expired,
            Event.RELEASED: self._released,
            Event.DUE: self._due,
            Event.DIED: self._died,
            Event.CANCELLED: self._cancelled,
            Event.CLEARED: self._cleared,
            Event.REPLACED: self._replaced,
            Event.REDRIVEN: self._redriven,
            Event.PURGED: self._purged,
            Event.MOVING: self._moving,
            Event.MOVED: self._moved,
            Event.KEPT: self._kept,
            Event.CLAIMED: self._claimed,
            Event.UNCLAIMED: self._unclaimed,
            Event.CLAIM_COMPLETED: self._claim_completed,
            Event.CLAIM_RETRIED: self._claim_retried,
            Event.PUBLISHED: self._published,
            Event.CARRYING: self._carrying,
            Event.ADOPTED: self._adopted,
        }

    def read(self, row: JournalRow) -> Iterator[Transition]:
        self._row = row
        for event in decode_entry(row.events).events:
            reader = self._readers.get(event[0])
            if reader is not None:  # the others change no state
                yield from reader(*event[1:])

    # ---- the events that change states --------------------------------------------------------------------

    def _produced(
        self,
        first: int,
        count: int,
        deadline: int,
        meta: bytes | None,
        requests: Sequence[Any],
        arrivals: Sequence[Sequence[Any]],
    ) -> Iterator[Transition]:
        arrived = {arrival[1] for arrival in arrivals}
        for number in self._add(first, count, meta):
            yield self._change(
                number, None, self._waits.get(number, State.READY), "arrived" if number in arrived else "produced"
            )

    def _published(
        self, txn: str, chunk: str, first: int, count: int, deadline: int, meta: bytes | None, dropped: Sequence[int]
    ) -> Iterator[Transition]:
        for number in self._add(first, count, meta, dropped):
            yield self._change(number, None, self._waits.get(number, State.READY), "published")

    def _leased(self, client: str, deadline: int, runs: Sequence[int]) -> Iterator[Transition]:
        for number in numbers_of(runs):
            yield self._change(number, State.READY, State.LEASED, "leased", client, attempt=True)

    def _completed(self, client: str, pairs: Sequence[int], keep_until: int, result: int) -> Iterator[Transition]:
        for number in numbers_of(pairs[::2]):
            yield self._change(number, State.LEASED, State.COMPLETED, "completed", client, attempt=True)
            self._end_or_keep(number, State.COMPLETED, keep_until)

    def _retried(self, client: str, number: int, due: int, deferred: bool, error: str | None) -> Iterator[Transition]:
        state = State.READY
        if due:
            state = self._waits[number] = State.SCHEDULED if deferred else State.RETRYING
        why = "defer" if deferred else "failure"
        yield self._change(number, State.LEASED, state, why, client, attempt=True)
        if not deferred:
            self._count_attempt(number)

    def _lease_expired(self, runs: Sequence[int]) -> Iterator[Transition]:
        for number in numbers_of(runs):
            yield self._change(number, State.LEASED, State.READY, "lease_expired", attempt=True)
            self._count_attempt(number)

    def _released(self, runs: Sequence[int]) -> Iterator[Transition]:
        for number in numbers_of(runs):
            yield self._change(number, State.LEASED, State.READY, "released", attempt=True)

    def _due(self, numbers: Sequence[int]) -> Iterator[Transition]:
        for number in numbers:
            yield self._change(number, self._waits.pop(number, None), State.READY, "due")

    def _died(
        self, reason: int, state: str, runs: Sequence[int], fate: int, target: str | None, error: str | None
    ) -> Iterator[Transition]:
        for number in numbers_of(runs):
            self._waits.pop(number, None)
            held = state in _HELD
            yield self._change(number, State(state), State.DEAD, _REASONS[reason], attempt=held)
            if held:
                self._count_attempt(number)
            if fate == _DELETE:
                self._forget(number)

    def _cancelled(self, state: str, runs: Sequence[int], keep_until: int) -> Iterator[Transition]:
        for number in numbers_of(runs):
            self._waits.pop(number, None)
            yield self._change(number, State(state), State.CANCELLED, "cancelled", attempt=state in _HELD)
            self._end_or_keep(number, State.CANCELLED, keep_until)

    def _cleared(self, state: str, runs: Sequence[int]) -> Iterator[Transition]:
        return self._remove(numbers_of(runs), State(state), "cleared")

    def _replaced(self, state: str, number: int) -> Iterator[Transition]:
        return self._remove(numbers_of([run_of(number, 1)]), State(state), "replaced")

    def _redriven(self, numbers: Sequence[int], deadline: int) -> Iterator[Transition]:
        for number in numbers:
            self._attempts.pop(number, None)
            yield self._change(number, State.DEAD, State.READY, "redriven")

    def _purged(self, runs: Sequence[int]) -> Iterator[Transition]:
        for number in numbers_of(runs):
            yield self._change(number, self._waits.pop(number, None), None, "retention")
            self._forget(number)

    def _moving(self, state: str, runs: Sequence[int], target: str) -> Iterator[Transition]:
        """On the way back from a dead queue an item counts as dead, wherever it stood."""
        for number in numbers_of(runs):
            self._waits.pop(number, None)
            self._redriving.add(number)
            if state != State.DEAD:
                yield self._change(number, State(state), State.DEAD, "redriven")

    def _moved(self, numbers: Sequence[int], names: Sequence[bytes], target: str) -> Iterator[Transition]:
        return self._remove(numbers, State.DEAD, "moved")

    def _carrying(self, state: str, runs: Sequence[int]) -> Iterator[Transition]:
        """To another partition of the queue: there it goes on as it was."""
        return self._remove(numbers_of(runs), State(state), "moved")

    def _adopted(
        self, first: int, count: int, created: int, deadline: int, meta: bytes, items: Sequence[Sequence[Any]]
    ) -> Iterator[Transition]:
        self._add(first, count, meta, created=created)
        for number, (_, state, _, tries, *_) in enumerate(items, first):
            self._waits.pop(number, None)
            if state not in (State.READY, State.DEAD):
                self._waits[number] = State(state)
            if tries >> TRIES_BITS:
                self._attempts[number] = tries >> TRIES_BITS
            yield self._change(number, None, State(state), "adopted")

    def _kept(self, numbers: Sequence[int]) -> Iterator[Transition]:
        """The dead stay dead; what was on its way back is a letter again."""
        for number in numbers:
            if number in self._redriving:
                self._redriving.remove(number)
                yield self._change(number, State.DEAD, State.READY, "kept")

    def _claimed(self, claim: bytes, claim_id: str, owner: str, runs: Sequence[int]) -> Iterator[Transition]:
        for number in numbers_of(runs):
            yield self._change(number, State.READY, State.CLAIMED, "claimed", owner, attempt=True)

    def _unclaimed(self, claim: bytes, runs: Sequence[int]) -> Iterator[Transition]:
        for number in numbers_of(runs):
            yield self._change(number, State.CLAIMED, State.READY, "claim_released", attempt=True)

    def _claim_completed(self, claim: bytes, owner: str, runs: Sequence[int], keep_until: int) -> Iterator[Transition]:
        for number in numbers_of(runs):
            yield self._change(number, State.CLAIMED, State.COMPLETED, "completed", owner, attempt=True)
            self._end_or_keep(number, State.COMPLETED, keep_until)

    def _claim_retried(
        self, claim: bytes, owner: str, number: int, due: int, error: str | None
    ) -> Iterator[Transition]:
        state = State.READY
        if due:
            state = self._waits[number] = State.RETRYING
        yield self._change(number, State.CLAIMED, state, "failure", owner, attempt=True)
        self._count_attempt(number)

    # ---- what they share ----------------------------------------------------------------------------------

    def _change(
        self, number: int, before: State | None, after: State | None, why: str, who: str = "", *, attempt: bool = False
    ) -> Transition:
        own_id, correlation_id = self._own.get(number, (None, None))
        chunk = self._chunk_of(number)
        if correlation_id is None and chunk is not None:
            correlation_id = self._names.correlation_id(number, chunk.created)
        return Transition(
            item_id=own_id or self._names.id(number),
            partition=self._partition,
            number=number,
            at=self._row.at,
            from_state=before,
            to_state=after,
            who=who,
            why=why,
            turn=self._row.turn,
            attempt=self._attempts.get(number, 0) + 1 if attempt and chunk is not None else None,
            correlation_id=correlation_id,
        )

    def _remove(self, numbers: Iterable[int], state: State, why: str) -> Iterator[Transition]:
        for number in numbers:
            yield self._change(number, state, None, why)
            self._forget(number)

    def _count_attempt(self, number: int) -> None:
        self._attempts[number] = self._attempts.get(number, 0) + 1

    def _end_or_keep(self, number: int, state: State, keep_until: int) -> None:
        if keep_until:
            self._waits[number] = state
        else:
            self._forget(number)

    def _forget(self, number: int) -> None:
        for column in (self._own, self._attempts, self._waits):
            column.pop(number, None)
        self._redriving.discard(number)
        chunk = self._chunk_of(number)
        if chunk is not None:
            chunk.live -= 1
            if not chunk.live:
                self._drop_chunk(number)

    def _add(
        self, first: int, count: int, meta: bytes | None, dropped: Sequence[int] = (), created: int | None = None
    ) -> list[int]:
        """Take in what was produced or published; returns the numbers of the items."""
        records: Sequence[Record | None] = [None] * count if meta is None else decode_meta(meta)
        gone = set(dropped)
        numbers = [number for number in range(first, first + count) if number not in gone]
        if numbers:
            self._chunks[first] = _Chunk(self._row.at if created is None else created, count, len(numbers))
            insort(self._firsts, first)
        for number in numbers:
            record = records[number - first]
            if record is None:
                continue
            if record.id is not None or record.correlation_id is not None:
                self._own[number] = (record.id, record.correlation_id)
            if record.enqueue_at:
                self._waits[number] = State.SCHEDULED
        return numbers

    def _chunk_of(self, number: int) -> _Chunk | None:
        """None for an item that was produced before the reader began."""
        first = self._first_of(number)
        chunk = self._chunks.get(first)
        return chunk if chunk is not None and number < first + chunk.count else None

    def _first_of(self, number: int) -> int:
        place = bisect_right(self._firsts, number) - 1
        return self._firsts[place] if place >= 0 else 0

    def _drop_chunk(self, number: int) -> None:
        del self._chunks[self._first_of(number)]
        if len(self._firsts) > 2 * len(self._chunks) + _CHUNKS_SLACK:
            self._firsts = sorted(self._chunks)


def read_history(store: Store, partition: int, names: Names, after: int = 0) -> Iterator[Transition]:
    """All that the store's journal has after that turn. The store is read a page at a time, between the yields."""
    reader = Reader(partition, names)
    while rows := store.journal(after, PAGE_ROWS):
        for row in rows:
            yield from reader.read(row)
        after = rows[-1].turn
