"""What a batch writer stages, from an Arrow IPC stream: columns to items. Whatever is wrong says where.

The stream is a stranger's: types are looked at before any data, every buffer is checked before it is read, and what
could unfold into more than was sent (compression, dictionaries, views) is refused.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qsl

from msgspec import Struct

from millpond.errors import BatchTooLarge, InvalidRequest
from millpond.model import STAGE_ITEMS_MAX, ItemColumns, PlainItems
from millpond.wire.arrow import compute, library
from millpond.wire.codec import NAME_SHOWN_MAX

COLUMNS: dict[str, str] = {
    "payload": "bytes",
    "key": "text",
    "id": "text",
    "kind": "few texts",
    "encoding": "few texts",
    "reference": "few texts",
    "priority": "integer",
    "enqueue_at": "instant",
    "delay": "duration",
    "max_attempts": "integer",
    "expire_timeout": "duration",
    "correlation_id": "text",
}
_WANTED = {
    "bytes": "binary or string",
    "text": "string",
    "few texts": "string",
    "integer": "an integer",
    "instant": "a timestamp with a time zone",
    "duration": "string, or a number of seconds",
}
PARAMETERS = ("queue", "txn", "chunk")  # a stream of items has no place for them
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class StagedRows(Struct):
    """As `requests.Stage`, with the items as the engine takes them."""

    queue: str
    txn: str
    chunk: str
    items: ItemColumns | PlainItems

    @property
    def kinds(self) -> frozenset[str]:
        kinds = self.items.columns.get("kind", ()) if isinstance(self.items, ItemColumns) else ()
        return frozenset(kind for kind in set(kinds) if kind)


def read_stage(query: bytes, body: bytes) -> StagedRows:
    items = decode_items(body)
    return StagedRows(**parameters(query), items=items)


# ---- the query string -------------------------------------------------------------------------------------


def parameters(query: bytes) -> dict[str, str]:
    """All of `PARAMETERS`, each once."""
    try:
        given = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=10)
    except ValueError:
        raise InvalidRequest("the query string is not percent-encoded UTF-8; send ?queue=…&txn=…&chunk=…") from None
    found: dict[str, str] = {}
    for name, value in given:
        if name not in PARAMETERS:
            raise InvalidRequest(f"unknown parameter {name[:NAME_SHOWN_MAX]!r}; {_nearest(name, PARAMETERS)}")
        if name in found:
            raise InvalidRequest(f"the parameter {name} is there twice; send it once")
        found[name] = value
    missing = [name for name in PARAMETERS if name not in found]
    if missing:
        raise InvalidRequest(f"there is no {missing[0]} in the query string; send ?queue=…&txn=…&chunk=…")
    return found


def _nearest(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name[:NAME_SHOWN_MAX], names, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"use {', '.join(names)}"


# ---- the stream -------------------------------------------------------------------------------------------


def decode_items(body: bytes) -> ItemColumns | PlainItems:
    """By columns; those of a single batch with nothing but payloads as they lie in the body."""
    pa = library()
    if not body.endswith(_END_OF_STREAM):
        raise InvalidRequest("the body is no whole Arrow IPC stream; send one, and close its writer first")
    payloads: list[bytes] = []
    columns: dict[str, list[Any]] = {}
    try:
        stream = pa.ipc.open_stream(body)
        _check_schema(stream.schema)
        _check_frames(body)
        batches = list(stream)
        if sum(batch.num_rows for batch in batches) > STAGE_ITEMS_MAX:
            raise BatchTooLarge(
                f"the stream has more than {STAGE_ITEMS_MAX} rows; stage it in several chunks",
                items_max=STAGE_ITEMS_MAX,
            )
        if len(batches) == 1 and (plain := _plain(batches[0])) is not None:
            return plain
        for batch in batches:
            _take_in(batch, payloads, columns)
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:  # names may be no UTF-8
        raise InvalidRequest(f"the body is no Arrow IPC stream ({_first_line(error)}); send one") from None
    return ItemColumns(payloads, columns)


def _check_frames(body: bytes) -> None:
    """By their heads alone: one schema, then batches, none of them compressed."""
    wanted, source = "schema", library().BufferReader(body)
    for frame in library().ipc.MessageReader.open_stream(source):
        if frame.type != wanted:
            raise InvalidRequest(f"the stream has a {frame.type} where a {wanted} belongs; send plain record batches")
        if wanted == "record batch" and _is_compressed(frame.metadata.to_pybytes()):
            raise InvalidRequest("the stream is compressed; send it as it is")
        wanted = "record batch"
    if source.tell() != len(body):
        raise InvalidRequest("there is more after the end of the stream; send one stream a request")


def _is_compressed(metadata: bytes) -> bool:
    """Whether the field `compression` of the RecordBatch in a Message is there: pyarrow tells only by unpacking."""

    def followed(at: int) -> int:
        offset: int = struct.unpack_from("<I", metadata, at)[0]
        return at + offset

    def field(table: int, number: int) -> int:
        """Where a flatbuffer's table has it; 0: not at all."""
        fields = table - struct.unpack_from("<i", metadata, table)[0]
        size: int = struct.unpack_from("<H", metadata, fields)[0]
        place = 4 + 2 * number
        offset: int = struct.unpack_from("<H", metadata, fields + place)[0] if place < size else 0
        return table + offset if offset else 0

    header = field(followed(0), 2)
    return header != 0 and field(followed(header), 3) != 0


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or "it ends too soon"


