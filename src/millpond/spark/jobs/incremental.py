"""The jobs as a stream: each run takes what is new in the lake, and what it sums up is kept beside the sums before.

    <out>/window-900000ms/plans/7.json       which turns of which partitions the batch is made of
    <out>/window-900000ms/counts/batch=7/    what `counts.partial` made of them; so for the other PARTS

A batch is a set of turns, not of files, so that a compaction changes nothing: the same turns are found in whatever
files hold them now. The plan is written before anything else, and a batch that is done again overwrites what it had
written; so a crash repeats and cannot double. Deleting the directory starts over.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from millpond.spark import lake as lakes
from millpond.spark.jobs import attempts, consumers, counts, durations, items, signatures
from millpond.spark.jobs.plans import Plans, Turns, by_place, place_of, plan_after

TURNS_SCHEMA = "queue string, date string, incarnation string, partition int, first long, last long"
PARTS = ("counts", "durations", "signatures", "consumers", "items")


class Sums(NamedTuple):
    """The partials of all batches so far; each goes to `result` of its job."""

    counts: DataFrame
    durations: DataFrame
    signatures: DataFrame
    consumers: DataFrame
    items: DataFrame


def run(
    spark: SparkSession, lake: str | Path, out: str | Path, window_ms: int, every: str | None = None
) -> StreamingQuery:
    """A query that ends when all is taken that is there now, or, with `every` ("1 minute"), goes on looking.

    The stream of files only says that there is something new; one batch takes all of it.
    """
    place = _place(out, window_ms)

    def take(_: DataFrame, batch: int) -> None:
        Batch(spark, lake, place, window_ms, batch).take()

    writer = (
        lakes.stream(spark, lake).writeStream.foreachBatch(take).option("checkpointLocation", f"{place}/checkpoint")
    )
    writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=every)
    return writer.start()


def sums(
    spark: SparkSession,
    out: str | Path,
    window_ms: int,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
) -> Sums:
    """Of the windows from `since` on and before `until`; items are as they were last seen, whenever that was."""
    place = _place(out, window_ms)
    found = {}
    for part in PARTS:
        read = spark.read.parquet(f"{place}/{part}").drop("batch")
        if since is not None and part != "items":
            read = read.where(F.col("window") >= F.lit(since))
        if until is not None and part != "items":
            read = read.where(F.col("window") < F.lit(until))
        found[part] = read
    return Sums(**found)


class Batch:
    def __init__(self, spark: SparkSession, lake: str | Path, out: str, window_ms: int, batch: int) -> None:
        self._spark = spark
        self._lake = lake
        self._out = out
        self._window_ms = window_ms
        self._batch = batch

    def take(self) -> None:
        new = [turns for turns in self._planned() if turns.new]
        if not new:  # files were merged, or an earlier batch was ahead of the stream
            return
        events = events_of(self._spark, self._lake, new)
        self._write("counts", counts.partial(events, self._window_ms))
        self._write("durations", durations.partial(events, self._window_ms))
        self._write("signatures", signatures.partial(events, self._window_ms))
        began = beginnings(self._spark, self._lake, events)
        self._write("consumers", consumers.partial(events, self._window_ms, began))
        self._write("items", items.partial(events))

    def _planned(self) -> list[Turns]:
        """Once for all: a batch that is done again has the same."""
        plans = Plans(self._spark, f"{self._out}/plans")
        plan = plans.read(self._batch)
        if plan is None:
            before = (plans.read(self._batch - 1) if self._batch else None) or []
            plan = plan_after(before, lakes.files(self._spark, self._lake))
            plans.write(self._batch, plan)
        return plan

    def _write(self, part: str, made: DataFrame) -> None:
        made.write.mode("overwrite").parquet(f"{self._out}/{part}/batch={self._batch}")


def beginnings(spark: SparkSession, lake: str | Path, events: DataFrame) -> DataFrame:
    """Where the attempts began that end in these events: in the lake, no earlier than the oldest of them."""
    [row] = attempts.first_begin(events).collect()
    return events if row.at is None else lakes.events(spark, lake, since=lakes.aware(row.at))


def events_of(spark: SparkSession, lake: str | Path, wanted: list[Turns]) -> DataFrame:
    """The events of these turns, from whichever files hold them now."""
    spans = by_place(wanted)
    inside, across = [], []
    for file in lakes.files(spark, lake):
        from_turn, to_turn = file.span.from_turn, file.span.to_turn
        near = [span for span in spans.get(place_of(file), []) if span[0] <= to_turn and from_turn <= span[1]]
        if any(first <= from_turn and to_turn <= last for first, last in near):
            inside.append(file)
        elif near:
            across.append(file)
    whole = lakes.read_files(spark, lake, inside)
    if not across:
        return whole
    rows = spark.createDataFrame([turns[:6] for turns in wanted], TURNS_SCHEMA).alias("wanted")
    part = lakes.read_files(spark, lake, across).alias("event")
    same = [F.col(f"event.{name}") == F.col(f"wanted.{name}") for name in ("queue", "incarnation", "partition")]
    fits = [*same, F.col("event.date").cast("string") == F.col("wanted.date"), F.expr("turn between first and last")]
    return whole.unionByName(part.join(F.broadcast(rows), fits, "left_semi"))


def _place(out: str | Path, window_ms: int) -> str:
    return f"{lakes.address(out)}/window-{window_ms}ms"
