"""Every item as its last row left it, now or at an instant in the past."""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from millpond.spark.jobs.columns import DEATHS, ITEM, ORDER

REMOVED = "removed"  # cleared, replaced, moved away, or kept long enough

_LAST = (
    "to_state",
    "why",
    "at",
    "age_ms",
    "item_id",
    "correlation_id",
    "kind",
    "priority",
    "source_queue",
    "source_id",
)
_PARTS = ("last", "attempt", "error", "death")


def partial(events: DataFrame) -> DataFrame:
    """Of each item the last row, and the last that had an attempt, an error, a death."""
    died = F.when(F.col("why").isin(*DEATHS), F.struct(*ORDER, "why", "at"))
    return events.groupBy(*ITEM).agg(
        F.min("at").alias("seen_at"),
        F.max(F.struct(*ORDER, *_LAST)).alias("last"),
        F.max(_where_given("attempt")).alias("attempt"),
        F.max(_where_given("error")).alias("error"),
        F.max(died).alias("death"),
    )


def result(partials: DataFrame) -> DataFrame:
    """`attempts` is the number of the last one; `dead_reason` and `died_at` stay when an item is redriven."""
    latest = partials.groupBy(*ITEM).agg(
        F.min("seen_at").alias("seen_at"), *(F.max(part).alias(part) for part in _PARTS)
    )
    return latest.select(
        "queue",
        "last.item_id",
        F.coalesce("last.to_state", F.lit(REMOVED)).alias("state"),
        F.col("last.why").alias("why"),
        F.col("last.at").alias("changed_at"),
        F.timestamp_millis(F.unix_millis("last.at") - F.col("last.age_ms")).alias("created_at"),
        F.coalesce("attempt.attempt", F.lit(0)).alias("attempts"),
        F.col("error.error").alias("last_error"),
        F.col("death.why").alias("dead_reason"),
        F.col("death.at").alias("died_at"),
        "last.kind",
        "last.priority",
        "last.correlation_id",
        "last.source_queue",
        "last.source_id",
        "incarnation",
        "partition",
        "number",
        "seen_at",
    )


def items(events: DataFrame) -> DataFrame:
    return result(partial(events))


def items_at(events: DataFrame, instant: datetime) -> DataFrame:
    """What a queue held at an instant, and what had ended in it: all but the removed.

    A queue that was deleted takes its items with it without a row for each: of the queues of one name, only the newest
    that had begun by then is shown. What has ended counts on as long as its rows are in the lake: the engine may have
    kept it for less.
    """
    return present(items(events.where(F.col("at") <= F.lit(instant))))


def present(found: DataFrame) -> DataFrame:
    began = F.min("seen_at").over(Window.partitionBy("queue", "incarnation"))
    newest = F.max(F.struct("began", "incarnation")).over(Window.partitionBy("queue"))
    known = found.withColumn("began", began).withColumn("newest", newest["incarnation"])
    shown = (F.col("incarnation") == F.col("newest")) & (F.col("state") != REMOVED)
    return known.where(shown).drop("began", "newest")


def states(found: DataFrame) -> DataFrame:
    """How many items of each queue are in which state."""
    return found.groupBy("queue", "state").agg(F.count("*").alias("items"))


def _where_given(name: str) -> Column:
    return F.when(F.col(name).isNotNull(), F.struct(*ORDER, name))
