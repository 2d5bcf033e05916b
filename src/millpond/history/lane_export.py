"""Writes the rows of one partition's journal into the lake. All of it blocks: the exporter runs it in a thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from millpond.history.acts import WHYS
from millpond.history.durable import DurableFile, Watch, room_in, write_file
from millpond.history.flatten import Flattener
from millpond.history.lake import (
    GAPS,
    LAKE_VERSION,
    ROW_GROUP_ROWS,
    About,
    Gap,
    Lake,
    Span,
    date_of,
    open_writer,
    write_about,
)
from millpond.history.progress import Lane, Progress
from millpond.model import JournalPage, JournalTurn

log = logging.getLogger("millpond.history")

_DAY_MS = 86_400_000
_CHECK_BITS = 0xFFFFFFFF


class QueueSync(msgspec.Struct, kw_only=True):
    """What was written of one queue."""

    events: int = 0
    files: int = 0
    bytes: int = 0
    gaps: list[Gap] = []
    problems: list[str] = []


class Unreadable(Exception):
    """A journal cannot be exported; it says why."""


class _DataFile:
    """The data file in the making."""

    def __init__(self, folder: Path, span_name: str) -> None:
        self.file = DurableFile(folder, f"export-{span_name}")
        self.writer = open_writer(self.file.sink)
        self.counts = np.zeros(len(WHYS), dtype=np.int64)
        self.events = 0

    def write(self, table: Any) -> None:
        self.writer.write_table(table, row_group_size=len(table))
        whys = table.column("why").chunk(0).indices.to_numpy()
        self.counts += np.bincount(whys, minlength=len(WHYS))
        self.events += len(table)

    def discard(self) -> None:
        with suppress(OSError):
            self.writer.close()
        self.file.discard()


class LaneExport:
    """Writes the rows of one partition. `done` gathers what was written since it was last taken away."""

    def __init__(self, lake: Lake, lane: Lane, queue: str, progress: Progress, file_events: int, watch: Watch) -> None:
        self._lake = lake
        self._lane = lane
        self._queue = queue
        self._progress = progress
        self._file_events = file_events
        self._watch = watch
        self._open: _DataFile | None = None
        self._day = 0  # since 1970, of the rows in the making
        self._turn = progress.turn  # the last that was read
        self._from = progress.turn + 1  # of the file in the making
        self._row: JournalTurn | None = None  # the last that was read
        self._checked = progress.row_check is None  # or there is nothing to compare
        self.newest = progress.data_turn  # the last turn that a data file has
        self.done = QueueSync()
        if progress.known is None:
            self._tell_lost()
        self._flattener = Flattener(*lane, progress.known)

    def _tell_lost(self) -> None:
        self.done.problems.append(
            f"{self._queue} partition {self._lane[1]}: what was known of its items after turn {self._turn} is lost"
            f" (no bookmark for it in {self._lake.state}); from there on, rows of older items lack their own ids,"
            " kinds, attempts and ages. Nothing is missing, nothing is there twice"
        )

    @property
    def read_after(self) -> int:
        """Once, the last row is read again, to be compared."""
        return self._turn if self._checked or not self._turn else self._turn - 1

    def check(self, page: JournalPage) -> None:
        """That this is the journal that was exported so far, as far as its rows are still there."""
        if page.last_turn < self._turn:
            raise Unreadable(
                f"its journal ends at turn {page.last_turn}, but turn {self._turn} is in the lake already: it"
                f" was restored from an older copy. {self._remedy()}"
            )
        if not self._checked and page.rows and page.rows[0].turn == self._turn:
            if _check(page.rows[0]) != self._progress.row_check:
                raise Unreadable(
                    f"turn {self._turn} of its journal is not what the lake has: it was restored from an older"
                    f" copy, or lost turns that were not yet on disk, and went on. {self._remedy()}"
                )
            page.rows = page.rows[1:]
        self._checked = True

    def _remedy(self) -> str:
        return f"Move the files named {self._lane[0]}-p{self._lane[1]:05d}-* out of {self._lake.path}, and sync again"

    def take(self, rows: Sequence[JournalTurn]) -> None:
        with room_in(self._lake.path):
            for row in rows:
                if row.turn != self._turn + 1:
                    self._note_gap(row.turn - 1)
                if row.at // _DAY_MS != self._day:
                    self._close()
                    self._day = row.at // _DAY_MS
                self._flattener.read(row.turn, row.at, row.events)
                self._turn, self._row = row.turn, row
                if self._flattener.pending >= ROW_GROUP_ROWS:
                    self._drain()
                    if self._open is not None and self._open.events >= self._file_events:
                        self._close()

    def finish(self) -> None:
        """All that was read is in the lake. Turns that changed no state are noted, so that none is missed later."""
        with room_in(self._lake.path):
            self._close()
            if self._turn > self._progress.turn:
                self._save(self.newest)
                self._progress.settle()
                self._from = self._turn + 1

    def abandon(self) -> None:
        """Leave no half-written file behind; what it would have held is exported again."""
        if self._open is not None:
            self._open.discard()
            self._open = None

    def _drain(self) -> None:
        for table in self._flattener.drain():
            if self._open is None:
                span = Span(*self._lane, self._from, self._turn)
                self._open = _DataFile(self._lake.folder(self._date, self._queue), span.name("parquet"))
            self._open.write(table)

    @property
    def _date(self) -> str:
        return date_of(self._day * _DAY_MS)

    def _close(self) -> None:
        """The file in the making becomes the lake's."""
        self._drain()
        making, self._open = self._open, None
        if making is None:
            return
        span = Span(*self._lane, self._from, self._turn)
        try:
            about = About(
                version=LAKE_VERSION,
                queue=self._queue,
                incarnation=self._lane[0],
                partition=self._lane[1],
                from_turn=span.from_turn,
                to_turn=span.to_turn,
                counts={str(WHYS[place]): int(count) for place, count in enumerate(making.counts) if count},
                letters=self._flattener.letters,
            )
            write_about(making.writer, about)
            making.writer.close()
            size = making.file.finish()
            self._watch("data written")
            self._save(self._turn)
            making.file.appear(span.name("parquet"))
        except BaseException:
            making.discard()
            raise
        self.newest, self._flattener.letters = self._turn, 0
        self._watch("data named")
        self._progress.settle()
        self._watch("bookmarks settled")
        self._from = self._turn + 1
        self.done.events += making.events
        self.done.files += 1
        self.done.bytes += size

    def _save(self, data_turn: int) -> None:
        assert self._row is not None, "there is something to save after a row only"
        self._progress.save(self._flattener.known, self._turn, data_turn, _check(self._row), self._watch)

    def _note_gap(self, to_turn: int) -> None:
        """Rows were trimmed before they could be read: never silently."""
        self._close()
        gap = Gap(
            queue=self._queue,
            incarnation=self._lane[0],
            partition=self._lane[1],
            from_turn=self._turn + 1,
            to_turn=to_turn,
            found_at=datetime.now(UTC),
        )
        write_file(self._lake.path / GAPS, gap.span.name("json"), msgspec.json.encode(gap))
        self._watch("gap noted")
        log.error(
            "history has a gap: journal rows were trimmed before they were exported; sync more often",
            extra={"queue": self._queue, "partition": gap.partition, "turns": [gap.from_turn, gap.to_turn]},
        )
        self.done.gaps.append(gap)
        self._progress.forget()
        self._flattener = Flattener(*self._lane)
        self._turn = to_turn
        self._from = to_turn + 1


def _check(row: JournalTurn) -> int:
    return crc32(row.events, row.at & _CHECK_BITS)
