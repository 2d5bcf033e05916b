"""The parts of the worker that decide: weights, slots, leases, delays, restarts. No loop, no clock."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import cast

import pytest

from millpond.jobs.spec import JobSpec
from millpond.model import LeasedItem
from millpond.worker.delays import retry_delay
from millpond.worker.executors import Running
from millpond.worker.leases import Leases
from millpond.worker.queues import Source, Sources
from millpond.worker.restarts import MEMORY_S, PAUSE_MAX_S, PAUSE_MIN_S, pause
from millpond.worker.slots import AHEAD_MAX, Place, Slots
from tests.worker.fakes import BacklogExecutor, FakeExecutor

ITEM = LeasedItem(b"", 0, None)


def job(deadline: float = 0.0, queue: str = "jobs") -> Running:
    return Running(ITEM, queue, None, deadline)


# ---- weights ------------------------------------------------------------------------------------------------


def served(sources: Sources, count: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for _ in range(count):
        source = cast(Source, sources.next())
        sources.take(source)
        counts[source.name] += 1
    return counts


def test_slots_follow_weights_while_all_queues_have_items() -> None:
    sources = Sources({"a": 5, "b": 3, "c": 2})
    for source in sources:
        sources.add(source, [job() for _ in range(100)])
    assert served(sources, 100) == {"a": 50, "b": 30, "c": 20}


def test_a_queue_that_was_idle_neither_saves_up_nor_is_punished() -> None:
    sources = Sources({"a": 1, "b": 1})
    a, b = sources
    sources.add(a, [job() for _ in range(200)])
    assert served(sources, 100) == {"a": 100}
    sources.add(b, [job() for _ in range(50)])
    assert served(sources, 40) == {"a": 20, "b": 20}


def test_what_may_wait_is_shared_by_weight_and_each_queue_may_have_one() -> None:
    sources = Sources({"a": 3, "b": 1})
    a, b = sources
    assert (sources.wanted(a, 8), sources.wanted(b, 8)) == (1, 1)  # both are only asked whether they have any
    a.hot = b.hot = True
    assert (sources.wanted(a, 8), sources.wanted(b, 8)) == (6, 2)
    assert (sources.wanted(a, 0), sources.wanted(b, 0)) == (1, 1)
    sources.add(b, [job()])
    assert sources.wanted(b, 0) == 0


def test_a_single_queue_is_asked_for_all_there_is_room_for() -> None:
    sources = Sources({"a": 1})
    [a] = sources
    assert (sources.wanted(a, 8), sources.wanted(a, 0)) == (8, 0)


# ---- slots --------------------------------------------------------------------------------------------------


def test_nothing_is_leased_ahead_of_long_jobs_and_a_tenth_of_a_second_of_short_ones() -> None:
    slots, place = Slots(4), Place(FakeExecutor())
    now = 0.0
    for seconds, ahead in [(60.0, 0), (0.002, 200)]:
        for _ in range(500):
            for _ in range(4):
                slots.begin(place, now)
            assert slots.full
            assert not slots.fits(place)
            for _ in range(4):
                slots.end(place)
            now += seconds
            slots.ended(4, now)
        assert slots.ahead == pytest.approx(ahead, abs=1)
    slots.rate = 1e6
    assert slots.ahead == AHEAD_MAX
    slots.fade(now + 5.0)
    assert slots.ahead == 0


def test_a_backlog_is_only_for_an_executor_that_has_all_the_jobs() -> None:
    slots, tasks, commands = Slots(1), Place(BacklogExecutor()), Place(FakeExecutor())
    slots.rate = 1_000.0
    slots.begin(tasks, 0.0)
    slots.rate = 1_000.0
    assert slots.fits(tasks)
    assert not slots.fits(commands)
    slots.end(tasks)
    slots.begin(commands, 0.0)
    assert not slots.fits(tasks)


# ---- leases -------------------------------------------------------------------------------------------------


def test_leases_are_due_at_half_time_at_the_latest_and_lost_before_their_deadline() -> None:
    leases = Leases(4.0)
    held = job(deadline=104.0)
    leases.add(held)
    assert leases.due(101.0) == {}
    assert leases.due(102.0) == {"jobs": [[held]]}
    assert leases.lost(103.0) == []
    assert leases.lost(104.0 - 2 * leases.look_every) == [held]  # a look that is late by another is not too late
    held.ending = "lease_lost"
    assert (leases.lost(104.0), leases.due(104.0)) == ([], {})


def test_leases_are_extended_by_queue_in_batches() -> None:
    leases = Leases(20.0)
    leases.add_all([job(queue="a") for _ in range(1_500)])
    leases.add_all([job(queue="b") for _ in range(2)])
    assert {queue: [len(lot) for lot in lots] for queue, lots in leases.due(0.0).items()} == {
        "a": [1_000, 500],
        "b": [2],
    }


# ---- delays and restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "attempts", "delay"),
    [
        (None, 1, None),
        (JobSpec(task="t"), 1, None),
        (JobSpec(task="t", backoff_base=2), 3, 8.0),
        (JobSpec(task="t", backoff_base=0), 1, 0.0),
        (JobSpec(task="t", backoff_base=2, backoff_cap=5), 3, 5.0),
        (JobSpec(task="t", backoff_base=2), 100_000, 3_600.0),
    ],
)
def test_a_delay_is_the_base_to_the_power_of_the_attempts(
    spec: JobSpec | None, attempts: int, delay: float | None
) -> None:
    assert retry_delay(spec, attempts, Random(1)) == delay


def test_jitter_spreads_a_delay_to_both_sides() -> None:
    spec, rng = JobSpec(task="t", backoff_base=10, backoff_jitter=0.5), Random(1)
    delays = [cast(float, retry_delay(spec, 1, rng)) for _ in range(200)]
    assert 5 <= min(delays) < 6
    assert 14 < max(delays) <= 15


def test_each_crash_that_is_remembered_doubles_the_pause() -> None:
    assert [pause([0.0] * count, 1.0) for count in range(4)] == [0, PAUSE_MIN_S, 2 * PAUSE_MIN_S, 4 * PAUSE_MIN_S]
    assert pause([0.0] * 50, 1.0) == PAUSE_MAX_S
    assert pause([0.0, MEMORY_S], MEMORY_S + 1) == PAUSE_MIN_S
