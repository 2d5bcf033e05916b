"""Items as an Arrow IPC stream: by columns, for readers of many.

pyarrow is an extra (`millpond[lake]`) and takes a while to import, so it is imported when it is first needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain, groupby, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from millpond.errors import NotBuilt
from millpond.model import CLAIM_PAGE_MAX, ClaimRows, ClaimRun, Item, to_ms

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
WIDTHS_KEPT = 64  # as wide as ids and correlation ids get
NEXT_HEADER = "X-Millpond-Next"  # a stream of items has no place for the cursor


class Field(NamedTuple):
    """`type` is one of `_types`."""

    name: str
    type: str
    nullable: bool = False


ITEM_FIELDS = (
    Field("id", "string"),
    Field("payload", "binary"),
    Field("state", "string"),
    Field("key", "string", True),
    Field("kind", "string"),
    Field("encoding", "string"),
    Field("reference", "string"),
    Field("priority", "int32"),
    Field("attempts", "int32"),
    Field("deliveries", "int32"),
    Field("max_attempts", "int32"),
    Field("correlation_id", "string"),
    Field("created_at", "timestamp"),
    Field("enqueue_at", "timestamp", True),
    Field("ended_at", "timestamp", True),
    Field("expire_deadline", "timestamp"),
    Field("last_error", "string", True),
    Field("state_doc", "string", True),  # as JSON text
    Field("state_version", "int32"),
    Field("dead_reason", "string", True),
    Field("source_queue", "string", True),
    Field("source_id", "string", True),
    Field("source_attempts", "int32", True),
    Field("partition", "int32"),
)


def library() -> Any:
    """pyarrow, or the error that says how to get it."""
    try:
        import pyarrow
    except ImportError:
        raise NotBuilt(
            "Arrow is not spoken here, for want of pyarrow; install millpond[lake] where the server runs,"
            " or use JSON or MessagePack"
        ) from None
    return pyarrow


@cache
def compute() -> Any:
    """What pyarrow does with whole columns; it is slow to load."""
    import pyarrow.compute

    return pyarrow.compute


@cache
def schema() -> Any:
    pa, types = library(), _types()
    return pa.schema([pa.field(field.name, types[field.type], field.nullable) for field in ITEM_FIELDS])


@cache
def _types() -> dict[str, Any]:
    pa = library()
    return {
        "string": pa.string(),
        "binary": pa.binary(),
        "int32": pa.int32(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }


def encode_items(items: Sequence[Item]) -> bytes:
    """One stream, of one batch; of none if there are no items."""
    pa = library()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema()) as stream:
        if len(items):
            stream.write_batch(pa.record_batch(_columns(items), schema=schema()))
    body: bytes = sink.getvalue().to_pybytes()
    return body


def _columns(items: Sequence[Item]) -> list[Any]:
    if isinstance(items, ClaimRows) and 2 * sum([len(run.known) for run in items.runs]) < len(items):
        return _columns_of_runs(items.runs)
    return [_array(_values(items, field), field) for field in ITEM_FIELDS]


# ---- row by row -------------------------------------------------------------------------------------------


def _values(items: Sequence[Item], field: Field) -> list[Any]:
    """As the column has them: instants in us, documents as text."""
    values = list(map(attrgetter(field.name), items))
    if field.type == "timestamp":  # many share one
        known = {instant: None if instant is None else to_ms(instant) * 1_000 for instant in set(values)}
        return list(map(known.__getitem__, values))
    if field.name == "state_doc":
        return [None if document is None else msgspec.json.encode(document).decode() for document in values]
    return values


def _array(values: Sequence[Any], field: Field) -> Any:
    return library().array(values, _types()[field.type])


# ---- runs of neighbours, of most of which their records tell all ------------------------------------------

_PLAIN: dict[str, Any] = {
    **dict.fromkeys(("kind", "encoding", "reference"), ""),
    **dict.fromkeys(("priority", "attempts", "deliveries", "state_version"), 0),
}  # what a plain item has in the columns that do not follow from its run; nothing, in those that are not named
_HEX = [f"{number:03x}" for number in range(0x1000)]
_DECIMAL = [f"{number:03}" for number in range(1_000)]


class _Texts:
    """A column of texts in the making, by neighbours that differ in their last digits: none costs a string."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._spans: list[tuple[int, int]] = []  # how wide, how many

    def add_hex(self, prefix: str, numbers: range | list[int]) -> None:
        """The prefix, and the number in 12 digits."""
        if not isinstance(numbers, range):
            self._add(prefix, [f"{number:012x}" for number in numbers])
            return
        number, stop = numbers.start, numbers.stop
        while number < stop:
            low = number & 0xFFF
            end = min(stop, number - low + 0x1000)
            self._add(f"{prefix}{number >> 12:09x}", _HEX[low : low + end - number])
            number = end

    def add_decimal(self, prefix: str, numbers: range | list[int]) -> None:
        if not isinstance(numbers, range):
            for _, digits in groupby(map(str, numbers), len):
                self._add(prefix, list(digits))
            return
        number, stop = numbers.start, numbers.stop
        while number < 1_000 and number < stop:  # no leading zeros
            self._add(prefix, [f"{number}"])
            number += 1
        while number < stop:
            thousands, low = divmod(number, 1_000)
            end = min(stop, number - low + 1_000)
            self._add(f"{prefix}{thousands}", _DECIMAL[low : low + end - number])
            number = end

    def _add(self, prefix: str, digits: Sequence[str]) -> None:
        """Names are ASCII, and these are of one length."""
        self._parts += (prefix, prefix.join(digits))
        self._spans.append((len(prefix) + len(digits[0]), len(digits)))

    def made(self) -> Any:
        pa = library()
        count = sum([count for _, count in self._spans])
        buffers = [None, pa.py_buffer(self._ends(count)), pa.py_buffer("".join(self._parts).encode("ascii"))]
        return pa.Array.from_buffers(pa.string(), count, buffers)

    def _ends(self, total: int) -> Any:
        widths = {width for width, _ in self._spans}
        if len(widths) == 1 and total <= CLAIM_PAGE_MAX:
            return _even_ends(widths.pop())
        ends, at = array("i", [0]), 0
        for width, count in self._spans:
            ends.extend(range(at + width, at + width * count + 1, width))
            at += width * count
        return ends


