"""The one place that reads the time. Instants are whole milliseconds since 1970, UTC."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

_NS = 1_000_000  # in a millisecond
_elapsed_ns = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)


class Clock:
    """Follows the wall clock forwards and never goes back.

    When the wall clock steps back, time goes on at the pace of the elapsed-time clock, so that leases still
    expire. `at_least` lifts it to a persisted high-water mark, so that a restart does not go back either. The two
    clocks that it follows tell nanoseconds.
    """

    def __init__(self, wall: Callable[[], int] = time.time_ns, elapsed: Callable[[], int] = _elapsed_ns) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._last = wall() // _NS
        self._last_elapsed = elapsed() // _NS

    def now(self) -> int:
        elapsed = self._elapsed() // _NS
        passed = self._last + elapsed - self._last_elapsed
        self._last_elapsed = elapsed
        wall = self._wall() // _NS
        self._last = now = wall if wall > passed else passed
        return now

    def at_least(self, instant: int) -> None:
        if instant > self._last:
            self._last = instant


class ManualClock(Clock):
    """A clock that tests move by hand: `advance` lets time pass, `step` changes only the wall clock."""

    def __init__(self, now: int = 1_700_000_000_000) -> None:
        self._wall_now = now
        self._elapsed_now = 0
        super().__init__(lambda: self._wall_now * _NS, lambda: self._elapsed_now * _NS)

    def advance(self, ms: int) -> None:
        self._wall_now += ms
        self._elapsed_now += ms

    def step(self, ms: int) -> None:
        self._wall_now += ms
