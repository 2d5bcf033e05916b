"""Every attempt that is over: who made it, when it began and ended, how it ended.

A lease that ran out, and a death, do not say whose lease it was: that is told by the row that began the attempt.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millpond.spark.jobs.columns import ITEM, begins_attempt, ends_attempt

_BEGAN = (*ITEM, "started_at")


def attempts(events: DataFrame, began: DataFrame | None = None) -> DataFrame:
    """`began`: where to look for the beginnings, if `events` are only a part of the history."""
    ended = events.where(ends_attempt()).select(
        "queue",
        "item_id",
        "attempt",
        "who",
        _started().alias("started_at"),
        F.col("at").alias("ended_at"),
        F.col("since_ms").alias("run_ms"),
        F.col("why").alias("outcome"),
        F.col("to_state").alias("state"),
        "error",
        "kind",
        "correlation_id",
        "incarnation",
        "partition",
        "number",
    )
    unnamed = F.col("who") == ""
    beginnings = _beginnings(events if began is None else began)
    found = ended.where(unnamed).join(beginnings, list(_BEGAN), "left")
    named = found.withColumn("who", F.coalesce("holder", F.lit(""))).drop("holder")
    return ended.where(~unnamed).unionByName(named)


def first_begin(events: DataFrame) -> DataFrame:
    """One row: when the oldest of the attempts that end in these events began."""
    return events.where(ends_attempt() & (F.col("who") == "")).agg(F.min(_started()).alias("at"))


def _beginnings(events: DataFrame) -> DataFrame:
    """A row for each attempt, even where a lease was given back and granted again within a millisecond."""
    leased = events.where(begins_attempt() & (F.col("who") != "")).withColumn("started_at", F.col("at"))
    return leased.groupBy(*_BEGAN).agg(F.max("who").alias("holder"))


def _started() -> Column:
    return F.timestamp_millis(F.unix_millis("at") - F.col("since_ms"))
