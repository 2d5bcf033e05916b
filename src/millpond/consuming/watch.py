"""Which leases are to be extended, and when. No I/O, no clock: the keepers have those."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from millpond.consuming.held import Held, Keeps
from millpond.durations import seconds
from millpond.model import TOKEN_BATCH_MAX, Duration, Result

PERIOD_MIN_S = 0.05  # shorter leases cannot be kept over a network
AGAIN_S = 1.0  # after a failure, if the lease has that long
SLACK = 0.25  # of a period: what is due soon goes along


class Kept(Struct):
    item: Held
    period: float
    due: float


class Watch:
    """Threads may add and remove while another looks: each step on the dict is one of the interpreter's."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, item: Held, period: float, now: float) -> float:
        due = now + period
        self._kept[id(item)] = Kept(item, period, due)
        return due

    def remove(self, item: Held) -> None:
        self._kept.pop(id(item), None)

    def forget(self, keeper: Keeps) -> None:
        """All the items that are told of to this one."""
        for key, kept in list(self._kept.items()):
            if kept.item.holding.keeper is keeper:
                self._kept.pop(key, None)

    def clear(self) -> None:
        self._kept.clear()

    def next_due(self) -> float:
        return min((kept.due for kept in list(self._kept.values())), default=math.inf)

    def due(self, now: float) -> Iterator[tuple[str, Duration | None, list[Kept]]]:
        """Queue, lease timeout and those that go in one request."""
        if self.next_due() > now:
            return
        groups: dict[tuple[str, str], list[Kept]] = {}
        for kept in list(self._kept.values()):
            if kept.due <= now + kept.period * SLACK:
                groups.setdefault((kept.item.queue, repr(kept.item.lease_timeout)), []).append(kept)
        for (queue, _), group in groups.items():
            for begin in range(0, len(group), TOKEN_BATCH_MAX):
                lot = group[begin : begin + TOKEN_BATCH_MAX]
                yield queue, lot[0].item.lease_timeout, lot

    def extended(self, lot: Sequence[Kept], results: Sequence[Result], now: float) -> None:
        for kept, result in zip(lot, results, strict=True):
            kept.due = now + kept.period
            if kept.item.finished:
                continue
            kept.item.learn(result)
            if kept.item.lost:
                self.remove(kept.item)
                kept.item.holding.keeper.drop(kept.item)  # who may be another than this watch's

    def failed(self, lot: Sequence[Kept], now: float) -> None:
        for kept in lot:
            kept.due = now + min(kept.period, AGAIN_S)


def period(item: Held) -> float:
    """Without a word on its lease's length, as this machine's clock has it."""
    known = None if item.lease_timeout is None else seconds(item.lease_timeout)
    if known is None:
        known = (item.lease_deadline - datetime.now(UTC)).total_seconds()
    return half_of(known)


def half_of(lease_s: float) -> float:
    """An extension may fail once."""
    return max(PERIOD_MIN_S, lease_s / 2)
