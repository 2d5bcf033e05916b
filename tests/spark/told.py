"""Made-up history: what happened to some items, told step by step, as rows or as files of a lake."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from millpond.history.lake import ITEM_EVENT_SCHEMA, Lake, Span
from millpond.spark.lake import SCHEMA

NOON = datetime(2031, 5, 7, 12, tzinfo=UTC)
COLUMNS = [column.split()[0] for column in SCHEMA.split(",")]

Row = dict[str, Any]


class Told:
    """One partition of one queue. Each call is a turn at the present second, which `at` moves on."""

    def __init__(self, queue: str = "mail", incarnation: str = "first", partition: int = 0) -> None:
        self.rows: list[Row] = []
        self._place = {"queue": queue, "incarnation": incarnation, "partition": partition}
        self._now = NOON
        self._turn = 0
        self._items: dict[int, Row] = {}  # the last row of each
        self._begun: dict[int, datetime] = {}
        self._attempts: dict[int, int] = {}

    def at(self, seconds: float) -> Told:
        """Seconds since noon."""
        self._now = NOON + timedelta(seconds=seconds)
        return self

    def produce(self, *numbers: int, why: str = "produced", **given: Any) -> Told:
        for number in numbers:
            self._begun[number] = self._now
        return self._turn_of(numbers, why, "ready", **given)

    def lease(self, *numbers: int, who: str = "", why: str = "leased") -> Told:
        return self._turn_of(numbers, why, {"leased": "leased", "claimed": "claimed"}[why], who=who)

    def complete(self, *numbers: int, who: str = "") -> Told:
        return self._turn_of(numbers, "completed", "completed", who=who)

    def fail(self, *numbers: int, error: str | None = None, who: str = "") -> Told:
        return self._turn_of(numbers, "failure", "retrying", who=who, error=error)

    def lose_lease(self, *numbers: int) -> Told:
        return self._turn_of(numbers, "lease_expired", "ready")

    def die(self, *numbers: int, why: str = "max_attempts", error: str | None = None) -> Told:
        return self._turn_of(numbers, why, "dead", error=error)

    def due(self, *numbers: int) -> Told:
        return self._turn_of(numbers, "due", "ready")

    def redrive(self, *numbers: int) -> Told:
        return self._turn_of(numbers, "redriven", "ready")

    def release(self, *numbers: int, why: str = "claim_released") -> Told:
        return self._turn_of(numbers, why, "ready")

    def remove(self, *numbers: int, why: str = "cleared") -> Told:
        return self._turn_of(numbers, why, None)

    def _turn_of(self, numbers: Sequence[int], why: str, to_state: str | None, **given: Any) -> Told:
        self._turn += 1
        for seq, number in enumerate(numbers):
            before = self._items.get(number, {})
            row: Row = dict.fromkeys(COLUMNS)
            row |= {name: before[name] for name in _KEPT if name in before} or dict(_PLAIN)
            row |= self._place | {"date": self._now.date(), "turn": self._turn, "seq": seq, "number": number}
            row |= {"item_id": f"i{number}", "correlation_id": f"c{number}", "at": self._now}
            row |= {"from_state": before.get("to_state"), "to_state": to_state, "why": why, "who": ""}
            row |= {"attempt": self._attempt(number, why, before.get("to_state")), "error": None}
            row |= {"since_ms": _ms(self._now - before["at"]) if before else None}
            row |= {"age_ms": _ms(self._now - self._begun[number])} | given
            self._items[number] = row
            self.rows.append(row)
        return self

    def _attempt(self, number: int, why: str, before: str | None) -> int | None:
        if why in ("leased", "claimed"):
            self._attempts[number] = self._attempts.get(number, 0) + 1
            return self._attempts[number]
        return self._attempts[number] if before in ("leased", "claimed") else None


_KEPT = ("kind", "priority", "source_queue", "source_id")
_PLAIN = {"kind": "", "priority": 0}


def _ms(passed: timedelta) -> int:
    return round(passed / timedelta(milliseconds=1))


def rows_of(*told: Told) -> list[Row]:
    return [row for one in told for row in one.rows]


def frame(spark: SparkSession, *told: Told) -> DataFrame:
    return spark.createDataFrame([tuple(row[name] for name in COLUMNS) for row in rows_of(*told)], SCHEMA)


def write_file(lake: Path, rows: Iterable[Row], turns: tuple[int, int] | None = None) -> Path:
    """Rows of one partition and date as a file of the lake, of all their turns unless told otherwise."""
    kept = list(rows)
    first, last = turns or (kept[0]["turn"], kept[-1]["turn"])
    span = Span(kept[0]["incarnation"], kept[0]["partition"], first, last)
    folder = Lake(lake).folder(kept[0]["date"].isoformat(), kept[0]["queue"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / span.name("parquet")
    pq.write_table(pa.Table.from_pylist(kept, ITEM_EVENT_SCHEMA), path)
    return path


def write_lake(lake: Path, *told: Told) -> Path:
    """A file for each partition and date."""
    for one in told:
        for day in sorted({row["date"] for row in one.rows}):
            write_file(lake, [row for row in one.rows if row["date"] == day])
    return lake
