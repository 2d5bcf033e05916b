"""Which items of a partition are held, and by whom: leased in which grant, or claimed in which claim.

What was taken together is one span for as long as it stays together, so that a batch is leased and completed in one
step. A span that loses items in its middle becomes two; what is left of it in small pieces has an entry an item.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

import msgspec

from millpond.queue.columns import Column

SPAN_MIN = 16  # items; a shorter span costs more to keep in order than an entry for each


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
    __slots__ = ("_count", "_ends", "_few", "_firsts", "_held", "_single")

    def __init__(self) -> None:
        self._few: dict[int, T] = {}  # items of short spans
        self._single: Column[T] = Column()  # items whose neighbours are held by others
        # The spans, by number: items from first to end (which is not in it) are held by one holder.
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
        return self._few.get(number) or self._single.get(number)

    def whole(self, first: int, count: int) -> T | None:
        """Who holds all of these; None if there are several, or one of the items has none."""
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
        while first < end:
            index = bisect_right(self._firsts, first) - 1
            if index >= 0 and first < self._ends[index]:
                cut = min(end, self._ends[index])
                self._cut(index, first, cut)
                first = cut
            else:
                if self._few.pop(first, None) is None and self._single.pop(first, None) is None:
                    raise KeyError(first)
                first += 1

    def spans(self) -> Iterator[tuple[int, int, T]]:
        """All of them as (first, count, holder)."""
        for first, end, holder in zip(self._firsts, self._ends, self._held, strict=True):
            yield first, end - first, holder
        first, count, held = 0, 0, None
        for number, holder in chain(self._few.items(), self._single.items()):
            if holder is held and number == first + count:
                count += 1
                continue
            if held is not None:
                yield first, count, held
            first, count, held = number, 1, holder
        if held is not None:
            yield first, count, held

    def within(self, first: int, count: int) -> list[int]:
        """Those of these neighbours that are held."""
        end = first + count
        found = self._single.within(first, count)
        if self._few:
            found += self._few.keys() & range(first, end)
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

    def _put(self, first: int, end: int, holder: T) -> None:
        if end - first == 1:
            self._single[first] = holder
        elif end - first < SPAN_MIN:
            self._few.update(dict.fromkeys(range(first, end), holder))
        else:
            index = bisect_right(self._firsts, first)
            self._firsts.insert(index, first)
            self._ends.insert(index, end)
            self._held.insert(index, holder)

    def _cut(self, index: int, low: int, high: int) -> None:
        """Take the items from low to high out of a span."""
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
