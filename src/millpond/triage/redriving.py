"""Brings chosen items back, batch by batch, each written to the record before it is moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import TypeVar

import msgspec

from millpond.errors import NotFound
from millpond.model import ErrorInfo
from millpond.triage.dead import Calls, Chosen
from millpond.triage.pace import Pace
from millpond.triage.record import Line, Record, groups_of

T = TypeVar("T")

ERRORS_SHOWN_MAX = 100  # of those that could not go back; the record has them all

Tell = Callable[[int], None]
Now = Callable[[], datetime]


class Outcome(msgspec.Struct):
    """`chosen` is how many were tried, `errors` the first of those that could not go back, by id."""

    chosen: int = 0
    moved: int = 0
    failed: Counter[str] = msgspec.field(default_factory=Counter)
    errors: dict[str, ErrorInfo] = msgspec.field(default_factory=dict)


def in_batches(things: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(things)
    while batch := list(islice(left, size)):
        yield batch


class Redrive:
    """`outcome` is what is done so far, also when `run` raises."""

    def __init__(self, pond: Calls, queue: str, record: Record, pace: Pace, now: Now) -> None:
        self._pond = pond
        self._queue = queue
        self._record = record
        self._pace = pace
        self._now = now
        self._targets: dict[str, str] = {}
        self.outcome = Outcome()

    def run(self, chosen: Iterable[Chosen], tell: Tell) -> None:
        """`tell` is told how many were tried."""
        outcome = self.outcome
        for batch in in_batches(chosen, self._pace.batch):
            self._pace.step(len(batch))
            targets = self._new_targets(batch)
            self._record.append(Line(at=self._now(), batch=groups_of(batch), targets=targets))
            self._move(batch)
            tell(outcome.chosen)
        ended = {"moved": outcome.moved, "failed": outcome.failed.total()}
        self._record.append(Line(at=self._now(), ended=ended))

    def _new_targets(self, batch: Sequence[Chosen]) -> dict[str, str]:
        found = {to: self._incarnation(to) for to in {one.to for one in batch} - self._targets.keys()}
        self._targets |= found
        return found

    def _incarnation(self, queue: str) -> str:
        try:
            return self._pond.queue_info(queue).incarnation
        except NotFound:
            return ""

    def _move(self, batch: Sequence[Chosen]) -> None:
        outcome = self.outcome
        moved = self._pond.redrive(self._queue, ids=[one.id for one in batch])
        outcome.chosen += len(batch)
        outcome.moved += moved.moved
        outcome.failed.update(error.code for error in moved.errors.values())
        outcome.failed[NotFound.code] += len(batch) - moved.moved - len(moved.errors)  # gone since they were chosen
        outcome.errors |= dict(islice(moved.errors.items(), ERRORS_SHOWN_MAX - len(outcome.errors)))
        errors = {id: error.message for id, error in moved.errors.items()}
        self._record.append(Line(done=moved.moved, errors=errors), durable=False)
