"""Instants at which something may be due.

An entry is a hint: whoever pops it looks at the item to see whether it still holds. So nothing is ever removed
from the middle; `rebuild` sheds stale entries when they outnumber the live ones.

With a steady timeout or delay each instant is no earlier than the one before: such entries are a line in two arrays,
16 bytes each. The others are a heap of ints, `at << 64 | run`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice
from operator import le

_RUN_BITS = 64
RUN_MASK = (1 << _RUN_BITS) - 1
NEVER = 1 << 62  # later than any instant
STALE_SLACK = 4_096  # below this a rebuild saves nothing worth having


class Timers:
    __slots__ = ("_ats", "_head", "_heap", "_last", "_runs", "count", "next_at")

    def __init__(self) -> None:
        self._ats, self._runs = array("q"), array("Q")  # the line, by instant
        self._head = 0  # how much of it has been popped
        self._last = 0  # the instant at its end
        self._heap: list[int] = []
        self.count = 0
        self.next_at = NEVER  # the first instant of all

    def push(self, at: int, run: int) -> None:
        self.count += 1
        if at < self.next_at:
            self.next_at = at
        if at >= self._last:
            self._last = at
            self._ats.append(at)
            self._runs.append(run)
        else:
            heappush(self._heap, at << _RUN_BITS | run)

    def pop_due(self, now: int) -> list[int]:
        """Runs whose instant is `now` or earlier, by instant, then by number."""
        return [entry & RUN_MASK for entry in self.pop_entries(now)]

    def pop_entries(self, now: int) -> list[int]:
        """The same with their instants: `at << 64 | run`."""
        head, heap, limit = self._head, self._heap, (now + 1) << _RUN_BITS
        tail = bisect_right(self._ats, now, head)
        due = [at << _RUN_BITS | run for at, run in zip(self._ats[head:tail], self._runs[head:tail], strict=True)]
        while heap and heap[0] < limit:
            due.append(heappop(heap))
        self.count -= len(due)
        self._drop(tail)
        due.sort()
        return due

    def stale(self, live: int) -> bool:
        return self.count > 2 * live + STALE_SLACK

    def rebuild(self, ats: Sequence[int], runs: Sequence[int]) -> None:
        """Start again with these, in any order."""
        if not all(map(le, ats, islice(ats, 1, None))):
            order = sorted(range(len(ats)), key=ats.__getitem__)
            ats, runs = [ats[index] for index in order], [runs[index] for index in order]
        self._ats, self._runs, self._heap = array("q", ats), array("Q", runs), []
        self.count = len(ats)
        self._head, self._last, self.next_at = 0, ats[-1] if ats else 0, ats[0] if ats else NEVER

    def _drop(self, head: int) -> None:
        """What has been popped goes when it is half of the line, and with its last entry the mark at its end."""
        self._head = head
        if head * 2 > len(self._ats):
            del self._ats[:head], self._runs[:head]
            self._head = 0
        if not self._ats:
            self._last = 0
        in_line = self._ats[self._head] if self._ats else NEVER
        self.next_at = min(in_line, self._heap[0] >> _RUN_BITS) if self._heap else in_line
