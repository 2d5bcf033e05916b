"""The clock follows the wall clock forwards and never goes back."""

from __future__ import annotations

from random import Random

from millpond.clock import Clock, ManualClock


def test_time_passes() -> None:
    clock = ManualClock(1_000)
    assert clock.now() == 1_000
    clock.advance(50)
    assert clock.now() == 1_050


def test_a_step_forwards_is_followed() -> None:
    clock = ManualClock(1_000)
    clock.step(5_000)
    assert clock.now() == 6_000


def test_after_a_step_back_time_goes_on_at_its_own_pace() -> None:
    clock = ManualClock(10_000)
    clock.step(-9_000)
    assert clock.now() == 10_000
    clock.advance(100)
    assert clock.now() == 10_100
    clock.advance(9_000)
    assert clock.now() == 19_100


def test_it_never_goes_back_whatever_the_wall_clock_does() -> None:
    rng, clock = Random(1), ManualClock()
    last, passed_since = clock.now(), 0
    for _ in range(1_000):
        if rng.random() < 0.5:
            clock.step(rng.randint(-100_000, 50_000))
        else:
            passed = rng.randint(0, 1_000)
            clock.advance(passed)
            passed_since += passed
        if rng.random() < 0.5:
            now = clock.now()
            assert now >= last + passed_since
            last, passed_since = now, 0


def test_a_high_water_mark_lifts_it() -> None:
    clock = ManualClock(1_000)
    clock.at_least(5_000)
    assert clock.now() == 5_000
    clock.at_least(2_000)
    clock.advance(10)
    assert clock.now() == 5_010


def test_the_real_clock_tells_milliseconds_since_1970() -> None:
    clock = Clock()
    first = clock.now()
    assert 1_600_000_000_000 < first <= clock.now()
