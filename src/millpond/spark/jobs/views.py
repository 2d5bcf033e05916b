"""The history as tables for SQL, and answers to questions in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from millpond.errors import InvalidRequest, MillpondError
from millpond.spark import lake as lakes
from millpond.spark.explaining import is_askers_own, line_of
from millpond.spark.jobs import attempts, consumers, dead, items, metrics, signatures


def make_views(spark: SparkSession, lake: str | Path, window_ms: int, lying: DataFrame | None = None) -> None:
    """For the session; each is worked out when it is asked. `lying`: what is dead, if it is not to be the lake's."""
    events = lakes.events(spark, lake)
    known = items.items(events)
    tables: dict[str, DataFrame] = {
        "events": events,  # every transition of every item
        "items": known.drop("seen_at"),  # every item as its last transition left it
        "attempts": attempts.attempts(events),  # every attempt that is over, with who made it
        "dead": dead.dead(known) if lying is None else lying,  # what is dead, also as letters in dead queues
        "metrics": metrics.metrics(events, window_ms),  # the figures of each queue by window
        "failures": signatures.signatures(events),  # errors by signature
        "consumers": consumers.consumers(events, window_ms),  # who is slow, who does not finish what it takes
    }
    for name, table in tables.items():
        table.createOrReplaceTempView(name)


class Answer:
    """The columns, and the rows one by one: they may be more than fit in memory."""

    def __init__(self, spark: SparkSession, query: str) -> None:
        with _explained():
            self._table = spark.sql(query)
        self.columns = self._table.columns

    def rows(self) -> Iterator[list[Any]]:
        with _explained():
            for row in self._table.toLocalIterator():
                yield [plain(value) for value in row]

    def first(self, limit: int) -> list[list[Any]]:
        with _explained():
            return [[plain(value) for value in row] for row in self._table.limit(limit).collect()]


def plain(value: Any) -> Any:
    """Instants with their zone, structs as dicts."""
    if isinstance(value, datetime):
        return lakes.aware(value)
    if isinstance(value, Row):
        return {name: plain(inner) for name, inner in value.asDict().items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return bytes(value) if isinstance(value, bytearray) else value


@contextmanager
def _explained() -> Iterator[None]:
    """Spark's errors as ours, in a line."""
    try:
        yield
    except PySparkException as error:
        if is_askers_own(error):
            raise InvalidRequest(f"the query cannot be answered: {line_of(error)}") from error
        raise MillpondError(f"Spark failed: {line_of(error)}") from error
