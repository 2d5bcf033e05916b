"""What is dead, as a table: items that lie where they died, and the letters in dead queues.

From the lake, which has no payloads, or from the queues themselves; with the same columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from millpond.model import State
from millpond.spark.jobs.items import present
from millpond.spark.jobs.signatures import signature
from millpond.spark.schema import item_schema
from millpond.spark.triage import dead_table

WAITING = (State.READY, State.SCHEDULED, State.RETRYING)

_TOLD = ("died_at", "dead_reason", "last_error", "attempts")


def dead(items: DataFrame) -> DataFrame:
    """From the items of a lake.

    Of a letter it knows by its source when and of what it died, if that queue's history is in the lake too. What a
    queue held when it was deleted, and made anew, went with it.
    """
    nothing = F.lit(None)
    there = present(items).select(*items.columns)
    lying = there.where(F.col("state") == State.DEAD).withColumn("source_attempts", nothing.cast("int"))
    found = lying.unionByName(_letters(items, there).select(*lying.columns))
    known = {
        "id": F.col("item_id"),
        "ended_at": F.col("died_at"),
        "error": F.col("last_error"),
        "reason": F.col("dead_reason"),
        "signature": signature(F.col("last_error")),
    }
    schema = _schema()
    told = {*lying.columns, *known}
    unknown = {field.name: nothing.cast(field.dataType) for field in schema if field.name not in told}
    return found.withColumns(known | unknown).select(*schema.names)


def dead_in(spark: SparkSession, options: Mapping[str, str], queues: Iterable[tuple[str, bool]]) -> DataFrame:
    """From the queues, of which it is told whether they hold letters; `options` are those of a read."""
    tables = [
        dead_table(spark, {**options, "queue": queue}, letters=letters).withColumn("queue", F.lit(queue))
        for queue, letters in queues
    ]
    schema = _schema()
    if not tables:
        return spark.createDataFrame([], schema)
    return reduce(DataFrame.unionByName, tables).select(*schema.names)


def _schema() -> StructType:
    """The queue, the columns of an item, and the short names that `triage.dead_table` adds."""
    texts = [StructField(name, StringType()) for name in ("error", "reason", "text", "signature")]
    return StructType([StructField("queue", StringType()), *item_schema(text=False).fields, *texts])


def _letters(items: DataFrame, there: DataFrame) -> DataFrame:
    """What waits in a queue and came from one in which it had died."""
    died = items.where(F.col("dead_reason").isNotNull()).select(
        F.col("queue").alias("source_queue"), F.col("item_id").alias("source_id"), F.struct(*_TOLD).alias("source")
    )
    last = died.groupBy("source_queue", "source_id").agg(F.max("source").alias("source"))
    waiting = there.where(F.col("state").isin(*WAITING) & F.col("source_queue").isNotNull())
    found = waiting.join(last, ["source_queue", "source_id"])
    told = {name: F.col(f"source.{name}") for name in ("died_at", "dead_reason", "last_error")}
    return found.withColumns(told | {"source_attempts": F.col("source.attempts")})
