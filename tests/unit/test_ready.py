"""The leasable items in order, against plain lists."""

from __future__ import annotations

from random import Random

import pytest

from millpond.history.format import numbers_of, run_of, runs_of
from millpond.queue.ready import Ready


class Lists:
    """What Ready is, said plainly: a list a priority."""

    def __init__(self) -> None:
        self.queues: dict[int, list[int]] = {}

    def items(self) -> list[int]:
        return [number for priority in sorted(self.queues) for number in self.queues[priority]]


def in_order(ready: Ready) -> list[int]:
    return [number for runs in ready.runs().values() for number in numbers_of(runs)]


@pytest.mark.parametrize("seed", range(10))
def test_ready_is_a_list_a_priority(seed: int) -> None:
    rng, ready, plain, following = Random(seed), Ready(), Lists(), 1
    gone: list[tuple[int, int]] = []
    for _ in range(400):
        act = rng.random()
        if act < 0.35:
            priority, count = rng.choice([0, 0, 0, -1, 7]), rng.randint(1, 9)
            ready.push(priority, following, count)
            plain.queues.setdefault(priority, []).extend(range(following, following + count))
            following += count
        elif act < 0.65 and ready.count:
            priority, limit = ready.head_priority() or 0, rng.randint(1, 12)
            runs = ready.peek(limit)
            assert list(numbers_of(runs)) == plain.queues[priority][:limit]
            for run in runs:
                ready.remove(priority, run)
            gone += [(priority, number) for number in plain.queues[priority][:limit]]
            del plain.queues[priority][:limit]
        elif act < 0.8 and ready.count:
            priority = rng.choice([p for p, queue in plain.queues.items() if queue])
            number = rng.choice(plain.queues[priority])
            ready.remove(priority, run_of(number, 1))
            plain.queues[priority].remove(number)
        elif gone:
            priority, number = gone.pop(rng.randrange(len(gone)))
            if act < 0.9:
                ready.push(priority, number, 1)
                plain.queues[priority].append(number)
            else:
                ready.push_front(priority, number, 1)
                plain.queues[priority].insert(0, number)
        expected = plain.items()
        assert ready.count == len(expected)
        assert sorted(ready.heads()) == sorted(queue[0] for queue in plain.queues.values() if queue)
        if rng.random() < 0.2:  # looking at the runs sweeps what is gone out of them
            assert in_order(ready) == expected
            assert in_order(Ready.from_runs(ready.runs())) == expected
    assert in_order(ready) == plain.items()


def test_a_million_items_in_order_are_one_run() -> None:
    ready = Ready()
    for first in range(1, 1_000_001, 1_000):
        ready.push(0, first, 1_000)
    assert [len(runs) for runs in ready.runs().values()] == [1]
    assert ready.count == 1_000_000


def test_a_run_never_grows_beyond_what_its_count_can_say() -> None:
    ready = Ready()
    ready.push(0, 1, (1 << 20) - 1)
    ready.push(0, 1 << 20, 5)
    assert ready.count == (1 << 20) + 4
    assert [len(runs) for runs in ready.runs().values()] == [2]


def test_removing_across_runs_keeps_the_rest_in_order() -> None:
    ready = Ready()
    ready.push(0, 1, 3)
    ready.push(0, 10, 3)
    ready.push(0, 4, 3)
    ready.remove(0, run_of(2, 4))  # 2, 3 and, further back, 4, 5
    assert in_order(ready) == [1, 10, 11, 12, 6]
    assert ready.runs() == {0: runs_of([1, 10, 11, 12, 6])}


def test_what_leaves_from_the_middle_and_comes_back_stands_at_the_tail_once() -> None:
    ready = Ready()
    ready.push(0, 1, 5)
    ready.remove(0, run_of(3, 1))
    ready.push(0, 3, 1)
    assert list(numbers_of(ready.peek(9))) == [1, 2, 4, 5, 3]


def test_removals_from_the_middle_do_not_look_at_the_whole_queue() -> None:
    """100,000 runs and a removal from the middle of each: done at once, not in minutes."""
    ready = Ready()
    for number in range(1, 300_001, 3):
        ready.push(0, number, 2)
    for number in range(299_999, 0, -3):
        ready.remove(0, run_of(number, 1))
    assert ready.count == 100_000
    assert list(numbers_of(ready.peek(3))) == [1, 4, 7]


def test_counts_tell_how_many_there_are_of_each_priority() -> None:
    ready = Ready()
    ready.push(0, 1, 10)
    ready.push(-3, 11, 2)
    ready.push(7, 13, 5)
    ready.remove(0, run_of(4, 2))
    assert list(ready.counts().items()) == [(-3, 2), (0, 8), (7, 5)]
    assert sum(ready.counts().values()) == ready.count
