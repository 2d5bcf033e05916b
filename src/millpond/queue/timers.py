"""Instants at which something may be due, as a heap of plain ints: `at << 64 | run`.

An entry is a hint: whoever pops it looks at the item to see whether it still holds. So nothing is ever removed
from the middle; `rebuild` sheds stale entries when they outnumber the live ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

_RUN_MASK = (1 << 64) - 1
STALE_SLACK = 4_096  # below this a rebuild saves nothing worth having


class Timers:
    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[int] = []

    def push(self, at: int, run: int) -> int:
        """Returns the entry, for those who keep it: one int, not two."""
        entry = at << 64 | run
        heappush(self._heap, entry)
        return entry

    def next_at(self) -> int:
        """Only if there is one: an empty heap is false."""
        return self._heap[0] >> 64

    def __len__(self) -> int:
        return len(self._heap)

    def pop_due(self, now: int) -> list[int]:
        """Runs whose instant is `now` or earlier, by instant, then by number."""
        heap, limit = self._heap, (now + 1) << 64
        due: list[int] = []
        while heap and heap[0] < limit:
            due.append(heappop(heap) & _RUN_MASK)
        return due

    def stale(self, live: int) -> bool:
        return len(self._heap) > 2 * live + STALE_SLACK

    def rebuild(self, entries: Iterable[tuple[int, int]]) -> None:
        self.rebuild_from(at << 64 | run for at, run in entries)

    def rebuild_from(self, entries: Iterable[int]) -> None:
        """From entries that `push` returned."""
        self._heap = list(entries)
        heapify(self._heap)
