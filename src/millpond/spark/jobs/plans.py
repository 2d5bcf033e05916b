"""Which turns a batch is made of, and where that is written down: one small file, on any file system of Spark's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
from pyspark.sql import SparkSession

from millpond.spark.lake import EventFile

Place = tuple[str, str, str, int]  # queue, date, incarnation, partition
TurnSpan = tuple[int, int]  # the first and the last


class Turns(NamedTuple):
    """Turns `first` to `last` of a partition, of one date. `new`: the batch takes them; else earlier ones did."""

    queue: str
    date: str
    incarnation: str
    partition: int
    first: int
    last: int
    new: bool

    @property
    def place(self) -> Place:
        return self.queue, self.date, self.incarnation, self.partition


def plan_after(before: Iterable[Turns], files: Iterable[EventFile]) -> list[Turns]:
    """What a batch takes: the turns of the files, less those taken before; and these, for the batch after it."""
    taken = by_place(before)
    done = [Turns(*place, *span, False) for place, spans in taken.items() for span in joined(spans)]
    new = []
    for file in files:
        place = place_of(file)
        left = without((file.span.from_turn, file.span.to_turn), joined(taken.get(place, [])))
        new += [Turns(*place, *span, True) for span in left]
    return done + new


def place_of(file: EventFile) -> Place:
    return file.queue, file.date, file.span.incarnation, file.span.partition


def by_place(turns: Iterable[Turns]) -> dict[Place, list[TurnSpan]]:
    found: dict[Place, list[TurnSpan]] = {}
    for one in turns:
        found.setdefault(one.place, []).append((one.first, one.last))
    return found


def joined(spans: Iterable[TurnSpan]) -> list[TurnSpan]:
    """Neighbours as one."""
    found: list[TurnSpan] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def without(span: TurnSpan, others: Iterable[TurnSpan]) -> Iterator[TurnSpan]:
    """What is left of a span; the others are in order and do not meet."""
    first, end = span
    for low, high in others:
        if high < first or low > end:
            continue
        if low > first:
            yield first, low - 1
        first = high + 1
    if first <= end:
        yield first, end


# ---- files ----------------------------------------------------------------------------------------------------


class Plans:
    """A file for each batch. It appears whole or not at all, and is never changed."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._hadoop: Any = spark.sparkContext._jvm.org.apache.hadoop  # type: ignore[union-attr]
        self._settings: Any = spark.sparkContext._jsc.hadoopConfiguration()
        self._folder = folder

    def read(self, batch: int) -> list[Turns] | None:
        """None: there is none yet."""
        path = self._path(f"{batch}.json")
        files = path.getFileSystem(self._settings)
        if not files.exists(path):
            return None
        stream = files.open(path)
        try:
            text = bytes(stream.readAllBytes())
        finally:
            stream.close()
        return msgspec.json.decode(text, type=list[Turns])

    def write(self, batch: int, plan: list[Turns]) -> None:
        making, path = self._path(f".{batch}.json"), self._path(f"{batch}.json")
        files = path.getFileSystem(self._settings)
        stream = files.create(making, True)
        try:
            stream.write(bytearray(msgspec.json.encode(plan)))
        finally:
            stream.close()
        if not files.rename(making, path):
            raise OSError(f"the plan of batch {batch} could not be written to {self._folder}")

    def _path(self, name: str) -> Any:
        return self._hadoop.fs.Path(f"{self._folder}/{name}")
