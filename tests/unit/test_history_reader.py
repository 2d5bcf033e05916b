"""History read from the journal: every change of state once, as the engine itself counts them.

The golden files `tests/golden/journal-v1.json` and `tests/golden/snapshot-v1.json` hold the bytes of a fixed story,
made by `python -m tests.golden.story`. They are what stored data of version 1 look like, and must stay readable for
ever: a new version gets files of its own beside them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpond.history.format import Event, decode_entry, decode_records
from millpond.history.reader import Reader, Transition, read_history
from millpond.model import State
from millpond.queue.tokens import Mint
from millpond.store.base import Chunk, JournalRow, Store, Turn
from millpond.store.memory import MemoryStores
from tests.conformance.engine import SteppedPond
from tests.conformance.test_engine_restart import Workload
from tests.drive import definition
from tests.golden.batch_story import BATCH_QUEUES, JOURNAL_FILE, SNAPSHOT_FILE, outcome_of
from tests.golden.rebalance_story import REBALANCE_FILE
from tests.golden.story import QUEUES

GOLDEN = Path(__file__).parent.parent / "golden"
ENDED = {State.COMPLETED, State.CANCELLED}


def worked_pond(seed: int, **settings: Any) -> SteppedPond:
    pond = SteppedPond(MemoryStores(), definition(dead_queue="dq", max_attempts=3, **settings), definition("dq"))
    work = Workload(pond, seed)
    for _ in range(300):
        work.step()
    return pond


def history_of(pond: SteppedPond, queue: str = "q", after: int = 0) -> list[Transition]:
    lane = pond.queues[queue].state.lanes[0]
    return list(read_history(lane.store, 0, lane.partition.mint, after))


# ---- against the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["q", "dq"])
@pytest.mark.parametrize("seed", range(4))
def test_transitions_are_counted_as_the_engine_counts_them(seed: int, queue: str) -> None:
    pond = worked_pond(seed)
    counts = Counter(one.why for one in history_of(pond, queue))
    totals = pond.partition(queue).totals
    assert counts["produced"] + counts["arrived"] + counts["published"] == totals["produced"]
    assert counts["leased"] == totals.get("leased", 0)
    assert counts["completed"] == totals.get("completed", 0)
    assert counts["failure"] + counts["defer"] == totals.get("retried", 0)
    assert counts["max_attempts"] + counts["expired"] + counts["rejected"] == totals.get("dead", 0)
    assert counts["cancelled"] == totals.get("cancelled", 0)


@pytest.mark.parametrize("retention", [0, 20_000])
@pytest.mark.parametrize("seed", range(4))
def test_transitions_lead_from_state_to_state_and_end_where_the_items_are(seed: int, retention: int) -> None:
    pond = worked_pond(seed, completed_retention_ms=retention)
    states: dict[int, State] = {}
    for one in history_of(pond):
        assert states.pop(one.number, None) == one.from_state
        if one.to_state is not None and (retention or one.to_state not in ENDED):
            states[one.number] = one.to_state
    assert states == pond.partition().states(states)
    assert len(states) == len(pond.list())


@pytest.mark.parametrize("seed", range(4))
def test_ids_correlation_ids_and_attempts_are_those_of_the_items(seed: int) -> None:
    pond = worked_pond(seed)
    last: dict[int, Transition] = {}
    attempts: dict[int, int] = {}
    for one in history_of(pond):
        last[one.number] = one
        if one.attempt is not None:
            attempts[one.number] = one.attempt
        if one.why == "leased":
            assert one.who in ("a", "b", "")
    for item in pond.list():
        number = next(n for n, one in last.items() if one.item_id == item.id and one.to_state == item.state)
        assert last[number].correlation_id == item.correlation_id
        if item.state == State.LEASED:
            assert attempts[number] == item.attempts


def test_a_reader_that_begins_later_tells_the_same_but_for_what_it_cannot_know() -> None:
    pond = worked_pond(1)
    whole = history_of(pond)
    half = whole[len(whole) // 2].turn
    later = history_of(pond, after=half)
    expected = [one for one in whole if one.turn > half]
    assert [(one.number, one.at, one.to_state, one.who, one.why) for one in later] == [
        (one.number, one.at, one.to_state, one.who, one.why) for one in expected
    ]
    mint = pond.partition().mint
    for mine, full in zip(later, expected, strict=True):
        assert mine.item_id in (full.item_id, mint.id(mine.number))
        assert mine.attempt in (None, full.attempt)
        assert mine.correlation_id in (None, full.correlation_id)
    produced = {one.number for one in expected if one.from_state is None and one.why in ("produced", "arrived")}
    assert [one for one in later if one.number in produced] == [one for one in expected if one.number in produced]


def test_a_reader_remembers_nothing_of_items_that_are_gone() -> None:
    pond = worked_pond(2)
    for claim in pond.claims():
        pond.complete_claim(claim.claim_id)
    pond.clear(*(state for state in State if state != State.CLAIMED))
    pond.advance(60_000)
    assert pond.list() == []
    lane = pond.queues["q"].state.lanes[0]
    reader = Reader(0, lane.partition.mint)
    for row in lane.store.journal(0, 100_000):
        list(reader.read(row))
    assert (reader._own, reader._attempts, reader._waits, reader._chunks) == ({}, {}, {}, {})


def test_history_is_read_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pond = worked_pond(3)
    whole = history_of(pond)
    monkeypatch.setattr("millpond.history.reader.PAGE_ROWS", 3)
    assert history_of(pond) == whole


# ---- golden files -----------------------------------------------------------------------------------------


def golden(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / name).read_text())
    return content


def rows_of(queue: dict[str, Any]) -> list[JournalRow]:
    return [JournalRow(turn, at, bytes.fromhex(events)) for turn, at, events in queue["rows"]]


def test_a_journal_of_version_1_reads_as_it_always_did() -> None:
    for name, queue in golden("journal-v1.json")["queues"].items():
        reader = Reader(0, Mint(f"inc{name}", 0))
        read = [one for row in rows_of(queue) for one in reader.read(row)]
        assert msgspec.to_builtins(read) == queue["transitions"]


def test_the_journals_of_version_1_have_every_kind_of_event() -> None:
    queues = [queue["rows"] for queue in golden("journal-v1.json")["queues"].values()]
    added = [rows for file in (JOURNAL_FILE, REBALANCE_FILE) for rows in golden(file)["places"].values()]
    rows = [row for queue in (*queues, *added) for row in queue]
    kinds = {event[0] for _, _, events in rows for event in decode_entry(bytes.fromhex(events)).events}
    assert kinds == {int(event) for event in Event}


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_partitions_of_version_1_recover_as_they_always_did(with_snapshot: bool) -> None:
    journal, snapshot = golden("journal-v1.json"), golden("snapshot-v1.json")
    stores = MemoryStores()
    for name, stored in snapshot["queues"].items():
        fill(stores.open(f"inc{name}", 0, "full"), rows_of(journal["queues"][name]), stored, with_snapshot)
    pond = SteppedPond(stores, *QUEUES)
    for name, stored in snapshot["queues"].items():
        assert pond.partition(name).turn == stored["turn"]
        assert covers(msgspec.to_builtins(pond.list(queue=name)), stored["items"])


def covers(shown: Any, stored: Any) -> bool:
    """Whether all is as it was; later versions say more of an item."""
    if isinstance(stored, dict):
        return all(name in shown and covers(shown[name], value) for name, value in stored.items())
    if isinstance(stored, list):
        return len(shown) == len(stored) and all(map(covers, shown, stored))
    return bool(shown == stored)


def fill(store: Store, rows: list[JournalRow], stored: dict[str, Any], with_snapshot: bool) -> None:
    """Put golden rows into a store; what they left there comes with the last."""
    store.recover()
    for row in rows:
        turn = Turn(number=row.turn, at=row.at, events=row.events)
        if row is rows[-1]:
            bodies = {int(first): bytes.fromhex(body) for first, body in stored["chunks"].items()}
            turn.chunks = [Chunk(first, len(decode_records(body)), body) for first, body in bodies.items()]
            turn.docs = {int(number): bytes.fromhex(doc) for number, doc in stored["docs"].items()}
            turn.snapshot = bytes.fromhex(stored["state"]) if with_snapshot else None
        store.commit(turn)


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_claims_and_transactions_of_version_1_are_carried_through_as_they_always_were(with_snapshot: bool) -> None:
    journal, snapshot = golden(JOURNAL_FILE), golden(SNAPSHOT_FILE)
    stores = MemoryStores()
    for place, stored in snapshot["places"].items():
        name, _, index = place.partition("/")
        rows = rows_of({"rows": journal["places"][place]})
        fill(stores.open(f"inc{name}", int(index), "full"), rows, stored, with_snapshot)
    pond = SteppedPond(stores, *BATCH_QUEUES)
    for place, stored in snapshot["places"].items():
        name, _, index = place.partition("/")
        if index == "0":
            assert pond.partition(name).turn >= stored["turn"]
    assert journal["outcome"] == snapshot["outcome"]
    assert covers(msgspec.to_builtins(outcome_of(pond)), journal["outcome"])


def test_a_row_of_a_version_to_come_is_refused() -> None:
    row = JournalRow(1, 0, msgspec.msgpack.encode((99, 1, [])))
    with pytest.raises(ValueError, match="version 99"):
        list(Reader(0, Mint("incq", 0)).read(row))
