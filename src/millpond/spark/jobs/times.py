"""Spans and windows as people write them, for whoever starts the jobs. Needs no Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from millpond.durations import text_ms
from millpond.errors import InvalidRequest

WINDOW_MS_MIN = 1_000  # of a shorter one there would be more than of events
WINDOW_MS_MAX = 366 * 86_400_000  # longer is a mistake of units


def window_ms(text: str, flag: str = "--window") -> int:
    ms = text_ms(text)
    if ms is None or not WINDOW_MS_MIN <= ms <= WINDOW_MS_MAX:
        raise InvalidRequest(f"{flag} is {text!r:.60}; give a duration from 1s to 366d, such as 15m")
    return ms


def instant(text: str | None, flag: str, now: datetime) -> datetime | None:
    """An instant, in UTC unless it says otherwise, or how long ago it was."""
    if text is None:
        return None
    ago = text_ms(text)
    try:
        found = datetime.fromisoformat(text) if ago is None else now - timedelta(milliseconds=ago)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{flag} is {text!r:.60}; write it like 2026-03-01T12:00Z, or 24h for so long ago"
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)


def span(since: str | None, until: str | None, now: datetime) -> tuple[datetime | None, datetime | None]:
    first, end = instant(since, "--since", now), instant(until, "--until", now)
    if first is not None and end is not None and first >= end:
        raise InvalidRequest(f"--since {first} is not before --until {end}; nothing lies between them")
    return first, end
