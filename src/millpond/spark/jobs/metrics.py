"""A queue's figures by window: what came in, what was done, what failed, how fast and how long it took."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millpond.history.reader import Why
from millpond.spark.jobs import counts, durations
from millpond.spark.jobs.columns import BURIED, DEATHS, ENTRIES, LEASES, RETRIES, total

WHYS: dict[str, Sequence[str]] = {
    "produced": ENTRIES,
    "leased": LEASES,
    "completed": (Why.COMPLETED,),
    "retried": RETRIES,  # as the engine counts them: deferred ones too
    "lease_expired": (Why.LEASE_EXPIRED,),
    "dead": DEATHS,
    "cancelled": (Why.CANCELLED,),
    "redriven": (Why.REDRIVEN,),
    "buried": (BURIED,),  # dead again by the undo of a redrive; not among the dead
}


def result(counted: DataFrame, measured: DataFrame, window_ms: int) -> DataFrame:
    """From the partials of `counts` and `durations`, a row for each window and queue."""
    rate = F.round(F.col("completed") / (window_ms / 1000), 3).alias("throughput")  # items a second
    figures = _figures(counted, ("window", "queue")).select("*", rate)
    return figures.join(durations.result(measured), ["window", "queue"], "left")


def totals(counted: DataFrame, measured: DataFrame) -> DataFrame:
    """The same over all windows, a row for each queue."""
    by = ("queue",)
    return _figures(counted, by).join(durations.result(measured, by), list(by), "left")


def metrics(events: DataFrame, window_ms: int) -> DataFrame:
    return result(counts.partial(events, window_ms), durations.partial(events, window_ms), window_ms)


def _figures(counted: DataFrame, by: Sequence[str]) -> DataFrame:
    figures = [_figure(whys).alias(name) for name, whys in WHYS.items()]
    return counted.groupBy(*by).agg(*figures, total(F.col("live_change")).alias("backlog_change"))


def _figure(whys: Sequence[str]) -> Column:
    return total(where=F.col("why").isin(*whys))
