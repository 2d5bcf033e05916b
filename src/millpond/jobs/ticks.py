"""When a schedule is due: a cron line in a time zone, or an interval that is anchored so that it does not drift.

Instants are aware datetimes, in UTC where they leave this module. Cron lines have the five fields of Debian's cron, and
its rules where clocks are set: what falls into a skipped hour runs right after it, what names an hour that comes twice
runs once.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import takewhile
from typing import Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from millpond.errors import InvalidRequest

EVERY_MIN = 1.0  # seconds: what must happen more often is a job that does not end
EVERY_MAX = 366 * 86_400.0  # seconds: longer is a unit mistake
CRON_CHARS_MAX = 1_000
_LOOKED_BACK = timedelta(minutes=1)  # for ticks that were missed, at first

_SOME_DAY = datetime(2024, 1, 1, tzinfo=UTC)
_HINT = "the fields are minute, hour, day of month, month, day of week, as in '*/5 8-17 * * mon-fri'"
_NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


class Ticks(Protocol):
    def after(self, instant: datetime) -> Iterator[datetime]:
        """Those after the instant, in order."""
        ...


def zone(name: str) -> tzinfo:
    if name.upper() in ("UTC", "ETC/UTC", "Z"):
        return UTC  # needs no data
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    try:
        ZoneInfo("Europe/Berlin")
    except (ZoneInfoNotFoundError, OSError):
        raise InvalidRequest(
            f"time zone {name!r:.60} is not known here: this machine has no time zone data; install the package tzdata"
        ) from None
    raise InvalidRequest(f"there is no time zone {name!r:.60}; use a name such as 'Europe/Berlin' or 'UTC'")


class Cron:
    def __init__(self, line: str, timezone: str = "UTC") -> None:
        self._zone = zone(timezone)
        self._line = _fields(line)
        wrong = _wrong(self._line)
        if wrong is not None and _wrong(_in_any_month(self._line)) is not None:
            raise InvalidRequest(f"cron line {line!r:.80} has a {wrong.lower()}; {_HINT}")
        if wrong is not None or next_after(self, _SOME_DAY) is None:
            raise InvalidRequest(f"cron line {line!r:.80} never comes; mend its day and month")

    def after(self, instant: datetime) -> Iterator[datetime]:
        for tick in CronSim(self._line, instant.astimezone(self._zone)):
            found = tick.astimezone(UTC)
            if found > instant:  # an hour that comes twice has come already
                yield found


def _wrong(line: str) -> str | None:
    try:
        CronSim(line, _SOME_DAY)
    except CronSimError as error:
        return str(error)
    return None


def _in_any_month(line: str) -> str:
    """What is wrong then is the field, not the date."""
    fields = line.split()
    return " ".join([*fields[:3], "*", fields[4]])


def _fields(line: str) -> str:
    if len(line) > CRON_CHARS_MAX:
        raise InvalidRequest("a cron line is a short text such as '*/5 * * * *'; give one")
    line = _NAMED.get(line.strip().lower(), line)
    count = len(line.split())
    if count != 5:
        raise InvalidRequest(f"cron line {line!r:.80} has {count} fields, but five are needed; {_HINT}")
    return line


class Every:
    """`first` is the first tick; all others are a whole number of intervals after it."""

    def __init__(self, seconds: float, first: datetime) -> None:
        if not EVERY_MIN <= seconds <= EVERY_MAX:
            raise InvalidRequest(f"every is {seconds:.15g} s; use {EVERY_MIN:g} s to {EVERY_MAX / 86_400:g} days")
        self._step = timedelta(milliseconds=round(seconds * 1000))
        self._first = first.astimezone(UTC)

    def after(self, instant: datetime) -> Iterator[datetime]:
        place = max(0, (instant - self._first) // self._step + 1)
        tick = self._first + place * self._step
        while True:
            yield tick
            tick += self._step


def next_after(ticks: Ticks, instant: datetime) -> datetime | None:
    """None: there is none, for 50 years at least."""
    return next(ticks.after(instant), None)


def missed(ticks: Ticks, last: datetime, now: datetime, limit: int) -> tuple[list[datetime], bool]:
    """The newest ticks after `last` up to `now`, at most `limit` in order; whether there were more."""
    back = _LOOKED_BACK
    while True:
        start = max(last, now - back)
        found = list(takewhile(lambda tick: tick <= now, ticks.after(start)))
        if start == last or len(found) > limit:
            return found[-limit:], len(found) > limit
        back *= 2
