"""Many rows at a time, against the same rows one by one: records, columns, names, ends, and what is published."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from millpond.errors import MillpondError
from millpond.history.format import Event, Record, Source, encode_meta, numbers_of, run_of
from millpond.model import ClaimRows, ClaimRun, ItemColumns, ItemPage, State
from millpond.queue import claims, settling
from millpond.queue.dedup import Dedup, digest, digests_of, id_digest, key_digest
from millpond.queue.named import Named
from millpond.queue.partition import Partition
from millpond.queue.tokens import Mint
from millpond.service import validate, validate_columns
from millpond.store.memory import MemoryStores
from millpond.wire import arrow, payloads
from millpond.wire.codec import JSON, MSGPACK
from tests.conformance.engine import SteppedPond
from tests.drive import definition
from tests.http.streams import read

NOW = 1_794_800_000_123
INSTANT = datetime(2030, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)

GOOD: dict[str, list[Any]] = {
    "key": ["k", "schlüssel", "x" * 1_024, " "],
    "id": ["own", "a.b_c:d-e", "9" * 128],
    "kind": ["", "click", "é" * 1_024],
    "encoding": ["", "gzip"],
    "reference": ["", "s3://x"],
    "priority": [0, -32_768, 32_767],
    "max_attempts": [0, 1, 1_000_000],
    "correlation_id": ["order 17", "~"],
    "expire_timeout": [1, 0.001, "1m30s"],
    "delay": [0, 2.5, "PT1M"],
    "enqueue_at": [INSTANT, INSTANT - timedelta(days=10_000)],
}
BAD: dict[str, list[Any]] = {
    "key": ["", "x" * 1_025, "\ud800"],
    "id": ["", "a b", "ü", "9" * 129, "a\n"],
    "kind": ["x" * 1_025, "\ud800"],
    "encoding": ["x" * 1_025],
    "reference": ["x" * 1_025],
    "priority": [-32_769, 32_768],
    "max_attempts": [-1, 1_000_001],
    "correlation_id": ["", "ü", "\n", "~" * 129],
    "expire_timeout": [0, -1, "soon", float("nan")],
    "delay": [-1, "soon", 1e30],
    "enqueue_at": [INSTANT.replace(year=1969), INSTANT.replace(year=2249)],
}


def outcome(items: Any, check: Any) -> Any:
    try:
        records, size, named = check(items)
    except MillpondError as error:
        return type(error), error.message
    assert named or not any(isinstance(one, Record) and one.id is not None for one in records)
    return records, size


def slowly(items: Any) -> Any:
    return validate.new_items(list(items), lambda: NOW, 10_000, repeats=True)


def by_columns(items: Any) -> Any:
    return validate_columns.staged_items(items, lambda: NOW)


@pytest.mark.parametrize("seed", range(300))
def test_columns_are_checked_as_items_are(seed: int) -> None:
    rng = Random(seed)
    count, null = rng.choice((1, 5, 30)), rng.choice((0.0, 0.3, 0.95))
    columns = {
        name: [None if rng.random() < null else rng.choice(values) for _ in range(count)]
        for name, values in GOOD.items()
        if rng.random() < 0.5 and not (name == "delay" and seed % 4)
    }
    if columns and seed % 2:
        name = rng.choice(list(columns))
        columns[name][rng.randrange(count)] = rng.choice(BAD[name])
    items = ItemColumns([rng.choice((b"", b"x", b"y" * 300)) for _ in range(count)], columns)
    assert outcome(items, by_columns) == outcome(items, slowly)


def test_good_columns_cost_no_item_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "new_items", None)
    columns = {name: values[:1] * 3 for name, values in GOOD.items() if name != "delay"}
    records, _, named = validate_columns.staged_items(ItemColumns([b"1", b"2", b"3"], columns), lambda: NOW)
    assert len(records) == 3
    assert named


def test_payloads_that_are_too_large_are_told_as_ever() -> None:
    for sizes in ([1, (1 << 20) + 1], [1 << 20] * 17):
        items = ItemColumns([bytes(size) for size in sizes], {"key": [f"{place}" for place in range(len(sizes))]})
        found = outcome(items, by_columns)
        assert found == outcome(items, slowly)
        assert "limit" in found[1]


# ---- pages ------------------------------------------------------------------------------------------------


def some_record(rng: Random) -> Record:
    record = Record(rng.choice((b"p", b"\xff")))
    for name in ("key", "kind", "encoding", "reference", "id", "correlation_id", "priority", "max_attempts"):
        if rng.random() < 0.3:
            setattr(record, name, rng.choice(GOOD[name]))
    if rng.random() < 0.1:
        record.source = Source("other", "other-0-1", rng.randrange(5), rng.choice((None, "rejected")))
    return record


def some_run(rng: Random, first: int, count: int) -> ClaimRun:
    run = ClaimRun(
        mint=Mint("zws3zjgu", 1),
        partition=1,
        numbers=range(first, first + count) if rng.random() < 0.7 else rng.sample(range(first, 3 * first), count),
        created=NOW + first,
        deadline=NOW + 86_400_000,
        max_attempts=rng.choice((0, 5)),
        payloads=[b"%d" % number for number in range(count)],
        known={},
        state=State.READY,
    )
    if rng.random() < 0.7:
        run.records = records = [some_record(rng) for _ in range(count)]
        run.payloads = [record.payload for record in records]
    for place in rng.sample(range(count), count // rng.choice((1, 4, 100))):
        number, item = run.numbers[place], list(run.items())[place]
        item.attempts, item.last_error, item.state_doc = 3, "boom", {"step": 1}
        run.known[number] = item
    return run


@pytest.mark.parametrize("seed", range(100))
def test_a_page_of_records_is_a_page_of_their_items(seed: int) -> None:
    rng = Random(seed)
    page = ClaimRows([some_run(rng, 100 * place, rng.choice((1, 10, 50))) for place in range(1, rng.choice((2, 5)))])
    assert read(arrow.encode_items(page)).equals(read(arrow.encode_items(list(page))))
    for codec in (JSON, MSGPACK):
        one_by_one = [payloads.look_item(item, codec) for item in page]
        assert payloads.look_page(ItemPage(page), codec).items == one_by_one


@pytest.mark.parametrize("seed", range(30))
def test_runs_of_any_length_are_read_in_the_order_of_the_claim(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    monkeypatch.setattr(claims, "CHUNKS_MIN", rng.choice((1, 2, 8)))
    pond, priorities = SteppedPond(MemoryStores(), definition()), rng.choice(([0], [0, 1], [0, 0, 0, 0, 0, 5, 9]))
    for chunk in range(4):
        pond.produce(*(Record(b"%d" % (60 * chunk + n), priority=rng.choice(priorities)) for n in range(60)))
    leased = pond.lease(rng.choice((1, 30)))
    for item in rng.sample(leased, len(leased)):
        pond.retry(item, due=0)
    pond.claim(parts=rng.choice((1, 3)))
    [hold] = pond.partition().claims.values()
    order = [f"incq-0-{number}" for number in numbers_of(hold.runs)]
    found = pond.read(limit=rng.choice((1, 7, 1_000)))
    assert [item.id for item in found] == order
    assert list(found) == [pond.get(item_id) for item_id in order]


# ---- names ------------------------------------------------------------------------------------------------


def named_records(rng: Random, count: int) -> list[bytes | Record]:
    """Mostly alike, as one writer's are."""
    key, item_id, plain, priority = (rng.choice((0.0, 0.0, 0.5, 1.0)) for _ in range(4))
    made: list[bytes | Record] = []
    for place in range(count):
        record = Record(b"", kind="k")
        if rng.random() < key:
            record.key = f"key {place}"
        if rng.random() < item_id:
            record.id = f"id{place}"
        if rng.random() < 0.1:
            record.correlation_id = "c"
        if rng.random() < priority * 0.5:
            record.priority = rng.choice((0, 3))
        made.append(b"" if rng.random() < plain * 0.5 else record)
    return made


