"""Rows that are to become items: which columns there may be, and which rows the server would not take, and why.

The server checks all of this again. It is checked here so that a bad row is told by its place, and the rest can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DoubleType,
    FloatType,
    IntegralType,
    StringType,
    StructType,
    TimestampType,
)

from millpond.spark.options import seconds_of
from millpond.spark.schema import PAYLOAD, WrongSchema

# The server's limits, which tests/spark/test_sink.py compares with model.py.
PAYLOAD_BYTES_MAX = 1 << 20
STRING_MAX = 1_024
KEY_MAX = 1_024
PRIORITY_LIMIT = 32_767
ATTEMPTS_LIMIT = 1_000_000
DURATION_MAX_S = 10 * 365 * 86_400
INSTANT_MAX_US = (1 << 43) * 1_000
DURATION_MIN_S = 0.001  # for what must not be nothing

TEXT: tuple[type[DataType], ...] = (StringType,)
WHOLE: tuple[type[DataType], ...] = (IntegralType,)
DURATION: tuple[type[DataType], ...] = (StringType, DoubleType, FloatType, IntegralType)
COLUMNS: dict[str, tuple[type[DataType], ...]] = {
    PAYLOAD: (StringType, BinaryType),
    "key": TEXT,
    "id": TEXT,
    "kind": TEXT,
    "encoding": TEXT,
    "reference": TEXT,
    "priority": WHOLE,
    "enqueue_at": (TimestampType,),
    "delay": DURATION,
    "max_attempts": WHOLE,
    "expire_timeout": DURATION,
    "correlation_id": TEXT,
}
_SAID = {
    TEXT: "a string",
    WHOLE: "a whole number",
    DURATION: "a string such as '1m30s' or a number of seconds",
    (TimestampType,): "a timestamp",
    (StringType, BinaryType): "a string or binary",
}

Wrong = tuple[pa.BooleanArray, str]
"""Which rows, and what is wrong with them."""


def check_columns(schema: StructType) -> None:
    names = schema.fieldNames()
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        near = get_close_matches(unknown[0], COLUMNS, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise WrongSchema(
            f"an item has no {', '.join(map(repr, unknown))}; {meant}The columns are {', '.join(COLUMNS)}: drop the"
            " others, or put them into the payload with millpond.spark.schema.to_payload(df) or to_json(struct(...))"
        )
    if PAYLOAD not in names:
        raise WrongSchema(
            "there is no column payload; make one with millpond.spark.schema.to_payload(df), or name yours with"
            " withColumnRenamed(..., 'payload')"
        )
    for field in schema.fields:
        if not isinstance(field.dataType, COLUMNS[field.name]):
            said = _SAID[COLUMNS[field.name]]
            raise WrongSchema(f"the column {field.name} is {field.dataType.simpleString()}; it must be {said}")


def prepared(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.StringArray | None]:
    """The batch as it is sent, with durations in seconds, and for each row what is wrong with it; None: nothing is."""
    columns = {name: batch.column(place) for place, name in enumerate(batch.schema.names)}
    found: list[Wrong] = []
    for name, column in columns.items():
        if _is_duration(name) and not pa.types.is_primitive(column.type):
            columns[name], unread = _seconds(column)
            found.append((unread, f"{name} is no duration; write it like '90s' or '1m30s'"))
        found += CHECKS[name](columns[name], name)
    if "delay" in columns and "enqueue_at" in columns:
        both = pc.and_(columns["delay"].is_valid(), columns["enqueue_at"].is_valid())
        found.append((both, "delay and enqueue_at exclude each other; give one"))
    sent = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    return sent, _reasons(found, batch.num_rows)


def _is_duration(name: str) -> bool:
    return COLUMNS[name] is DURATION


def _reasons(found: list[Wrong], rows: int) -> pa.StringArray | None:
    reasons: pa.StringArray | None = None
    for wrong, why in reversed(found):
        if pc.any(wrong).as_py():
            reasons = pa.nulls(rows, pa.string()) if reasons is None else reasons
            reasons = pc.if_else(pc.fill_null(wrong, False), why, reasons)
    return reasons


# ---- a check for each column ----------------------------------------------------------------------------------------


def _payload(column: pa.Array, name: str) -> Iterator[Wrong]:
    yield column.is_null(), "payload is null; give every row one"
    yield (
        pc.greater(pc.binary_length(column), PAYLOAD_BYTES_MAX),
        f"payload is longer than {PAYLOAD_BYTES_MAX} bytes; store it elsewhere and send a reference",
    )


def _key(column: pa.Array, name: str) -> Iterator[Wrong]:
    yield pc.equal(pc.binary_length(column), 0), "key is empty; make it null for an item without a key"
    yield pc.greater(pc.utf8_length(column), KEY_MAX), f"key is longer than {KEY_MAX} characters"


def _string(column: pa.Array, name: str) -> Iterator[Wrong]:
    yield pc.greater(pc.utf8_length(column), STRING_MAX), f"{name} is longer than {STRING_MAX} characters"


def _matching(pattern: str, allowed: str) -> Callable[[pa.Array, str], Iterator[Wrong]]:
    def check(column: pa.Array, name: str) -> Iterator[Wrong]:
        fits = pc.match_substring_regex(column, rf"\A{pattern}{{1,128}}\z")
        yield pc.invert(fits), f"{name} is not 1 to 128 characters of {allowed}"

    return check


def _whole(low: int, high: int) -> Callable[[pa.Array, str], Iterator[Wrong]]:
    def check(column: pa.Array, name: str) -> Iterator[Wrong]:
        yield pc.or_(pc.less(column, low), pc.greater(column, high)), f"{name} is not from {low} to {high}"

    return check


def _duration(low: float) -> Callable[[pa.Array, str], Iterator[Wrong]]:
    def check(column: pa.Array, name: str) -> Iterator[Wrong]:
        fits = pc.and_(pc.greater_equal(column, low), pc.less_equal(column, DURATION_MAX_S))  # a NaN does neither
        yield pc.invert(fits), f"{name} is not from {low:g} to {DURATION_MAX_S} s"

    return check


def _instant(column: pa.Array, name: str) -> Iterator[Wrong]:
    at = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    yield (
        pc.or_(pc.less(at, 0), pc.greater_equal(at, INSTANT_MAX_US)),
        f"{name} is not between the years 1970 and 2248",
    )


CHECKS: dict[str, Callable[[pa.Array, str], Iterator[Wrong]]] = {
    PAYLOAD: _payload,
    "key": _key,
    "id": _matching("[A-Za-z0-9._:-]", "letters, digits and '._:-'"),
    "kind": _string,
    "encoding": _string,
    "reference": _string,
    "priority": _whole(-PRIORITY_LIMIT - 1, PRIORITY_LIMIT),
    "enqueue_at": _instant,
    "delay": _duration(0),
    "max_attempts": _whole(0, ATTEMPTS_LIMIT),
    "expire_timeout": _duration(DURATION_MIN_S),
    "correlation_id": _matching(r"[\x20-\x7e]", "printable ASCII"),
}


def _seconds(column: pa.StringArray) -> tuple[pa.DoubleArray, pa.BooleanArray]:
    """Texts of durations as seconds, and which of them are none. There are few different ones."""
    encoded = column.dictionary_encode()
    values = pa.array([seconds_of(text) for text in encoded.dictionary.to_pylist()], pa.float64())
    seconds = values.take(encoded.indices)
    return seconds, pc.and_(column.is_valid(), seconds.is_null())
