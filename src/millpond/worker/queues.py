"""The queues of a worker and their weights: whose job is next, and how much to lease from each. No I/O, no clock.

Each job that a queue gets a slot for costs it 1 / weight; the next slot goes to who has paid least. A queue that had
nothing to do begins again with what the others have paid by then: it is neither punished nor saves up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from millpond.errors import InvalidRequest
from millpond.worker.executors import Running

WEIGHT_MAX = 1_000_000.0  # beyond it, shares are not told apart from none at all


class Source:
    """A queue of this worker. `asked`: how many it was asked for and has not answered; `hot`: it had all it was."""

    __slots__ = ("asked", "hot", "name", "paid", "price", "waiting", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.price = 1.0 / weight
        self.paid = 0.0
        self.waiting: deque[Running] = deque()
        self.asked = 0
        self.hot = False

    @property
    def active(self) -> bool:
        return self.hot or bool(self.waiting)


class Sources:
    def __init__(self, weights: Mapping[str, float]) -> None:
        if not weights:
            raise InvalidRequest("a worker needs a queue; name one")
        self._all = [Source(name, _weight(name, weight)) for name, weight in weights.items()]
        self._now = 0.0  # what those who are served have paid

    def __iter__(self) -> Iterator[Source]:
        return iter(self._all)

    @property
    def several(self) -> bool:
        return len(self._all) > 1

    @property
    def waiting(self) -> int:
        return sum([len(source.waiting) for source in self._all])

    @property
    def in_hand(self) -> int:
        """Items that wait for a slot, and those that may come any moment: asked for and thought to be there."""
        return sum([len(source.waiting) + (source.asked if source.hot else 0) for source in self._all])

    def add(self, source: Source, jobs: list[Running]) -> None:
        if not source.active:
            source.paid = max(source.paid, self._now)
        source.waiting.extend(jobs)

    def next(self) -> Source | None:
        """Whose job is next; it stays there until it is taken."""
        best: Source | None = None
        for source in self._all:
            if source.waiting and (best is None or source.paid < best.paid):
                best = source
        return best

    def take(self, source: Source) -> Running:
        self._now = source.paid
        source.paid += source.price
        return source.waiting.popleft()

    def take_all(self) -> list[Running]:
        """All that wait, to be given back."""
        jobs = [job for source in self._all for job in source.waiting]
        for source in self._all:
            source.waiting.clear()
        return jobs

    def wanted(self, source: Source, places: int) -> int:
        """How many to ask for, if so many may wait for a slot in all. Its share of them, of those who have items.

        With several queues each may have one that waits, come what may: else its turn would find it empty-handed.
        """
        free = places - self.in_hand
        if not self.several:
            return max(0, free)
        if not source.waiting and not source.hot:
            return 1  # it is asked whether it has any: its share comes once it has
        weights = sum([other.weight for other in self._all if other.active or other is source])
        share = round(places * source.weight / weights) - len(source.waiting)
        return max(min(share, free), 0 if source.waiting else 1)


def _weight(name: str, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= WEIGHT_MAX:
        raise InvalidRequest(f"the weight of {name!r:.60} is {weight!r:.60}; use a number above 0, such as 2")
    return float(weight)
