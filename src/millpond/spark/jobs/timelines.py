"""The life of every item, from being produced to its end, as one row with its steps in order."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millpond.spark.jobs.columns import ITEM, ORDER, begins_attempt, ends_attempt, total

STEP = ("at", "from_state", "to_state", "why", "who", "attempt", "error", "since_ms")


def timelines(events: DataFrame) -> DataFrame:
    """`waited_ms` until leases, `ran_ms` in leases and claims, both over all attempts."""
    grouped = events.groupBy(*ITEM).agg(
        F.sort_array(F.collect_list(F.struct(*ORDER, *STEP))).alias("ordered"),
        F.max("item_id").alias("item_id"),
        F.max("correlation_id").alias("correlation_id"),
        F.max("attempt").alias("attempts"),
        total(F.col("since_ms"), begins_attempt()).alias("waited_ms"),
        total(F.col("since_ms"), ends_attempt()).alias("ran_ms"),
    )
    last = F.element_at("ordered", -1)
    return grouped.select(
        "queue",
        "item_id",
        "correlation_id",
        F.col("ordered")[0]["at"].alias("began_at"),
        last["at"].alias("changed_at"),
        last["to_state"].alias("state"),
        F.coalesce("attempts", F.lit(0)).alias("attempts"),
        "waited_ms",
        "ran_ms",
        F.transform("ordered", _step).alias("steps"),
        "incarnation",
        "partition",
        "number",
    )


def _step(row: Column) -> Column:
    return F.struct(*(row[name].alias(name) for name in STEP))
