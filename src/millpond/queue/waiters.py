"""Leases that wait for items: first come, first served, shared one item at a time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count, islice

from millpond.queue.requests import Lease


class Waiters:
    """The parked leases in the order of their arrival. One that was answered or has gone is passed over."""

    __slots__ = ("_order", "_parked", "_timers")

    def __init__(self) -> None:
        self._parked: dict[int, Lease] = {}
        self._timers: list[tuple[int, int]] = []
        self._order = count()

    def park(self, lease: Lease) -> None:
        lease.order = next(self._order)
        self._parked[lease.order] = lease
        heappush(self._timers, (lease.until, lease.order))

    def park_again(self, lease: Lease) -> None:
        """Back to its old place: its items were lost with a failed commit."""
        self._parked[lease.order] = lease
        self._parked = dict(sorted(self._parked.items()))
        heappush(self._timers, (lease.until, lease.order))

    def withdraw(self, lease: Lease) -> bool:
        return self._parked.pop(lease.order, None) is not None

    def first(self, limit: int) -> list[Lease]:
        """The `limit` leases that have waited longest."""
        return list(islice(self._parked.values(), limit))

    def remove_first(self, number: int) -> None:
        for order in list(islice(self._parked, number)):
            del self._parked[order]

    def pop_due(self, now: int) -> list[Lease]:
        """Leases whose wait is over."""
        due: list[Lease] = []
        while self._timers and self._timers[0][0] <= now:
            lease = self._parked.pop(heappop(self._timers)[1], None)
            if lease is not None:
                due.append(lease)
        return due

    def pop_all(self) -> list[Lease]:
        leases = list(self._parked.values())
        self._parked.clear()
        self._timers.clear()
        return leases

    def next_at(self) -> int | None:
        while self._timers and self._timers[0][1] not in self._parked:
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def __len__(self) -> int:
        return len(self._parked)


def share(items: int, batches: Sequence[int]) -> list[int]:
    """Deal `items` round-robin, one at a time, to waiters that want at most `batches` each.

    >>> share(23, [20, 6, 1])
    [16, 6, 1]
    """
    if len(batches) == 1:
        return [min(items, batches[0])]
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
