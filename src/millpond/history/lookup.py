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
from millpond.history.lake import ITEM_EVENT_SCHEMA, WORDS, About, Lake, LakeFile, read_about
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
LETTERS = "letters"  # and this, of those that arrived: they came dead

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
    """All that happened to an item, in order; `since` and `until` are dates. Empty: the lake does not know it.

    It is followed into its dead queue and back, also from the id of its letter there.
    """
    return _settled(lambda: _timeline(lake, item_id, queues, since, until))


def _timeline(
    lake: Lake, item_id: str, queues: Sequence[str] | None, since: str | None, until: str | None
) -> list[ItemEvent]:
    """A letter in a dead queue, and an item that came back and found its id taken, know their `source_id`."""
    story: dict[tuple[Any, ...], ItemEvent] = {}
    asked: set[str] = set()
    names = {item_id}
    while names := names - asked:
        for name in names:
            story |= {_place(event): event for event in _under(lake, name, queues, since, until)}
        asked |= names
        names = {event.source_id for event in story.values() if event.source_id is not None}
        moved = [event for event in story.values() if event.why == Why.MOVED]
        if moved:
            first = min(moved, key=_when).at.date().isoformat()
            arrived = _sent_on(lake.files(queues=queues, since=first, until=until), {event.item_id for event in moved})
            there = {event.queue for event in story.values()}
            names |= {event.item_id for event in arrived if event.source_queue in there}
    return sorted(story.values(), key=_when)


def _under(
    lake: Lake, item_id: str, queues: Sequence[str] | None, since: str | None, until: str | None
) -> Iterator[ItemEvent]:
    """All that happened under an id."""
    derived = parse_id(item_id)
    found: list[ItemEvent] = []
    if derived is not None:
        incarnation, partition, number = derived
        files = lake.files(queues=queues, since=since, until=until, lane=(incarnation, partition))
        found = sorted(_with_number(files, number, item_id), key=_when)
        yield from found
    if not found or found[-1].why == Why.MOVED:  # an own id; or a redriven item came back with its id as its own
        since = found[-1].at.date().isoformat() if found else since
        yield from _with_id(lake.files(queues=queues, since=since, until=until), item_id)


def _place(event: ItemEvent) -> tuple[Any, ...]:
    return event.incarnation, event.partition, event.turn, event.seq


def _when(event: ItemEvent) -> tuple[Any, ...]:
    """Of two queues in one millisecond, the one that it came from is the first."""
    return event.at, event.source_id is not None, *_place(event)


def _sent_on(files: Sequence[LakeFile], ids: set[str]) -> Iterator[ItemEvent]:
    """Arrivals in another queue, or back, of what was moved under these ids."""

    def chosen(file: Any, group: int) -> Any:
        table = file.read_row_group(group, columns=["why", "source_id"])
        sent = pc.is_in(table.column("source_id").cast(pa.string()), pa.array(sorted(ids)))
        return pc.and_(sent, pc.equal(table.column("why").cast(pa.string()), str(Why.ARRIVED)))

    return _search([file for file in files if _footer(file).counts.get(Why.ARRIVED)], None, None, chosen)


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
    files: Sequence[LakeFile], column: int | None, value: Any, chosen: Callable[[Any, int], Any]
) -> Iterator[ItemEvent]:
    """The rows that `chosen` marks, in the row groups that may have the value in that column, or in all.

    Strings are read as places in a dictionary: only those of the rows that are found are made.
    """
    for lake_file in files:
        with pq.ParquetFile(lake_file.path, read_dictionary=WORDS) as file:
            for group in range(file.num_row_groups):
                if column is not None and not _may_have(file.metadata.row_group(group).column(column), value):
                    continue
                mark = chosen(file, group)
                if mark is not None and pc.any(mark).as_py():
                    for row in file.read_row_group(group).filter(mark).to_pylist():
                        yield ItemEvent(queue=lake_file.queue, **row)


def _may_have(column: Any, value: Any) -> bool:
    statistics = column.statistics
    return statistics is None or not statistics.has_min_max or statistics.min <= value <= statistics.max


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
    letters = 0
    for lake_file in lake.files(queues=[queue]):
        if incarnation is None or lake_file.span.incarnation == incarnation:
            about = _footer(lake_file)
            counts.update(about.counts)
            letters += _count_letters(lake_file) if about.letters is None else about.letters
    return {name: sum(counts[why] for why in whys) for name, whys in TOTALS.items()} | {LETTERS: letters}


def _count_letters(file: LakeFile) -> int:
    """Of a file that does not tell. What came back and found its id taken counts too: here they look alike."""
    table = pq.read_table(file.path, columns=["why", "source_id"], partitioning=None)
    arrived = pc.equal(table.column("why"), str(Why.ARRIVED))
    return int(pc.sum(pc.and_(arrived, pc.is_valid(table.column("source_id")))).as_py() or 0)


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
    for why, count in _footer(file).counts.items():
        values = {"queue": file.queue, "date": file.date, "why": why}
        counted[tuple(values[name] for name in by)] += count


def _footer(file: LakeFile) -> About:
    return read_about(pq.read_metadata(file.path))


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
