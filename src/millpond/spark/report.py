"""A report on the history: the jobs over one span, as tables and as plain data for whoever shows it.

A span is widened to whole windows, so that a report from the sums of incremental runs says the same as one from the
events themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.errors import NotFound
from millpond.spark import lake as lakes
from millpond.spark.jobs import consumers, counts, durations, incremental, items, metrics, signatures
from millpond.spark.jobs.incremental import Sums

WINDOWS_MS = tuple(60_000 * minutes for minutes in (1, 5, 15, 60, 360, 1_440, 10_080))  # what "auto" chooses from
WINDOWS_WANTED = 72  # at most, then: as many as a plot shows well
QUEUES_MAX = 1_000  # the busiest; more are a dump, not a report
PLOTTED_MAX = 20  # queues whose windows are told, again the busiest
WINDOWS_MAX = 100_000  # rows of them: some ten megabytes
FAILURES_MAX = 50
CONSUMERS_MAX = 200

MOMENT = timedelta(milliseconds=1)  # as close as two instants of the engine can be

Row = dict[str, Any]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the report is about; `until` is not part of it.

    `at`: the instant whose states are told, the end of the span if none is given. `sums`: where incremental runs keep
    theirs; None: everything is read anew.
    """

    queues: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    window_ms: int | None = None
    at: datetime | None = None
    sums: str | None = None


class Span(NamedTuple):
    """Whole windows, from the beginning of one to the end of one."""

    since: datetime
    until: datetime
    window_ms: int


class Findings(NamedTuple):
    """What the jobs answer. `items` are those in the queues at the instant `at`."""

    span: Span
    at: datetime
    metrics: DataFrame
    totals: DataFrame
    failures: DataFrame
    consumers: DataFrame
    items: DataFrame


class Report(msgspec.Struct, kw_only=True):
    lake: str
    made_at: datetime
    since: datetime
    until: datetime
    window_ms: int
    queues: list[Row]
    windows: list[Row]
    failures: list[Row]
    consumers: list[Row]
    states_at: datetime
    states: list[Row]


# ---- asking -------------------------------------------------------------------------------------------------


@contextmanager
def findings(spark: SparkSession, lake: str | Path, asked: Asked) -> Iterator[Findings]:
    """To be used within the `with`: what the answers share is held in memory or on disk meanwhile."""
    events = lakes.events(spark, lake, queues=asked.queues or None, since=asked.since, until=asked.until)
    span = span_of(events, lake, asked)
    at = asked.at or span.until
    with ExitStack() as held:
        sums = _sums(spark, lake, asked, span)
        kept = [part.persist() for part in (sums.counts, sums.durations, sums.signatures, sums.consumers)]
        for part in kept:
            held.callback(part.unpersist)
        known = _items(spark, lake, asked, at, sums)
        yield Findings(
            span=span,
            at=at,
            metrics=metrics.result(kept[0], kept[1], span.window_ms),
            totals=metrics.totals(kept[0], kept[1]),
            failures=signatures.result(kept[2]),
            consumers=consumers.result(kept[3]),
            items=items.present(known),
        )


def span_of(events: DataFrame, lake: str | Path, asked: Asked) -> Span:
    [row] = events.agg(F.min("at").alias("first"), F.max("at").alias("last")).collect()
    if row.first is None:
        what = f"of {', '.join(asked.queues)} " if asked.queues else ""
        raise NotFound(f"the history in {lake} has nothing {what}in that span; widen it, or sync the lake first")
    first, end = asked.since or lakes.aware(row.first), asked.until or lakes.aware(row.last) + MOMENT
    window_ms = asked.window_ms or _window_for(end - first)
    window = timedelta(milliseconds=window_ms)
    return Span(_floor(first, window), _floor(end - MOMENT, window) + window, window_ms)


def _window_for(length: timedelta) -> int:
    fitting = (window for window in WINDOWS_MS if length / timedelta(milliseconds=window) <= WINDOWS_WANTED)
    return next(fitting, WINDOWS_MS[-1])


def _floor(instant: datetime, window: timedelta) -> datetime:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return epoch + (instant - epoch) // window * window


def _sums(spark: SparkSession, lake: str | Path, asked: Asked, span: Span) -> Sums:
    """All that is needed of the events, by window."""
    window_ms = span.window_ms
    if asked.sums is None:
        queues = asked.queues or None
        events = lakes.events(spark, lake, queues=queues, since=span.since, until=span.until)
        before = lakes.events(spark, lake, queues=queues, until=span.until)
        began = events if asked.since is None else incremental.beginnings(spark, lake, events)
        return Sums(
            counts=counts.partial(events, window_ms),
            durations=durations.partial(events, window_ms),
            signatures=signatures.partial(events, window_ms),
            consumers=consumers.partial(events, window_ms, began),
            items=items.partial(before),
        )
    incremental.run(spark, lake, asked.sums, window_ms).awaitTermination()
    sums = incremental.sums(spark, asked.sums, window_ms, since=span.since, until=span.until)
    if not asked.queues:
        return sums
    return Sums(*(part.where(F.col("queue").isin(*asked.queues)) for part in sums))


def _items(spark: SparkSession, lake: str | Path, asked: Asked, at: datetime, sums: Sums) -> DataFrame:
    """The sums hold the items as they are; for any earlier instant the events are read."""
    if asked.at is None and asked.until is None:
        return items.result(sums.items)
    return items.items(lakes.events(spark, lake, queues=asked.queues or None).where(F.col("at") <= F.lit(at)))


# ---- telling ------------------------------------------------------------------------------------------------


def report(found: Findings, lake: str | Path, made_at: datetime) -> Report:
    queues = _rows(found.totals.orderBy(F.desc("produced"), "queue").limit(QUEUES_MAX))
    shown = [row["queue"] for row in queues[:PLOTTED_MAX]]
    windows = found.metrics.where(F.col("queue").isin(*shown)).orderBy("queue", "window").limit(WINDOWS_MAX)
    return Report(
        lake=str(lake),
        made_at=made_at,
        since=found.span.since,
        until=found.span.until,
        window_ms=found.span.window_ms,
        queues=queues,
        windows=_rows(windows),
        failures=_rows(found.failures.limit(FAILURES_MAX)),
        consumers=_rows(found.consumers.limit(CONSUMERS_MAX)),
        states_at=found.at,
        states=_rows(items.states(found.items).orderBy("queue", "state")),
    )


def write_parquet(found: Findings, folder: str | Path) -> None:
    """A folder for each table; what was there before is replaced."""
    place = lakes.address(folder)
    for name in ("metrics", "failures", "consumers", "items"):
        table: DataFrame = getattr(found, name)
        table.write.mode("overwrite").parquet(f"{place}/{name}")


def _rows(table: DataFrame) -> list[Row]:
    return [_told(row.asDict(recursive=True)) for row in table.collect()]


def _told(row: Row) -> Row:
    return {name: lakes.aware(value) if isinstance(value, datetime) else value for name, value in row.items()}
