"""Dead items as a table, and those that a predicate in SQL chooses. Payloads stay with the executors."""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from millpond.errors import InvalidRequest, MillpondError, Unavailable
from millpond.model import State
from millpond.spark.explaining import is_askers_own, line_of
from millpond.spark.formats import FORMAT, register
from millpond.spark.jobs.signatures import signature
from millpond.spark.session import Setting, end_java, session

TABLE = "dead"
PREDICATE = "--where"  # as who gave it knows it
ROWS_AT_ONCE = 20_000  # chosen items that the driver holds at a time: with errors of 4 KiB each, 80 MB
LETTER_STATES = (State.DEAD, State.READY, State.SCHEDULED, State.RETRYING)
LINES_KEPT = 20  # of what Spark said before it could not start

_OURS = re.compile(r"^millpond\.spark\.\w+\.(\w+): (.*)$", re.MULTILINE)


# ---- the table --------------------------------------------------------------------------------------------------


def dead_table(spark: SparkSession, options: Mapping[str, str], *, letters: bool) -> DataFrame:
    """The columns of the source, the short names, and the payload as text. `options` are those of a read.

    Letters are told from other items that wait in their queue by having come from another one.
    """
    rows = spark.read.format(FORMAT).options(**options, state="any" if letters else str(State.DEAD)).load()
    if letters:
        is_letter = F.col("source_queue").isNotNull() & F.col("dead_reason").isNotNull()
        rows = rows.where(F.col("state").isin(*LETTER_STATES) & ((F.col("state") == State.DEAD) | is_letter))
    return rows.withColumns(
        {
            "error": F.col("last_error"),
            "reason": F.col("dead_reason"),
            "text": F.col("payload").cast("string"),
            "signature": signature(F.col("last_error")),
        }
    )


class Match(NamedTuple):
    """A dead item that was chosen; `to` and `to_id` are None for one that comes back where it lies."""

    id: str
    to: str | None
    to_id: str | None
    reason: str
    error: str | None


class Signature(NamedTuple):
    reason: str
    signature: str | None
    items: int


class Matches:
    """What a predicate chooses, settled once: it is looked at and moved as it was when it was counted.

    Close it, or use `with`.
    """

    def __init__(self, table: DataFrame, predicate: str, *, letters: bool) -> None:
        letter = F.col("source_queue").isNotNull() if letters else F.lit(False)
        with explained(PREDICATE):
            table.createOrReplaceTempView(TABLE)
            self._rows = table.where(predicate).select(
                "id",
                F.when(letter, F.col("source_queue")).alias("to"),
                F.when(letter, F.col("source_id")).alias("to_id"),
                "reason",
                "error",
                "signature",
                F.monotonically_increasing_id().alias("place"),
            )
            self._rows.persist(StorageLevel.DISK_ONLY)
            self.count = self._rows.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._rows.unpersist()

    def signatures(self, limit: int) -> list[Signature]:
        """Most frequent first."""
        counted = self._rows.groupBy("reason", "signature").agg(F.count("*").alias("items"))
        with explained(PREDICATE):
            found = counted.orderBy(F.desc("items"), "reason", "signature").limit(limit).collect()
        return [Signature(row["reason"], row["signature"], row["items"]) for row in found]

    def sample(self, limit: int) -> list[Match]:
        """The oldest."""
        with explained(PREDICATE):
            return [_match(row) for row in self._rows.orderBy("place").limit(limit).collect()]

    def __iter__(self) -> Iterator[Match]:
        """In the order of the queue, some at a time: millions are never here at once."""
        pieces = max(1, math.ceil(self.count / ROWS_AT_ONCE))
        with explained(PREDICATE):
            rows = self._rows.repartitionByRange(pieces, "place").sortWithinPartitions("place")
            for row in rows.toLocalIterator(prefetchPartitions=True):
                yield _match(row)


def _match(row: Row) -> Match:
    return Match(*(row[name] for name in Match._fields))


# ---- errors -----------------------------------------------------------------------------------------------------


@contextmanager
def explained(asked: str = "") -> Iterator[None]:
    """Spark's errors as ours: who asked is told what is wrong with what they `asked`, in a line."""
    try:
        yield
    except PySparkException as error:
        raise _told(error, asked) from error


def _told(error: PySparkException, asked: str) -> MillpondError:
    ours = _OURS.findall(str(error))
    if ours:
        kind, said = ours[-1]
        return (Unavailable if kind == "NoAnswer" else MillpondError)(said)
    line = line_of(error)
    if is_askers_own(error):
        return InvalidRequest(f"{asked}: {line}" if asked else line)
    return MillpondError(f"Spark failed: {line}")


# ---- the session ------------------------------------------------------------------------------------------------


@contextmanager
def quiet_session(app_name: str, **conf: Setting) -> Iterator[SparkSession]:
    """A session of its own, of which nothing is seen: what goes wrong in it is raised, and Spark tells it thrice."""
    logging.getLogger("SQLQueryContextLogger").disabled = True
    spark = _started(app_name, conf)
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    try:
        register(spark)
        yield spark
    finally:
        spark.stop()
        end_java(gateway)


def _started(app_name: str, conf: Mapping[str, Setting]) -> SparkSession:
    """The JVM and its children keep the stderr that they start with."""
    seen = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            spark = session(app_name, **conf)
            spark.sparkContext.setLogLevel("OFF")
            return spark
        except Exception:
            said.seek(0)
            os.write(seen, b"".join(said.readlines()[-LINES_KEPT:]))
            raise
        finally:
            os.dup2(seen, 2)
            os.close(seen)
