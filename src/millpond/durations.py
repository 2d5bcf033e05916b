"""Durations as callers give them: seconds, a `timedelta`, or a string such as 90s, 1m30s, 500ms or PT1M30S."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import lru_cache
from typing import Any

from millpond.errors import InvalidRequest
from millpond.model import Duration

_CHARS_MAX = 100  # of the longest sensible one
_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_SHORT = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhdw]))+", re.ASCII)
_SHORT_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_ISO = re.compile(
    r"P(?:(?P<w>\d+(?:\.\d+)?)W)?(?:(?P<d>\d+(?:\.\d+)?)D)?"
    r"(?:T(?:(?P<h>\d+(?:\.\d+)?)H)?(?:(?P<m>\d+(?:\.\d+)?)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?",
    re.ASCII,
)


@lru_cache  # the same few are sent with every request
def _ms_of_text(value: str) -> int | None:
    text = value.strip()
    if _SHORT.fullmatch(text):
        return round(sum(float(n) * _UNITS[unit] for n, unit in _SHORT_PART.findall(text)))
    iso = _ISO.fullmatch(text)
    if iso and any(iso.groups()):
        return round(sum(float(n) * _UNITS[unit] for unit, n in iso.groupdict().items() if n))
    return None


def text_ms(value: str) -> int | None:
    """None for what is no duration."""
    return _ms_of_text(value) if len(value) <= _CHARS_MAX else None


def seconds(value: Any) -> float | None:
    """None for what is no duration."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        ms = text_ms(value)
        return None if ms is None else ms / 1000
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def checked_seconds(value: Duration, name: str) -> float:
    found = seconds(value)
    if found is None or not 0 <= found < float("inf"):
        raise InvalidRequest(f"{name} is {value!r:.60}; give a duration of 0 or more, such as 10 or '30s'")
    return found
