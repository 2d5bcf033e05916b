"""What a partition leaves on disk: the journal within its bounds, and chunks without what is gone."""

from __future__ import annotations

import pytest

from millpond.queue import lane
from tests.conformance.conftest import MakePond
from tests.conformance.engine import SteppedPond
from tests.drive import definition

LARGE = b"x" * 10_000


def turns_of(pond: SteppedPond) -> list[int]:
    return [row.turn for row in pond.queues["q"].state.lanes[0].store.journal(0, 1_000_000)]


def test_the_journal_keeps_within_its_bytes_in_a_flood_of_turns(
    make_pond: MakePond, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "SNAPSHOT_ROWS", 50)
    monkeypatch.setattr(lane, "TRIM_INTERVAL_TURNS", 20)
    pond = make_pond(definition(journal_bytes_max=2_000))
    for _ in range(300):
        pond.produce(b"a")
    turns = turns_of(pond)
    assert turns[0] > 150
    assert turns[-1] == 300
    pond.reopen()
    assert len(pond.lease(1_000)) == 300


def test_partitions_share_what_the_queue_may_keep_of_its_journal(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=4, journal_bytes_max=4_000))
    assert pond.queues["q"].state.journal_bytes == 1_000


def test_old_journal_rows_go_with_time(make_pond: MakePond, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "SNAPSHOT_ROWS", 2)
    pond = make_pond(definition(journal_retention_ms=3_600_000))
    for _ in range(4):
        pond.produce(b"a")
    pond.advance(3_600_001)
    pond.produce(b"b")
    pond.advance(lane.TRIM_INTERVAL_MS)
    pond.produce(b"c")
    assert turns_of(pond)[0] > 4


def test_a_chunk_of_which_little_is_left_gives_up_the_room_of_the_rest(make_pond: MakePond) -> None:
    pond = make_pond(definition(max_attempts=1))
    store = pond.queues["q"].state.lanes[0].store
    pond.produce(*[LARGE] * 100)
    items = pond.lease(100)
    pond.complete(items[1:])
    chunks, _ = store.read([1], [])
    assert len(chunks[1]) < 2 * len(LARGE)
    pond.advance(30_000)
    pond.reopen()
    [dead] = pond.list()
    assert (dead.id, dead.payload, dead.state) == (items[0].id, LARGE, "dead")


def test_a_sparse_chunk_with_ready_items_keeps_them(make_pond: MakePond) -> None:
    pond = make_pond()
    pond.produce(*[LARGE] * 100)
    items = pond.lease(99)
    pond.complete(items[1:])
    chunks, _ = pond.queues["q"].state.lanes[0].store.read([1], [])
    assert len(chunks[1]) < 3 * len(LARGE)
    pond.reopen()
    [ready] = pond.lease(1)
    assert ready.payload == LARGE
    assert pond.complete([ready, items[0]])[0].ok
