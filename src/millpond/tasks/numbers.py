"""Numbers that JSON cannot say. msgspec writes null for them, which would be another value without a word."""

from __future__ import annotations

import math
from typing import Any

import msgspec


def odd_number(value: Any) -> str | None:
    """NaN or an infinity that is somewhere in the value, by its name."""
    waiting = [msgspec.to_builtins(value, str_keys=True)]
    while waiting:
        one = waiting.pop()
        if type(one) is float:
            if not math.isfinite(one):
                return "NaN" if math.isnan(one) else "Infinity" if one > 0 else "-Infinity"
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return None
