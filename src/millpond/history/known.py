"""What an exporter knows of the items that live: what later journal rows do not repeat.

Items lie in pages by number. A page of items that are as they were produced is only the list of its pieces; arrays are
made when something happens to one of them, and a page whose items have all ended is dropped. What was told apart at
production (own ids, kind, priority, source) is a `Fact`, which items that have no name of their own share.

All of it can be saved, whole or as what has changed since it was last saved, and loaded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.history.acts import CODES, STATES
from millpond.history.names import Numbers
from millpond.model import State

STATE_VERSION = 1
PAGE_BITS = 12  # 4,096 items of 25 bytes: a few of them are touched by a batch, and few outlive their neighbours
PAGE_ITEMS = 1 << PAGE_BITS
PIECES_MAX = 128  # in a page, beyond which arrays are smaller
SHARED_FACTS_MAX = 10_000  # beyond which a kind and priority are not looked for among the others
UNKNOWN = -1  # an instant that was before the exporter began
GONE = CODES[None]

_MASK = PAGE_ITEMS - 1
_READY = CODES[State.READY]
_HEADER = b"millpond.known"


class Fact(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What was said of an item when it was produced, apart from its payload."""

    id: str | None
    correlation_id: str | None
    kind: str
    priority: int
    source_queue: str | None
    source_id: str | None

    @property
    def is_shared(self) -> bool:
        return self.id is None and self.correlation_id is None and self.source_id is None


PLAIN = Fact(None, None, "", 0, None, None)


class Columns:
    """Of some items: creation and last change (ms), attempts that are over, state by code, fact by place."""

    __slots__ = ("attempts", "changed", "created", "facts", "states")

    def __init__(self, count: int) -> None:
        """Of items of which nothing is known."""
        self.created = np.full(count, UNKNOWN, dtype=np.int64)
        self.changed = np.full(count, UNKNOWN, dtype=np.int64)
        self.attempts = np.zeros(count, dtype=np.int32)
        self.states = np.zeros(count, dtype=np.uint8)
        self.facts = np.zeros(count, dtype=np.int32)

    @classmethod
    def of(cls, **columns: npt.NDArray[Any]) -> Columns:
        made = cls(0)
        for name, column in columns.items():
            setattr(made, name, column)
        return made


class _Page:
    __slots__ = ("columns", "live", "pieces")

    def __init__(self) -> None:
        self.live = 0
        self.pieces: list[tuple[int, int, int]] = []  # first, end (not in it), creation: while there are no columns
        self.columns: Columns | None = None


class _Header(msgspec.Struct, kw_only=True):
    version: int
    states: list[str]  # by code, from 1
    whole: bool
    pieces: list[tuple[int, int, int]]
    facts: dict[int, Fact]
    shared: list[int]
    redriving: list[int]


