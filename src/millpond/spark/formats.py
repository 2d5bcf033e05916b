"""The formats by their names, and how they get to where Spark runs them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pyspark import cloudpickle
from pyspark.errors import AnalysisException
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, DataSourceWriter
from pyspark.sql.types import StructType

from millpond.spark.options import WrongOption, payload_is_text, peek_options, sink_options, stream_options
from millpond.spark.schema import WrongSchema, item_schema
from millpond.spark.sink import BatchWriter, StreamWriter
from millpond.spark.source import ClaimReader, PeekReader, RefusingReader
from millpond.spark.verdicts import FORMAT as VERDICTS
from millpond.spark.verdicts import VerdictSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT = "millpond"
CONNECTOR = ("transport", "options", "schema", "source", "rows", "rejects", "sink", "verdicts", "formats")
"""The modules that travel. They import nothing of millpond but each other."""

PUT_BY_SPARK = {
    "SPARK_AUTH_SOCKET_TIMEOUT": "15",
    "SPARK_BUFFER_SIZE": "65536",
    "SPARK_LOCAL_DIRS": "",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}
"""Variables that Spark puts into a format's environment as a stream starts, whatever was there."""


class MillpondSource(DataSource):
    """`format("millpond")`: a queue to read, to stream, to write."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return item_schema(payload_is_text(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        return PeekReader(peek_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            return ClaimReader(stream_options(self.options), schema)
        except (WrongOption, WrongSchema) as error:
            return RefusingReader(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(sink_options(self.options, streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return StreamWriter(sink_options(self.options, streaming=True), schema, overwrite)


def pack() -> None:
    """Let the connector be pickled by value from now on: then no other machine need have it."""
    for name in CONNECTOR:
        cloudpickle.register_pickle_by_value(sys.modules[f"millpond.spark.{name}"])  # type: ignore[no-untyped-call]


def register(spark: SparkSession) -> None:
    """Make the formats `millpond` and `millpond.verdicts` known to a session, wherever its executors run."""
    pack()
    make_known(spark, MillpondSource)
    make_known(spark, VerdictSource)


def make_known(spark: SparkSession, source: type[DataSource]) -> None:
    """Register one format, so that streams of it can start at the same time.

    All of them share one hash map of variables on the driver, and Spark guards it by no lock: two streams that put the
    same new one into it can spoil it for good, and then no task of either can be read (OptionalDataException). One that
    is there already is only replaced, which does no harm.
    """
    context = getattr(spark, "sparkContext", None)
    if context is None:  # Spark Connect: its server makes the map
        spark.dataSource.register(source)
        return
    before = dict(context.environment)
    context.environment.update(PUT_BY_SPARK | before)
    try:
        spark.dataSource.register(source)
    finally:
        for name in PUT_BY_SPARK.keys() - before.keys():
            del context.environment[name]


def give_verdicts(df: DataFrame, **options: str) -> None:
    """Rows `id`, `verdict` (retry or dead) and, where wanted, `error` and `delay`, inside foreachBatch.

    `options` are those of the readStream: url, queue, consumer, and how to get in.
    """
    writer = df.write.format(VERDICTS).mode("append").options(**options)
    try:
        writer.save()
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_NOT_FOUND":
            raise
        register(df.sparkSession)
        writer.save()
