"""Items a second over the last minute."""

from __future__ import annotations

from millpond.model import Rates

_SECONDS = 60
_NAMES = ("produced", "leased", "completed", "retried", "dead")


class RateMeter:
    """A ring of one-second buckets for each name."""

    __slots__ = ("_buckets", "_second")

    def __init__(self) -> None:
        self._buckets = {name: [0] * _SECONDS for name in _NAMES}
        self._second = 0

    def count(self, name: str, by: int, now: int) -> None:
        if now // 1000 > self._second:
            self._roll(now)
        self._buckets[name][self._second % _SECONDS] += by

    def rates(self, now: int) -> Rates:
        self._roll(now)
        return Rates(**{name: sum(ring) / _SECONDS for name, ring in self._buckets.items()})

    def _roll(self, now: int) -> None:
        second = now // 1000
        for passed in range(max(self._second + 1, second - _SECONDS + 1), second + 1):
            for ring in self._buckets.values():
                ring[passed % _SECONDS] = 0
        self._second = max(self._second, second)
