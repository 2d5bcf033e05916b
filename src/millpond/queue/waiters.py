"""Who waits: first come, first served. Leases share arriving items one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Generic, Protocol, TypeVar

STALE_SLACK = 1_024  # timers of those who wait no more, beyond as many as do: what is left behind must not pile up


class Waiter(Protocol):
    """`until` when it waits; its place among the others is its `order`."""

    @property
    def until(self) -> int: ...

    order: int


W = TypeVar("W", bound=Waiter)


class Waiters(Generic[W]):
    """Those who are parked, in the order of their arrival. One that was answered or has gone is passed over."""

    __slots__ = ("_fresh", "_order", "_timers", "parked")

    def __init__(self) -> None:
        self.parked: dict[int, W] = {}  # by order
        self._fresh: list[W] = []  # those without a timer: most have what they wait for before one is looked at
        self._timers: list[tuple[int, int]] = []
        self._order = count()

    def park(self, waiter: W) -> None:
        waiter.order = order = next(self._order)
        self.parked[order] = waiter
        self._fresh.append(waiter)

    def park_again(self, waiter: W) -> None:
        """Back to its old place: its items were lost with a failed commit."""
        self.parked[waiter.order] = waiter
        self.parked = dict(sorted(self.parked.items()))
        heappush(self._timers, (waiter.until, waiter.order))

    def withdraw(self, waiter: W) -> bool:
        return self.parked.pop(waiter.order, None) is not None

    def first(self, limit: int) -> list[W]:
        """The `limit` waiters that have waited longest."""
        return list(islice(self.parked.values(), limit))

    def remove_first(self, number: int) -> None:
        if number == len(self.parked):
            self.parked.clear()
            self._fresh.clear()
            return
        for order in list(islice(self.parked, number)):
            del self.parked[order]

    def _set_timers(self) -> None:
        fresh, self._fresh = self._fresh, []
        for waiter in fresh:
            if waiter.order in self.parked:
                heappush(self._timers, (waiter.until, waiter.order))
        if len(self._timers) > 2 * len(self.parked) + STALE_SLACK:
            self._timers = [timer for timer in self._timers if timer[1] in self.parked]
            heapify(self._timers)

    def pop_due(self, now: int) -> list[W]:
        """Those whose wait is over."""
        if self._fresh:
            self._set_timers()
        due: list[W] = []
        while self._timers and self._timers[0][0] <= now:
            waiter = self.parked.pop(heappop(self._timers)[1], None)
            if waiter is not None:
                due.append(waiter)
        return due

    def pop_all(self) -> list[W]:
        waiters = list(self.parked.values())
        self.parked.clear()
        self._fresh.clear()
        self._timers.clear()
        return waiters

    def next_at(self) -> int | None:
        if self._fresh:
            self._set_timers()
        while self._timers and self._timers[0][1] not in self.parked:
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def __len__(self) -> int:
        return len(self.parked)


def share(items: int, batches: Sequence[int]) -> list[int]:
    """Deal `items` round-robin, one at a time, to waiters that want at most `batches` each.

    >>> share(23, [20, 6, 1])
    [16, 6, 1]
    """
    if sum(batches) <= items:
        return list(batches)
    if len(batches) == 1:
        return [items]
    shares = [0] * len(batches)
    open_waiters = list(range(len(batches)))
    while items and open_waiters:
        rounds = min(min(batches[w] - shares[w] for w in open_waiters), items // len(open_waiters))
        if not rounds:  # fewer items than waiters: one each for the first
            for waiter in open_waiters[:items]:
                shares[waiter] += 1
            break
        for waiter in open_waiters:
            shares[waiter] += rounds
        items -= rounds * len(open_waiters)
        open_waiters = [w for w in open_waiters if shares[w] < batches[w]]
    return shares