@lru_cache(WIDTHS_KEPT)
def _even_ends(width: int) -> Any:
    """Where texts of one width end, for as many as a page can have. Never changed."""
    return array("i", range(0, width * CLAIM_PAGE_MAX + 1, width))


def _columns_of_runs(runs: Sequence[ClaimRun]) -> list[Any]:
    """Whole columns as if all items were plain; then those that are not are put in."""
    ids, correlations = _Texts(), _Texts()
    for run in runs:
        ids.add_decimal(run.mint.id_prefix, run.numbers)
        correlations.add_hex(run.mint.correlation_prefix(run.created), run.numbers)
    counts = [len(run.payloads) for run in runs]
    plain: dict[str, Any] = {
        "id": ids.made(),
        "correlation_id": correlations.made(),
        "payload": list(chain.from_iterable([run.payloads for run in runs])),
        "created_at": _Repeated([run.created * 1_000 for run in runs], counts),
        "expire_deadline": _Repeated([run.deadline * 1_000 for run in runs], counts),
        "max_attempts": _Repeated([run.max_attempts for run in runs], counts),
        "state": _Repeated([run.state for run in runs], counts),
        "partition": _Repeated([run.partition for run in runs], counts),
    }
    if any(run.records for run in runs):
        _put_own(plain, runs)
    rows, items = _not_plain(runs)
    total = sum(counts)
    return [_column(plain.get(field.name), total, field, rows, items) for field in ITEM_FIELDS]


_OWN: dict[str, Any] = {
    **dict.fromkeys(("id", "key", "correlation_id")),
    **dict.fromkeys(("kind", "encoding", "reference"), ""),
    "priority": 0,
    "max_attempts": -1,
}  # what a record may have of its own, and how it says that it has not
_SOURCE = {"dead_reason": "reason", "source_queue": "queue", "source_id": "id", "source_attempts": "attempts"}


def _put_own(plain: dict[str, Any], runs: Sequence[ClaimRun]) -> None:
    """Into the columns of which any record has something of its own."""
    for name, nothing in _OWN.items():
        own = _of_records(runs, name, nothing)
        if own.count(nothing) == len(own):
            continue
        if name in plain:
            pairs = zip(own, plain[name].to_pylist(), strict=True)
            own = [other if value == nothing else value for value, other in pairs]
        plain[name] = own
    sources = _of_records(runs, "source", None)
    if sources.count(None) < len(sources):
        for name, attribute in _SOURCE.items():
            plain[name] = [None if source is None else getattr(source, attribute) for source in sources]


def _of_records(runs: Sequence[ClaimRun], name: str, nothing: Any) -> list[Any]:
    get = attrgetter(name)
    values = [map(get, run.records) if run.records else repeat(nothing, len(run.payloads)) for run in runs]
    return list(chain.from_iterable(values))


class _Repeated(NamedTuple):
    """A column of numbers, each of which many neighbours share."""

    values: Sequence[Any]
    counts: Sequence[int]

    def to_pylist(self) -> list[Any]:
        return list(chain.from_iterable(map(repeat, self.values, self.counts)))

    def made(self, field: Field) -> Any:
        pa = library()
        if len(set(self.values)) == 1:
            return pa.repeat(pa.scalar(self.values[0], _types()[field.type]), sum(self.counts))
        code = "i" if field.type == "int32" else "q"
        numbers = array(code)
        for value, count in zip(self.values, self.counts, strict=True):
            numbers += array(code, (value,)) * count
        return pa.Array.from_buffers(_types()[field.type], len(numbers), [None, pa.py_buffer(numbers)])


def _not_plain(runs: Sequence[ClaimRun]) -> tuple[list[int], list[Item]]:
    """Their rows, and themselves."""
    rows: list[int] = []
    items: list[Item] = []
    at = 0
    for run in runs:
        if run.known:
            rows += [at + run.numbers.index(number) for number in run.known]
            items += run.known.values()
        at += len(run.payloads)
    return rows, items


def _column(plain: Any, count: int, field: Field, rows: Sequence[int], items: Sequence[Item]) -> Any:
    """`plain` has a value a row; None: all have the same, save for the items that have another."""
    others = _values(items, field)
    if plain is None:
        value = _PLAIN.get(field.name)
        if others.count(value) == len(others):
            pa = library()
            return pa.repeat(pa.scalar(value, _types()[field.type]), count)
        plain = [value] * count
    if others:
        plain = plain if isinstance(plain, list) else plain.to_pylist()
        for row, other in zip(rows, others, strict=True):
            plain[row] = other
    if isinstance(plain, _Repeated):
        return plain.made(field)
    return _array(plain, field) if isinstance(plain, list) else plain
