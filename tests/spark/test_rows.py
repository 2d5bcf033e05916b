"""Which rows can become items: the same answer as the server's own checks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from millpond import durations, model
from millpond.clock import Clock
from millpond.errors import MillpondError
from millpond.service import validate
from millpond.spark import rows
from millpond.spark.options import seconds_of
from millpond.spark.rows import check_columns, prepared
from millpond.spark.schema import WrongSchema
from millpond.wire.staged import COLUMNS

TYPES = {
    "payload": pa.binary(),
    "priority": pa.int64(),
    "max_attempts": pa.int64(),
    "enqueue_at": pa.timestamp("us", tz="UTC"),
}


def test_the_limits_are_the_servers() -> None:
    for name in ("PAYLOAD_BYTES_MAX", "STRING_MAX", "KEY_MAX", "PRIORITY_LIMIT", "ATTEMPTS_LIMIT"):
        assert getattr(rows, name) == getattr(model, name)
    assert rows.DURATION_MAX_S * 1_000 == model.DURATION_MAX_MS


def test_the_columns_are_those_that_the_server_takes() -> None:
    assert list(rows.COLUMNS) == list(COLUMNS)


VALUES: dict[str, list[Any]] = {
    "payload": [b"", b"x", b"x" * (1 << 20), b"x" * ((1 << 20) + 1)],
    "key": ["", "k", "é" * 1_024, "k" * 1_025],
    "id": ["", "a", "a.b_c:d-e", "a b", "a\n", "é", "x" * 128, "x" * 129],
    "kind": ["", "k", "é" * 1_024, "k" * 1_025],
    "encoding": ["", "k" * 1_025],
    "reference": ["", "k" * 1_025],
    "priority": [0, -32_768, 32_767, -32_769, 32_768],
    "max_attempts": [0, 1, 1_000_000, -1, 1_000_001],
    "delay": ["0s", "90s", "1m30s", "500ms", "PT1M30S", "P1DT2H", "10w", "3650d", "3651d", "soon", "-5s", "", "1y"],
    "expire_timeout": ["1ms", "1d", "0s", "P1W", "never"],
    "correlation_id": ["c", " ", "c d~", "é", "", "x" * 128, "x" * 129, "a\tb"],
    "enqueue_at": [
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(1969, 12, 31, tzinfo=UTC),
        datetime(2248, 1, 1, tzinfo=UTC),
        datetime(2249, 1, 1, tzinfo=UTC),
    ],
}


def takes(fields: dict[str, Any]) -> bool:
    """Whether the server does."""
    try:
        validate.new_items([model.NewItem(**fields)], Clock().now)
    except MillpondError:
        return False
    return True


@pytest.mark.parametrize("name", list(VALUES))
def test_a_row_is_rejected_exactly_if_the_server_would(name: str) -> None:
    values = VALUES[name]
    columns = {name: pa.array(values, TYPES.get(name, pa.string()))}
    if name != "payload":
        columns["payload"] = pa.array([b"p"] * len(values))
    _, reasons = prepared(pa.RecordBatch.from_pydict(columns))
    rejected = [False] * len(values) if reasons is None else [bool(one.as_py()) for one in reasons]
    assert rejected == [not takes({"payload": b"p", name: value}) for value in values]
    assert any(rejected) or name == "nothing"


def test_nothing_given_is_nothing_wrong_save_for_the_payload() -> None:
    empty = {name: pa.array([None], TYPES.get(name, pa.string())) for name in COLUMNS if name != "payload"}
    _, reasons = prepared(pa.RecordBatch.from_pydict({"payload": pa.array([b"p"]), **empty}))
    assert reasons is None
    _, reasons = prepared(pa.RecordBatch.from_pydict({"payload": pa.array([None], pa.binary()), **empty}))
    assert reasons is not None
    assert reasons.to_pylist() == ["payload is null; give every row one"]


def test_delay_and_enqueue_at_exclude_each_other() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "payload": pa.array([b"p"] * 3),
            "delay": pa.array([1.0, 1.0, None]),
            "enqueue_at": pa.array([datetime(2030, 1, 1, tzinfo=UTC), None, None], TYPES["enqueue_at"]),
        }
    )
    _, reasons = prepared(batch)
    assert reasons is not None
    assert [one is not None for one in reasons.to_pylist()] == [True, False, False]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_number_that_is_no_duration_is_rejected(seconds: float) -> None:
    batch = pa.RecordBatch.from_pydict({"payload": pa.array([b"p"]), "delay": pa.array([seconds])})
    assert prepared(batch)[1] is not None


@pytest.mark.parametrize(
    "text", ["90s", "1m30s", "500ms", "1.5h", "PT1M30S", "P2DT0.5S", "P1W", "1d1h", "soon", "P", "5 s"]
)
def test_durations_are_read_as_the_server_reads_them(text: str) -> None:
    ms = durations.text_ms(text)
    assert seconds_of(text) == (None if ms is None else ms / 1_000)


def test_texts_of_durations_are_sent_as_seconds() -> None:
    batch = pa.RecordBatch.from_pydict({"payload": pa.array(["p"] * 3), "delay": pa.array(["1m30s", None, "500ms"])})
    sent, reasons = prepared(batch)
    assert reasons is None
    assert sent.column("delay").to_pylist() == [90.0, None, 0.5]


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("payload string, prio int", "an item has no 'prio'; did you mean priority?"),
        ("payload string, a int, b int", "an item has no 'a', 'b'; The columns are payload"),
        ("key string", "there is no column payload"),
        ("payload int", "the column payload is int; it must be a string or binary"),
        ("payload string, priority string", "the column priority is string; it must be a whole number"),
        ("payload string, enqueue_at string", "the column enqueue_at is string; it must be a timestamp"),
        (
            "payload string, delay boolean",
            "the column delay is boolean; it must be a string such as '1m30s' or a number",
        ),
    ],
)
def test_columns_that_do_not_fit_are_named(spark: SparkSession, ddl: str, said: str) -> None:
    with pytest.raises(WrongSchema) as caught:
        check_columns(spark.createDataFrame([], ddl).schema)
    assert said in str(caught.value)