def told(partition: Partition) -> Any:
    dedup = partition.dedup
    ended = dedup.ended.dump(partition.at, partition.dedup_window)
    return (
        list(dedup.live.items()),
        sorted(dedup.digests.items()),
        sorted(dedup.names.items()),
        ended,
        partition.ready.runs(),
        dict(partition.priorities.items()),
        partition.totals,
        dedup.uncommitted,
    )


@pytest.mark.parametrize("seed", range(100))
def test_neighbours_are_placed_and_end_as_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    records = named_records(rng, rng.choice((1, 40, 600)))
    meta, count = encode_meta(records) or encode_meta([Record(b"", kind="k"), *records[1:]]), len(records)
    assert meta is not None
    ends = sorted({rng.randint(1, count + 1) for _ in range(4)} | {1, count + 1})
    partitions = [Partition("incarnation", 0), Partition("incarnation", 0)]
    for slow, partition in enumerate(partitions):
        if slow:
            monkeypatch.setattr(Named, "read", classmethod(_not_simple))
        partition.begin(1_000)
        partition.change(Event.PRODUCED, 1, count, 10_000, meta, [], [])
    assert told(partitions[0]) == told(partitions[1])
    for low, high in pairwise(ends):
        for slow, partition in enumerate(partitions):
            partition.begin(2_000 + low)
            size = 1 if slow else high - low
            for first in range(low, high, size):
                for piece in partition._by_priority(run_of(first, size)):
                    partition.change(Event.CLEARED, "ready", [run_of(*piece[:2])])
        assert told(partitions[0]) == told(partitions[1])


