"""Counters, histograms, and looks at a partition that must never show less than they have shown."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from millpond.meters import SECONDS, SIZES, STATES, TRANSITIONS, Histogram, StoreMeter, cumulated
from millpond.model import REQUEST_TIMEOUT_MS, State
from millpond.queue import partition, readings
from millpond.queue.partition import Partition
from millpond.queue.readings import LaneLook, QueueLook
from millpond.store.memory import MemoryStores
from tests.conformance.engine import FaultyStores, SteppedPond, numbered, request
from tests.drive import definition

NONE = [0] * len(TRANSITIONS)


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1, 10))
    for value in (0, 1, 2, 10, 11):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 24
    assert cumulated(histogram) == [("1.0", 2.0), ("10.0", 4.0), ("+Inf", 5.0)]


def test_a_commit_is_counted_as_three_observations() -> None:
    meter = StoreMeter()
    meter.count(3, 1_000, 0.002)
    for histogram, bounds, value in (
        (meter.requests, SIZES, 3),
        (meter.items, SIZES, 1_000),
        (meter.seconds, SECONDS, 0.002),
    ):
        expected = Histogram(bounds)
        expected.observe(value)
        assert (histogram.bounds, histogram.counts, histogram.total) == (bounds, expected.counts, value)


def test_failures_are_counted_by_job_and_reason() -> None:
    meter = StoreMeter()
    for _ in range(2):
        meter.fail("turn", "full")
    meter.fail("load", "failed")
    assert meter.failures == {("turn", "full"): 2, ("load", "failed"): 1}


def test_every_total_that_a_partition_keeps_is_shown() -> None:
    kept = re.findall(r'self\._count\("(\w+)"', inspect.getsource(partition))
    assert set(kept) == set(TRANSITIONS)


def test_totals_that_a_lost_commit_took_back_do_not_go_down() -> None:
    partition = Partition("incq", 0)
    partition.totals, partition.turn = {"produced": 5}, 7
    look = LaneLook(partition, NONE)
    partition.totals, partition.turn = {"produced": 9, "leased": 2}, 8
    look.look(partition)
    assert look.high[:2] == [9, 2]
    reloaded = Partition("incq", 0)
    reloaded.totals, reloaded.turn = {"produced": 6}, 8
    look.turn = -1  # as a load does
    look.look(reloaded)
    assert look.high[:2] == [9, 2]
    reloaded.totals, reloaded.turn = {"produced": 11}, 9
    look.look(reloaded)
    assert look.high[:2] == [11, 2]


def test_what_was_shown_of_a_lost_commit_is_remembered_while_the_queue_sleeps() -> None:
    stores: Any = FaultyStores(MemoryStores())
    pond = SteppedPond(stores, definition())
    look = QueueLook(pond.queues["q"], {})
    look.loaded(0, pond.partition())
    produce = pond.submit(request(b"x"))
    jobs = pond.tick()
    assert look.read(pond.clock.now()).transitions == [1, *NONE[1:]]
    stores.of().away = True
    pond.do(jobs)
    pond.advance(REQUEST_TIMEOUT_MS)
    stores.of().away = False
    pond.advance(60_000)
    assert produce.error is not None
    assert pond.partition().totals.get("produced", 0) == 0
    look.loaded(0, pond.partition())
    assert look.read(pond.clock.now()).transitions == [1, *NONE[1:]]
    assert look.take_rise() == [1, *NONE[1:]]
    again = QueueLook(pond.queues["q"], look.unsaved())
    again.loaded(0, pond.partition())
    assert again.read(pond.clock.now()).transitions == [1, *NONE[1:]]
    assert again.take_rise() == NONE
    pond.produce(b"y", b"z")
    assert again.take_rise() == [1, *NONE[1:]]
    assert again.unsaved() == {}


def test_a_partition_is_looked_at_again_only_after_a_turn() -> None:
    partition = Partition("incq", 0)
    look = LaneLook(partition, NONE)
    partition.totals = {"produced": 1}
    look.look(partition)
    assert look.high == NONE
    partition.turn += 1
    look.look(partition)
    assert look.high[0] == 1


@pytest.fixture
def mixed() -> Partition:
    """With items in every state that an item can be in today."""
    pond = SteppedPond(MemoryStores(), definition(completed_retention_ms=3_600_000))
    pond.produce(*numbered(12))
    items = pond.lease(9)
    pond.complete(items[:2])
    for item in items[2:5]:
        pond.retry(item)
    pond.retry(items[5], deferred=True, due=pond.clock.now() + 60_000)
    pond.kill(items[6])
    pond.cancel(pond.list(State.READY)[0].id)
    return pond.partition()


def test_counts_are_those_of_the_partition(mixed: Partition) -> None:
    counts = dict(zip(STATES, LaneLook(mixed, NONE).counts, strict=True))
    assert counts == mixed.counts()
    assert [state for state in STATES if not counts[state]] == [State.CLAIMED]


def test_the_sums_of_an_estimate_are_exact(mixed: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "COUNT_MAX", 2)
    counts, exact = dict(zip(STATES, LaneLook(mixed, NONE).counts, strict=True)), mixed.counts()
    for one, other in ((State.SCHEDULED, State.RETRYING), (State.COMPLETED, State.CANCELLED)):
        assert counts.pop(one) + counts.pop(other) == exact.pop(one) + exact.pop(other)
    assert counts == exact


def test_an_estimate_follows_the_shares_of_what_is_old_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "COUNT_MAX", 100)
    partition = Partition("incq", 0)
    for number in range(100_000):
        partition.waiting[number] = number << 1 | (number % 4 == 0)
    counts = dict(zip(STATES, LaneLook(partition, NONE).counts, strict=True))
    assert counts[State.SCHEDULED] + counts[State.RETRYING] == 100_000
    assert 20_000 < counts[State.RETRYING] < 30_000
