"""How long items waited to be leased, and how long attempts ran, as percentiles of each window.

Durations are counted in buckets (see `columns.bucket`): a percentile is within 1/128, 0.8 %, of the exact one, and
exact below 128 ms. Counts merge without loss; what a sketch (KLL, t-digest) says depends on the order of the merges.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millpond.spark.jobs.columns import RUNS, begins_attempt, bucket, ends_attempt, ran_out, total, window_start

WAIT, RUN = "wait", "run"
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
KEYS = ("window", "queue", "measure", "ms")


def partial(events: DataFrame, window_ms: int) -> DataFrame:
    """A run counts in the window of its end, a wait in that of its lease."""
    measure = F.when(begins_attempt(), WAIT).when(ends_attempt() & F.col("why").isin(*RUNS) & ~ran_out(), RUN)
    measured = events.where(measure.isNotNull() & F.col("since_ms").isNotNull())
    return measured.groupBy(
        window_start(window_ms), "queue", measure.alias("measure"), bucket(F.col("since_ms")).alias("ms")
    ).agg(F.count("*").alias("n"))


def merged(partials: DataFrame) -> DataFrame:
    return partials.groupBy(*KEYS).agg(total().alias("n"))


def result(partials: DataFrame, by: Sequence[str] = ("window", "queue")) -> DataFrame:
    """Columns wait_p50_ms and so on, a row for each window and queue, or by fewer of them for longer spans."""
    found = partials.groupBy(*by).agg(*(_percentiles(measure) for measure in (WAIT, RUN)))
    return found.select(*by, *(column for measure in (WAIT, RUN) for column in _columns(measure)))


def percentiles(events: DataFrame, window_ms: int) -> DataFrame:
    return result(partial(events, window_ms))


def _percentiles(measure: str) -> Column:
    ms = F.when(F.col("measure") == measure, F.col("ms"))
    return F.percentile(ms, list(PERCENTILES.values()), F.col("n")).alias(measure)


def _columns(measure: str) -> list[Column]:
    return [F.col(measure)[place].alias(f"{measure}_{name}_ms") for place, name in enumerate(PERCENTILES)]
