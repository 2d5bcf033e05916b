"""Queue metrics by window: every count and every percentile, exactly."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.testing import assertDataFrameEqual

from millpond.spark.jobs import counts, durations, metrics
from millpond.spark.jobs.columns import DURATION_ERROR, bucket
from tests.spark.told import NOON, Told, frame

MINUTE = 60_000


def busy_mail() -> Told:
    """Two minutes: one item done at once, one that fails once, one that is lost and dies, one that waits."""
    told = Told().at(0).produce(1, 2, 3, 4)
    told.at(0.010).lease(1, 2, who="ann").at(0.012).complete(1, who="ann").fail(2, error="no", who="ann")
    told.at(0.020).lease(3, who="bob").at(59.990).lose_lease(3)
    told.at(60).due(2).at(60.001).lease(2, who="ann").at(60.005).complete(2, who="ann")
    return told.at(60.010).lease(3, who="bob").at(60.040).die(3, error="gave up")


def test_each_window_has_its_counts_and_percentiles(spark: SparkSession) -> None:
    quiet = Told(queue="team/quiet", incarnation="second").at(30).produce(1)
    found = metrics.metrics(frame(spark, busy_mail(), quiet), MINUTE)
    assert found.columns[2:13] == [
        *("produced", "leased", "completed", "retried", "lease_expired", "dead", "cancelled", "redriven", "buried"),
        *("backlog_change", "throughput"),
    ]
    later = NOON + timedelta(minutes=1)
    expected = [
        (NOON, "mail", 4, 3, 1, 1, 1, 0, 0, 0, 0, 3, 0.017, 10.0, 19.0, 19.8, 2.0, 2.0, 2.0),
        (later, "mail", 0, 2, 1, 0, 0, 1, 0, 0, 0, -2, 0.017, 10.5, 19.05, 19.81, 17.0, 28.7, 29.74),
        (NOON, "team/quiet", 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0.0, *[None] * 6),
    ]
    assertDataFrameEqual(found, spark.createDataFrame(expected, found.schema))


def test_a_lease_that_ran_out_is_no_run_also_if_the_item_died_of_it(spark: SparkSession) -> None:
    told = Told().at(0).produce(1, 2, 3).lease(1, 2, 3).at(0.005).complete(1).at(30).lose_lease(2).die(3)
    [row] = metrics.metrics(frame(spark, told), MINUTE).collect()
    assert (row.dead, row.lease_expired, row.run_p50_ms, row.run_p99_ms) == (1, 1, 5.0, 5.0)


def test_totals_are_over_all_windows(spark: SparkSession) -> None:
    events = frame(spark, busy_mail())
    [row] = metrics.totals(counts.partial(events, MINUTE), durations.partial(events, MINUTE)).collect()
    assert (row.produced, row.completed, row.dead, row.backlog_change) == (4, 2, 1, 1)


def durations_frame(spark: SparkSession, values: list[int]) -> DataFrame:
    return spark.createDataFrame([(value,) for value in values], "ms long")


def test_a_bucket_holds_few_milliseconds_and_is_exact_below_128(spark: SparkSession) -> None:
    random.seed(4)
    values = [*range(1_100), *(2**power + step for power in range(10, 45) for step in (-1, 0, 1))]
    values += [random.randrange(10 ** random.randrange(4, 14)) for _ in range(2_000)]
    found = durations_frame(spark, values).select("ms", bucket(F.col("ms")).alias("bucket")).collect()
    assert all(row.ms == row.bucket for row in found if row.ms < 128)
    assert max(abs(row.bucket - row.ms) / max(row.ms, 1) for row in found) <= DURATION_ERROR


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_percentiles_are_within_the_promised_error_of_the_exact_ones(spark: SparkSession, share: float) -> None:
    random.seed(5)
    values = [int(random.lognormvariate(6, 1.5)) for _ in range(5_000)]
    told = durations_frame(spark, values)
    [row] = told.select(F.percentile("ms", share).alias("exact"), F.percentile(bucket(F.col("ms")), share)).collect()
    assert abs(row[1] - row.exact) / row.exact <= DURATION_ERROR


def test_a_claim_counts_as_a_lease(spark: SparkSession) -> None:
    told = Told().at(0).produce(1, 2).at(0.1).lease(1, 2, why="claimed", who="reader")
    told.at(0.15).complete(1, 2, who="reader")
    [row] = metrics.metrics(frame(spark, told), MINUTE).collect()
    assert (row.leased, row.completed, row.wait_p50_ms, row.run_p50_ms) == (2, 2, 100.0, 50.0)


def test_an_undone_redrive_is_no_new_death(spark: SparkSession) -> None:
    told = Told().at(0).produce(1, 2, 3, 4).lease(1).at(1).die(1, error="no").at(2).redrive(1)
    told.at(3).die(1, why="max_attempts", error="no").at(4).die(2, why="expired")
    told.at(5).die(3, why="rejected", error="by hand").die(4, why="expired", error="of old")
    [row] = metrics.metrics(frame(spark, told), MINUTE).collect()
    assert (row.dead, row.redriven, row.buried, row.backlog_change) == (2, 1, 3, 0)
