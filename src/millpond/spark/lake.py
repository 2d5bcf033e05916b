"""The history lake as a DataFrame, on any file system that Spark reads; see `history.lake` for what lies where."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.errors import NotFound
from millpond.history.lake import EVENTS, Lake, Span, parse_span, whole

# The columns of a file and, first, those that are in its path.
SCHEMA = """queue string, date date, incarnation string, partition int, turn long, seq int, number long, item_id string,
correlation_id string, at timestamp, from_state string, to_state string, why string, who string, attempt int,
kind string, priority int, error string, source_queue string, source_id string, since_ms long, age_ms long"""

_REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_PLACE = re.compile(rf".*/{EVENTS}/date=([^/]+)/queue=([^/]+)/([^/]+)")
_GLOB = re.compile(r"([\\*?\[\]{}])")
_NULL = "__HIVE_DEFAULT_PARTITION__"  # a queue may have this name; Spark takes it in a path for none


class EventFile(NamedTuple):
    """A file that counts. `path` is as Spark reads it."""

    queue: str
    date: str
    span: Span
    path: str


def events(
    spark: SparkSession,
    lake: str | Path,
    *,
    queues: Sequence[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """Every transition once, in no order; of these queues, from `since` on and before `until`."""
    found = files(spark, lake, queues=queues, since=_date(since), until=_date(until))
    read = read_files(spark, lake, found)
    at = F.col("at")
    bounds: list[Column] = []
    if since is not None:
        bounds.append(at >= F.lit(since))
    if until is not None:
        bounds.append(at < F.lit(until))
    for bound in bounds:
        read = read.where(bound)
    return read


def files(
    spark: SparkSession,
    lake: str | Path,
    *,
    queues: Sequence[str] | None = None,
    since: str | None = None,
    until: str | None = None,
) -> list[EventFile]:
    """Those that count; the dates `since` and `until` are included. A lake without any is not found."""
    listed = list(_remote_files(spark, str(lake)) if is_remote(lake) else _local_files(lake))
    if not listed:
        raise _empty(lake)
    return [
        file
        for file in listed
        if (queues is None or file.queue in queues)
        and (since is None or file.date >= since)
        and (until is None or file.date <= until)
    ]


def check_there(lake: str | Path) -> None:
    """Before a session is started for it. What is elsewhere only Spark can see."""
    if not is_remote(lake) and next(_local_files(lake), None) is None:
        raise _empty(lake)


def read_files(spark: SparkSession, lake: str | Path, found: Iterable[EventFile]) -> DataFrame:
    paths = [_literal(file.path) for file in found]
    if not paths:
        return spark.createDataFrame([], SCHEMA)
    read = spark.read.schema(SCHEMA).option("basePath", root(lake)).parquet(*paths)
    columns = [column.split()[0] for column in SCHEMA.split(",")]
    return read.select(F.coalesce("queue", F.lit(_NULL)).alias("queue"), *columns[1:])


def stream(spark: SparkSession, lake: str | Path) -> DataFrame:
    """Files as they appear, for a stream of your own. A file that was merged from others brings their rows again:
    drop what was seen by (incarnation, partition, turn, seq), or let `jobs.incremental` see to it.
    """
    return spark.readStream.schema(SCHEMA).parquet(_literal(root(lake)))


def is_remote(lake: str | Path) -> bool:
    return bool(_REMOTE.match(str(lake)))


def root(lake: str | Path) -> str:
    """Where the events are."""
    return f"{address(lake)}/{EVENTS}"


def address(place: str | Path) -> str:
    """As Spark names it: a path is of this machine, whatever file system is Spark's default."""
    return str(place).rstrip("/") if is_remote(place) else f"file://{Path(place).absolute()}"


def aware(instant: datetime) -> datetime:
    """Spark hands instants over in the zone of this process, without saying so."""
    return instant.astimezone(UTC)


def _empty(lake: str | Path) -> NotFound:
    return NotFound(f"there is no history in {lake}; fill it with `millpond history sync`, or name another lake")


def _literal(path: str) -> str:
    """Not a pattern, whatever is in it."""
    return _GLOB.sub(r"\\\1", path)


def _local_files(lake: str | Path) -> Iterator[EventFile]:
    for file in Lake(Path(lake).absolute()).files():
        yield EventFile(file.queue, file.date, file.span, f"file://{file.path}")


def _remote_files(spark: SparkSession, lake: str) -> Iterator[EventFile]:
    """Listed by Spark, which has the keys to the place; no file is opened for it."""
    listed = spark.read.format("binaryFile").option("recursiveFileLookup", True).load(_literal(root(lake)))
    folders: dict[tuple[str, str], list[EventFile]] = {}
    for row in listed.select("path").collect():
        place = _PLACE.fullmatch(row.path)
        span = parse_span(place[3]) if place else None
        if place and span:
            file = EventFile(unquote(place[2]), place[1], span, row.path)
            folders.setdefault((file.date, file.queue), []).append(file)
    for folder in folders.values():
        yield from whole(folder)[0]


def _date(instant: datetime | None) -> str | None:
    if instant is None:
        return None
    day: date = (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).astimezone(UTC).date()
    return day.isoformat()
