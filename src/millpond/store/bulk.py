"""Bodies that come in bulk, in files of their own beside a partition's database.

SQLite writes a body twice, into its log and from there into its file, page by page. For a turn that brings much, as a
batch writer's does, that takes five times as long as writing it once. So the bodies of such a turn are appended to a
file here and synced, before the turn's one transaction says where they lie: what no row names does not exist, and what
a row names is on disk. A file is never written over, and goes when no row names it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from millpond.store.base import Chunk, Turn
from millpond.store.disk import PRIVATE_FILE, bytes_of, sync_directory, write_all

BULK_SUFFIX = "-bulk-"  # with a number after it, of the files of a database
BULK_BYTES_MIN = 512 << 10  # a turn with less loses more by the second sync than it saves
FILE_BYTES_MAX = 32 << 20  # then the next one is begun, so that the oldest can go while others are in use
SPARSE_SHARE = 4  # a file of which less than a fourth is in use is emptied into the newest


class Extent(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where a chunk's body lies: a row of the table."""

    first: int
    count: int
    file: int
    place: int
    bytes: int


class Share(msgspec.Struct):
    """What becomes of a turn's chunks: those for the tables, those that lie here now, and the firsts of those that no
    longer do."""

    chunks: Sequence[Chunk]
    extents: Sequence[Extent] = ()
    drops: Sequence[int] = ()


