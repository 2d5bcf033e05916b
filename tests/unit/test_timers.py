"""Timers: what is due comes by instant, then by number."""

from __future__ import annotations

from random import Random

from millpond.history.format import run_of
from millpond.queue.timers import NEVER, Timers


def test_what_is_due_comes_by_instant_then_by_number() -> None:
    rng, timers = Random(1), Timers()
    pending: list[tuple[int, int]] = []
    now = 0
    for _ in range(500):
        if rng.random() < 0.7:
            entry = (now + rng.randint(0, 50), run_of(rng.randint(1, 1_000), rng.randint(1, 5)))
            timers.push(*entry)
            pending.append(entry)
        else:
            now += rng.randint(0, 30)
            due = sorted(entry for entry in pending if entry[0] <= now)
            assert timers.pop_due(now) == [run for _, run in due]
            pending = [entry for entry in pending if entry[0] > now]
        assert timers.count == len(pending)
        assert timers.next_at == min((at for at, _ in pending), default=NEVER)


def test_nothing_is_due_before_its_instant() -> None:
    timers = Timers()
    timers.push(100, run_of(1, 1))
    assert timers.pop_due(99) == []
    assert timers.pop_due(100) == [run_of(1, 1)]
    assert timers.count == 0


def test_many_more_entries_than_live_items_are_stale() -> None:
    timers = Timers()
    for number in range(5_000):
        timers.push(number, run_of(1, 1))
    assert timers.stale(1)
    assert not timers.stale(5_000)
    timers.rebuild([7], [run_of(1, 1)])
    assert timers.count == 1
    assert not timers.stale(1)
    assert timers.pop_due(7) == [run_of(1, 1)]
