"""A partition's journal rows as columns: every change of state of every item, once, in order.

It tells what `history.reader` tells, and more, many items at a time. Reading a row only notes its runs of items, each
with an *act* (what happens to all of them alike); `drain` spreads the runs into rows (`history.spread`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from millpond.history import acts
from millpond.history.format import (
    RUN_BITS,
    RUN_MAX,
    TRIES_BITS,
    Event,
    Record,
    decode_entry,
    decode_meta,
    run_of,
    runs_of,
)
from millpond.history.known import PLAIN, Fact, Known
from millpond.history.lake import ROW_GROUP_ROWS
from millpond.history.reader import Why
from millpond.history.spread import Notes, Spread
from millpond.model import DeadReason, State

_REASONS = list(DeadReason)
_DELETE = 1  # the fate of a dead item that is not kept; see queue.partition


def _is_letter(record: Record | None) -> bool:
    return record is not None and record.source is not None and record.source.letter


class Flattener:
    """Reads the rows of one partition in order."""

    def __init__(self, incarnation: str, partition: int, known: Known | None = None) -> None:
        self.known = Known() if known is None else known
        self._spread = Spread(incarnation, partition, self.known)
        self._notes = Notes()
        self._at = 0
        self.letters = 0  # that were read since somebody set this to 0
        self._readers: dict[int, Callable[..., None]] = {
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

    def read(self, turn: int, at: int, events: bytes) -> None:
        self._at = at
        self._notes.begin(turn, at)
        readers = self._readers
        for event in decode_entry(events).events:
            reader = readers.get(event[0])
            if reader is not None:  # the others change no state
                reader(*event[1:])

    def _produced(
        self,
        first: int,
        count: int,
        deadline: int,
        meta: bytes | None,
        requests: Sequence[Any],
        arrivals: Sequence[Sequence[Any]],
    ) -> None:
        if meta is None and not arrivals:
            if count:
                self.known.add(first, count, self._at)
                self._notes.add(acts.PRODUCED[Why.PRODUCED, False], [run_of(first, count)])
            return
        arrived = {arrival[1] for arrival in arrivals}
        records = [None] * count if meta is None else decode_meta(meta)
        whys = [Why.ARRIVED if number in arrived else Why.PRODUCED for number in range(first, first + count)]
        self._add(first, records, whys)
        self.letters += sum(_is_letter(record) for record in records)

    def _published(
        self, txn: str, chunk: str, first: int, count: int, deadline: int, meta: bytes | None, dropped: Sequence[int]
    ) -> None:
        records = [None] * count if meta is None else decode_meta(meta)
        gone = sorted(number - first for number in dropped)
        for low, high in zip([0, *(place + 1 for place in gone)], [*gone, count], strict=True):
            self._add(first + low, records[low:high], [Why.PUBLISHED] * (high - low))

    def _add(self, first: int, records: Sequence[Record | None], whys: Sequence[Why]) -> None:
        """Neighbours that are not all alike: noted in runs of those that are."""
        if not records:
            return
        happened = [
            acts.PRODUCED[why, record is not None and record.enqueue_at > 0]
            for why, record in zip(whys, records, strict=True)
        ]
        facts = [0 if record is None else self._fact_of(record) for record in records]
        self.known.add(first, len(records), self._at, facts if any(facts) else None)
        start = 0
        for place in range(1, len(happened) + 1):
            if place == len(happened) or happened[place] != happened[start]:
                self._notes.add(happened[start], [run_of(first + start, place - start)])
                start = place

    def _fact_of(self, record: Record) -> int:
        source = record.source
        origin = (None, None) if source is None else (source.queue, source.id)
        fact = Fact(record.id, record.correlation_id, record.kind, record.priority, *origin)
        return 0 if fact == PLAIN else self.known.place_of(fact)

    def _leased(self, client: str, deadline: int, runs: Sequence[int]) -> None:
        self._notes.add(acts.LEASED, runs, client)

    def _completed(self, client: str, pairs: Sequence[int], keep_until: int, result: int) -> None:
        self._notes.add(acts.COMPLETED[State.LEASED, not keep_until], pairs[::2], client)

    def _retried(self, client: str, number: int, due: int, deferred: bool, error: str | None) -> None:
        act = acts.DEFERRED[due > 0] if deferred else acts.FAILED[State.LEASED, due > 0]
        self._notes.add(act, [run_of(number, 1)], client, error)

    def _lease_expired(self, runs: Sequence[int]) -> None:
        self._notes.add(acts.LEASE_EXPIRED, runs)

    def _released(self, runs: Sequence[int]) -> None:
        self._notes.add(acts.RELEASED, runs)

    def _due(self, numbers: Sequence[int]) -> None:
        self._notes.add(acts.DUE, runs_of(numbers))

    def _died(
        self, reason: int, state: str, runs: Sequence[int], fate: int, target: str | None, error: str | None
    ) -> None:
        self._notes.add(acts.DIED[_REASONS[reason], State(state), fate == _DELETE], runs, error=error)

    def _cancelled(self, state: str, runs: Sequence[int], keep_until: int) -> None:
        self._notes.add(acts.CANCELLED[State(state), not keep_until], runs)

    def _cleared(self, state: str, runs: Sequence[int]) -> None:
        self._notes.add(acts.CLEARED[State(state)], runs)

    def _replaced(self, state: str, number: int) -> None:
        self._notes.add(acts.REPLACED[State(state)], [run_of(number, 1)])

    def _redriven(self, numbers: Sequence[int], deadline: int) -> None:
        self._notes.add(acts.REDRIVEN, runs_of(numbers))

    def _purged(self, runs: Sequence[int]) -> None:
        self._notes.add(acts.PURGED, runs)

    def _moving(self, state: str, runs: Sequence[int], target: str) -> None:
        for run in runs:
            first = run >> RUN_BITS
            self.known.redriving.update(range(first, first + (run & (RUN_MAX - 1)) + 1))
        if state != State.DEAD:
            self._notes.add(acts.MOVING[State(state)], runs)

    def _moved(self, numbers: Sequence[int], names: Sequence[bytes], target: str) -> None:
        self.known.redriving.difference_update(numbers)
        self._notes.add(acts.MOVED, runs_of(numbers))

    def _carrying(self, state: str, runs: Sequence[int]) -> None:
        self._notes.add(acts.CARRYING[State(state)], runs)

    def _adopted(
        self, first: int, count: int, created: int, deadline: int, meta: bytes, items: Sequence[Sequence[Any]]
    ) -> None:
        records = decode_meta(meta)
        facts = [0 if record is None else self._fact_of(record) for record in records]
        self.known.add(first, count, created, facts, [item[3] >> TRIES_BITS for item in items])
        self.letters += sum(_is_letter(record) for record in records)
        for number, item in enumerate(items, first):
            self._notes.add(acts.ADOPTED[State(item[1])], [run_of(number, 1)])

    def _kept(self, numbers: Sequence[int]) -> None:
        back = [number for number in numbers if number in self.known.redriving]
        self.known.redriving.difference_update(back)
        if back:
            self._notes.add(acts.KEPT, runs_of(back))

    def _claimed(self, claim: bytes, claim_id: str, owner: str, runs: Sequence[int]) -> None:
        self._notes.add(acts.CLAIMED, runs, owner)

    def _unclaimed(self, claim: bytes, runs: Sequence[int]) -> None:
        self._notes.add(acts.UNCLAIMED, runs)

    def _claim_completed(self, claim: bytes, owner: str, runs: Sequence[int], keep_until: int) -> None:
        self._notes.add(acts.COMPLETED[State.CLAIMED, not keep_until], runs, owner)

    def _claim_retried(self, claim: bytes, owner: str, number: int, due: int, error: str | None) -> None:
        self._notes.add(acts.FAILED[State.CLAIMED, due > 0], [run_of(number, 1)], owner, error)

    # ---- rows -----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """How many rows `drain` would give."""
        return self._notes.rows

    def drain(self, rows_max: int = ROW_GROUP_ROWS) -> Iterator[Any]:
        """What was read, as Arrow tables of at most so many rows; when it is through, `known` is up to date."""
        notes, self._notes = self._notes, Notes()
        return self._spread.tables(notes, rows_max)
