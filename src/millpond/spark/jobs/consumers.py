"""Who is slow, and who takes items and does not finish them: consumers against the others of their queue."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from millpond.history.reader import Why
from millpond.spark.jobs.attempts import attempts
from millpond.spark.jobs.columns import DEATHS, RELEASES, RUNS, bucket, ran_out, total, window_start

ATTEMPTS_MIN = 20  # fewer prove nothing
SLOW_RATIO = 2.0  # times the median of its queue
FLAPPING_SHARE = 0.2  # of its attempts are lost or fail …
FLAPPING_RATIO = 2.0  # … and so many times the share of the others: else it is the queue that has a problem
KEYS = ("window", "queue", "who", "outcome", "ms")

FAILED = (Why.FAILURE, *DEATHS)


def partial(events: DataFrame, window_ms: int, began: DataFrame | None = None) -> DataFrame:
    """Attempts by outcome and, where the work ended by itself, by bucket of run time. What was released is none; a
    lease that ran out is lost, also if its item died of it.
    """
    told = events.withColumn("why", F.when(ran_out(), Why.LEASE_EXPIRED).otherwise(F.col("why")))
    run = F.when(F.col("outcome").isin(*RUNS), bucket(F.col("run_ms")))
    ended = attempts(told, began).where(~F.col("outcome").isin(*RELEASES)).withColumn("at", F.col("ended_at"))
    return ended.groupBy(window_start(window_ms), "queue", "who", "outcome", run.alias("ms")).agg(
        F.count("*").alias("n")
    )


def merged(partials: DataFrame) -> DataFrame:
    return partials.groupBy(*KEYS).agg(total().alias("n"))


def result(partials: DataFrame) -> DataFrame:
    """Those with something to say first. `slowness`: median run time in medians of the queue."""
    summed = partials.rollup("queue", "who").agg(
        total().alias("attempts"),
        total(where=F.col("outcome") == Why.COMPLETED).alias("completed"),
        total(where=F.col("outcome").isin(*FAILED)).alias("failed"),
        total(where=F.col("outcome") == Why.LEASE_EXPIRED).alias("lease_expired"),
        _run_percentile(0.5).alias("run_p50_ms"),
        _run_percentile(0.95).alias("run_p95_ms"),
    )
    compared = summed.where(F.col("queue").isNotNull()).select(
        "*",
        F.round(F.col("run_p50_ms") / F.greatest(_of_queue(F.col("run_p50_ms")), F.lit(1)), 3).alias("slowness"),
        _share(_bad(), F.col("attempts")).alias("bad_share"),
        _share_of_others().alias("others_bad_share"),
    )
    judged = compared.where(F.col("who").isNotNull()).select("*", _slow().alias("slow"), _flapping().alias("flapping"))
    findings = F.col("slow").cast("int") + F.col("flapping").cast("int")
    return judged.orderBy(F.desc(findings), F.desc("bad_share"), "queue", "who")


def consumers(events: DataFrame, window_ms: int) -> DataFrame:
    return result(partial(events, window_ms))


def _of_queue(value: Column) -> Column:
    """The value in the row of the whole queue, which has no `who`."""
    return F.max(F.when(F.col("who").isNull(), value)).over(Window.partitionBy("queue"))


def _bad() -> Column:
    return F.col("failed") + F.col("lease_expired")


def _share(part: Column, whole: Column) -> Column:
    return F.round(part / whole, 4)


def _share_of_others() -> Column:
    """None where there are no others."""
    others = _of_queue(F.col("attempts")) - F.col("attempts")
    return F.when(others > 0, _share(_of_queue(_bad()) - _bad(), others))


def _slow() -> Column:
    return (F.col("attempts") >= ATTEMPTS_MIN) & F.coalesce(F.col("slowness") >= SLOW_RATIO, F.lit(False))


def _flapping() -> Column:
    others = F.coalesce("others_bad_share", F.lit(0.0))
    return (
        (F.col("attempts") >= ATTEMPTS_MIN)
        & (F.col("bad_share") >= FLAPPING_SHARE)
        & (F.col("bad_share") >= FLAPPING_RATIO * others)
    )


def _run_percentile(share: float) -> Column:
    return F.percentile(F.col("ms"), share, F.col("n"))
