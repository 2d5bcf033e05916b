"""A schedule: when, and which job. What is in its item, and in the item's state document."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from millpond.errors import InvalidRequest
from millpond.jobs.names import HELD, JOBS_QUEUE, KINDS
from millpond.jobs.spec import JobSpec
from millpond.jobs.ticks import Cron, Every, Ticks, next_after

Missed = Literal["skip", "latest", "all"]


class Schedule(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of `cron` and `every` (seconds). `last`: ticks up to there are over, fired or not; `fired`: the newest
    that is known to be fired. Both as of when the item was made: its state document knows more.

    A tick was missed if the next one is due too, or if it is over a minute late. Of those that were, `missed` fires
    the newest, all, or none (`skip`).
    """

    name: str
    cron: str | None = None
    every: float | None = None
    timezone: str = "UTC"
    queue: str = JOBS_QUEUE
    spec: JobSpec
    priority: int = 0
    max_retries: int | None = None
    missed: Missed = "latest"
    start: datetime | None = None
    paused: bool = False
    created_at: datetime
    last: datetime
    fired: datetime | None = None

    def ticks(self) -> Ticks:
        if self.cron is not None:
            return Cron(self.cron, self.timezone)
        assert self.every is not None, "it was checked"
        return Every(self.every, self.start or self.created_at)

    @property
    def when(self) -> str:
        """For people."""
        if self.cron is not None:
            return f"{self.cron} ({self.timezone})"
        return f"every {self.every:g} s"


class Scheduled(msgspec.Struct, kw_only=True):
    """A schedule as it is now. `error`: why it could not be fired, if it was tried and not done yet."""

    schedule: Schedule
    next_at: datetime | None
    fired_at: datetime | None = None
    error: str | None = None


class Fired(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The state document of a schedule: the ticks that were about to be fired, when, and in which attempt.

    It is written before they are. A delivery that ended well gives its attempt back, so at the next one the count is
    the same; if it has grown, nobody knows whether they were fired.
    """

    ticks: list[datetime]
    at: datetime
    attempts: int


def read(payload: bytes, kind: str) -> Schedule | None:
    """None for what is no schedule: its kind must be its job's, since that is what its producer was allowed."""
    try:
        schedule = msgspec.json.decode(payload, type=Schedule)
        schedule.ticks()
    except (msgspec.DecodeError, InvalidRequest, AssertionError):
        return None
    return schedule if kind in KINDS and schedule.spec.kind == kind else None


def read_fired(document: object) -> Fired | None:
    try:
        return None if document is None else msgspec.convert(document, Fired)
    except msgspec.ValidationError:
        return None


def next_due(schedule: Schedule, last: datetime) -> datetime:
    """The first tick after `last`."""
    due = next_after(schedule.ticks(), last)
    if due is None or due >= HELD:
        raise InvalidRequest(f"schedule {schedule.name!r} has no tick in the years to come; mend its cron line")
    return due
