"""Streaming queries that gather what they read, batch by batch, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.spark.formats import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

QUERY_TIMEOUT_S = 60  # for a query that ends by itself

Then = Callable[["DataFrame", int], Any]


class Gathered:
    """The batches of one run. `then` is done after a batch was gathered; if it raises, the batch is not committed."""

    def __init__(self, then: Then | None = None) -> None:
        self.batches: dict[int, list[Row]] = {}
        self.tasks: dict[int, int] = {}
        self._then = then

    def __call__(self, df: DataFrame, batch: int) -> None:
        self.tasks[batch] = df.rdd.getNumPartitions()
        self.batches[batch] = df.collect()
        if self._then is not None:
            self._then(df, batch)

    @property
    def rows(self) -> list[Row]:
        return [row for batch in sorted(self.batches) for row in self.batches[batch]]

    @property
    def payloads(self) -> list[str]:
        return [str(row["payload"]) for row in self.rows]

    @property
    def sizes(self) -> list[int]:
        return [len(self.batches[batch]) for batch in sorted(self.batches)]


def stream_of(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    register(spark)
    return spark.readStream.format("millpond").options(**{"payload": "string", **options}).load()


def started(df: DataFrame, into: Gathered, checkpoint: Path, **trigger: Any) -> StreamingQuery:
    writer = df.writeStream.foreachBatch(into).option("checkpointLocation", str(checkpoint))
    return (writer.trigger(**trigger) if trigger else writer).start()


def consume(spark: SparkSession, options: Mapping[str, str], checkpoint: Path, then: Then | None = None) -> Gathered:
    """What there is now, from where the checkpoint is. What a query ends with is raised."""
    gathered = Gathered(then)
    query = started(stream_of(spark, options), gathered, checkpoint, availableNow=True)
    end(query)
    return gathered


def end(query: StreamingQuery) -> None:
    try:
        assert query.awaitTermination(QUERY_TIMEOUT_S), "the query goes on"
    finally:
        query.stop()


def failure(query: StreamingQuery) -> str:
    """Of a query that must fail: what it says."""
    try:
        query.awaitTermination(QUERY_TIMEOUT_S)
    except Exception as error:
        return str(error)
    finally:
        query.stop()
    raise AssertionError("the query did not fail")
