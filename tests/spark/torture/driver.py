"""The driver that is killed: two queries, one to Parquet and one to a queue, in a process of its own.

Both are the connector's, unchanged, by classes that tell the gate when a method of theirs begins and ends: a reply
means go on. What else happens the gate sees for itself, since all calls to the server go through it. The classes are
pickled by value, as all of this file is, so it imports nothing of the tests.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition, WriterCommitMessage
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from millpond.spark.formats import MillpondSource, make_known, register
from millpond.spark.options import sink_options, stream_options
from millpond.spark.session import session
from millpond.spark.sink import StreamWriter
from millpond.spark.source import ClaimReader

ASK_TIMEOUT_S = 3_600  # an order is given when there is something to do
NOTHING = -1  # no wave of items: what there is, is to be done at once

Offset = dict[str, Any]


def ask(url: str, path: str, **fields: Any) -> Any:
    body = json.dumps(fields | {"pid": os.getpid()}).encode()
    request = urllib.request.Request(f"{url}/torture/{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as reply:
        return json.load(reply)


# ---- the connector, which tells where it is -------------------------------------------------------------------------


class TellingReader(ClaimReader):
    def initialOffset(self) -> Offset:
        offset = super().initialOffset()
        self._tell("initialOffset", "after")
        return offset

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        self._tell("latestOffset", "before")
        end = super().latestOffset(start, limit)
        self._tell("latestOffset", "after", made=end["seq"] > start["seq"])
        return end

    def commit(self, end: Offset) -> None:
        self._tell("commit", "before")
        super().commit(end)
        self._tell("commit", "after")

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        self._tell("partitions", "before")
        planned = super().partitions(start, end)
        self._tell("partitions", "after")
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for place, batch in enumerate(super().read(partition)):
            yield batch
            if not place:
                self._tell("read", "middle")
        self._tell("read", "after")

    def _tell(self, at: str, side: str, **more: Any) -> None:
        ask(self._options.server.url, "tell", at=at, side=side, queue=self._options.queue, **more)


class TellingWriter(StreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        staged = super().write(iterator)
        self._tell("write")
        return staged

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        super().commit(messages, batchId)
        self._tell("publish")

    def _tell(self, at: str) -> None:
        ask(self._options.server.url, "tell", at=at, side="after", queue=self._options.queue)


class TellingSource(MillpondSource):
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return TellingReader(stream_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return TellingWriter(sink_options(self.options, streaming=True), schema, overwrite)


# ---- the queries ----------------------------------------------------------------------------------------------------


def source(spark: SparkSession, place: dict[str, str], order: dict[str, Any], name: str) -> DataFrame:
    options = {
        "url": place["url"],
        "queue": place[f"from_{name}"],
        "consumer": name,
        "payload": "string",
        "maxItemsPerBatch": str(order["items_max"]),
        "parts": str(order["parts"]),
        "retryFor": place["retry_for"],
    }
    read = spark.readStream.format("millpond").options(**options).load()
    return read.repartition(2) if order["shuffled"] else read


def to_parquet(df: DataFrame, place: dict[str, str]) -> DataStreamWriter:
    def write(batch: DataFrame, number: int) -> None:
        ask(place["url"], "tell", at="foreachBatch", side="before", queue=place["from_parquet"])
        batch.write.mode("overwrite").parquet(f"{place['parquet']}/batch={number}")
        ask(place["url"], "tell", at="foreachBatch", side="after", queue=place["from_parquet"])

    return df.select("id", "payload").writeStream.foreachBatch(write)


def to_queue(df: DataFrame, place: dict[str, str]) -> DataStreamWriter:
    options = {"url": place["url"], "queue": place["to_queue"], "retryFor": place["retry_for"]}
    rows = df.select("payload", F.col("id").alias("reference"))
    return rows.writeStream.format("millpond").options(**options)


SINKS: dict[str, Callable[[DataFrame, dict[str, str]], DataStreamWriter]] = {"parquet": to_parquet, "queue": to_queue}


def start(spark: SparkSession, place: dict[str, str], order: dict[str, Any], name: str) -> StreamingQuery:
    writer = SINKS[name](source(spark, place, order, name), place)
    trigger: dict[str, Any] = {"availableNow": True} if order["now"] else {"processingTime": "0 seconds"}
    return writer.option("checkpointLocation", place[f"checkpoint_{name}"]).trigger(**trigger).start()


def run(spark: SparkSession, place: dict[str, str], name: str) -> None:
    """One run after the other, each from the checkpoint, as the gate orders. One that fails is told, and run again."""
    jvm: Any = spark._jvm
    jvm.SparkSession.setActiveSession(spark._jsparkSession)  # a format is looked for in the active one of the thread
    seen, error = NOTHING, ""
    while True:
        order = ask(place["url"], "order", query=name, seen=seen, error=error)
        if order["end"]:
            return
        try:
            start(spark, place, order, name).awaitTermination()
            seen, error = order["wave"], ""
        except Exception as failure:
            print(f"{name} failed: {failure}", flush=True)
            seen, error = NOTHING, str(failure)


def main() -> None:
    settings, place = map(json.loads, sys.argv[1:])
    spark = session("torture", **settings)
    register(spark)
    make_known(spark, TellingSource)
    queries = [threading.Thread(target=run, args=(spark, place, name)) for name in SINKS]
    for query in queries:
        query.start()
    for query in queries:
        query.join()
    spark.stop()


if __name__ == "__main__":
    main()