# ---- columns ----------------------------------------------------------------------------------------------


def _check_schema(schema: Any) -> None:
    seen: set[str] = set()
    for field in schema:
        name: str = field.name
        if name not in COLUMNS:
            shown = name[:NAME_SHOWN_MAX]
            raise InvalidRequest(f"unknown column {shown!r}; {_nearest(name, list(COLUMNS))}", column=shown)
        if name in seen:
            raise InvalidRequest(f"the column {name!r} is there twice; send it once", column=name)
        seen.add(name)
        if not _fits(field.type, COLUMNS[name]):
            wanted = _WANTED[COLUMNS[name]]
            raise InvalidRequest(f"column {name!r} is {field.type!s:.60}; make it {wanted}", column=name)
    if "payload" not in seen:
        raise InvalidRequest("there is no column 'payload'; send one, of binary or string", column="payload")


def _fits(kind: Any, wanted: str) -> bool:
    types = library().types
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if wanted == "bytes":
        return bool(is_text or types.is_binary(kind) or types.is_large_binary(kind))
    fits = {
        "text": is_text,
        "few texts": is_text,
        "integer": types.is_integer(kind),
        "instant": types.is_timestamp(kind) and kind.tz is not None,
        "duration": is_text or types.is_integer(kind) or types.is_floating(kind),
    }
    return bool(fits[wanted] or types.is_null(kind))


def _take_in(batch: Any, payloads: list[bytes], columns: dict[str, list[Any]]) -> None:
    """Add a batch's rows. A column without a value in it is as good as none."""
    before = len(payloads)
    for field, column in zip(batch.schema, batch.columns, strict=True):
        name: str = field.name
        try:
            column.validate(full=True)
        except (library().ArrowException, OSError) as error:
            raise InvalidRequest(f"column {name!r}: {_first_line(error)}; mend it", column=name) from None
        if name == "payload":
            payloads += _payloads(column, before)
        elif column.null_count < len(column):
            columns.setdefault(name, [None] * before).extend(
                _READERS.get(COLUMNS[name], _as_they_are)(name, column, before)
            )
    for values in columns.values():
        values += [None] * (before + batch.num_rows - len(values))


def _plain(batch: Any) -> PlainItems | None:
    """None: there is more to the rows, or something is wrong with them."""
    types, column = library().types, batch.column(0)
    if batch.num_columns > 1 or not batch.num_rows or column.null_count or sys.byteorder != "little":
        return None
    if not (types.is_binary(column.type) or types.is_string(column.type)):  # the large ones have larger offsets
        return None
    try:
        column.validate(full=True)
    except (library().ArrowException, OSError):
        return None
    _, places, data = column.buffers()
    offsets = memoryview(places).cast("B").cast("I")[column.offset : column.offset + len(column) + 1]
    largest = compute().max(compute().binary_length(column)).as_py()
    return PlainItems(offsets, memoryview(data or b"").cast("B"), largest)


def _payloads(column: Any, before: int) -> list[bytes]:
    pa = library()
    if column.null_count:
        raise _wrong("payload", before + column.to_pylist().index(None), "is null; give bytes, or leave the row out")
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if is_text:
        column = column.cast(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
    payloads: list[bytes] = column.to_pylist()
    return payloads


def _as_they_are(name: str, column: Any, before: int) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _few_texts(name: str, column: Any, before: int) -> list[Any]:
    """Most rows share theirs with others: so they share the text that is made of it."""
    coded = column.dictionary_encode()
    texts = [*coded.dictionary.to_pylist(), None]
    return [texts[place] for place in coded.indices.fill_null(len(texts) - 1).to_pylist()]


def _instants(name: str, column: Any, before: int) -> list[datetime | None]:
    pa = library()
    units = _UNITS_A_SECOND[column.type.unit]
    made: list[datetime | None] = []
    for value in column.cast(pa.int64()).to_pylist():
        try:
            made.append(None if value is None else _EPOCH + timedelta(microseconds=value * 10**6 // units))
        except OverflowError:
            raise _wrong(name, before + len(made), "is no instant that a calendar has; mend it") from None
    return made


_READERS: dict[str, Callable[[str, Any, int], list[Any]]] = {"instant": _instants, "few texts": _few_texts}


def _wrong(name: str, row: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"column {name!r}, row {row}: {what}", column=name, row=row)
