"""Items by columns: the schema for ever, and every value where it belongs, from runs as from rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from millpond.model import ClaimRows, ClaimRun, Item, State
from millpond.queue.tokens import Mint
from millpond.wire import arrow
from tests.http.streams import read

# What readers were built against: columns may be added at the end, and no other way.
GOLDEN = """\
id: string not null
payload: binary not null
state: string not null
key: string
kind: string not null
encoding: string not null
reference: string not null
priority: int32 not null
attempts: int32 not null
deliveries: int32 not null
max_attempts: int32 not null
correlation_id: string not null
created_at: timestamp[us, tz=UTC] not null
enqueue_at: timestamp[us, tz=UTC]
ended_at: timestamp[us, tz=UTC]
expire_deadline: timestamp[us, tz=UTC] not null
last_error: string
state_doc: string
state_version: int32 not null
dead_reason: string
source_queue: string
source_id: string
source_attempts: int32
partition: int32 not null"""

NOW = 1_794_800_000_123
INSTANT = datetime(2026, 11, 16, 4, 30, 0, 250_000, tzinfo=UTC)
FULL = Item(
    id="own.id",
    state=State.DEAD,
    partition=3,
    payload=b"\x00\xff",
    correlation_id="order 17",
    created_at=INSTANT,
    expire_deadline=INSTANT + timedelta(days=14),
    attempts=2,
    deliveries=4,
    max_attempts=7,
    key="schlüssel",
    kind="kind",
    encoding="gzip",
    reference="s3://x",
    priority=-3,
    enqueue_at=INSTANT + timedelta(hours=1),
    ended_at=INSTANT + timedelta(hours=2),
    last_error="boom ✗",
    state_doc={"step": [1, None, "é"]},
    state_version=9,
    dead_reason="rejected",
    source_queue="other",
    source_id="other-0-1",
    source_attempts=5,
)


def run(first: int, count: int, *, partition: int = 0, created: int = NOW, max_attempts: int = 5) -> ClaimRun:
    return ClaimRun(
        mint=Mint("zws3zjgu", partition),
        partition=partition,
        numbers=range(first, first + count),
        created=created,
        deadline=created + 86_400_000,
        max_attempts=max_attempts,
        payloads=[f"payload {number}".encode() for number in range(first, first + count)],
        known={},
    )


def rows(items: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(arrow.encode_items(items)).to_pylist()
    return found


def told(item: Item) -> dict[str, Any]:
    """An item as a row has it."""
    row = {field.name: getattr(item, field.name) for field in arrow.ITEM_FIELDS}
    if item.state_doc is not None:
        row["state_doc"] = '{"step":[1,null,"é"]}'
    return row


def test_the_schema_is_the_one_that_readers_know() -> None:
    assert str(arrow.schema()) == GOLDEN
    assert read(arrow.encode_items([])).schema.equals(arrow.schema())


def test_every_column_has_its_value() -> None:
    assert rows([FULL]) == [told(FULL)]


@pytest.mark.parametrize(
    ("first", "count"),
    [(1, 1), (1, 1_500), (995, 10), (4_090, 12), (65_536, 1_000), (999_990, 20), ((1 << 44) - 5_000, 4_999)],
)
def test_plain_neighbours_have_their_names(first: int, count: int) -> None:
    items = ClaimRows([run(first, count)])
    assert rows(items) == [told(item) for item in items]


def test_runs_of_several_partitions_and_chunks_follow_each_other() -> None:
    items = ClaimRows([run(7, 3), run(5_000, 1, partition=2, max_attempts=0), run(900, 300, created=NOW + 1)])
    assert rows(items) == [told(item) for item in items]


@pytest.mark.parametrize("places", [[0], [9], [3, 4, 8], range(4), range(6), range(10)])
def test_items_that_are_not_plain_are_in_their_places(places: Any) -> None:
    """Few of them are put into whole columns, of many the page is made row by row."""
    before, mixed = run(100, 10), run(2_000, 10, partition=1)
    mixed.known = {2_000 + place: replace(FULL, id=f"own{place}") for place in places}
    items = ClaimRows([before, mixed])
    found = rows(items)
    assert found == [told(item) for item in items]
    assert [row["id"] for row in found if row["key"]] == [f"own{place}" for place in places]


@pytest.mark.parametrize("field", arrow.ITEM_FIELDS)
def test_an_item_may_differ_in_one_column_alone(field: arrow.Field) -> None:
    mixed = run(1, 5)
    other = replace(list(mixed.items())[2], **{field.name: getattr(FULL, field.name)})
    mixed.known = {3: other}
    items = ClaimRows([mixed])
    assert rows(items) == [told(item) for item in items]


def test_a_page_is_one_batch_and_an_empty_one_none() -> None:
    def batches(body: bytes) -> int:
        return len(list(pa.ipc.open_stream(body)))

    assert batches(arrow.encode_items(ClaimRows([run(1, 10), run(500, 10)]))) == 1
    assert batches(arrow.encode_items(ClaimRows([]))) == 0
