"""The leasable items of a partition, in order: priorities, and within each a queue of runs.

A million items in order are one int, whatever their number of chunks; only what went back to the tail on its
own is a run of its own. Items are leased from the head. What leaves from the middle (cancelled, expired, replaced)
stays in its run, noted as gone, until the head comes to it or a sweep pays: no removal looks at the whole queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from millpond.history.format import RUN_BITS, RUN_MAX, items_in

_COUNT_MASK = RUN_MAX - 1
_GONE_SLACK = 4_096  # items noted as gone before a sweep is thought of


class Ready:
    __slots__ = ("_gone", "_priorities", "_queues", "count")

    def __init__(self) -> None:
        self._queues: dict[int, deque[int]] = {}
        self._priorities: list[int] = []
        self._gone: set[int] = set()
        self.count = 0

    def push(self, priority: int, first: int, count: int) -> None:
        """Add to the tail."""
        self._forget_gone(first, count)
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
        self._forget_gone(first, count)
        self.count += count
        self._queue(priority).appendleft(first << RUN_BITS | (count - 1))

    def head_priority(self) -> int | None:
        while self._priorities:
            priority = self._priorities[0]
            queue = self._queues[priority]
            if self._gone:
                self._skip_gone(queue)
            if queue:
                return priority
            self._forget_empty(priority)
        return None

    def heads(self, limit: int = 0) -> list[int]:
        """The number of the item that would be leased next, of each priority, or of the `limit` least urgent ones."""
        heads: list[int] = []
        for priority in self._priorities[-limit:]:
            queue = self._queues[priority]
            self._skip_gone(queue)
            if queue:
                heads.append(queue[0] >> RUN_BITS)
            else:
                self._forget_empty(priority)
        return heads

    def peek(self, limit: int) -> list[int]:
        """Runs of up to `limit` items from the head, of the best priority only. Nothing is removed."""
        priority = self.head_priority()
        assert priority is not None, "there is something to lease"
        gone = self._gone
        runs: list[int] = []
        for run in self._queues[priority]:
            number, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            if not gone:
                if count > limit:
                    count = limit
                runs.append(number << RUN_BITS | (count - 1))
                limit -= count
            else:
                end = number + count
                while number < end and limit:
                    first = number
                    while number < end and number not in gone and number - first < limit:
                        number += 1
                    if number > first:
                        runs.append(first << RUN_BITS | (number - first - 1))
                        limit -= number - first
                    else:
                        number += 1
            if not limit:
                break
        return runs

    def counts(self) -> dict[int, int]:
        """How many there are of each priority, the best first."""
        runs = self.runs()
        return {priority: items_in(runs[priority]) for priority in runs}

    def remove(self, priority: int, run: int) -> None:
        """Take these items out: from the head in fact, from elsewhere by noting that they are gone."""
        queue = self._queues[priority]
        first, left = run >> RUN_BITS, (run & _COUNT_MASK) + 1
        self.count -= left
        if not self._gone and queue and queue[0] == run:  # the usual case
            queue.popleft()
            left = 0
        while left:
            if self._gone:
                self._skip_gone(queue)
            if not queue or queue[0] >> RUN_BITS != first:
                self._gone.update(range(first, first + left))
                break
            head_count = (queue[0] & _COUNT_MASK) + 1
            count = left if left < head_count else head_count
            if count == head_count:
                queue.popleft()
            else:
                queue[0] = (first + count) << RUN_BITS | (head_count - count - 1)
            first += count
            left -= count
        self._forget_empty(priority)
        if len(self._gone) > _GONE_SLACK and len(self._gone) > sum(map(len, self._queues.values())):
            self._sweep()

    def runs(self) -> dict[int, list[int]]:
        self._sweep()
        return {priority: list(self._queues[priority]) for priority in self._priorities}

    @classmethod
    def from_runs(cls, runs: dict[int, list[int]]) -> Ready:
        ready = cls()
        for priority, queue in runs.items():
            ready._queue(priority).extend(queue)
            ready.count += items_in(queue)
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

    def _forget_gone(self, first: int, count: int) -> None:
        """An item that left from the middle comes back: what is left of its old place must go first."""
        if self._gone and not self._gone.isdisjoint(range(first, first + count)):
            self._sweep()

    def _skip_gone(self, queue: deque[int]) -> None:
        gone = self._gone
        while gone and queue and queue[0] >> RUN_BITS in gone:
            head = queue[0]
            gone.remove(head >> RUN_BITS)
            if head & _COUNT_MASK:
                queue[0] = ((head >> RUN_BITS) + 1) << RUN_BITS | ((head & _COUNT_MASK) - 1)
            else:
                queue.popleft()

    def _sweep(self) -> None:
        """Rewrite the queues without what is gone."""
        if not self._gone:
            return
        gone = sorted(self._gone)
        self._gone = set()
        for priority in list(self._priorities):
            queue = self._queues[priority]
            kept: list[int] = []
            for run in queue:
                first = run >> RUN_BITS
                end = first + (run & _COUNT_MASK) + 1
                place = bisect_left(gone, first)
                while place < len(gone) and gone[place] < end:
                    if first < gone[place]:
                        kept.append(first << RUN_BITS | (gone[place] - first - 1))
                    first = gone[place] + 1
                    place += 1
                if first < end:
                    kept.append(first << RUN_BITS | (end - first - 1))
            self._queues[priority] = deque(kept)
            self._forget_empty(priority)
