"""How long an executor that crashed stays down. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

PAUSE_MIN_S = 0.5  # a single crash is hardly noticed
PAUSE_MAX_S = 60.0  # one that crashes all the time costs a try a minute, and is back within one once it is mended
MEMORY_S = 300.0  # a crash so long ago says nothing about the next


def remembered(crashes: Sequence[float], now: float) -> list[float]:
    return [instant for instant in crashes if now - instant < MEMORY_S]


def pause(crashes: Sequence[float], now: float) -> float:
    """Seconds until the next start, from the instants of the crashes so far: doubled with each that is remembered."""
    count = len(remembered(crashes, now))
    return 0.0 if count == 0 else min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** min(count - 1, 30))
