"""How many transitions of which kind a queue had in each window."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.spark.jobs.columns import BURIED, change_of_live, is_burial, total, window_start

KEYS = ("window", "queue", "why")


def partial(events: DataFrame, window_ms: int) -> DataFrame:
    """Deaths that an operator made are told apart: they are `buried`."""
    why = F.when(is_burial(), BURIED).otherwise(F.col("why")).alias("why")
    return events.groupBy(window_start(window_ms), "queue", why).agg(
        F.count("*").alias("n"), F.sum(change_of_live()).alias("live_change")
    )


def result(partials: DataFrame) -> DataFrame:
    return partials.groupBy(*KEYS).agg(total().alias("n"), total(F.col("live_change")).alias("live_change"))


def counts(events: DataFrame, window_ms: int) -> DataFrame:
    return result(partial(events, window_ms))
