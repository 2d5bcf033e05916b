"""What a queue has decided: names with numbers, what is remembered and for how long, and all of it as one value."""

from __future__ import annotations

from random import Random

import pytest

from millpond.history.format import numbers_of, runs_of
from millpond.model import CLAIM_MEMORY_MS
from millpond.queue.decisions import Decisions, Ending, split_number
from millpond.queue.settling import _without, slice_runs


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("s:1", ("s", 1)),
        ("a:b:27", ("a:b", 27)),
        ("s:0", None),
        ("s:01", None),
        ("s:-1", None),
        ("s:", None),
        (":1", None),
        ("plain", None),
        ("s:1x", None),
        ("s:" + "9" * 18, ("s", int("9" * 18))),
        ("s:" + "9" * 19, None),
    ],
)
def test_a_name_may_end_in_a_number(name: str, parts: tuple[str, int] | None) -> None:
    assert split_number(name) == parts


def decided() -> Decisions:
    decisions = Decisions()
    decisions.on_consumer_opened(1, "s", 1)
    decisions.on_consumer_opened(2, "s", 2)
    decisions.on_claim_sealed(3, b"nonce 1", "s:1", "me", 2, [[0, 0, 5], [2, 0, 3]])
    decisions.on_claim_sealed(4, b"nonce 2", "plain", "", None, [[1, 0, 1]])
    decisions.on_claim_ending(5, "s:1", Ending.COMPLETED)
    decisions.on_stage_decided(6, "t", {"x": 0, "y": 2})
    decisions.on_stage_decided(7, "job:4", {})
    decisions.on_stage_settled(8, "job:4")
    return decisions


def test_all_of_it_is_one_value() -> None:
    decisions, loaded = decided(), Decisions()
    loaded.load(decisions.dump())
    assert loaded.__dict__ == decisions.__dict__
    assert decisions
    assert not Decisions()


def test_a_claim_knows_its_items_and_partitions() -> None:
    claim = decided().claims["s:1"]
    assert (claim.items, claim.partitions, claim.ending) == (8, {0, 2}, Ending.COMPLETED)


def test_who_is_finished_and_published() -> None:
    decisions = decided()
    assert [decisions.is_finished(name) for name in ("s:1", "s:2", "plain", "other:1")] == [True, False, False, False]
    assert [decisions.is_published(name) for name in ("t", "u", "job:3", "job:4", "job:5")] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_what_is_decided_is_published_though_it_be_long_ago() -> None:
    decisions = decided()
    decisions.on_stage_decided(7 + CLAIM_MEMORY_MS, "later", {})
    assert "t" not in decisions.published
    assert decisions.is_published("t")
    decisions.on_stage_settled(8 + CLAIM_MEMORY_MS, "t")
    assert not decisions.is_published("t")


def test_names_are_forgotten_oldest_first() -> None:
    decisions = Decisions()
    for number in range(10):
        decisions.on_claim_sealed(0, b"%d" % number, f"c{number}", "", None, [[0, 0, 1]])
        decisions.on_claim_ending(0, f"c{number}", Ending.COMPLETED)
        decisions.on_claim_settled(number * CLAIM_MEMORY_MS // 4, f"c{number}")
    assert list(decisions.finished) == ["c5", "c6", "c7", "c8", "c9"]


@pytest.mark.parametrize("seed", range(5))
def test_runs_are_cut_as_lists_are(seed: int) -> None:
    rng = Random(seed)
    numbers: list[int] = []
    for first in range(1, 400, 40):
        numbers += range(first, first + rng.randint(1, 30))
    runs = runs_of(rng.sample(numbers, len(numbers)) if seed % 2 else numbers)
    order = list(numbers_of(runs))
    start, stop = sorted(rng.sample(range(len(order) + 1), 2))
    assert list(numbers_of(slice_runs(runs, start, stop))) == order[start:stop]
    out = sorted(rng.sample(order, rng.randint(0, 20)))
    assert list(numbers_of(_without(runs, out))) == [number for number in order if number not in out]
