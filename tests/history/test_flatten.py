"""Columns made many items at a time say what the reader says item by item."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from millpond.history.acts import WHYS
from millpond.history.flatten import Flattener
from millpond.history.format import Event, decode_entry, encode_entry, run_of
from millpond.history.known import PAGE_ITEMS, PIECES_MAX, Known
from millpond.history.lake import ROW_GROUP_ROWS
from millpond.history.names import Namer, parse_id
from millpond.model import State
from millpond.queue.tokens import Mint
from millpond.store.base import JournalRow
from tests.conformance.engine import SteppedPond
from tests.history.told import Row, rows_of, tell
from tests.history.work import begun, journals, worked_pond
from tests.seeds import seeds

GOLDEN = Path(__file__).parent.parent / "golden"
FIRST = 1_900_000_000_000


def flatten(rows: list[JournalRow], flattener: Flattener, rng: Random | None = None) -> list[Row]:
    """All rows, drained now and then, in tables of any size."""
    tables: list[Any] = []
    for row in rows:
        flattener.read(row.turn, row.at, row.events)
        if rng is not None and rng.random() < 0.1:
            tables += flattener.drain(rng.choice([1, 7, 1_000]))
    return rows_of([*tables, *flattener.drain()])


def kinds_of(rows: list[JournalRow]) -> set[int]:
    return {event[0] for row in rows for event in decode_entry(row.events).events}


# ---- against the reader -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead_queue", ["dq", None])
@pytest.mark.parametrize("retention", [0, 20_000])
@pytest.mark.parametrize("seed", seeds(3, fast=1))
def test_rows_are_what_the_reader_tells(seed: int, retention: int, dead_queue: str | None) -> None:
    pond = worked_pond(seed, completed_retention_ms=retention, dead_queue=dead_queue)
    for (incarnation, partition), rows in journals(pond).items():
        flat = flatten(rows, Flattener(incarnation, partition), Random(seed))
        assert flat == tell(rows, incarnation, partition)


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_what_a_reader_tells_that_begins_later(seed: int) -> None:
    pond = worked_pond(seed)
    for (incarnation, partition), rows in journals(pond).items():
        later = rows[len(rows) // 2 :]
        assert flatten(later, Flattener(incarnation, partition)) == tell(later, incarnation, partition)


def test_the_random_work_has_all_the_events_that_change_states() -> None:
    met: set[int] = set()
    whys: set[str] = set()
    for seed in range(4):
        pond = worked_pond(seed, completed_retention_ms=20_000 * (seed % 2), dead_queue="dq" if seed < 3 else None)
        for (incarnation, partition), rows in journals(pond).items():
            met |= kinds_of(rows)
            whys |= {row["why"] for row in tell(rows, incarnation, partition)}
    assert set(Flattener("i", 0)._readers) - met == {Event.KEPT, Event.CARRYING, Event.ADOPTED}  # test_rebalance
    assert {str(why) for why in WHYS} - whys == {"kept", "adopted"}


@pytest.mark.parametrize("state", [State.READY, State.DEAD])
def test_a_letter_whose_way_back_is_closed_is_a_letter_again(state: State) -> None:
    """Moved back from wherever it stood, and kept: both readers say that it is ready."""
    events: list[list[Any]] = [
        [Event.PRODUCED, 1, 3, FIRST, None, [], []],
        [Event.DIED, 1, "ready", [run_of(1, 2)], 0, "gone", None],
        [Event.KEPT, [1, 2]],
    ]
    back = run_of(1, 1) if state == State.DEAD else run_of(3, 1)
    events += [[Event.MOVING, str(state), [back], "gone"], [Event.KEPT, [back >> 20]]]
    rows = [JournalRow(turn, FIRST + turn, encode_entry(4, [event])) for turn, event in enumerate(events, 1)]
    flat = flatten(rows, Flattener("i", 0))
    assert flat == tell(rows, "i")
    assert [(row["number"], row["why"], row["to_state"]) for row in flat][-1] == (back >> 20, "kept", "ready")
    assert sum(row["why"] == "kept" for row in flat) == 1


def golden_rows(stored: list[Any]) -> list[JournalRow]:
    return [JournalRow(turn, at, bytes.fromhex(events)) for turn, at, events in stored]


def test_the_golden_journal_reads_as_it_always_did() -> None:
    for name, queue in json.loads((GOLDEN / "journal-v1.json").read_text())["queues"].items():
        rows = golden_rows(queue["rows"])
        flat = flatten(rows, Flattener(f"inc{name}", 0))
        for row, wanted in zip(flat, queue["transitions"], strict=True):
            at = round(row["at"].timestamp() * 1_000)
            assert {key: row[key] for key in wanted} | {"at": at} == wanted


def test_the_golden_journal_of_claims_and_transactions_reads_as_the_reader_reads_it() -> None:
    for place, stored in json.loads((GOLDEN / "journal-v1-batch.json").read_text())["places"].items():
        rows = golden_rows(stored)
        assert flatten(rows, Flattener(place[0], 0)) == tell(rows, place[0])


def test_an_item_that_fails_and_comes_back_in_one_batch_has_its_attempts_counted() -> None:
    events: list[list[Any]] = [[Event.PRODUCED, 1, 1, FIRST, None, [], []]]
    for _ in range(3):
        events += [[Event.LEASED, "w", FIRST, [run_of(1, 1)]], [Event.RETRIED, "w", 1, 0, False, "boom"]]
    events += [[Event.LEASED, "w", FIRST, [run_of(1, 1)]], [Event.DIED, 0, "leased", [run_of(1, 1)], 0, None, "boom"]]
    events += [[Event.REDRIVEN, [1], FIRST], [Event.LEASED, "w", FIRST, [run_of(1, 1)]]]
    rows = [JournalRow(turn, FIRST + turn, encode_entry(2, [event])) for turn, event in enumerate(events, 1)]
    flat = flatten(rows, Flattener("i", 0))
    assert [row["attempt"] for row in flat] == [None, 1, 1, 2, 2, 3, 3, 4, 4, None, 1]
    assert flat == tell(rows, "i")


# ---- what is known of items ---------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_saved_and_loaded_goes_on_as_if_nothing_had_been(seed: int, whole: bool) -> None:
    """A crash after every few rows: all that is left is what was saved, whole or as changes since the last time."""
    rng = Random(seed)
    pond = worked_pond(seed, completed_retention_ms=20_000)
    for (incarnation, partition), rows in journals(pond).items():
        known, saved, flat = Known(), [Known().save(whole=True)], []
        for start in range(0, len(rows), 10):
            flat += flatten(rows[start : start + 10], Flattener(incarnation, partition, known))
            is_whole = whole or rng.random() < 0.1
            saved = [*([] if is_whole else saved), known.save(whole=is_whole)]
            known = Known()
            for table in saved:
                known.load(table)
        assert flat == tell(rows, incarnation, partition)


def test_nothing_is_known_of_items_that_are_gone() -> None:
    work = begun(2, completed_retention_ms=10_000)
    for _ in range(300):
        work.step()
    pond: SteppedPond = work.pond
    for name in work.claim_ids:
        if any(claim.claim_id == name for claim in pond.claims()):
            pond.release_claim(name)
    for queue in ("q", "dq"):
        pond.clear(*(state for state in State if state != State.CLAIMED), queue=queue)
    pond.advance(60_000)
    pond.clear(*(state for state in State if state != State.CLAIMED))
    pond.advance(60_000)
    assert pond.list() == []
    for (incarnation, partition), rows in journals(pond).items():
        if incarnation == "incq":
            flattener = Flattener(incarnation, partition)
            flatten(rows, flattener)
            known = flattener.known
            assert (known._pages, known.redriving, len(known)) == ({}, set(), 0)
            assert all(fact.is_shared for fact in known.facts.values())


def produced(first: int, count: int) -> list[Any]:
    return [Event.PRODUCED, first, count, FIRST, None, [], []]


def test_a_backlog_of_plain_items_costs_no_room_an_item() -> None:
    flattener = Flattener("i", 0)
    items, batch = 1_000_000, 1_000
    for turn, first in enumerate(range(1, items, batch), 1):
        flattener.read(turn, FIRST + turn, encode_entry(first + batch, [produced(first, batch)]))
        if flattener.pending >= ROW_GROUP_ROWS:
            for _ in flattener.drain():
                pass
    for _ in flattener.drain():
        pass
    assert len(flattener.known) == 0
    assert flattener.known.save(whole=True).nbytes < 1_000


def test_items_that_came_one_by_one_are_kept_as_compactly_as_any() -> None:
    flattener = Flattener("i", 0)
    for number in range(1, 2 * PIECES_MAX):
        flattener.read(number, FIRST + number, encode_entry(number + 1, [produced(number, 1)]))
    list(flattener.drain())
    [page] = flattener.known._pages.values()
    assert page.columns is not None
    assert page.pieces == []


def test_one_turn_with_more_items_than_fit_in_memory_at_a_time_comes_in_tables_of_bounded_size() -> None:
    items = 5 * ROW_GROUP_ROWS
    events = [produced(first, PAGE_ITEMS) for first in range(1, items, PAGE_ITEMS)]
    events.append([Event.CLAIMED, b"n", "c", "spark", [run_of(1, items)]])
    events.append([Event.CLAIM_COMPLETED, b"n", "spark", [run_of(1, items)], 0])
    flattener = Flattener("i", 0)
    flattener.read(1, FIRST, encode_entry(items + 1, events))
    count = 0
    for table in flattener.drain():
        assert len(table) <= ROW_GROUP_ROWS
        assert table.column("seq").to_numpy().tolist() == list(range(count, count + len(table)))
        count += len(table)
    assert count == 3 * items
    assert flattener.known._pages == {}


def test_facts_of_ended_items_make_room_for_others() -> None:
    known = Known()
    pond = worked_pond(1, steps=0)
    rng = Random(5)
    for round_ in range(20):
        pond.produce(
            *[record for record in (begun(round_).record() for _ in range(30)) if not isinstance(record, bytes)]
        )
        pond.complete(pond.lease(1_000))
        pond.advance(rng.randint(1, 30_000))
    for (incarnation, partition), rows in journals(pond).items():
        flatten(rows, Flattener(incarnation, partition, known := Known()))
        assert len(known.facts) < 60


# ---- names --------------------------------------------------------------------------------------------------


def test_names_are_those_that_the_engine_gives() -> None:
    numbers = np.array([1, 2, 9, 10, 4_095, 4_096, 10**9, (1 << 44) - 1])
    created = np.array([0, 1, FIRST, FIRST + 1, FIRST, FIRST, FIRST, (1 << 48) - 1])
    mint, namer = Mint("a1b2", 65_535), Namer("a1b2", 65_535)
    assert namer.ids(numbers).to_pylist() == [mint.id(number) for number in numbers.tolist()]
    assert namer.correlation_ids(numbers, created).to_pylist() == [
        mint.correlation_id(number, at) for number, at in zip(numbers.tolist(), created.tolist(), strict=True)
    ]
    assert namer.ids(numbers[:0]).to_pylist() == []


@pytest.mark.parametrize(
    ("item_id", "parsed"),
    [
        ("a1b2-0-17", ("a1b2", 0, 17)),
        ("a1b2-65535-1", ("a1b2", 65_535, 1)),
        ("a1b2-00-17", None),
        ("a1b2-0-017", None),
        ("a1b2-0-0", None),
        ("order-17", None),
        ("A1b2-0-17", None),
        ("", None),
    ],
)
def test_only_ids_that_a_queue_may_have_assigned_are_taken_apart(item_id: str, parsed: Any) -> None:
    assert parse_id(item_id) == parsed
