"""Small questions to the lake, answered without Spark: what became of an item, and how many of what there were.

An id that a queue assigned tells the item's partition and number, and row groups know the least and the greatest number
in them, so few are read. An own id is looked for among the ids of all row groups whose ids reach around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpond.errors import InvalidRequest
from millpond.history.lake import ITEM_EVENT_SCHEMA, WORDS, Lake, LakeFile, read_about
from millpond.history.names import parse_id
from millpond.history.reader import Why

TOTALS = {
    "produced": (Why.PRODUCED, Why.ARRIVED, Why.PUBLISHED),
    "leased": (Why.LEASED,),
    "completed": (Why.COMPLETED,),
    "retried": (Why.FAILURE, Why.DEFER),
    "dead": (Why.MAX_ATTEMPTS, Why.EXPIRED, Why.REJECTED),
    "cancelled": (Why.CANCELLED,),
    "claimed": (Why.CLAIMED,),
}
"""What a queue counts in its totals, and which changes of state that is."""

COUNTED = ("queue", "date", "minute", "why", "from_state", "to_state", "who", "kind", "partition")
_OF_THE_FOOTER = {"queue", "date", "why"}  # a file's own counts are enough for these

ASKED_MAX = 5  # times: a lake is compacted every few minutes, not while we look again

_MINUTE_US = 60_000_000
_NUMBER = ITEM_EVENT_SCHEMA.get_field_index("number")
_ITEM_ID = ITEM_EVENT_SCHEMA.get_field_index("item_id")

T = TypeVar("T")


class ItemEvent(msgspec.Struct, kw_only=True):
    """A row of the lake, with its queue."""

    queue: str
    incarnation: str
    partition: int
    turn: int
    seq: int
    number: int
    item_id: str
    correlation_id: str | None
    at: datetime
    from_state: str | None
    to_state: str | None
    why: str
    who: str
    attempt: int | None
    kind: str
    priority: int
    error: str | None
    source_queue: str | None
    source_id: str | None
    since_ms: int | None
    age_ms: int | None


# ---- one item -----------------------------------------------------------------------------------------------


def timeline(
    lake: Lake,
    item_id: str,
    *,
    queues: Sequence[str] | None = None,
    since: str | None = None,
    until: str | None = None,
) -> list[ItemEvent]:
    """All that happened to an item, in order; `since` and `until` are dates. Empty: the lake does not know it."""
    return _settled(lambda: _timeline(lake, item_id, queues, since, until))


def _timeline(
    lake: Lake, item_id: str, queues: Sequence[str] | None, since: str | None, until: str | None
) -> list[ItemEvent]:
    derived = parse_id(item_id)
    if derived is None:
        return sorted(_with_id(lake.files(queues=queues, since=since, until=until), item_id), key=_when)
    incarnation, partition, number = derived
    files = lake.files(queues=queues, since=since, until=until, lane=(incarnation, partition))
    found = sorted(_with_number(files, number, item_id), key=_when)
    if not found or found[-1].why == Why.MOVED:  # a redriven item comes back with its id as its own
        since = found[-1].at.date().isoformat() if found else since
        later = _with_id(lake.files(queues=queues, since=since, until=until), item_id)
        known = {(event.incarnation, event.partition, event.turn, event.seq) for event in found}
        found += [e for e in later if (e.incarnation, e.partition, e.turn, e.seq) not in known]
    return sorted(found, key=_when)


def _when(event: ItemEvent) -> tuple[Any, ...]:
    return event.at, event.incarnation, event.partition, event.turn, event.seq


def _with_number(files: Sequence[LakeFile], number: int, item_id: str) -> Iterator[ItemEvent]:
    def chosen(file: Any, group: int) -> Any:
        table = file.read_row_group(group, columns=["number"])
        return pc.equal(table.column("number"), number)

    for event in _search(files, _NUMBER, number, chosen):
        if event.item_id == item_id:
            yield event


def _with_id(files: Sequence[LakeFile], item_id: str) -> Iterator[ItemEvent]:
    def chosen(file: Any, group: int) -> Any:
        ids = file.read_row_group(group, columns=["item_id"]).column("item_id").combine_chunks()
        place = pc.index(ids.dictionary, item_id).as_py()
        return None if place < 0 else pc.equal(ids.indices, place)

    return _search(files, _ITEM_ID, item_id, chosen)


def _search(
    files: Sequence[LakeFile], column: int, value: Any, chosen: Callable[[Any, int], Any]
) -> Iterator[ItemEvent]:
    """The rows that `chosen` marks, in the row groups that may have the value in that column.

    Strings are read as places in a dictionary: only those of the rows that are found are made.
    """
    for lake_file in files:
        with pq.ParquetFile(lake_file.path, read_dictionary=WORDS) as file:
            for group in range(file.num_row_groups):
                statistics = file.metadata.row_group(group).column(column).statistics
                if statistics is not None and statistics.has_min_max and not statistics.min <= value <= statistics.max:
                    continue
                mark = chosen(file, group)
                if mark is not None and pc.any(mark).as_py():
                    for row in file.read_row_group(group).filter(mark).to_pylist():
                        yield ItemEvent(queue=lake_file.queue, **row)


def _settled(question: Callable[[], T]) -> T:
    """Asked again if a file was merged into another one, or dropped, after it had been listed."""
    for _ in range(ASKED_MAX - 1):
        try:
            return question()
        except FileNotFoundError:
            continue
    return question()


# ---- counts -------------------------------------------------------------------------------------------------


def totals(lake: Lake, queue: str, *, incarnation: str | None = None) -> dict[str, int]:
    """What the queue's own `totals` count, from the lake; of one incarnation, or of all."""
    return _settled(lambda: _totals(lake, queue, incarnation))


