"""Columns: what some items have, by number, at a few bytes an item.

A dict spends about a hundred bytes on a number and its value. But items that have something are mostly neighbours:
produced, retried or buried together. So values lie in pages, one slot for each of 256 neighbours, and only what is
alone, an item here and there, has an entry in a dict. Which of the two holds an entry is nobody else's business.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, overload

from millpond.history.format import RUN_BITS, RUN_MAX, numbers_of, run_span

_COUNT_MASK = RUN_MAX - 1
_PAGE_BITS = 8
_PAGE = 1 << _PAGE_BITS
_SLOT = _PAGE - 1
_WORTH = 32  # entries for which a page is made: it is as large as so many in the dict
_THIN = 16  # entries below which it is given up again: half of that, so that a page does not come and go
_SETTLE = 1_024  # new entries in the dict after which neighbours are looked for among them
_SAMPLE = 4  # one in so many of them is looked at
_APART = 8  # pages between runs for which each is looked at by itself
_NOTHING = -1 << 63  # in a page of ints: no entry; no value is so low

# Many items that are alone have been tried the same few times: let them share the int that says so.
_SAME: dict[int, int] = {}
_SAME_MAX = 1_000

T = TypeVar("T")
Dump = tuple[bytes, bytes, bytes, bytes]


class Get(Protocol[T]):
    @overload
    def __call__(self, number: int, /) -> T | None: ...

    @overload
    def __call__(self, number: int, default: T, /) -> T: ...


class Column(Generic[T]):
    """Number -> anything but None, as a dict would have it. Nothing is in it when `pages` and `alone` are empty."""

    __slots__ = ("_blank", "_counts", "_empty", "_in_pages", "_unsettled", "alone", "get", "pages", "pop")

    get: Get[T]
    pop: Callable[[int, Any], Any]

    def __init__(self, blank: Any = (None,) * _PAGE, empty: Any = None) -> None:
        self._blank = blank if isinstance(blank, array) else list(blank)
        self._empty = empty
        self.pages: dict[int, Any] = {}  # number >> 8 -> its slots: a list, or an array of ints
        self._counts: dict[int, int] = {}  # how many of them are in use
        self._in_pages = 0
        self.alone: dict[int, T] = {}  # those whose page was not made
        self._unsettled = 0
        self.get, self.pop = self.alone.get, self.alone.pop  # while there is no page: most columns are asked in vain

    # ---- as a dict ----------------------------------------------------------------------------------------

    def _get(self, number: int, default: Any = None) -> Any:
        page = self.pages.get(number >> _PAGE_BITS)
        if page is None:
            return self.alone.get(number, default)
        value = page[number & _SLOT]
        return default if value == self._empty else value

    def __getitem__(self, number: int) -> T:
        value = self.get(number)
        if value is None:
            raise KeyError(number)
        return value

    def __contains__(self, number: int) -> bool:
        page = self.pages.get(number >> _PAGE_BITS)
        return number in self.alone if page is None else page[number & _SLOT] != self._empty

    def __setitem__(self, number: int, value: T) -> None:
        key = number >> _PAGE_BITS
        page = self.pages.get(key)
        if page is None:
            self.alone[number] = value
            self._unsettled += 1
            if self._unsettled >= _SETTLE:
                self._settle()
            return
        slot = number & _SLOT
        if page[slot] == self._empty:
            self._counts[key] += 1
            self._in_pages += 1
        page[slot] = value

    def _pop(self, number: int, default: Any = None) -> Any:
        key = number >> _PAGE_BITS
        page = self.pages.get(key)
        if page is None:
            return self.alone.pop(number, default)
        slot = number & _SLOT
        value = page[slot]
        if value == self._empty:
            return default
        page[slot] = self._empty
        self._in_pages -= 1
        self._counts[key] = left = self._counts[key] - 1
        if left < _THIN:
            self._give_up(key)
        return value

    def __delitem__(self, number: int) -> None:
        if self.pop(number, None) is None:
            raise KeyError(number)

    def __len__(self) -> int:
        return self._in_pages + len(self.alone)

    def __iter__(self) -> Iterator[int]:
        """By number within a page, and otherwise in no order; that of `items` and `values` is the same."""
        return iter(self.numbers())

    def numbers(self) -> list[int]:
        empty, pages = self._empty, ((key << _PAGE_BITS, page) for key, page in self.pages.items())
        found = [number for start, page in pages for number, value in enumerate(page, start) if value != empty]
        return [*found, *self.alone]

    def values(self) -> list[T]:
        empty = self._empty
        found = [value for page in self.pages.values() for value in page if value != empty]
        return [*found, *self.alone.values()]

    def items(self) -> Iterator[tuple[int, T]]:
        for key in self.pages:
            yield from self._entries(key)
        yield from self.alone.items()

    # ---- neighbours ---------------------------------------------------------------------------------------

    def has_any(self, runs: Sequence[int], numbers: Iterable[int]) -> bool:
        """Whether one of the `numbers` in these runs may have an entry; if not, that is told at once for all."""
        if self.pages:
            low, high = (run_span(run)[place] >> _PAGE_BITS for run, place in ((min(runs), 0), (max(runs), -1)))
            if high - low > _APART * len(runs) or not self.pages.keys().isdisjoint(range(low, high + 1)):
                return True
        return bool(self.alone) and not self.alone.keys().isdisjoint(numbers)

    def within(self, first: int, count: int) -> list[int]:
        """Those of these neighbours that have an entry, in order. What lies between them costs next to nothing."""
        pages, alone, empty = self.pages, self.alone, self._empty
        if not pages:
            return [number for number in range(first, first + count) if number in alone] if alone else []
        found: list[int] = []
        end = first + count
        while first < end:
            page, low = pages.get(first >> _PAGE_BITS), first & _SLOT
            stop = first - low + _PAGE
            if stop > end:
                stop = end
            if page is not None:
                slots = page[low : low + stop - first]
                if slots.count(empty) < stop - first:
                    found += [number for number, value in enumerate(slots, first) if value != empty]
            elif alone and not alone.keys().isdisjoint(numbers := range(first, stop)):
                found += [number for number in numbers if number in alone]
            first = stop
        return found

    def within_all(self, runs: Sequence[int]) -> list[int]:
        """The same of several runs."""
        if not (self.pages or self.alone) or (len(runs) > 1 and not self.has_any(runs, numbers_of(runs))):
            return []
        return [number for run in runs for number in self.within(run >> RUN_BITS, (run & _COUNT_MASK) + 1)]

    def discard(self, first: int, count: int) -> list[tuple[int, T]]:
        """Whatever these neighbours have, they have it no more; returns it, in order."""
        gone: list[tuple[int, T]] = []
        pages, alone, empty = self.pages, self.alone, self._empty
        end = first + count
        while first < end:
            key, low = first >> _PAGE_BITS, first & _SLOT
            page = pages.get(key)
            stop = first - low + _PAGE if pages else end
            if stop > end:
                stop = end
            if page is not None:
                high = low + stop - first
                slots = page[low:high]
                used = high - low - slots.count(empty)
                if used:
                    gone += [(number, value) for number, value in enumerate(slots, first) if value != empty]
                    page[low:high] = self._blank[low:high]
                    self._in_pages -= used
                    self._counts[key] -= used
                    if self._counts[key] < _THIN:
                        self._give_up(key)
            elif alone and not alone.keys().isdisjoint(numbers := range(first, stop)):
                gone += [(number, alone.pop(number)) for number in numbers if number in alone]
            first = stop
        return gone

    def fill(self, first: int, count: int, value: T) -> None:
        """All of these neighbours have the same."""
        end = first + count
        while first < end:
            key, low = first >> _PAGE_BITS, first & _SLOT
            high = min(_PAGE, low + end - first)
            if high - low >= _WORTH and key not in self.pages:
                self._make(key)
            if (page := self.pages.get(key)) is None:
                self.alone.update(dict.fromkeys(range(first, first + high - low), value))
                self._unsettled += high - low
                if self._unsettled >= _SETTLE:
                    self._settle()
            else:
                new = page[low:high].count(self._empty)
                self._counts[key] += new
                self._in_pages += new
                one = page[:1]
                one[0] = value
                page[low:high] = one * (high - low)
            first += high - low

    def put(self, first: int, values: Sequence[T]) -> None:
        """These neighbours have one each."""
        at = 0
        while at < len(values):
            key, low = (first + at) >> _PAGE_BITS, (first + at) & _SLOT
            some = values[at : at + _PAGE - low]
            if len(some) >= _WORTH and key not in self.pages:
                self._make(key)
            if (page := self.pages.get(key)) is None:
                for number, value in enumerate(some, first + at):
                    self[number] = value
            else:
                high = low + len(some)
                new = page[low:high].count(self._empty)
                self._counts[key] += new
                self._in_pages += new
                slots = page[:0]
                slots.extend(some)
                page[low:high] = slots
            at += len(some)

    # ---- pages --------------------------------------------------------------------------------------------

    def _entries(self, key: int) -> Iterable[tuple[int, T]]:
        empty, start = self._empty, key << _PAGE_BITS
        return [(number, value) for number, value in enumerate(self.pages[key], start) if value != empty]

    def _settle(self) -> None:
        """Make pages of those entries that came lately and are neighbours, as a sample of them tells."""
        self._unsettled = 0
        lately = islice(reversed(self.alone), 0, _SETTLE, _SAMPLE)
        for key, count in Counter([number >> _PAGE_BITS for number in lately]).items():
            if count * _SAMPLE >= _WORTH:
                self._make(key)

    def _make(self, key: int) -> None:
        take, empty, start = self.alone.pop, self._empty, key << _PAGE_BITS
        page = self._blank[:]
        if self.alone:
            page = page[:0]
            page.extend([take(number, empty) for number in range(start, start + _PAGE)])
        self._put(key, page, _PAGE - page.count(empty))

    def _put(self, key: int, page: Any, count: int) -> None:
        self.pages[key], self._counts[key] = page, count
        self._in_pages += count
        self.get, self.pop = self._get, self._pop

    def _give_up(self, key: int) -> None:
        self.alone.update(self._entries(key))
        self._in_pages -= self._counts.pop(key)
        del self.pages[key]
        if not self.pages:
            self.get, self.pop = self.alone.get, self.alone.pop


class IntColumn(Column[int]):
    """Number -> int of 63 bits and a sign: 8 bytes in a page, no object, and stored as it lies in memory."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(array("q", [_NOTHING]) * _PAGE, _NOTHING)

    def add(self, number: int, more: int) -> None:
        """To what it has; nothing counts as 0."""
        page = self.pages.get(number >> _PAGE_BITS)
        slot = number & _SLOT
        if page is None or page[slot] == _NOTHING:
            total = self.alone.get(number, 0) + more
            self[number] = _SAME.setdefault(total, total) if len(_SAME) < _SAME_MAX else total
        else:
            page[slot] += more

    def count_odd(self) -> int:
        """How many have their lowest bit set: a column may have a flag there."""
        return sum([value & 1 for page in (*self.pages.values(), self.alone.values()) for value in page])

    def guess_odd(self, look: int) -> int:
        """The same from about so many entries, old and new ones, however many there are."""
        few, alone, pages = look // 2 // _PAGE + 1, self.alone.values(), self.pages.values()
        some = [*islice(alone, look // 2 + 1), *islice(reversed(alone), look // 2 + 1)]
        ends = [*islice(pages, few), *islice(reversed(pages), few)]
        in_ends = [value for page in ends for value in page if value != _NOTHING]
        samples = ((some, len(alone)), (in_ends, self._in_pages))
        return sum(sum([value & 1 for value in sample]) * total // len(sample) for sample, total in samples if sample)

    def dump(self) -> Dump:
        """Pages, by key, as they are; what is alone, or in a page not half full, as numbers and values."""
        keys, pages = array("q"), []
        numbers, values = array("q", self.alone), array("q", self.alone.values())
        for key, page in self.pages.items():
            if self._counts[key] * 2 >= _PAGE:
                keys.append(key)
                pages.append(page)
            else:
                entries = self._entries(key)
                numbers.extend([number for number, _ in entries])
                values.extend([value for _, value in entries])
        return keys.tobytes(), b"".join(pages), numbers.tobytes(), values.tobytes()

    def load(self, dumped: Dump, same: dict[int, int]) -> None:
        """`same`: ints that others hold already; what several columns have in their dicts is one object."""
        keys, pages, numbers, values = (array("q", column) for column in dumped)
        for index, key in enumerate(keys):
            page = pages[index * _PAGE : (index + 1) * _PAGE]
            self._put(key, page, _PAGE - page.count(_NOTHING))
        for number, value in zip(numbers, values, strict=True):
            self[same.setdefault(number, number)] = same.setdefault(value, value)
