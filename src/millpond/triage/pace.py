"""So many a second and no more."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from millpond.errors import InvalidRequest
from millpond.model import TOKEN_BATCH_MAX

_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/(s|m|h))?", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3_600}


def read_rate(text: str) -> float:
    """`500/s`, `30/m` and `1000/h`, in items a second; a bare number is that already."""
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) / _SECONDS[found[2] or "s"] if found else 0.0
    if rate <= 0:
        raise InvalidRequest(f"--rate is {text!r:.60}; give items a second above 0, such as 500/s (or 30/m, 1000/h)")
    return rate


class Pace:
    """`rate` is items a second; None: as fast as it goes. The clock starts with the first step."""

    def __init__(
        self,
        rate: float | None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._monotonic = monotonic
        self._sleep = sleep
        self._due: float | None = None

    @property
    def batch(self) -> int:
        """Items a step: about a second's, and never more than a call takes."""
        return TOKEN_BATCH_MAX if self._rate is None else max(1, min(TOKEN_BATCH_MAX, round(self._rate)))

    def step(self, items: int) -> None:
        """Before so many are moved: waits until those before them have had their time."""
        if self._rate is None:
            return
        now = self._monotonic()
        due = now if self._due is None else max(self._due, now)
        if due > now:
            self._sleep(due - now)
        self._due = due + items / self._rate
