"""Items as rows: the columns of the source, how pages are put into a read's schema, and JSON payloads as columns."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, IntegerType, StringType, StructField, StructType, TimestampType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PAYLOAD = "payload"
COLUMNS: dict[str, type[DataType]] = {
    "id": StringType,
    PAYLOAD: BinaryType,
    "state": StringType,
    "key": StringType,
    "kind": StringType,
    "encoding": StringType,
    "reference": StringType,
    "priority": IntegerType,
    "attempts": IntegerType,
    "deliveries": IntegerType,
    "max_attempts": IntegerType,
    "correlation_id": StringType,
    "created_at": TimestampType,
    "enqueue_at": TimestampType,
    "ended_at": TimestampType,
    "expire_deadline": TimestampType,
    "last_error": StringType,
    "state_doc": StringType,  # JSON
    "state_version": IntegerType,
    "dead_reason": StringType,
    "source_queue": StringType,
    "source_id": StringType,
    "source_attempts": IntegerType,
    "partition": IntegerType,
}
ARROW_TYPES: dict[type[DataType], pa.DataType] = {
    StringType: pa.string(),
    BinaryType: pa.binary(),
    IntegerType: pa.int32(),
    TimestampType: pa.timestamp("us", tz="UTC"),
}
VALUE = "value"
CORRUPT = "_corrupt"
_CORRUPT_INSIDE = "_millpond_corrupt"  # in the parsed struct, where it must not meet a field of the user's


class WrongSchema(ValueError):
    """A schema that a read or a write cannot have."""


class NotText(ValueError):
    """A payload that is not UTF-8, in a read that wants strings."""


# ---- reading ------------------------------------------------------------------------------------------------------


def item_schema(text: bool) -> StructType:
    """All there is to know of an item; `text`: the payload as a string."""
    fields = [StructField(name, kind()) for name, kind in COLUMNS.items()]
    if text:
        fields[1] = StructField(PAYLOAD, StringType())
    return StructType(fields)


def arrow_schema(schema: StructType) -> pa.Schema:
    """What pages are put into. A schema of the user's own may leave columns out and take the payload as either type."""
    fields = []
    for field in schema.fields:
        kinds = [COLUMNS.get(field.name)]
        if field.name == PAYLOAD:
            kinds.append(StringType)
        kind = type(field.dataType)
        if kind not in kinds:
            raise WrongSchema(_misfit(field))
        fields.append(pa.field(field.name, ARROW_TYPES[kind], field.nullable))
    return pa.schema(fields)


def _misfit(field: StructField) -> str:
    if field.name not in COLUMNS:
        near = get_close_matches(field.name, COLUMNS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COLUMNS)}"
        return (
            f"items have no column {field.name!r:.60}; {hint} The fields of a JSON payload are found by"
            " millpond.spark.schema.parse_json"
        )
    known = COLUMNS[field.name]().simpleString()
    also = " or string" if field.name == PAYLOAD else ""
    return f"the column {field.name} is {field.dataType.simpleString()}; it can be read as {known}{also}"


def arranged(page: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """A page of the server's in the read's own schema."""
    columns = []
    for field in target:
        place = page.schema.get_field_index(field.name)
        if place < 0:
            raise WrongSchema(f"the server sends no column {field.name}; it is older than this connector, upgrade it")
        column = page.column(place)
        if column.type != field.type:
            column = _as_text(page, column) if field.name == PAYLOAD else column.cast(field.type)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _as_text(page: pa.RecordBatch, payloads: pa.Array) -> pa.Array:
    try:
        return payloads.cast(pa.string())
    except pa.ArrowInvalid:
        ids = page.column(page.schema.get_field_index("id"))
        wrong = [str(ids[row]) for row in range(len(payloads)) if not _is_text(payloads[row].as_py())]
    raise NotText(
        f"{len(wrong)} payloads are not UTF-8 text, the first of item {wrong[0]}; read with the option payload=binary"
        " (a running query's checkpoint allows that) and look at them there"
    )


def _is_text(payload: bytes | None) -> bool:
    try:
        (payload or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


# ---- JSON payloads ------------------------------------------------------------------------------------------------


def parse_json(df: DataFrame, schema: StructType | str, *, into: str = VALUE, corrupt: str = CORRUPT) -> DataFrame:
    """The payloads as a struct of `schema` in the column `into`. No row is lost: one whose payload is not such JSON has
    its text in `corrupt`, which is null for the others.
    """
    from pyspark.sql import functions as F

    inside = _with_corrupt(schema)
    text = F.col(PAYLOAD).cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT_INSIDE}
    parsed = df.withColumn(into, F.from_json(text, inside, options))
    marked = parsed.withColumn(
        corrupt,
        F.when(F.col(into).isNull(), text).otherwise(F.col(f"`{into}`.`{_CORRUPT_INSIDE}`")),
    )
    return marked.withColumn(into, F.col(into).dropFields(_CORRUPT_INSIDE))


def to_payload(df: DataFrame, *fields: str) -> DataFrame:
    """The columns as a JSON payload, save for those that are named: these stay as the item's own (key, priority, …)."""
    from pyspark.sql import functions as F

    packed = [F.col(f"`{name}`") for name in df.columns if name not in fields]
    return df.select(F.to_json(F.struct(*packed)).alias(PAYLOAD), *(F.col(f"`{name}`") for name in fields))


def _with_corrupt(schema: StructType | str) -> StructType:
    fields = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    assert isinstance(fields, StructType)
    return StructType([*fields.fields, StructField(_CORRUPT_INSIDE, StringType())])
