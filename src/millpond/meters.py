"""What is counted while the engine runs, and readings of it: plain numbers for whoever shows them. No I/O, no clock.

All of it belongs to the engine's event loop: counting and reading there needs no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add

import msgspec

from millpond.model import State

STATES = tuple(State)
TRANSITIONS = ("produced", "leased", "completed", "retried", "dead", "cancelled", "letters", "claimed")
"""What a partition keeps totals of, over its whole life. `letters` are dead letters that came from other queues."""

OTHER_QUEUES = "(other)"  # no queue can be called that
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram:
    """`counts[i]` of the values were at most `bounds[i]` and above the bound before; the last were above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += times * value


class StoreMeter:
    """The commits of all partitions in one store, and what failed: counts by job and reason."""

    __slots__ = ("failures", "items", "requests", "seconds")

    def __init__(self) -> None:
        self.requests = Histogram(SIZES)
        self.items = Histogram(SIZES)
        self.seconds = Histogram(SECONDS)
        self.failures: dict[tuple[str, str], int] = {}

    def count(self, requests: int, items: int, seconds: float) -> None:
        """With every commit: three `observe`s without the calls."""
        meter = self.requests
        meter.counts[bisect_left(SIZES, requests)] += 1
        meter.total += requests
        meter = self.items
        meter.counts[bisect_left(SIZES, items)] += 1
        meter.total += items
        meter = self.seconds
        meter.counts[bisect_left(SECONDS, seconds)] += 1
        meter.total += seconds

    def fail(self, job: str, reason: str) -> None:
        self.failures[job, reason] = self.failures.get((job, reason), 0) + 1


class EngineMeter:
    def __init__(self, stores: Iterable[str]) -> None:
        self.stores = {name: StoreMeter() for name in stores}
        self.loads = 0  # of queues
        self.panics = 0  # bugs of ours that a queue survived
        self.registry_failures = 0

    def know(self, store: str) -> None:
        self.stores.setdefault(store, StoreMeter())


class QueueReading(msgspec.Struct, kw_only=True):
    """A queue that is awake, or the sum of several.

    `counts` are in the order of STATES. `transitions` are in that of TRANSITIONS and never go down, unlike the totals
    in memory, which a failed commit takes back; None until each partition was read once. `away` and `paused` are
    numbers of partitions and queues.
    """

    queue: str
    counts: list[int]
    transitions: list[int] | None
    oldest_ready_s: float
    waiters: int
    away: int
    paused: int


class EngineReading(msgspec.Struct, kw_only=True):
    """`partitions` are those of awake queues, by store and status; `job_age_s` is that of a store's oldest job."""

    queues: list[QueueReading]
    awake: int
    known: int
    partitions: dict[tuple[str, str], int]
    job_age_s: dict[str, float]
    meter: EngineMeter


def added(one: Iterable[int], other: Iterable[int]) -> list[int]:
    return list(map(add, one, other))


def cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    """As Prometheus wants it: how many were at most each bound."""
    names = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(names, accumulate(map(float, histogram.counts)), strict=True))
