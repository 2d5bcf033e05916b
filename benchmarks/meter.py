"""What both sides of the comparison are measured with: the payloads, and the rate in a window of time."""

from __future__ import annotations

import random
import time
from typing import Any

PAYLOAD_BYTES = 200  # as in all the figures that this benchmark is compared with


def payloads(count: int) -> list[bytes]:
    """Distinct and incompressible; the same ones go in every turn, so making them costs nothing while it counts."""
    rng = random.Random(count)
    return [rng.randbytes(PAYLOAD_BYTES) for _ in range(count)]


class Meter:
    """Counts finished items from the end of the warm-up until `seconds` or `items_max` are over.

    `adds_first` are part of the warm-up: clients that begin together first do nothing but produce.
    """

    def __init__(self, seconds: float, items_max: int | None = None, adds_first: int = 0) -> None:
        self._seconds = seconds
        self._items_max = items_max
        self._adds_left = adds_first
        self._warm_at = time.perf_counter() + 0.15 * seconds
        self._start: float | None = None
        self._start_cpu = 0.0
        self._wall = self._cpu = 0.0
        self._items = 0
        self._done = False

    def add(self, items: int) -> None:
        now = time.perf_counter()
        if self._start is None:
            self._adds_left -= 1
            if now >= self._warm_at and self._adds_left <= 0:
                self._start, self._start_cpu = now, time.process_time()
            return
        if self._done:
            return
        self._items += items
        self._wall = now - self._start
        if self._wall >= self._seconds or (self._items_max is not None and self._items >= self._items_max):
            self._cpu = time.process_time() - self._start_cpu
            self._done = True

    def is_done(self) -> bool:
        return self._done

    def result(self) -> dict[str, Any]:
        return {
            "items": self._items,
            "rate": self._items / self._wall,
            "cpu_us": self._cpu / self._items * 1e6,
        }


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
