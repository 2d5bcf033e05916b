"""How long a failed item waits."""

from __future__ import annotations

from random import Random

import pytest

from millpond.model import Backoff
from millpond.queue.backoff import backoff_ms


@pytest.mark.parametrize(("attempts", "wait"), [(1, 2_000), (2, 4_000), (3, 8_000), (11, 2_048_000), (12, 3_600_000)])
def test_base_two_gives_two_four_eight_up_to_the_cap(attempts: int, wait: int) -> None:
    assert backoff_ms(Backoff(), attempts, Random(0)) == wait


def test_attempts_beyond_all_numbers_give_the_cap() -> None:
    assert backoff_ms(Backoff(), 1_000_000, Random(0)) == 3_600_000
    assert backoff_ms(Backoff(base=1e300), 5, Random(0)) == 3_600_000


@pytest.mark.parametrize(("base", "wait"), [(0.0, 0), (1.0, 1_000), (0.5, 125)])
def test_small_bases(base: float, wait: int) -> None:
    assert backoff_ms(Backoff(base=base), 3, Random(0)) == wait


def test_jitter_spreads_both_ways_and_never_beyond_the_cap() -> None:
    rng = Random(1)
    waits = [backoff_ms(Backoff(jitter=0.5, cap_ms=9_000), 3, rng) for _ in range(500)]
    assert min(waits) >= 4_000
    assert max(waits) == 9_000
    assert any(wait < 7_000 for wait in waits)
    assert all(0 <= backoff_ms(Backoff(jitter=1.0), 1, rng) <= 4_000 for _ in range(500))
