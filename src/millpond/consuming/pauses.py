"""How long to wait before what failed is tried again. No I/O, no clock."""

from __future__ import annotations

from random import Random

PAUSE_MIN_S = 0.05  # a dropped connection is had again at once, a restarting server in some tries
PAUSE_MAX_S = 5.0  # a server that is back after an hour is found within seconds


class Pauses:
    """Exponential, half of each by chance: clients that failed together do not come back together."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._count = 0

    def next(self) -> float:
        pause = min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** min(self._count, 30))
        self._count += 1
        return pause * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._count = 0
