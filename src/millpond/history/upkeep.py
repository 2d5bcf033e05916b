"""Keeps the lake in few files and for as many days as are wanted. All of it can be cut short anywhere, and done again.

Compaction merges neighbours: it writes the larger file first, from then on the smaller ones do not count
(`Lake.files`), and a later run removes them, so that whoever had listed them can still read them for a while.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.errors import InvalidRequest
from millpond.history.durable import DurableFile, Watch, remove_files, room_in, unwatched
from millpond.history.lake import (
    EVENTS,
    FLAT_SCHEMA,
    LAKE_VERSION,
    ROW_GROUP_ROWS,
    UPKEEP_LOCK,
    WORDS,
    About,
    Lake,
    LakeFile,
    Span,
    open_writer,
    read_about,
    write_about,
)
from millpond.history.progress import raise_floor
from millpond.history.reader import Why

TARGET_BYTES = 16 << 20  # some 5 million events: enough for one task of a reader, and one file a day for most
SMALL_BYTES = 1 << 20  # up to this it does not matter what is written anew; beyond, a file is merged with its like
GRACE_S = 600.0  # a merged file stays so long for those who had listed it
RETAIN_DAYS_MAX = 36_500  # more is a mistake of units


class Upkeep(msgspec.Struct, kw_only=True):
    """What was done. `removed` were merged earlier, or dropped for their age."""

    merged: int = 0
    written: int = 0
    removed: int = 0
    dates: list[str] = []


# ---- compaction ---------------------------------------------------------------------------------------------


def compact(
    lake: Lake,
    *,
    queues: Sequence[str] | None = None,
    target_bytes: int = TARGET_BYTES,
    grace: float = GRACE_S,
    watch: Watch = unwatched,
) -> Upkeep:
    """Merge the small files of each date, queue and partition into larger ones, of about `target_bytes`.

    Files that were merged `grace` seconds ago or earlier are removed.
    """
    done = Upkeep()
    with lake.locked(UPKEEP_LOCK, "looks after"), room_in(lake.path):
        remove_files(list((lake.path / EVENTS).glob("*/*/.merge-*")))
        for kept, covered in lake.folders(queues=queues):
            stale = [file for file in covered if _is_over(file, kept, grace)]
            remove_files([file.path for file in stale])
            done.removed += len(stale)
            for _, files in groupby(kept, key=lambda file: file.lane):
                for group in _groups(files, target_bytes):
                    _merge(group, watch)
                    done.merged += len(group)
                    done.written += 1
                    if grace <= 0:
                        remove_files([file.path for file in group])
                        done.removed += len(group)
                        watch("small files removed")
    return done


def _is_over(file: LakeFile, kept: Sequence[LakeFile], grace: float) -> bool:
    larger = next(other for other in kept if file.span.within(other.span))
    return time.time() - larger.path.stat().st_mtime >= grace


def _groups(files: Iterable[LakeFile], target_bytes: int) -> Iterator[list[LakeFile]]:
    """Neighbours that together are not larger than the target, two at least, and worth the writing."""
    group: list[LakeFile] = []
    for file in files:
        if group and _size(group) + file.size > target_bytes:
            yield from _worth(group)
            group = []
        group.append(file)
    yield from _worth(group)


def _worth(group: list[LakeFile]) -> Iterator[list[LakeFile]]:
    """Without a first file that is larger than the rest: else a day's file would be written anew for each small one."""
    while len(group) > 1 and _size(group) > SMALL_BYTES and group[0].size > _size(group[1:]):
        group = group[1:]
    if len(group) > 1:
        yield group


def _size(files: Iterable[LakeFile]) -> int:
    return sum(file.size for file in files)


def _merge(files: Sequence[LakeFile], watch: Watch) -> None:
    first, last = files[0], files[-1]
    span = Span(*first.lane, first.span.from_turn, last.span.to_turn)
    making = DurableFile(first.path.parent, f"merge-{span.name('parquet')}")
    abouts: list[About] = []
    try:
        with open_writer(making.sink) as writer:
            for table in _row_groups([file.path for file in files], abouts):
                writer.write_table(table, row_group_size=len(table))
            about = About(
                version=LAKE_VERSION,
                queue=first.queue,
                incarnation=span.incarnation,
                partition=span.partition,
                from_turn=span.from_turn,
                to_turn=span.to_turn,
                counts=dict(sum((Counter(one.counts) for one in abouts), Counter[str]())),
                letters=_letters(abouts),
            )
            write_about(writer, about)
        making.finish()
        watch("merged file written")
        making.appear(span.name("parquet"))
    except BaseException:
        making.discard()
        raise
    watch("merged file named")


def _letters(abouts: Iterable[About]) -> int | None:
    counted = [one.letters for one in abouts if one.letters is not None or one.counts.get(Why.ARRIVED)]
    return None if None in counted else sum(filter(None, counted))


def _row_groups(paths: Sequence[Path], abouts: list[About]) -> Iterator[Any]:
    """The rows of these files in whole row groups, as far as they go."""
    waiting: list[Any] = []
    rows = 0
    for path in paths:
        with pq.ParquetFile(path, read_dictionary=WORDS) as file:
            abouts.append(read_about(file.metadata))
            for group in range(file.num_row_groups):
                waiting.append(file.read_row_group(group))
                rows += len(waiting[-1])
                if rows >= ROW_GROUP_ROWS:
                    yield _joined(waiting)
                    waiting, rows = [], 0
    if rows:
        yield _joined(waiting)


def _joined(tables: list[Any]) -> Any:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks().cast(FLAT_SCHEMA)


# ---- retention ----------------------------------------------------------------------------------------------


def retain(lake: Lake, days: int, *, today: date | None = None, watch: Watch = unwatched) -> Upkeep:
    """Drop all dates but the last `days`, of which today is one. Dates are UTC."""
    if not 1 <= days <= RETAIN_DAYS_MAX:
        raise InvalidRequest(f"days must be from 1 to {RETAIN_DAYS_MAX:,}, not {days}; a lake keeps today at least")
    first = ((today or datetime.now(UTC).date()) - timedelta(days=days - 1)).isoformat()
    done = Upkeep()
    with lake.locked(UPKEEP_LOCK, "looks after"), room_in(lake.path):
        for name in lake.dates():
            if name < first:
                done.removed += _drop(lake, name, watch)
                done.dates.append(name)
    return done


def _drop(lake: Lake, name: str, watch: Watch) -> int:
    """How far its partitions had been exported is noted first: the newest file of one may be among these."""
    removed = 0
    for kept, covered in lake.folders(since=name, until=name):
        for lane, files in groupby(kept, key=lambda file: file.lane):
            raise_floor(lake, lane, max(file.span.to_turn for file in files))
        watch("floor raised")
        remove_files([file.path for file in (*covered, *kept)])
        removed += len(covered) + len(kept)
        watch("files dropped")
    _remove_empty(lake.events / f"date={name}")
    return removed


def _remove_empty(folder: Path) -> None:
    """With its queues' folders. What is not ours in there is left alone."""
    for path in (*folder.iterdir(), folder):
        try:
            os.rmdir(path)
        except OSError:
            pass
