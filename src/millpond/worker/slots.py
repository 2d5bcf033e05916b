"""How many jobs run at a time, and how many more to have at hand. No I/O, no clock."""

from __future__ import annotations

import math
from typing import Any

from millpond.errors import InvalidRequest
from millpond.worker.executors import Executor, TakesBacklog

SLOTS_MAX = 10_000  # each may be a process
AHEAD_S = 0.1  # items are leased ahead for so long: a round trip is hidden, and no other worker would be much sooner
AHEAD_MAX = 500  # items at a commit: beyond it, larger batches gain nothing
RATE_MEMORY_S = 0.1  # how long the past counts for the rate: as far as it looks ahead


class Place:
    """An executor, and what the runner knows about it. `down`: it crashed, and is not started again yet."""

    __slots__ = ("crashes", "down", "executor", "load", "takes_backlog")

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.takes_backlog = isinstance(executor, TakesBacklog)
        self.load = 0
        self.down = False
        self.crashes: list[float] = []


class Slots:
    """`running` are all that were handed to executors, a backlog that they keep included."""

    def __init__(self, count: Any) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= SLOTS_MAX:
            raise InvalidRequest(f"slots is {count!r:.60}; use 1 to {SLOTS_MAX}")
        self.count: int = count
        self.running = 0
        self.rate = 0.0  # jobs a second that end
        self.moved_at = 0.0  # when a job last began or ended
        self._measured_at = 0.0

    @property
    def taken(self) -> int:
        """A backlog takes none: it waits."""
        return min(self.running, self.count)

    @property
    def full(self) -> bool:
        return self.running >= self.count

    @property
    def ahead(self) -> int:
        return min(AHEAD_MAX, int(self.rate * AHEAD_S))

    @property
    def places(self) -> int:
        """How many may wait for a slot, those that are free included."""
        return max(0, self.count + self.ahead - self.running)

    def batch_max(self, hot: bool) -> int:
        """The most to lease at a time: one half while the other runs. From a queue that was empty just now, who knows
        of what kind the next items are: only what can begin at once.
        """
        if not hot:
            return max(1, self.count - self.running)
        return max(self.count, (self.count + self.ahead) // 2)

    def fits(self, place: Place) -> bool:
        """In a free slot; or in the backlog of an executor that has all the jobs there are."""
        if self.running < self.count:
            return True
        return place.takes_backlog and place.load == self.running and self.running < self.count + self.ahead

    def fade(self, now: float) -> None:
        """While nothing runs, what was is less and less of a guide to what comes."""
        if self.running == 0:
            self.rate *= math.exp((self._measured_at - now) / RATE_MEMORY_S)
            self._measured_at = now

    def begin(self, place: Place, now: float) -> None:
        self.fade(now)
        self.moved_at = now
        self.running += 1
        place.load += 1

    def end(self, place: Place) -> None:
        self.running -= 1
        place.load -= 1

    def ended(self, count: int, now: float) -> None:
        """So many did since it was last said: a rate that fades with the time that it took."""
        self.moved_at = now
        passed = max(1e-6, now - self._measured_at)
        self._measured_at = now
        self.rate += (count / passed - self.rate) * -math.expm1(-passed / RATE_MEMORY_S)
