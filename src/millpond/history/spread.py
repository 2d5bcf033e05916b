"""From notes of runs to rows: how `flatten` makes its columns.

What came before a row (its item's last change, attempts and state) is found by sorting a batch by item: it is the
item's row before it, or what is `Known` from earlier batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.history import acts
from millpond.history.format import RUN_BITS, RUN_MAX
from millpond.history.known import GONE, PLAIN, UNKNOWN, Columns, Fact, Known
from millpond.history.lake import FLAT_SCHEMA
from millpond.history.names import Namer, Numbers

_MS = 1_000  # µs
_COUNT_MASK = RUN_MAX - 1
_STATE_NAMES = pa.array([str(state) for state in acts.STATES])
_WHY_NAMES = pa.array([str(why) for why in acts.WHYS])

Bools = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int32]


class Notes:
    """What was read and not spread yet: turns, and in each the runs of items to which the same happened."""

    def __init__(self) -> None:
        self.rows = 0
        self.turns: list[int] = []
        self.ats: list[int] = []
        # An entry for each time that something happened:
        self.acts: list[int] = []
        self.whos: list[str] = []
        self.errors: list[str | None] = []
        self.places: list[int] = []  # of its turn
        self.lengths: list[int] = []  # how many runs
        self.runs: list[int] = []

    def begin(self, turn: int, at: int) -> None:
        self.turns.append(turn)
        self.ats.append(at)

    def add(self, act: int, runs: Sequence[int], who: str = "", error: str | None = None) -> None:
        self.acts.append(act)
        self.whos.append(who)
        self.errors.append(error)
        self.places.append(len(self.turns) - 1)
        self.lengths.append(len(runs))
        self.runs += runs
        for run in runs:
            self.rows += (run & _COUNT_MASK) + 1


class _Entries:
    """Notes as arrays."""

    def __init__(self, notes: Notes) -> None:
        self.turns = np.array(notes.turns, dtype=np.int64)
        self.ats = np.array(notes.ats, dtype=np.int64)
        self.acts = np.array(notes.acts, dtype=np.intp)
        self.places = np.array(notes.places, dtype=np.intp)
        self._whos, self._who_names = _coded(notes.whos)
        self._has_errors = any(error is not None for error in notes.errors)
        if self._has_errors:
            self._errors, self._error_names, self._no_error = _coded_or_none(notes.errors)
        runs = np.array(notes.runs, dtype=np.uint64)
        self._firsts = (runs >> np.uint64(RUN_BITS)).astype(np.int64)
        self._entries = np.repeat(np.arange(len(self.acts)), notes.lengths)
        self._ends = np.cumsum((runs & np.uint64(_COUNT_MASK)).astype(np.int64) + 1)
        self._begins = np.concatenate([np.zeros(1, dtype=np.int64), self._ends[:-1]])
        self.starts = self._starts_of_turns()

    def _starts_of_turns(self) -> Numbers:
        """The first row of each turn that has any."""
        starts = np.zeros(len(self.turns), dtype=np.int64)
        run_turns = self.places[self._entries]
        first_runs = np.flatnonzero(np.diff(run_turns, prepend=-1))
        starts[run_turns[first_runs]] = self._begins[first_runs]
        return starts

    def spread(self, low: int, high: int) -> tuple[Numbers, Numbers, Numbers]:
        """Of the rows from low to high: number, entry, and place among all rows."""
        first, last = np.searchsorted(self._ends, [low, high - 1], side="right")
        chosen = slice(first, last + 1)
        begins = np.maximum(self._begins[chosen], low)
        counts = np.minimum(self._ends[chosen], high) - begins
        rows = np.arange(low, high)
        numbers = rows + np.repeat(self._firsts[chosen] - self._begins[chosen], counts)
        return numbers, np.repeat(self._entries[chosen], counts), rows

    def whos(self, entries: Numbers) -> Any:
        return _words(self._whos[entries], self._who_names)

    def errors(self, entries: Numbers) -> Any:
        if not self._has_errors:
            return _none(len(entries))
        return _words(self._errors[entries], self._error_names, self._no_error[entries])


class Spread:
    """Makes the rows of one partition, and keeps what is known of its items up to date."""

    def __init__(self, incarnation: str, partition: int, known: Known) -> None:
        self._incarnation = incarnation
        self._partition = partition
        self._known = known
        self._namer = Namer(incarnation, partition)

    def tables(self, notes: Notes, rows_max: int) -> Iterator[Any]:
        if not notes.rows:
            return
        entries = _Entries(notes)
        for low in range(0, notes.rows, rows_max):
            yield self._table(entries, *entries.spread(low, min(low + rows_max, notes.rows)))

    def _table(self, all_entries: _Entries, numbers: Numbers, entries: Numbers, rows: Numbers) -> Any:
        happened = all_entries.acts[entries]
        turns = all_entries.places[entries]
        ats = all_entries.ats[turns]
        past = _Past(numbers, ats, happened, self._known)
        item_of, created = past.item_of, past.looked.created
        facts = _Facts(self._known, past.looked.facts, item_of)
        ids, correlation_ids, unnamed = facts.names(
            self._namer.ids(past.items), self._namer.correlation_ids(past.items, created), created == UNKNOWN
        )
        columns = {
            "incarnation": _same(self._incarnation, len(rows)),
            "partition": pa.array(np.full(len(rows), self._partition, dtype=np.int32)),
            "turn": pa.array(all_entries.turns[turns]),
            "seq": pa.array((rows - all_entries.starts[turns]).astype(np.int32)),
            "number": pa.array(numbers),
            "item_id": _words(item_of, ids),
            "correlation_id": _words(item_of, correlation_ids, unnamed),
            "at": pa.array(ats * _MS).view(pa.timestamp("us", tz="UTC")),
            "from_state": _words(past.before - 1, _STATE_NAMES, past.before == GONE),
            "to_state": _words(past.after - 1, _STATE_NAMES, past.after == GONE),
            "why": _words(acts.WHY[happened], _WHY_NAMES),
            "who": all_entries.whos(entries),
            "attempt": pa.array(past.attempts, mask=~acts.ATTEMPT[happened] | past.unknown),
            "kind": facts.kinds(),
            "priority": facts.priorities(),
            "error": all_entries.errors(entries),
            "source_queue": facts.sources([fact.source_queue for fact in facts.facts]),
            "source_id": facts.sources([fact.source_id for fact in facts.facts]),
            "since_ms": pa.array(ats - past.since, mask=past.since == UNKNOWN),
            "age_ms": pa.array(ats - created[item_of], mask=past.unknown),
        }
        past.remember(self._known)  # the facts of those that ended are gone after this
        return pa.Table.from_arrays(list(columns.values()), schema=FLAT_SCHEMA)


class _Past:
    """What was before each row: in the same batch, or known from before it. `items` are those of the batch, sorted."""

    def __init__(self, numbers: Numbers, ats: Numbers, happened: Numbers, known: Known) -> None:
        self._order = order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        begins = np.ones(len(ordered), dtype=np.bool_)
        np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
        # By item: its first and its last row in the order by item.
        self._firsts = np.flatnonzero(begins)
        self._lasts = np.append(self._firsts[1:], len(order)) - 1
        self.items = ordered[self._firsts]
        self.looked = known.look(self.items)
        # By row in the order by item:
        self._item_of = np.cumsum(begins) - 1
        self._happened = happened[order]
        self._ats = ats[order]
        # By row:
        self.item_of = self._back(self._item_of.astype(np.int32))
        self.unknown: Bools = (self.looked.created == UNKNOWN)[self.item_of]
        self.since = self._back(self._since())
        self.after = acts.AFTER[happened]
        self.before = self._before(happened)
        self.attempts = self._count_attempts()

    def _back(self, values: Any) -> Any:
        """From the order by item to that of the rows."""
        back = np.empty_like(values)
        back[self._order] = values
        return back

    def _since(self) -> Numbers:
        since = np.empty_like(self._ats)
        since[1:] = self._ats[:-1]
        since[self._firsts] = self.looked.changed
        since[acts.CREATES[self._happened]] = UNKNOWN
        return since

    def _before(self, happened: Numbers) -> Any:
        before, looked_up = acts.BEFORE[happened], acts.LOOKED_UP[happened]
        if not looked_up.any():
            return before
        earlier = np.empty_like(before)
        earlier[1:] = acts.AFTER[self._happened[:-1]]
        earlier[self._firsts] = self.looked.states
        return np.where(looked_up, self._back(earlier), before)

    def _count_attempts(self) -> Places:
        """The attempt that is under way at each row; and, for `remember`, those that are over in the end."""
        counts, resets = acts.COUNTS[self._happened], acts.RESETS[self._happened]
        if not counts.any() and not resets.any():
            self._over = self.looked.attempts
            under_way: Places = self.looked.attempts[self.item_of] + np.int32(1)
            return under_way
        over = np.concatenate([[0], np.cumsum(counts)])  # before each row, through all items
        first_rows = np.zeros(len(counts), dtype=np.int64)  # of the item, or after its last reset
        after_reset = np.flatnonzero(resets[:-1]) + 1
        first_rows[after_reset] = after_reset
        first_rows[self._firsts] = self._firsts
        first_rows = np.maximum.accumulate(first_rows)
        begins_anew = np.zeros(len(counts), dtype=np.bool_)
        begins_anew[after_reset] = True
        begins_anew[self._firsts] = False
        carried = np.where(begins_anew[first_rows], 0, self.looked.attempts[self._item_of])
        before = carried + over[:-1] - over[first_rows]
        last = self._lasts
        self._over = np.where(resets[last], 0, before[last] + counts[last]).astype(np.int32)
        under_way = self._back((before + 1).astype(np.int32))
        return under_way

    def remember(self, known: Known) -> None:
        """What the items have become. Those that are only new, ready and plain are known already."""
        last = self._happened[self._lasts]
        changed = ~((self._firsts == self._lasts) & acts.PLAIN[last])
        states = np.where(acts.ENDS[last], GONE, acts.AFTER[last]).astype(np.uint8)
        news = Columns.of(
            created=self.looked.created[changed],
            changed=self._ats[self._lasts][changed],
            attempts=self._over[changed],
            states=states[changed],
            facts=self.looked.facts[changed],
        )
        known.change(self.items[changed], news)


class _Facts:
    """What the items of a batch were produced with. `facts` are the different ones; empty: all items are plain."""

    def __init__(self, known: Known, places: Places, item_of: Places) -> None:
        self._item_of = item_of
        self._codes: npt.NDArray[Any] = places
        self.facts: list[Fact] = []
        if places.any():
            found, self._codes = np.unique(places, return_inverse=True)
            self.facts = [known.facts[place] if place else PLAIN for place in found.tolist()]

    def names(self, ids: Any, correlation_ids: Any, unknown: Bools) -> tuple[Any, Any, Bools | None]:
        """Ids and correlation ids by item, own ones in the place of derived ones; and which rows have none of these."""
        if self.facts:
            ids, _ = self._own(ids, [fact.id for fact in self.facts])
            correlation_ids, own = self._own(correlation_ids, [fact.correlation_id for fact in self.facts])
            unknown = unknown & ~own
        return ids, correlation_ids, unknown[self._item_of] if unknown.any() else None

    def _own(self, derived: Any, names: list[str | None]) -> tuple[Any, Bools]:
        given = np.array([name is not None for name in names], dtype=np.bool_)[self._codes]
        values = pa.array(names, pa.string()).take(pa.array(self._codes[given]))
        return pc.replace_with_mask(derived, pa.array(given), values), given

    def kinds(self) -> Any:
        if not self.facts:
            return _same("", len(self._item_of))
        codes, names = _coded([fact.kind for fact in self.facts])
        return _words(codes[self._codes[self._item_of]], names)

    def priorities(self) -> Any:
        if not self.facts:
            return pa.array(np.zeros(len(self._item_of), dtype=np.int32))
        priorities = np.array([fact.priority for fact in self.facts], dtype=np.int32)
        return pa.array(priorities[self._codes[self._item_of]])

    def sources(self, names: list[str | None]) -> Any:
        if all(name is None for name in names):
            return _none(len(self._item_of))
        codes, values, missing = _coded_or_none(names)
        places = self._codes[self._item_of]
        return _words(codes[places], values, missing[places])


# ---- columns of strings -------------------------------------------------------------------------------------


def _coded(names: Sequence[str]) -> tuple[Places, Any]:
    """Each as its place among the different ones, and those."""
    places: dict[str, int] = {}
    codes = np.array([places.setdefault(name, len(places)) for name in names], dtype=np.int32)
    return codes, pa.array(list(places), pa.string())


def _coded_or_none(names: Sequence[str | None]) -> tuple[Places, Any, Bools]:
    """The same, and which are None."""
    codes, values = _coded(["" if name is None else name for name in names])
    return codes, values, np.array([name is None for name in names], dtype=np.bool_)


def _words(codes: Any, names: Any, missing: Bools | None = None) -> Any:
    indices = pa.array(codes.astype(np.int32, copy=False), mask=missing)
    return pa.DictionaryArray.from_arrays(indices, names, safe=False)


def _same(name: str, count: int) -> Any:
    return _words(np.zeros(count, dtype=np.int32), pa.array([name]))


def _none(count: int) -> Any:
    return pa.nulls(count, pa.dictionary(pa.int32(), pa.string()))
