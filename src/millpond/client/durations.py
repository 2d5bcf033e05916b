"""Durations as callers give them: for the wire, and in seconds where a deadline follows from one."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from millpond.errors import InvalidRequest
from millpond.model import Duration

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_TIMEOUT_MAX_S = 7 * 86_400.0  # a call that may take longer has no deadline worth the name


def on_wire(value: Any) -> Any:
    """A timedelta has no form of its own there. Whatever is wrong is for the server to say."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def seconds(value: Any) -> float | None:
    """None for what is no duration; `PT1M30S` reads as `1m30s` here: neither form has a part that the other lacks."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        text = value.strip().removeprefix("P").replace("T", "").lower()
        if not _PART.sub("", text) and text:
            return sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(text))
        return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def timeout_seconds(value: Duration, name: str) -> float:
    found = seconds(value)
    if found is None or not 0 < found <= _TIMEOUT_MAX_S:
        raise InvalidRequest(f"{name} is {value!r:.60}; give a duration above 0, such as 10 or '30s', up to 7 days")
    return found
