"""Which leases are to be extended, and when. No I/O, no clock: the keepers have those."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from millpond.consuming.held import Held, Keeps
from millpond.durations import seconds
from millpond.errors import MillpondError, NotFound
from millpond.model import TOKEN_BATCH_MAX, Duration, Result

PERIOD_MIN_S = 0.05  # shorter leases cannot be kept over a network
AGAIN_S = 1.0  # after a failure, if the lease has that long
SLACK = 0.25  # of a period: what is due soon goes along
MEASURE_S = 0.5  # what is held for longer is worth asking how long the queue's leases are by now
CHANGED = 0.1  # of a lease's length: more than a reply is late by


class Kept(Struct):
    """`since` and `deadline`: when the lease was last heard of, by this machine's clock, and its end by the server's.

    One that is not `measured` has a period that may be wrong: the queue was changed since, or this machine's time is
    not the server's.
    """

    item: Held
    period: float
    due: float
    since: float
    deadline: datetime
    measured: bool


class Watch:
    """Threads may add and remove while another looks: each step on the dict is one of the interpreter's."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, item: Held, every: float | None, now: float) -> float:
        guess = period(item)
        length = guess if every is None else every
        measured = item.lease_timeout is not None  # by the caller's own word
        due = now + (length if measured else min(length, guess, MEASURE_S))
        self._kept[id(item)] = Kept(item, length, due, now, item.lease_deadline, measured)
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

    def unmeasured(self, now: float) -> list[tuple[str, list[Kept]]]:
        groups: dict[str, list[Kept]] = {}
        for kept in list(self._kept.values()):
            if not kept.measured and kept.due <= now:
                groups.setdefault(kept.item.queue, []).append(kept)
        return list(groups.items())

    def measured(self, lot: Sequence[Kept], period: float | None) -> None:
        """None: nobody knows better than the guess."""
        for kept in lot:
            kept.period = kept.period if period is None else period
            kept.due = kept.since + kept.period
            kept.measured = True

    def due(self, now: float) -> Iterator[tuple[str, Duration | None, list[Kept]]]:
        """Queue, lease timeout and those that go in one request."""
        if self.next_due() > now:
            return
        groups: dict[tuple[str, str], list[Kept]] = {}
        for kept in list(self._kept.values()):
            if kept.measured and kept.due <= now + kept.period * SLACK:
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
            if result.lease_deadline is not None and kept.item.lease_timeout is None:
                _compare(kept, result.lease_deadline, now)
            if kept.item.lost:
                self._let_go(kept.item)

    def failed(self, lot: Sequence[Kept], error: MillpondError, now: float) -> None:
        for kept in lot:
            kept.due = now + min(kept.period, AGAIN_S)
            if isinstance(error, NotFound):
                kept.item.lose()
                self._let_go(kept.item)

    def _let_go(self, item: Held) -> None:
        self.remove(item)
        item.holding.keeper.drop(item)  # who may be another than this watch's


def _compare(kept: Kept, deadline: datetime, now: float) -> None:
    """A deadline that went on by another time than passed is of a lease of another length: that is asked for."""
    longer = (deadline - kept.deadline).total_seconds() - (now - kept.since)
    kept.since, kept.deadline = now, deadline
    if abs(longer) > CHANGED * 2 * kept.period:
        kept.measured = False
        kept.due = now + min(kept.period, MEASURE_S)


def period(item: Held) -> float:
    """Without a word on its lease's length, as this machine's clock has it."""
    known = None if item.lease_timeout is None else seconds(item.lease_timeout)
    if known is None:
        known = (item.lease_deadline - datetime.now(UTC)).total_seconds()
    return half_of(known)


def half_of(lease_s: float) -> float:
    """An extension may fail once."""
    return max(PERIOD_MIN_S, lease_s / 2)