class BulkFiles:
    """Those of one partition. The rows that name them are its store's; this has them in memory, one a chunk."""

    def __init__(self, database: Path, bytes_min: int, *, durable: bool) -> None:
        """Turns with bodies of `bytes_min` or more come here.

        Not `durable`: a power cut may undo rows. Then nothing is written here, nor removed before the next load.
        """
        self._database = database
        self._bytes_min = bytes_min
        self._durable = durable
        self._extents: dict[int, Extent] = {}
        self._used: dict[int, int] = {}  # bytes that are named, by file
        self._sparse: set[int] = set()
        self._last = 0  # the highest number of a file
        self._file = self._end = 0  # the one that is written, 0 if none is, and up to where

    def load(self, extents: Iterable[Extent]) -> None:
        """All that the database names, which is durable. What it does not name goes: files, and the ends of files."""
        self._extents = {extent.first: extent for extent in extents}
        self._used, self._sparse = {}, set()
        ends: dict[int, int] = {}
        for extent in self._extents.values():
            self._used[extent.file] = self._used.get(extent.file, 0) + extent.bytes
            ends[extent.file] = max(ends.get(extent.file, 0), extent.place + extent.bytes)
        there = self._files()
        self._last, self._file = max([0, *there, *self._used]), 0
        for file in there.keys() - self._used.keys():
            self._remove(file)
        for file in there.keys() & self._used.keys():
            self._cut_back(file, ends[file])
        self._look_for_sparse(self._used)

    def take(self, turn: Turn, *, tidy: bool) -> Share:
        """Write what comes in bulk. Raises OSError; then nothing names what may have been written.

        Not `tidy`: there is no room for more than the turn, so what is left in sparse files stays there.
        """
        chunks, drops = turn.chunks, turn.chunk_drops
        if self._sparse and tidy:
            chunks = [*chunks, *self._stragglers(turn)]
        if self._durable and sum([len(chunk.body) for chunk in chunks]) >= self._bytes_min:
            kept = [chunk for chunk in chunks if chunk.first not in drops]
            return Share((), self._write(kept), self._here(drops))
        if not self._extents:
            return Share(chunks)
        return Share(chunks, (), self._here([*drops, *(chunk.first for chunk in chunks)]))

    def taken(self, share: Share) -> None:
        """The turn is committed."""
        if not share.extents and not share.drops:
            return
        gone = [self._extents.pop(first) for first in share.drops]
        for extent in share.extents:
            if (replaced := self._extents.pop(extent.first, None)) is not None:
                gone.append(replaced)
            self._extents[extent.first] = extent
            self._used[extent.file] = self._used.get(extent.file, 0) + extent.bytes
        for extent in gone:
            self._used[extent.file] -= extent.bytes
        files = {extent.file for extent in gone}
        for file in [file for file in files if not self._used[file]]:
            del self._used[file]
            self._file = 0 if file == self._file else self._file
            if self._durable:
                self._remove(file)
        self._look_for_sparse(files)

    def read(self, firsts: Iterable[int]) -> dict[int, bytes]:
        """Those of them that lie here. Raises OSError."""
        found: dict[int, bytes] = {}
        for extent in self._in_order(firsts):
            descriptor = os.open(self._path(extent.file), os.O_RDONLY | os.O_CLOEXEC)
            try:
                body = os.pread(descriptor, extent.bytes, extent.place)
            finally:
                os.close(descriptor)
            if len(body) == extent.bytes:  # else it is missing, as a row would be
                found[extent.first] = body
        return found

    def size(self) -> int:
        return sum(bytes_of(path) for path in self._files().values())

    def check(self) -> list[str]:
        """Bodies that are not all there, and such that lie over one another."""
        problems: list[str] = []
        sizes = {file: bytes_of(self._path(file)) for file in self._used}
        file = edge = 0
        for extent in sorted(self._extents.values(), key=lambda extent: (extent.file, extent.place)):
            if extent.place + extent.bytes > sizes[extent.file]:
                problems.append(f"chunk {extent.first} is not all in {self._path(extent.file).name}")
            if extent.file == file and extent.place < edge:
                problems.append(f"chunk {extent.first} lies over another in {self._path(file).name}")
            file, edge = extent.file, extent.place + extent.bytes
        return problems

    # ---- inside ----

    def _path(self, file: int) -> Path:
        return self._database.with_name(f"{self._database.name}{BULK_SUFFIX}{file}")

    def _files(self) -> dict[int, Path]:
        """All that are there, named or not."""
        beginning = self._database.name + BULK_SUFFIX
        found = [(path.name.removeprefix(beginning), path) for path in self._database.parent.glob(f"{beginning}*")]
        return {int(number): path for number, path in found if number.isdecimal()}

    def _here(self, firsts: Iterable[int]) -> list[int]:
        return [first for first in dict.fromkeys(firsts) if first in self._extents]

    def _in_order(self, firsts: Iterable[int]) -> list[Extent]:
        return [self._extents[first] for first in sorted(self._here(firsts))]

    def _write(self, chunks: Sequence[Chunk]) -> list[Extent]:
        if not chunks:
            return []
        if not self._file or self._end >= FILE_BYTES_MAX:
            full = self._file
            self._last += 1
            self._file, self._end = self._last, 0
            self._look_for_sparse([full])  # while it was written, it did not count as one
        extents: list[Extent] = []
        start = self._end
        for chunk in chunks:
            extents.append(Extent(chunk.first, chunk.count, self._file, self._end, len(chunk.body)))
            self._end += len(chunk.body)
        descriptor = os.open(self._path(self._file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            write_all(descriptor, [chunk.body for chunk in chunks], start)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if not start:
            sync_directory(self._database.parent)
        return extents

    def _stragglers(self, turn: Turn) -> list[Chunk]:
        """What is left in a sparse file, as if the turn brought it: so it gets a new place, and the file can go."""
        sparse = self._sparse.pop()
        changed = {*turn.chunk_drops, *(chunk.first for chunk in turn.chunks)}
        left = [one for one in self._extents.values() if one.file == sparse and one.first not in changed]
        try:
            bodies = self.read([extent.first for extent in left])
        except OSError:  # of no concern to the turn; whoever needs one of them is told
            return []
        return [Chunk(one.first, one.count, bodies[one.first]) for one in left if one.first in bodies]

    def _remove(self, file: int) -> None:
        with suppress(OSError):  # the next load tries again
            self._path(file).unlink(missing_ok=True)

    def _cut_back(self, file: int, end: int) -> None:
        """Of a turn that was not committed: on a full disk it may be all the room there was."""
        with suppress(OSError):  # likewise
            if bytes_of(self._path(file)) > end:
                os.truncate(self._path(file), end)

    def _look_for_sparse(self, files: Iterable[int]) -> None:
        for file in files:
            used = self._used.get(file)
            if used and file != self._file:
                with suppress(OSError):  # the turn is committed; the next one that drops something looks again
                    if used < bytes_of(self._path(file)) // SPARSE_SHARE:
                        self._sparse.add(file)
