"""Columns, against a plain dict."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from millpond.history.format import runs_of
from millpond.queue import columns as module
from millpond.queue.columns import Column, IntColumn


def check(column: Column[int], plain: dict[int, int], rng: Random) -> None:
    assert len(column) == len(plain)
    assert dict(column.items()) == plain
    assert dict(zip(column.numbers(), column.values(), strict=True)) == plain
    assert sorted(column) == sorted(plain)
    for number in rng.sample(range(3_000), 30):
        assert (number in column) == (number in plain)
        assert column.get(number) == plain.get(number)
        assert column.get(number, 7) == plain.get(number, 7)
    first, count = rng.randint(0, 3_000), rng.randint(1, 1_000)
    assert column.within(first, count) == [n for n in range(first, first + count) if n in plain]
    numbers = sorted(rng.sample(range(first, first + 2 * count), min(count, 50)))
    there = [n for n in numbers if n in plain]
    runs = runs_of(numbers)
    assert column.has_any(runs, numbers) or not there
    assert column.within_all(runs) == there
    assert sum(column._counts.values()) == column._in_pages
    assert column.alone.keys().isdisjoint(n for key in column.pages for n in range(key << 8, (key + 1) << 8))


@pytest.mark.parametrize("settle", [1, 40, 1_024])
@pytest.mark.parametrize("kind", [Column, IntColumn])
@pytest.mark.parametrize("seed", range(3))
def test_a_column_is_a_dict(monkeypatch: pytest.MonkeyPatch, seed: int, kind: type[Column[int]], settle: int) -> None:
    monkeypatch.setattr(module, "_SETTLE", settle)
    rng, column, plain = Random(seed), kind(), dict[int, int]()
    for _ in range(150):
        first, count = rng.randint(0, 3_000), rng.choice([1, 1, 10, 100, 600])
        numbers, value = range(first, first + count), rng.choice([0, -5, 1 << 50])
        act = rng.random()
        if act < 0.3:
            for number in numbers:
                column[number] = value
            plain.update(dict.fromkeys(numbers, value))
        elif act < 0.4:
            column.fill(first, count, value)
            plain.update(dict.fromkeys(numbers, value))
        elif act < 0.5:
            values = [value + place % 3 for place in range(count)]
            column.put(first, values)
            plain.update(zip(numbers, values, strict=True))
        elif act < 0.7:
            gone = column.discard(first, count)
            assert gone == [(number, plain.pop(number)) for number in numbers if number in plain]
        elif act < 0.9:
            for number in rng.sample(range(3_000), 200):
                assert column.pop(number, None) == plain.pop(number, None)
        elif isinstance(column, IntColumn):
            column.add(first, 3)
            plain[first] = plain.get(first, 0) + 3
            assert column.count_odd() == sum(one & 1 for one in plain.values())
            assert 0 <= column.guess_odd(10) <= len(column)
            dumped, column = column.dump(), IntColumn()
            column.load(dumped, {})
        check(column, plain, rng)


@pytest.mark.parametrize("kind", [Column, IntColumn])
def test_what_is_not_there_cannot_be_taken(kind: type[Column[int]]) -> None:
    column = kind()
    column.fill(0, 1_000, 1)
    for number in (1_000, 5_000):
        with pytest.raises(KeyError):
            del column[number]
        with pytest.raises(KeyError):
            column[number]


def test_neighbours_cost_a_few_bytes_each_and_those_alone_no_more_than_in_a_dict() -> None:
    for step, most in ((1, 12), (100, 180)):
        tracemalloc.start()
        column = IntColumn()
        for number in range(0, 20_000 * step, step):
            column[number] = number << 20
        spent = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert spent / 20_000 < most, step


def test_a_page_of_which_little_is_left_is_given_up() -> None:
    column = IntColumn()
    column.fill(0, 256, 5)
    column.discard(0, 250)
    assert (len(column.pages), len(column.alone)) == (0, 6)
