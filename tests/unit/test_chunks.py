"""What is known of chunks, against a plain dict."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from random import Random

import pytest

from millpond.history.format import run_span, runs_of
from millpond.queue import chunks as module
from millpond.queue.chunks import Chunks


class Plain:
    """One chunk, said plainly."""

    def __init__(self, first: int, count: int, created: int, deadline: int) -> None:
        self.first, self.count, self.created, self.deadline = first, count, created, deadline
        self.live = set(range(first, first + count))


def runs_in(plain: dict[int, Plain], rng: Random) -> tuple[int, int]:
    """A run of live items, perhaps over several chunks."""
    chosen = rng.choice([chunk for chunk in plain.values() if chunk.live])
    first = rng.choice(sorted(chosen.live))
    live = set().union(*(chunk.live for chunk in plain.values()))
    count = 1
    while first + count in live and rng.random() < 0.8:
        count += 1
    return first, count


def end(plain: dict[int, Plain], numbers: Iterable[int]) -> list[int]:
    """The chunks that have none left."""
    drops = []
    for number in numbers:
        chunk = next(one for one in plain.values() if number in one.live)
        chunk.live.remove(number)
        if not chunk.live:
            drops.append(chunk.first)
    return drops


@pytest.mark.parametrize("block", [1, 5, 512])
@pytest.mark.parametrize("seed", range(8))
def test_chunks_are_a_dict_of_chunks(monkeypatch: pytest.MonkeyPatch, seed: int, block: int) -> None:
    monkeypatch.setattr(module, "_BLOCK_CHUNKS", block)
    monkeypatch.setattr(module, "_STALE_SLACK", block)
    rng, chunks, plain, following, now = Random(seed), Chunks(), dict[int, Plain](), 1, 1_000
    timeout = 100
    expired: set[int] = set()
    reserved: list[tuple[int, int]] = []
    for _ in range(600):
        act = rng.random()
        if act < 0.06:
            reserved.append((following, rng.randint(1, 6)))
            chunks.reserve(following)
            following += reserved[-1][1]
        elif act < 0.1 and reserved:
            first, count = reserved.pop(rng.randrange(len(reserved)))
            chunks.put_in(first, count, now, now + timeout)
            plain[first] = Plain(first, count, now, now + timeout)
            plain = dict(sorted(plain.items()))
        elif act < 0.3:
            count = rng.randint(1, 6)
            chunks.add(following, count, now, now + timeout)
            plain[following] = Plain(following, count, now, now + timeout)
            following += count
        elif act < 0.55 and any(chunk.live for chunk in plain.values()):
            first, count = runs_in(plain, rng)
            assert chunks.end(first, count) == end(plain, range(first, first + count))
        elif act < 0.65 and any(chunk.live for chunk in plain.values()):
            live = sorted(number for chunk in plain.values() for number in chunk.live)
            near = live[rng.randrange(len(live)) :][:20]
            numbers = [number for number in near if rng.random() < 0.7] or near
            runs = runs_of(numbers)
            if rng.random() < 0.3:
                rng.shuffle(runs)
            pieces = [piece for run in runs for piece in chunks.pieces(run_span(run)[0], len(run_span(run)))]
            assert list(chunks.pieces_of(runs)) == pieces
            assert sorted(chunks.end_all(runs)) == sorted(end(plain, numbers))
        elif act < 0.85:
            now += rng.choice([1, 10, 60])
            due = [one for one in plain.values() if one.live and one.deadline <= now and one.first not in expired]
            found = chunks.pop_expired(now)
            assert sorted(found) == [one.first for one in due]
            expired.update(one.first for one in plain.values() if one.deadline <= now)
        elif act < 0.92:
            timeout = rng.choice([10, 100, 300])
        elif act < 0.96:
            chunks.dump()
        else:
            chunks = Chunks.load(chunks.dump())
            for first, _ in reserved:
                chunks.reserve(first)
            chunks.pop_expired(now)  # what had expired before is told again after a restart
            expired.update(one.first for one in plain.values() if one.deadline <= now)
        alive = [one for one in plain.values() if one.live]
        assert len(chunks) == len(alive)
        walked = sorted(number for one in alive for number in one.live)
        after = rng.randint(0, walked[-1]) if walked else 0
        assert list(chunks.walk(after)) == [number for number in walked if number > after]
        for one in alive:
            for number in one.live:
                assert chunks.holds(number)
                assert chunks.first_of(number) == one.first
                assert chunks.created_of(number) == one.created
                assert chunks.deadline_of(number) == one.deadline
        waiting = [one.deadline for one in alive if one.first not in expired]
        if waiting:
            wake = chunks.next_deadline()
            assert wake is not None
            assert wake <= min(waiting)
    assert len(plain) > 100


def test_pieces_cut_a_run_at_the_edges_of_chunks() -> None:
    chunks = Chunks()
    for first, count, created in ((1, 3, 10), (4, 2, 20), (6, 5, 30)):
        chunks.add(first, count, created, 100)
    assert list(chunks.pieces(2, 6)) == [(1, 2, 4, 10), (4, 4, 6, 20), (6, 6, 8, 30)]


def test_a_chunk_that_is_gone_holds_nothing() -> None:
    chunks = Chunks()
    chunks.add(1, 3, 0, 100)
    chunks.add(4, 3, 0, 100)
    assert chunks.end(1, 3) == [1]
    assert not chunks.holds(2)
    assert chunks.holds(4)
    assert not chunks.holds(7)
    assert not Chunks().holds(1)


def test_a_steady_timeout_costs_a_heap_entry_a_block() -> None:
    chunks = Chunks()
    for number in range(1, 1_000):
        chunks.add(number, 1, number, number + 500)
    assert len(chunks._expiry) == 2
    assert len(chunks.pop_expired(900)) == 400
    assert len(chunks._expiry) == 2


def test_blocks_that_are_gone_leave_nothing_in_the_heap() -> None:
    chunks = Chunks()
    for number in range(1, 200_000):
        chunks.add(number, 1, number, number + 1_000_000)
        assert chunks.end(number, 1) == [number]
    assert (len(chunks), len(chunks._blocks)) == (0, 1)
    assert len(chunks._expiry) < 100


@pytest.mark.parametrize("step", [1, 1_000, 3_600_000])
def test_one_item_chunks_cost_ten_bytes_however_far_apart_in_time(step: int) -> None:
    tracemalloc.start()
    try:
        chunks = Chunks()
        for number in range(1, 20_001):
            chunks.add(number, 1, number * step, number * step + 1_000_000)
        assert tracemalloc.get_traced_memory()[0] < 20_000 * 10
    finally:
        tracemalloc.stop()
    assert [chunks.created_of(number) for number in (1, 600, 20_000)] == [step, 600 * step, 20_000 * step]


def test_chunks_far_apart_are_told_apart() -> None:
    chunks, far = Chunks(), 1 << 40
    for place in range(5):
        chunks.add(1 + place * far, 1_000, place * far, place * far + 10)
        chunks.add(1_001 + place * far, 1_000, place * far, place * far + 10)
    for number in (1, 1_000 + far, 1_001 + 4 * far, 2_000 + 4 * far):
        assert chunks.created_of(number) == number // far * far
        assert chunks.first_of(number) == number // far * far + (1 if number % far <= 1_000 else 1_001)
    assert not chunks.holds(2_001)
    assert not chunks.holds(far)


def test_a_chunk_is_sparse_when_few_of_its_items_are_left() -> None:
    chunks = Chunks()
    chunks.add(1, 10, 0, 100)
    chunks.end(1, 7)
    assert chunks.sparse == set()
    chunks.end(8, 1)
    assert chunks.sparse == {1}
    chunks.rewritten(1)
    assert chunks.sparse == set()
    chunks.end(9, 2)
    assert chunks.sparse == set()
