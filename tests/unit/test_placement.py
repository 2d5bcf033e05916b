"""Partitions by affinity: all of them are placed, and none where nothing may go."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import InvalidRequest
from millpond.store.placement import place


@pytest.mark.parametrize(
    ("count", "affinities", "expected"),
    [
        (1, {"a": 1.0}, {"a": 1}),
        (1, {"a": 1.0, "b": 1.0}, {"a": 1}),  # a tie is the first one's
        (3, {"a": 1.0, "b": 1.0}, {"a": 2, "b": 1}),
        (3, {"b": 1.0, "a": 1.0}, {"b": 2, "a": 1}),
        (10, {"a": 0.1, "b": 0.2, "c": 0.7}, {"a": 1, "b": 2, "c": 7}),
        (1, {"a": 0.1, "b": 0.0}, {"a": 1}),
        (4, {"a": 0.0, "b": 0.3}, {"b": 4}),
        (7, {"a": 0.4, "b": 0.4, "c": 0.2}, {"a": 3, "b": 3, "c": 1}),
        (1, {"a": 1e-300, "b": 0.0}, {"a": 1}),
        (100, {"a": 1.0, "b": 0.005}, {"a": 100}),  # its share is no half of a partition
    ],
)
def test_partitions_go_by_largest_remainder(count: int, affinities: dict[str, float], expected: dict[str, int]) -> None:
    assert Counter(place(count, affinities)) == expected


@given(st.integers(1, 1_000), st.dictionaries(st.text("abc"), st.floats(0, 1), min_size=1))
def test_no_partition_is_lost_and_none_is_far_from_its_share(count: int, affinities: dict[str, float]) -> None:
    total = sum(affinities.values())
    if not total:
        return
    placed = Counter(place(count, affinities))
    assert placed.total() == count
    for name, affinity in affinities.items():
        assert abs(placed[name] - count * affinity / total) < 1.0001
        assert affinity or not placed[name]


def test_where_nothing_may_go_nothing_is_placed() -> None:
    for affinities in ({"a": 0.0, "b": 0.0}, {}):
        with pytest.raises(InvalidRequest, match="all have affinity 0; raise the affinity of one"):
            place(1, affinities)
