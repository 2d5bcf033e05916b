"""The leasable items of a partition, in order: priorities, and within each a queue of runs.

A million items in order are one int, whatever their number of chunks; only what went back to the tail on its
own is a run of its own.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from millpond.history.format import RUN_BITS, RUN_MAX

_COUNT_MASK = RUN_MAX - 1


class Ready:
    __slots__ = ("_priorities", "_queues", "count")

    def __init__(self) -> None:
        self._queues: dict[int, deque[int]] = {}
        self._priorities: list[int] = []
        self.count = 0

    def push(self, priority: int, first: int, count: int) -> None:
        """Add to the tail."""
        self.count += count
        queue = self._queue(priority)
        if queue:
            last = queue[-1]
            last_count = (last & _COUNT_MASK) + 1
            if (last >> RUN_BITS) + last_count == first and last_count + count <= RUN_MAX:
                queue[-1] = last + count
                return
        queue.append(first << RUN_BITS | (count - 1))

    def push_front(self, priority: int, first: int, count: int) -> None:
        self.count += count
        self._queue(priority).appendleft(first << RUN_BITS | (count - 1))

    def head_priority(self) -> int | None:
        return self._priorities[0] if self._priorities else None

    def head(self) -> int | None:
        """The number of the item that would be leased next."""
        return self._queues[self._priorities[0]][0] >> RUN_BITS if self._priorities else None

    def peek(self, limit: int) -> list[int]:
        """Runs of up to `limit` items from the head, of the best priority only. Nothing is removed."""
        runs: list[int] = []
        for run in self._queues[self._priorities[0]]:
            count = (run & _COUNT_MASK) + 1
            if count >= limit:
                runs.append(run - count + limit)
                break
            runs.append(run)
            limit -= count
        return runs

    def remove(self, priority: int, run: int) -> None:
        """Take these items out; they stand in this order somewhere in the queue, nearly always at its head."""
        queue = self._queues[priority]
        first, left = run >> RUN_BITS, (run & _COUNT_MASK) + 1
        self.count -= left
        while left:
            head = queue[0]
            if head >> RUN_BITS != first:
                self._remove_inside(queue, first, left)
                break
            count = min(left, (head & _COUNT_MASK) + 1)
            if count == (head & _COUNT_MASK) + 1:
                queue.popleft()
            else:
                queue[0] = (first + count) << RUN_BITS | ((head & _COUNT_MASK) - count)
            first += count
            left -= count
        self._forget_empty(priority)

    def within(self, first: int, end: int, expected: int) -> list[int]:
        """The items numbered first .. end-1 as runs, wherever they stand; the search stops with the `expected` last."""
        found: list[int] = []
        for priority in self._priorities:
            for run in self._queues[priority]:
                run_first = run >> RUN_BITS
                low, high = max(run_first, first), min(run_first + (run & _COUNT_MASK) + 1, end)
                if low < high:
                    found.append(low << RUN_BITS | (high - low - 1))
                    expected -= high - low
                    if expected <= 0:
                        return found
        return found

    def among(self, numbers: Iterable[int]) -> set[int]:
        """Which of these items are here. Looks at every run: for the few calls that go by id."""
        wanted = set(numbers)
        found: set[int] = set()
        for queue in self._queues.values():
            for run in queue:
                first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
                if count < len(wanted):
                    found.update(n for n in range(first, first + count) if n in wanted)
                else:
                    found.update(n for n in wanted if first <= n < first + count)
        return found

    def runs(self) -> dict[int, list[int]]:
        return {priority: list(self._queues[priority]) for priority in self._priorities}

    @classmethod
    def from_runs(cls, runs: dict[int, list[int]]) -> Ready:
        ready = cls()
        for priority, queue in runs.items():
            ready._queue(priority).extend(queue)
            ready.count += sum((run & _COUNT_MASK) + 1 for run in queue)
        return ready

    def _queue(self, priority: int) -> deque[int]:
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = deque()
            insort(self._priorities, priority)
        return queue

    def _forget_empty(self, priority: int) -> None:
        if not self._queues[priority]:
            del self._queues[priority]
            self._priorities.remove(priority)

    @staticmethod
    def _remove_inside(queue: deque[int], first: int, left: int) -> None:
        end = first + left
        kept: list[int] = []
        for run in queue:
            run_first = run >> RUN_BITS
            run_end = run_first + (run & _COUNT_MASK) + 1
            low, high = max(run_first, first), min(run_end, end)
            if low >= high:
                kept.append(run)
                continue
            left -= high - low
            if run_first < low:
                kept.append(run_first << RUN_BITS | (low - run_first - 1))
            if high < run_end:
                kept.append(high << RUN_BITS | (run_end - high - 1))
        assert not left, "items to remove are not ready"
        queue.clear()
        queue.extend(kept)