_read = Named.read.__func__  # type: ignore[attr-defined]


def _not_simple(cls: type[Named], meta: bytes) -> Named:
    named: Named = _read(cls, meta)
    named.simple = False
    return named


def test_ends_are_told_with_what_each_had() -> None:
    fast, slow = Dedup(), Dedup()
    for dedup in (fast, slow):
        for number in range(1, 500):
            own = f"id{number}" if number % 3 == 0 else None
            if number % 5:
                dedup.add(number, own, f"k{number}" if number % 2 else None, "c" if number % 7 == 0 else None)
    for window in (100, 0):
        low, high = (1, 300) if window else (300, 500)
        fast.end_all(low, high - low, 1_000, 900, window)
        for number in range(low, high):
            if number in slow.digests:
                slow.end(number, 1_000, 900, window)
        assert (fast.live, fast.uncommitted) == (slow.live, slow.uncommitted)
        assert fast.ended.dump(1_000, 100) == slow.ended.dump(1_000, 100)
        assert sorted(fast.names.items()) == sorted(slow.names.items())
    assert len(fast.digests) == len(slow.digests) == 0


def test_digests_are_those_that_were_stored_before() -> None:
    for name in ("k", "schlüssel", "x" * 1_024):
        assert (key_digest(name), id_digest(name)) == (digest("key", name), digest("id", name))
    assert digests_of("i", "k") == id_digest("i") + key_digest("k")
    assert (digests_of(None, "k"), digests_of("i", None)) == (key_digest("k"), id_digest("i"))
    assert digests_of(None, None) == b""


# ---- what is published ------------------------------------------------------------------------------------


def published(seed: int) -> Any:
    """The same transactions, with names that come twice: in a chunk, in another one, and in the queue."""
    rng = Random(seed)
    pond = SteppedPond(MemoryStores(), definition(partitions=2))
    shown: list[Any] = []
    for txn in range(4):
        for chunk in range(3):
            names = rng.sample(range(10_000), 30) if rng.random() < 0.5 else [rng.randrange(60) for _ in range(30)]
            pond.stage(f"{chunk}", *(_item(rng, name) for name in names), txn=f"t{txn}")
        if rng.random() < 0.3:
            pond.reopen()
        done = pond.publish("0", "1", "2", txn=f"t{txn}")
        shown.append((done.items, done.duplicates))
        shown.append([(item.key, item.id, item.payload) for item in pond.list()])
        if rng.random() < 0.5:
            pond.complete(pond.lease(20))
    return shown, pond.stats().totals


def _item(rng: Random, name: int) -> bytes | Record:
    if rng.random() < 0.1:
        return b"bare"
    return Record(b"%d" % name, key=f"k{name}", id=f"i{name}" if rng.random() < 0.02 else None, kind="k")


@pytest.mark.parametrize("seed", range(20))
def test_as_many_are_published_as_if_each_name_were_looked_up(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = published(seed)
    monkeypatch.setattr(settling, "_are_free", lambda *_: False)
    assert found == published(seed)
