"""Which items of a partition are held, and by whom: leased in which grant, or claimed in which claim.

What was taken together is one span for as long as it stays together, so that a batch is leased and completed in one
step. A span that loses items in its middle becomes two; an item that is left alone has an entry in a column.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from millpond.queue.columns import Column

SPAN_MIN = 16  # items; shorter spans may be very many, and are not kept in order: who looks for one tries its places


class Lease(msgspec.Struct, frozen=True, gc=False):
    """One grant, shared by all the items leased in it."""

    client: str
    grant: int
    deadline: int
    fence: int
    at: int = 0  # when it was granted; 0 is not known

    @property
    def fencing_token(self) -> int:
        return self.fence + self.grant


T = TypeVar("T")


class Spans(Generic[T]):
    __slots__ = ("_count", "_ends", "_firsts", "_held", "_short", "_short_ends", "_single")

    def __init__(self) -> None:
        self._single: Column[T] = Column()  # items whose neighbours are held by others
        # Short spans, by their first item: the holder, and the end (which is not in it).
        self._short: dict[int, T] = {}
        self._short_ends: dict[int, int] = {}
        # The others, by number: from first to end.
        self._firsts: list[int] = []
        self._ends: list[int] = []
        self._held: list[T] = []
        self._count = 0

    def add(self, first: int, count: int, holder: T) -> None:
        self._count += count
        self._put(first, first + count, holder)

    def get(self, number: int) -> T | None:
        index = bisect_right(self._firsts, number) - 1
        if index >= 0 and number < self._ends[index]:
            return self._held[index]
        holder = self._single.get(number)
        if holder is None and (first := self._short_first(number)) is not None:
            return self._short[first]
        return holder

    def whole(self, first: int, count: int) -> T | None:
        """Who holds all of these; None if there are several, or one of the items has none."""
        if self._short_ends.get(first, 0) >= first + count:  # what was taken together mostly ends together
            return self._short[first]
        index = bisect_right(self._firsts, first) - 1
        if index >= 0 and first < self._ends[index]:
            return self._held[index] if first + count <= self._ends[index] else None
        holder = self.get(first)
        if count > 1 and any(self.get(number) is not holder for number in range(first + 1, first + count)):
            return None
        return holder

    def remove(self, first: int, count: int) -> None:
        self._count -= count
        end = first + count
        if self._short_ends.get(first) == end:
            del self._short[first], self._short_ends[first]
            return
        while first < end:
            index = bisect_right(self._firsts, first) - 1
            if index >= 0 and first < self._ends[index]:
                cut = min(end, self._ends[index])
                self._cut(index, first, cut)
            elif self._single.pop(first, None) is not None:
                cut = first + 1
            elif (start := self._short_first(first)) is not None:
                cut = min(end, self._short_ends[start])
                self._cut_short(start, first, cut)
            else:
                raise KeyError(first)
            first = cut

    def spans(self) -> Iterator[tuple[int, int, T]]:
        """All of them as (first, count, holder)."""
        for first, end, holder in zip(self._firsts, self._ends, self._held, strict=True):
            yield first, end - first, holder
        for first, holder in self._short.items():
            yield first, self._short_ends[first] - first, holder
        for number, holder in self._single.items():
            yield number, 1, holder

    def within(self, first: int, count: int) -> list[int]:
        """Those of these neighbours that are held."""
        end = first + count
        found = self._single.within(first, count)
        if self._short:
            start = self._short_first(first)
            starts = self._short.keys() & range(first, end)
            if start is not None:
                starts.add(start)
            for start in starts:
                found += range(max(first, start), min(end, self._short_ends[start]))
        index = max(0, bisect_right(self._firsts, first) - 1)
        while index < len(self._firsts) and self._firsts[index] < end:
            found += range(max(first, self._firsts[index]), min(end, self._ends[index]))
            index += 1
        return found

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.get(number) is not None

    def __getitem__(self, number: int) -> T:
        holder = self.get(number)
        if holder is None:
            raise KeyError(number)
        return holder

    def __iter__(self) -> Iterator[int]:
        for first, count, _ in self.spans():
            yield from range(first, first + count)

    def __len__(self) -> int:
        return self._count

    def _short_first(self, number: int) -> int | None:
        """The first item of the short span that this one is in."""
        short = self._short
        if short:
            for first in range(number, number - SPAN_MIN, -1):
                if first in short:
                    return first if number < self._short_ends[first] else None
        return None

    def _put(self, first: int, end: int, holder: T) -> None:
        if end - first == 1:
            self._single[first] = holder
        elif 1 < end - first < SPAN_MIN:
            self._short[first] = holder
            self._short_ends[first] = end
        elif first < end:
            index = bisect_right(self._firsts, first)
            self._firsts.insert(index, first)
            self._ends.insert(index, end)
            self._held.insert(index, holder)

    def _cut_short(self, start: int, low: int, high: int) -> None:
        """Take the items from low to high out of a short span."""
        end, holder = self._short_ends.pop(start), self._short.pop(start)
        self._put(start, low, holder)
        self._put(high, end, holder)

    def _cut(self, index: int, low: int, high: int) -> None:
        """Take the items from low to high out of one of the others."""
        first, end, holder = self._firsts[index], self._ends[index], self._held[index]
        if high == end and low - first >= SPAN_MIN:
            self._ends[index] = low
        elif low == first and end - high >= SPAN_MIN:
            self._firsts[index] = high
        else:
            del self._firsts[index], self._ends[index], self._held[index]
            self._put(first, low, holder)
            self._put(high, end, holder)


class Leases(Spans[Lease]):
    __slots__ = ()
