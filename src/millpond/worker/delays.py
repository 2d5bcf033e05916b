"""When a job that failed is tried again, by its own spec."""

from __future__ import annotations

from random import Random

from millpond.jobs.names import BACKOFF_CAP
from millpond.jobs.spec import JobSpec


def retry_delay(spec: JobSpec | None, attempts: int, rng: Random) -> float | None:
    """`base ** attempts` seconds, at most the cap, spread by the jitter. None: the job leaves it to its queue."""
    if spec is None or spec.backoff_base is None:
        return None
    cap = BACKOFF_CAP if spec.backoff_cap is None else spec.backoff_cap
    try:
        delay = min(cap, spec.backoff_base**attempts)
    except OverflowError:
        delay = cap
    if spec.backoff_jitter:
        delay *= 1 + spec.backoff_jitter * rng.uniform(-1, 1)
    return min(cap, max(0.0, delay))
