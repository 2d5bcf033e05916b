"""How long a failed item waits."""

from __future__ import annotations

from random import Random

from millpond.model import Backoff


def backoff_ms(policy: Backoff, attempts: int, rng: Random) -> int:
    """`base ** attempts` seconds, at most the cap, spread by the jitter."""
    try:
        wait = min(policy.cap_ms, policy.base**attempts * 1000)
    except OverflowError:
        wait = policy.cap_ms
    if policy.jitter:
        wait *= 1 + policy.jitter * rng.uniform(-1, 1)
    return min(policy.cap_ms, max(0, round(wait)))