class Known:
    """Of the items of one partition."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self.facts: dict[int, Fact] = {}
        self._shared: dict[Fact, int] = {}
        self._free: list[int] = []
        self.redriving: set[int] = set()  # on their way back out of a dead queue
        self._pieces: list[tuple[int, int, int]] = []  # since it was last saved
        self._touched: list[Numbers] = []

    # ---- items ----------------------------------------------------------------------------------------------

    def add(
        self,
        first: int,
        count: int,
        created: int,
        facts: Sequence[int] | None = None,
        attempts: Sequence[int] | None = None,
    ) -> None:
        """New items, ready and plain, or with the facts at these places; and attempts that are over."""
        self._pieces.append((first, first + count, created))
        self._put_piece(first, first + count, created)
        if facts is not None:
            numbers = np.arange(first, first + count)
            self._touched.append(numbers)
            for page, low, high, where in self._walk(numbers, make=False):
                self._columns(page).facts[where] = facts[low:high]
                if attempts is not None:
                    self._columns(page).attempts[where] = attempts[low:high]

    def place_of(self, fact: Fact) -> int:
        place = self._shared.get(fact)
        if place is None:
            place = self._free.pop() if self._free else len(self.facts) + 1
            self.facts[place] = fact
            if fact.is_shared and len(self._shared) < SHARED_FACTS_MAX:
                self._shared[fact] = place
        return place

    def look(self, numbers: Numbers) -> Columns:
        """What is known of these items, which are sorted and without a double."""
        found = Columns(len(numbers))
        for page, low, high, where in self._walk(numbers, make=False):
            columns = page.columns or self._made_of(page.pieces)
            found.created[low:high] = columns.created[where]
            found.changed[low:high] = columns.changed[where]
            found.attempts[low:high] = columns.attempts[where]
            found.states[low:high] = columns.states[where]
            found.facts[low:high] = columns.facts[where]
        return found

    def change(self, numbers: Numbers, news: Columns) -> None:
        """What these items, which are sorted, have become; `GONE` are those that have ended."""
        self._touched.append(numbers)
        ended = news.states == GONE
        if news.facts.any():
            self._forget_facts(news.facts[ended])
            news.facts[ended] = 0
        self._put(numbers, news)

    def _put(self, numbers: Numbers, news: Columns) -> None:
        for page, low, high, where in self._walk(numbers, make=True):
            columns, states = self._columns(page), news.states[low:high]
            page.live += int(np.count_nonzero(states)) - int(np.count_nonzero(columns.states[where]))
            columns.created[where] = news.created[low:high]
            columns.changed[where] = news.changed[low:high]
            columns.attempts[where] = news.attempts[low:high]
            columns.states[where] = states
            columns.facts[where] = news.facts[low:high]
            if not page.live:
                del self._pages[int(numbers[low]) >> PAGE_BITS]

    def _forget_facts(self, places: npt.NDArray[np.int32]) -> None:
        for place in places[places > 0].tolist():
            if not self._is_shared(place):
                del self.facts[place]
                self._free.append(place)

    def _is_shared(self, place: int) -> bool:
        return self._shared.get(self.facts[place]) == place

    # ---- pages ----------------------------------------------------------------------------------------------

    def _walk(self, numbers: Numbers, *, make: bool) -> Iterator[tuple[_Page, int, int, Any]]:
        """The pages of these sorted numbers, each with which of the numbers, and where in the page, they are."""
        if not len(numbers):
            return
        places = numbers >> PAGE_BITS
        cuts = [0, *(np.flatnonzero(places[1:] != places[:-1]) + 1).tolist(), len(numbers)]
        for low, high in pairwise(cuts):
            place = int(places[low])
            page = self._pages.get(place)
            if page is None:
                if not make:
                    continue
                page = self._pages[place] = _Page()
            first, last = int(numbers[low]) & _MASK, int(numbers[high - 1]) & _MASK
            neighbours = last - first == high - low - 1
            yield page, low, high, slice(first, last + 1) if neighbours else numbers[low:high] & _MASK

    def _put_piece(self, first: int, end: int, created: int) -> None:
        while first < end:
            place = first >> PAGE_BITS
            cut = min(end, (place + 1) << PAGE_BITS)
            page = self._pages.get(place)
            if page is None:
                page = self._pages[place] = _Page()
            page.live += cut - first
            piece = (first & _MASK, (cut - 1 & _MASK) + 1, created)
            if page.columns is None:
                page.pieces.append(piece)
                if len(page.pieces) > PIECES_MAX:
                    self._columns(page)
            else:
                self._lay(page.columns, piece)
            first = cut

    def _columns(self, page: _Page) -> Columns:
        if page.columns is None:
            page.columns = self._made_of(page.pieces)
            page.pieces = []
        return page.columns

    def _made_of(self, pieces: Iterable[tuple[int, int, int]]) -> Columns:
        columns = Columns(PAGE_ITEMS)
        for piece in pieces:
            self._lay(columns, piece)
        return columns

    def _lay(self, columns: Columns, piece: tuple[int, int, int]) -> None:
        first, end, created = piece
        columns.created[first:end] = columns.changed[first:end] = created
        columns.states[first:end] = _READY

    # ---- saving and loading ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Items that cost room of their own when all is saved; plain ones do not."""
        return sum(page.live for page in self._pages.values() if page.columns is not None)

    @property
    def touched(self) -> int:
        """Items that cost room of their own when the changes are saved; some of them may be counted twice."""
        return sum(map(len, self._touched))

    def save(self, *, whole: bool) -> Any:
        """An Arrow table: all that is known, or the changes since the last call."""
        pieces = self._pieces
        if whole:
            numbers = self._live_numbers()
            pieces = [
                ((place << PAGE_BITS) + first, (place << PAGE_BITS) + end, created)
                for place, page in self._pages.items()
                for first, end, created in page.pieces
            ]
        else:
            numbers = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *self._touched]))
        self._pieces, self._touched = [], []
        columns = self.look(numbers)
        facts = {place: self.facts[place] for place in np.unique(columns.facts).tolist() if place}
        header = _Header(
            version=STATE_VERSION,
            states=[str(state) for state in STATES],
            whole=whole,
            pieces=pieces,
            facts=facts,
            shared=[place for place in facts if self._is_shared(place)],
            redriving=sorted(self.redriving),
        )
        arrays = {"number": numbers} | {name: getattr(columns, name) for name in Columns.__slots__}
        table = pa.table({name: pa.array(array) for name, array in arrays.items()})
        return table.replace_schema_metadata({_HEADER: msgspec.msgpack.encode(header)})

    def load(self, table: Any) -> None:
        """Take in what was saved: begin with a whole one, then the changes since, in their order."""
        header = msgspec.msgpack.decode(table.schema.metadata[_HEADER], type=_Header)
        if header.version != STATE_VERSION:
            raise ValueError(f"known items of version {header.version}; this millpond reads up to {STATE_VERSION}")
        if header.whole:
            self._pages, self.facts, self._shared = {}, {}, {}
        for first, end, created in header.pieces:
            self._put_piece(first, end, created)
        numbers = table.column("number").to_numpy()
        news = Columns.of(**{name: table.column(name).to_numpy() for name in Columns.__slots__})
        codes = np.array([GONE, *(CODES[State(state)] for state in header.states)], dtype=np.uint8)
        news.states = codes[news.states]
        self.facts |= header.facts
        self._put(numbers, news)
        self.redriving = set(header.redriving)
        self._tidy_facts({*self._shared.values(), *header.shared})

    def _tidy_facts(self, shared: set[int]) -> None:
        """Those that no item has any more were dropped, or their place was given to another, by what was loaded."""
        used = {0}.union(*(np.unique(p.columns.facts).tolist() for p in self._pages.values() if p.columns is not None))
        self.facts = {place: fact for place, fact in self.facts.items() if place in used}
        self._free = sorted(set(range(1, max(self.facts, default=0))) - self.facts.keys(), reverse=True)
        self._shared = {fact: place for place, fact in self.facts.items() if place in shared and fact.is_shared}

    def _live_numbers(self) -> Numbers:
        found = [
            np.flatnonzero(page.columns.states) + (place << PAGE_BITS)
            for place, page in sorted(self._pages.items())
            if page.columns is not None
        ]
        return np.concatenate([np.zeros(0, dtype=np.int64), *found])