def _totals(lake: Lake, queue: str, incarnation: str | None) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for lake_file in lake.files(queues=[queue]):
        if incarnation is None or lake_file.span.incarnation == incarnation:
            counts.update(_footer_counts(lake_file))
    return {name: sum(counts[why] for why in whys) for name, whys in TOTALS.items()}


def counts(
    lake: Lake,
    by: Sequence[str] = ("queue", "why"),
    *,
    queues: Sequence[str] | None = None,
    since: str | None = None,
    until: str | None = None,
) -> Any:
    """How many changes of state there were, as an Arrow table: the columns `by` (see `COUNTED`), and `events`.

    By queue, date and why alone it reads only the ends of the files.
    """
    for name in by:
        if name not in COUNTED:
            raise InvalidRequest(f"cannot count by {name!r}; by any of {', '.join(COUNTED)}")
    counted = _settled(lambda: _counts(lake.files(queues=queues, since=since, until=until), by))
    rows = sorted(counted.items(), key=lambda row: [(value is None, value) for value in row[0]])
    columns = {name: [key[place] for key, _ in rows] for place, name in enumerate(by)}
    kinds = {"minute": pa.timestamp("us", tz="UTC"), "partition": pa.int32()}
    schema = [(name, kinds.get(name, pa.string())) for name in by]
    return pa.table(
        {**columns, "events": [count for _, count in rows]}, schema=pa.schema([*schema, ("events", pa.int64())])
    )


def _counts(files: Sequence[LakeFile], by: Sequence[str]) -> Counter[tuple[Any, ...]]:
    counted: Counter[tuple[Any, ...]] = Counter()
    for lake_file in files:
        if set(by) <= _OF_THE_FOOTER:
            _count_footer(lake_file, by, counted)
        else:
            _count_rows(lake_file, by, counted)
    return counted


def _count_footer(file: LakeFile, by: Sequence[str], counted: Counter[tuple[Any, ...]]) -> None:
    for why, count in _footer_counts(file).items():
        values = {"queue": file.queue, "date": file.date, "why": why}
        counted[tuple(values[name] for name in by)] += count


def _footer_counts(file: LakeFile) -> dict[str, int]:
    return read_about(pq.read_metadata(file.path)).counts


def _count_rows(file: LakeFile, by: Sequence[str], counted: Counter[tuple[Any, ...]]) -> None:
    """A row group at a time, so that memory does not grow with the file."""
    inside = [name for name in by if name not in ("queue", "date")]
    columns = ["at" if name == "minute" else name for name in inside]
    with pq.ParquetFile(file.path, read_dictionary=WORDS) as opened:
        for group in range(opened.num_row_groups):
            table = opened.read_row_group(group, columns=columns)
            if "minute" in inside:
                minutes = pc.divide(table.column("at").cast(pa.int64()), _MINUTE_US)  # numbers are five times as fast
                table = table.drop_columns("at").append_column("minute", minutes)
            found = table.group_by(inside, use_threads=False).aggregate([([], "count_all")])
            for row in found.to_pylist():
                values = {"queue": file.queue, "date": file.date, **row}
                if "minute" in row:
                    values["minute"] = datetime.fromtimestamp(row["minute"] * 60, UTC)
                counted[tuple(values[name] for name in by)] += row["count_all"]
