"""What the lake should hold, told the slow way: from `Reader`'s transitions and the journal's records, item by item."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa

from millpond.history.format import Event, Record, decode_entry, decode_meta, numbers_of
from millpond.history.lake import ITEM_EVENT_SCHEMA, Lake
from millpond.history.reader import Reader
from millpond.model import JournalTurn
from millpond.queue.tokens import Mint
from millpond.store.base import JournalRow

Row = dict[str, Any]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Teller:
    """Tells the rows of one partition, one journal row after the other."""

    def __init__(self, incarnation: str, partition: int) -> None:
        self._incarnation = incarnation
        self._reader = Reader(partition, Mint(incarnation, partition))
        self._records: dict[int, Record] = {}
        self._created: dict[int, int] = {}
        self._adopted: dict[int, int] = {}  # when each was made in the partition that it came from
        self._changed: dict[int, int] = {}

    def tell(self, row: JournalRow | JournalTurn) -> list[Row]:
        events = decode_entry(row.events).events
        self._learn(events)
        errors = _errors(events)
        transitions = self._reader.read(JournalRow(row.turn, row.at, row.events))
        return [self._row(seq, one, errors) for seq, one in enumerate(transitions)]

    def _learn(self, events: Sequence[Sequence[Any]]) -> None:
        for event in events:
            if event[0] == Event.PRODUCED:
                first, meta = event[1], event[4]
            elif event[0] == Event.PUBLISHED:
                first, meta = event[3], event[6]
            elif event[0] == Event.ADOPTED:
                first, meta = event[1], event[5]
                self._adopted |= dict.fromkeys(range(first, first + event[2]), event[3])
            else:
                continue
            for number, record in enumerate(decode_meta(meta) if meta else [], first):
                if record is not None:
                    self._records[number] = record

    def _row(self, seq: int, one: Any, errors: dict[tuple[int, str], str | None]) -> Row:
        number = one.number
        if one.why in ("produced", "arrived", "published", "adopted"):
            self._created[number] = self._adopted.get(number, one.at)
        record = self._records.get(number, Record())
        created, changed = self._created.get(number), self._changed.get(number)
        self._changed[number] = one.at
        return {
            **{name: value for name, value in msgspec.structs.asdict(one).items() if name in ITEM_EVENT_SCHEMA.names},
            "incarnation": self._incarnation,
            "seq": seq,
            "at": EPOCH + timedelta(milliseconds=one.at),
            "kind": record.kind,
            "priority": record.priority,
            "error": errors.get((number, one.why)),
            "source_queue": record.source and record.source.queue,
            "source_id": record.source and record.source.id,
            "since_ms": None if changed is None else one.at - changed,
            "age_ms": None if created is None else one.at - created,
        }


def _errors(events: Sequence[Sequence[Any]]) -> dict[tuple[int, str], str | None]:
    """By item and by what happened to it in this turn."""
    found: dict[tuple[int, str], str | None] = {}
    for kind, *arguments in events:
        if kind == Event.RETRIED:
            found[arguments[1], "defer" if arguments[3] else "failure"] = arguments[4]
        elif kind == Event.CLAIM_RETRIED:
            found[arguments[2], "failure"] = arguments[4]
        elif kind == Event.DIED:
            reason = ("max_attempts", "expired", "rejected")[arguments[0]]
            found |= {(number, reason): arguments[5] for number in numbers_of(arguments[2])}
    return found


def tell(rows: Iterable[JournalRow | JournalTurn], incarnation: str, partition: int = 0) -> list[Row]:
    teller = Teller(incarnation, partition)
    return [row for one in rows for row in teller.tell(one)]


def rows_of(tables: Sequence[Any]) -> list[Row]:
    return ordered(pa.concat_tables(tables).cast(ITEM_EVENT_SCHEMA).to_pylist()) if tables else []


def lake_rows(lake: Lake, queue: str | None = None) -> list[Row]:
    """All rows of the files that count, by partition and turn."""
    import pyarrow.parquet as pq

    files = lake.files(queues=None if queue is None else [queue])
    rows = [row for file in files for row in pq.ParquetFile(file.path).read().to_pylist()]
    return ordered(rows)


def ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["incarnation"], row["partition"], row["turn"], row["seq"]))
