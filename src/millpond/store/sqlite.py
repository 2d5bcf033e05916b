"""Stores in SQLite: a file a partition, with others beside it for what comes often and for what comes in bulk.

The turns of a busy partition gather in a log of their own, see turnlog.py, and the tables take many of them at a time.
What the tables take is one INSERT into a temporary view, whose trigger (see sqlite.sql) writes them: a small view if it
is a turn like most, a large one if not. So it is one call and one transaction of its own: it gives up the GIL once, and
there is nothing to roll back by hand. Each file has one connection, which holds its lock for as long as it is open.
"""

from __future__ import annotations

import errno
import importlib.resources
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import msgspec

from millpond.model import AuditEntry, QueueDefinition
from millpond.store.base import META_PARTITION, Chunk, JournalRow, Recovered, Store, StoreFailed, StoreFull, Turn
from millpond.store.bulk import BULK_BYTES_MIN, BULK_SUFFIX, BulkFiles, Extent, Share
from millpond.store.disk import (
    NO_FILES,
    PRIVATE,
    Reserve,
    bytes_of,
    make_directory,
    make_private_file,
    out_of_files,
    sync_directory,
)
from millpond.store.turnlog import TURNS_BEFORE, TURNS_SUFFIX, Gathered, Row, TurnLog

PAGE_BYTES = 8192  # measured: a chunk of 100 small items is three pages
CHECKPOINT_PAGES = 2000  # 16 MB of log between checkpoints
CHECKPOINT_PAGES_RELIEVED = 100  # when the reserve is given up, many stores' logs must fit into it
LOG_BYTES_MAX = 2 * CHECKPOINT_PAGES * PAGE_BYTES  # a log that a huge snapshot blew up is cut back to this
GROW_PAGES_MIN, GROW_PAGES_MAX = 64, 512  # allocated beyond what is needed, by the size of the file: 4 MB at most
TREE_PAGES_MAX = 2  # that a turn adds to the trees above what it stores, on the average
CACHE_KIB = 1024  # thousands of partitions are open at a time, and the engine has a cache of its own
COPY_BYTES = 64 << 10  # a SQLite file takes less than 128 KiB at a time
TRIM_ROWS_MAX = 2000  # bounds what a trim adds to its commit
BODY_COLUMNS = 16  # of the view that takes a turn: more than there are chunks in a full request of a batch writer
RESERVE_BYTES = 8 << 20  # room for the logs of some ten busy partitions on a full disk
SHRINK_FREE_BYTES = 32 << 20  # fewer free pages are left for new items
SHRINK_LIVE_BYTES = 16 << 20  # shrinking copies what is live: a tenth of a second at most

NO_CHUNK: tuple[int | None, int | None, bytes | None] = (None, None, None)
PLAIN_DROPS_MAX = 4  # of the view that takes a plain turn: more than consumers side by side mostly finish at a time
NO_DROPS = (None,) * PLAIN_DROPS_MAX
SYNCHRONOUS = {"full": "FULL", "relaxed": "NORMAL"}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Step n brings a file of version n to n + 1; a new file is of version 0.
PARTITION_UPGRADES = ("partition_1", "partition_2", "partition_3")
REGISTRY_UPGRADES = ("registry_1", "registry_2", "registry_3")


def load_statements(text: str) -> dict[str, str]:
    """`-- name: x` opens a statement."""
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


SQL = load_statements(importlib.resources.files("millpond.store").joinpath("sqlite.sql").read_text("utf-8"))

# ---- errors -----------------------------------------------------------------------------------------------


def is_full(problem: BaseException, connection: apsw.Connection | None) -> bool:
    """A full disk is an error of its own, but a quota that is used up is any I/O error with a certain errno."""
    if isinstance(problem, apsw.FullError):
        return True
    if isinstance(problem, OSError):
        return problem.errno in NO_ROOM
    if connection is None or not isinstance(problem, apsw.IOError | apsw.CantOpenError):
        return False
    if getattr(problem, "extendedresult", 0) == apsw.SQLITE_IOERR_FSYNC:
        return False  # what was written before the sync may stand
    return connection.system_errno in NO_ROOM


def describe(path: Path, problem: BaseException) -> str:
    if isinstance(problem, apsw.BusyError):
        return f"{path} is open in another process; stop that one first"
    if isinstance(problem, apsw.CorruptError | apsw.NotADBError):
        return f"{path} is damaged ({problem}); restore it from a copy"
    what = f"{path} could not be used ({type(problem).__name__}: {problem})"
    if getattr(problem, "errno", None) in NO_FILES or (isinstance(problem, apsw.CantOpenError) and out_of_files()):
        return f"{what}: too many files are open; raise `ulimit -n`, or use fewer queues at a time"
    return f"{what}; see to the disk, then try again"


# ---- connections ------------------------------------------------------------------------------------------


def connect(path: Path, upgrades: Sequence[str], durability: str, vfs: str | None) -> apsw.Connection:
    """Opens or creates the file, of the newest version, with nothing in it that a power cut could undo."""
    make_directory(path.parent, PRIVATE)
    left_unclean = bytes_of(log_of(path)) > 0
    make_private_file(path)  # its log is as private as it is
    connection = apsw.Connection(str(path), vfs=vfs)
    try:
        connection.pragma("page_size", PAGE_BYTES)
        connection.pragma("locking_mode", "EXCLUSIVE")  # before the first access: then there is no shared memory
        connection.pragma("journal_mode", "WAL")
        connection.pragma("synchronous", SYNCHRONOUS[durability])
        connection.pragma("journal_size_limit", LOG_BYTES_MAX)
        connection.pragma("cache_size", -CACHE_KIB)
        connection.pragma("secure_delete", 0)
        connection.pragma("temp_store", "MEMORY")
        upgrade(connection, path, upgrades)
        if left_unclean:
            settle(connection, path, vfs)
    except BaseException:
        close_quietly(connection)
        raise
    return connection


def upgrade(connection: apsw.Connection, path: Path, upgrades: Sequence[str]) -> None:
    version = connection.pragma("user_version")
    if version > len(upgrades):
        raise StoreFailed(
            f"{path} is of version {version}, and this millpond knows {len(upgrades)} at most; upgrade millpond"
        )
    if version == 0:  # its name is made durable before anything in it counts
        sync_directory(path.parent)
        sync_directory(path.parent.parent)
    for step in range(version, len(upgrades)):
        connection.execute(f"BEGIN IMMEDIATE; {SQL[upgrades[step]]}; PRAGMA user_version = {step + 1}; COMMIT")


def settle(connection: apsw.Connection, path: Path, vfs: str | None) -> None:
    """Makes durable what a crash or a failed commit left in the log, which may be in memory only."""
    try:
        write_again(log_of(path), vfs)
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.Error as problem:
        if not is_full(problem, connection):
            raise
        # The log is synced, if there was no room to move it into the file.


def write_again(path: Path, vfs: str | None) -> None:
    """Writes a file over itself. After a failed sync Linux takes pages for clean that never reached the disk: they
    can be read, and the next sync succeeds without them. The lock of the database must be held.
    """
    file = apsw.VFSFile(vfs or "", str(path), [apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_READWRITE, 0])
    try:
        size = file.xFileSize()
        for offset in range(0, size, COPY_BYTES):
            file.xWrite(file.xRead(min(COPY_BYTES, size - offset), offset), offset)
        file.xSync(apsw.SQLITE_SYNC_NORMAL)
    finally:
        file.xClose()


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def close_quietly(connection: apsw.Connection) -> None:
    """What was acknowledged is durable already; what fails to be tidied up now, the next opening tidies up."""
    try:
        connection.close()
    except apsw.Error:
        pass


def json_array(rows: Sequence[Any]) -> str | None:
    return msgspec.json.encode(list(rows)).decode() if rows else None


def pack(rows: Sequence[tuple[Any, ...]], bodies: Sequence[bytes]) -> tuple[str | None, bytes | None]:
    """Rows and their bodies as two values: SQLite takes no arrays of blobs that a trigger could read."""
    if not rows:
        return None, None
    index, place = [], 1
    for row, body in zip(rows, bodies, strict=True):
        index.append((*row, place, len(body)))
        place += len(body)
    return json_array(index), b"".join(bodies)


def spread(chunks: Sequence[Chunk]) -> tuple[Any, ...]:
    """The same for chunks, of which most turns have few: a body with a column of its own is not copied on its way."""
    bodies: list[bytes | None] = [chunk.body for chunk in chunks[:BODY_COLUMNS]]
    bodies += [None] * (BODY_COLUMNS - len(bodies))
    index: list[tuple[int, ...]] = [(chunk.first, chunk.count) for chunk in chunks]
    others = chunks[BODY_COLUMNS:]
    place = 1
    for number, chunk in enumerate(others, BODY_COLUMNS):
        index[number] += (place, len(chunk.body))
        place += len(chunk.body)
    return json_array(index), *bodies, b"".join([chunk.body for chunk in others]) if others else None


# ---- the store --------------------------------------------------------------------------------------------


class SqliteStore:
    """A partition's store. After an error it is closed: only `recover` opens it again."""

    blocking = True

    def __init__(
        self,
        path: Path,
        durability: str,
        reserve: Reserve,
        vfs: str | None,
        bulk_bytes_min: int = BULK_BYTES_MIN,
        turns_before: int = TURNS_BEFORE,
    ) -> None:
        """A turn goes into the log only after `turns_before` others since it was opened."""
        self._path = path
        self._durability = durability
        self._reserve = reserve
        self._vfs = vfs
        self._bulk = BulkFiles(path, bulk_bytes_min, durable=durability == "full")
        self._log = TurnLog(path)
        self._turns_before = turns_before
        self._turns_to_log = turns_before  # so many more until there is one
        self._gathered = Gathered()
        self._connection: apsw.Connection | None = None
        self._last_turn = 0
        self._snapshot_turn = 0
        self._total = 0  # bytes of events so far
        self._descriptor: int | None = None  # of the file, to allocate room in it
        self._room_pages = 0  # that turns can surely still add to the file without its growing
        self._gathered_pages = 0  # that those which the tables lack will add
        self._logged_pages = 0  # since the last checkpoint, at most

    def recover(self) -> Recovered:
        self.close()
        with self._failing():
            self._connection = connection = self._connect()
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            os.fsync(self._descriptor)  # see _make_room
            self._shrink(connection)
            connection.execute(SQL["turn"])
            connection.execute(SQL["plain_turn"])
            recovered = self._read_state(connection)
            self._bulk.load([Extent(*row) for row in connection.execute(SQL["extents"])])
            self._total = connection.execute(SQL["journal_total"]).get
            self._room_pages = self._logged_pages = self._gathered_pages = 0
            self._snapshot_turn = recovered.snapshot_turn
            self._last_turn = recovered.rows[-1].turn if recovered.rows else recovered.snapshot_turn
            self._gathered = Gathered()
            self._turns_to_log = self._turns_before
            for turn in self._log.load(self._last_turn):
                self._gather(turn, pages_of(turn, turn.chunks))
                self._count(turn, self._snapshot_turn)
        recovered.rows += [row.journalled() for row in self._gathered.rows]
        return recovered

    def commit(self, turn: Turn) -> None:
        connection = self._open_connection()
        if turn.number != self._last_turn + 1:
            self.close()
            raise StoreFailed(f"{self._path}: turn {turn.number} cannot follow {self._last_turn}; recover, then go on")
        snapshot_turn = self._snapshot_turn if turn.snapshot is None else turn.number
        try:
            if not self._write_log(connection, turn):
                self._write_tables(connection, turn, snapshot_turn)
        except Exception as problem:
            raise self._failed_commit(turn.number, problem) from problem
        except BaseException:
            self._abandon()
            raise
        self._count(turn, snapshot_turn)

    def read(self, chunks: Sequence[int], docs: Sequence[int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        connection = self._open_connection()
        bodies, chunks = self._gathered.read_chunks(chunks)
        found, docs = self._gathered.read_docs(docs)
        with self._failing():
            bodies.update(self._bulk.read(chunks))
            others = [first for first in chunks if first not in bodies]
            if others:
                bodies.update(connection.execute(SQL["read_chunks"], (json_array(others),)))
            if docs:
                found.update(connection.execute(SQL["read_docs"], (json_array(docs),)))
        return bodies, found

    def journal(self, after: int, limit: int) -> list[JournalRow]:
        connection = self._open_connection()
        with self._failing():
            rows = journal_rows(connection.execute(SQL["journal_page"], (after, limit)))
        gathered = [row.journalled() for row in self._gathered.rows if row.turn > after]
        return rows + gathered[: limit - len(rows)]

    def ended(self, low: int, high: int, since: int) -> Iterator[JournalRow]:
        """No statement stays open between rows: it would keep the log from being reused."""
        connection = self._open_connection()
        with self._failing():
            turns = connection.execute(SQL["journal_ended"], (since, low, high)).fetchall()
        yield from self._gathered.ended(low, high, since)
        for turn in turns:
            with self._failing():
                rows = journal_rows(self._open_connection().execute(SQL["journal_row"], turn))
            yield from rows

    def relieve(self, full: bool) -> bool:
        if full:
            self._reserve.give_up()
            return False
        return self._reserve.take()

    def size(self) -> int:
        tables = sum(bytes_of(file) for file in (self._path, log_of(self._path)))
        return tables + self._log.size() + self._bulk.size()

    def check(self) -> list[str]:
        connection = self._open_connection()
        try:
            found = [str(line) for (line,) in connection.execute("PRAGMA quick_check")]
            problems = [line for line in found if line != "ok"]
            for statement in ("check_chunks", "check_journal"):
                problems += [line for (line,) in connection.execute(SQL[statement])]
        except apsw.Error as problem:
            return [describe(self._path, problem)]
        return problems + self._bulk.check()

    def close(self) -> None:
        if self._connection is not None and self._descriptor is not None:
            self._empty_log(self._connection)
            self._give_back_room(self._connection, self._descriptor)
        self._abandon()

    # ---- inside ----

    def _abandon(self) -> None:
        """Closes, as after an error: no more is asked of the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            close_quietly(connection)
        self._log.close()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)  # last: with any descriptor of a file, a process loses all its locks on it

    def _connect(self) -> apsw.Connection:
        connection = connect(self._path, PARTITION_UPGRADES, self._durability, self._vfs)
        connection.wal_autocheckpoint(0)  # `commit` sees to it
        self._reserve.take_at_first()
        return connection

    def _open_connection(self) -> apsw.Connection:
        if self._connection is None:
            raise StoreFailed(f"{self._path} is not open; recover it first")
        return self._connection

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except StoreFailed:
            self._abandon()
            raise
        except (apsw.Error, OSError) as problem:
            full = is_full(problem, self._connection)
            self._abandon()
            raise (StoreFull if full else StoreFailed)(describe(self._path, problem)) from problem

    def _failed_commit(self, number: int, problem: Exception) -> StoreFailed:
        """StoreFull promises that nothing was written: only the file itself, opened again, can say so."""
        full = is_full(problem, self._connection)
        self._abandon()
        if full and self._stored_turn(unknown=number) < number:
            return StoreFull(f"{self._path} has no room ({problem}); free some disk space")
        return StoreFailed(describe(self._path, problem))

    def _stored_turn(self, unknown: int) -> int:
        try:
            connection = self._connect()
        except (apsw.Error, OSError, StoreFailed):
            return unknown
        try:
            last = int(connection.execute(SQL["last_turn"]).get)
            return last + len(self._log.load(last))
        except (apsw.Error, OSError, StoreFailed):
            return unknown
        finally:
            self._log.close()
            close_quietly(connection)

    def _count(self, turn: Turn, snapshot_turn: int) -> None:
        self._last_turn, self._snapshot_turn = turn.number, snapshot_turn
        self._total += len(turn.events)

    def _write_log(self, connection: apsw.Connection, turn: Turn) -> bool:
        """Whether it could go there. Room for it in the tables is made first: they must have it one day."""
        if not self._log.made or not self._reserve.held:
            return False
        pages = pages_of(turn, turn.chunks)
        if self._room_pages < pages:
            self._make_room(connection, pages)
        if not self._log.write(turn):
            return False
        self._gather(turn, pages)
        return True

    def _gather(self, turn: Turn, pages: int) -> None:
        self._gathered.add(turn, self._total + len(turn.events))
        self._gathered_pages += pages
        self._room_pages -= pages

    def _write_tables(self, connection: apsw.Connection, turn: Turn, snapshot_turn: int) -> None:
        """With all that has gathered before it, as one."""
        total = self._total + len(turn.events)
        if self._gathered.rows:
            self._gathered.add(turn, total)
            turn = self._gathered.as_one()
        self._insert(connection, turn, total, snapshot_turn)
        if self._logged_pages >= (CHECKPOINT_PAGES if self._reserve.held else CHECKPOINT_PAGES_RELIEVED):
            self._checkpoint(connection)
        if self._log.made:
            self._log_is_taken()
        else:
            self._make_log()

    def _insert(self, connection: apsw.Connection, turn: Turn, total: int, snapshot_turn: int) -> None:
        earlier = self._gathered.rows[:-1]
        share = self._bulk.take(turn, tidy=self._reserve.held)
        pages = pages_of(turn, share.chunks) + sum([len(row.events) for row in earlier]) // PAGE_BYTES
        more = pages - self._gathered_pages
        if self._room_pages < more:
            self._make_room(connection, more)
        if not earlier and is_plain(turn, share):
            connection.execute(SQL["commit_plain"], plain_bindings_of(turn, share, total))
        else:
            connection.execute(SQL["commit"], bindings_of(turn, share, total, snapshot_turn, earlier))
        self._bulk.taken(share)
        self._room_pages -= more
        self._logged_pages += pages + len(turn.chunk_drops) + len(turn.doc_drops)
        self._gathered, self._gathered_pages = Gathered(), 0

    def _log_is_taken(self) -> None:
        if self._durability != "full":
            self._log.close()  # a power cut may undo what the tables took: the next load sees to the file
        elif self._reserve.held:
            self._log.begin()
        else:
            self._log.remove()

    def _make_log(self) -> None:
        if self._durability == "full" and self._reserve.held:
            self._turns_to_log -= 1
            if self._turns_to_log < 0 and not self._log.make():
                self._turns_to_log = TURNS_BEFORE

    def _empty_log(self, connection: apsw.Connection) -> None:
        """Ten thousand queues that sleep should not have such a file each."""
        try:
            if self._gathered.rows:
                self._insert(connection, self._gathered.as_one(), self._total, self._snapshot_turn)
            if self._durability == "full":
                self._log.remove()
        except (apsw.Error, OSError):
            pass  # the next opening reads it

    def _read_state(self, connection: apsw.Connection) -> Recovered:
        turn, state = connection.execute(SQL["snapshot"]).get or (0, None)
        rows = journal_rows(connection.execute(SQL["journal_after"], (turn,)))
        if rows and rows[-1].turn - turn != len(rows):
            raise StoreFailed(f"{self._path} lacks turns after turn {turn}; restore it from a copy")
        return Recovered(snapshot_turn=turn, snapshot=state, rows=rows)

    def _make_room(self, connection: apsw.Connection, pages: int) -> None:
        """Allocates what turns will add to the file before they are logged: a log that could not be moved into the
        file for want of room could not be emptied either, and nothing more could be written, completes included.

        SQLite may log the file's new size as the database's, so that has to be durable first.
        """
        assert self._descriptor is not None
        used, free = connection.execute(SQL["pages"]).get
        size = os.fstat(self._descriptor).st_size // PAGE_BYTES
        self._room_pages = size - used + free - self._gathered_pages
        missing = pages - self._room_pages
        if missing > 0:
            ahead = min(GROW_PAGES_MAX, max(GROW_PAGES_MIN, used // 2)) if self._reserve.held else 0
            self._room_pages = pages + ahead
            try:
                os.posix_fallocate(self._descriptor, size * PAGE_BYTES, (missing + ahead) * PAGE_BYTES)
            except OSError as problem:
                if problem.errno in NO_ROOM:
                    raise
                # Not every file system can do it; then this precaution is not to be had.
            os.fsync(self._descriptor)

    def _give_back_room(self, connection: apsw.Connection, descriptor: int) -> None:
        """Ten thousand queues that sleep should not hold on to it."""
        try:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            used, _ = connection.execute(SQL["pages"]).get
            os.ftruncate(descriptor, used * PAGE_BYTES)
        except (apsw.Error, OSError):
            pass  # the next opening will do with the file as it is

    def _checkpoint(self, connection: apsw.Connection) -> None:
        """Also cuts the file back to what is used: room has to be made again."""
        self._room_pages = self._logged_pages = 0
        try:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.Error:
            pass  # the turn is in the log, and safe; a later checkpoint moves it

    def _shrink(self, connection: apsw.Connection) -> None:
        """Gives the disk back what a long backlog took, once it is drained and the partition is opened again."""
        free = connection.pragma("freelist_count") * PAGE_BYTES
        live = connection.pragma("page_count") * PAGE_BYTES - free
        if free >= SHRINK_FREE_BYTES and live <= SHRINK_LIVE_BYTES:
            try:
                connection.execute("VACUUM")
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.Error as problem:
                if not is_full(problem, connection):
                    raise
                # It copies before it frees; another time.


def pages_of(turn: Turn, chunks: Sequence[Chunk]) -> int:
    """At most so many pages come into use with a turn, be it that nothing is freed before it is written anew."""
    size = len(turn.events) + len(turn.snapshot or b"")
    for chunk in chunks:
        size += len(chunk.body)
    for doc in turn.docs.values():
        size += len(doc)
    return size // PAGE_BYTES + 2 * len(chunks) + len(turn.docs) + TREE_PAGES_MAX


def journal_rows(cursor: Iterable[Any]) -> list[JournalRow]:
    return [JournalRow(turn, at, events) for turn, at, events in cursor]


def is_plain(turn: Turn, share: Share) -> bool:
    """Whether a `plain_turn` holds it."""
    if len(share.chunks) > 1 or len(turn.chunk_drops) > PLAIN_DROPS_MAX or turn.docs or turn.doc_drops:
        return False
    return turn.snapshot is None and turn.trim is None and not share.extents and not share.drops


def plain_bindings_of(turn: Turn, share: Share, total: int) -> tuple[Any, ...]:
    ended_lo, ended_hi = turn.ended or (None, None)
    first, count, body = NO_CHUNK
    if share.chunks:
        [chunk] = share.chunks
        first, count, body = chunk.first, chunk.count, chunk.body
    drops = (*turn.chunk_drops, *NO_DROPS[len(turn.chunk_drops) :])
    return turn.number, turn.at, ended_lo, ended_hi, total, turn.events, first, count, body, *drops


def bindings_of(
    turn: Turn, share: Share, total: int, snapshot_turn: int, earlier: Sequence[Row] = ()
) -> tuple[Any, ...]:
    """The columns of the view, in order. `earlier` are rows of turns that it is one with."""
    ended_lo, ended_hi = turn.ended or (None, None)
    trim = turn.trim
    return (
        *(turn.number, turn.at, ended_lo, ended_hi, total, turn.events),
        *spread(share.chunks),
        json_array(turn.chunk_drops),
        json_array(share.extents),
        json_array(share.drops),
        *pack([(number,) for number in turn.docs], list(turn.docs.values())),
        json_array(turn.doc_drops),
        turn.snapshot,
        *((trim.before_at, trim.keep_bytes, min(trim.keep_from, snapshot_turn)) if trim else (None, None, None)),
        TRIM_ROWS_MAX,
        *pack([row[:-1] for row in earlier], [row.events for row in earlier]),
    )


class SqliteStores:
    """`<directory>/queues/<incarnation>/<partition>.db`, a `decisions.db` there, and the reserve beside them.

    A partition's log of turns is `<partition>.db-turns`, its files of bulk are `<partition>.db-bulk-1`, and so on.
    """

    def __init__(
        self,
        directory: Path,
        vfs: str | None = None,
        reserve_bytes: int = RESERVE_BYTES,
        bulk_bytes_min: int = BULK_BYTES_MIN,
        turns_before: int = TURNS_BEFORE,
    ) -> None:
        self._directory = directory.absolute()
        self._vfs = vfs
        self._bulk_bytes_min = bulk_bytes_min
        self._turns_before = turns_before
        self._reserve = Reserve(self._directory / "reserve", reserve_bytes)

    def open(self, incarnation: str, partition: int, durability: str) -> Store:
        path = self._path(incarnation, partition)
        return SqliteStore(path, durability, self._reserve, self._vfs, self._bulk_bytes_min, self._turns_before)

    def _path(self, incarnation: str, partition: int) -> Path:
        name = "decisions" if partition == META_PARTITION else str(partition)
        return self._directory / "queues" / incarnation / f"{name}.db"

    def incarnations(self) -> list[str]:
        folder = self._directory / "queues"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def destroy(self, incarnation: str, partitions: Sequence[int] | None = None) -> None:
        folder = self._directory / "queues" / incarnation
        if not folder.exists():
            return
        names = None if partitions is None else {str(partition) for partition in partitions}
        for path in folder.iterdir():
            name, _, suffix = path.name.partition(".db")
            ours = suffix in ("", "-wal", "-journal", TURNS_SUFFIX) or suffix.startswith(BULK_SUFFIX)
            if ours and (names is None or name in names):
                path.unlink(missing_ok=True)
        sync_directory(folder)
        if not any(folder.iterdir()):
            folder.rmdir()
            sync_directory(folder.parent)


class SqliteRegistry:
    """`<directory>/meta.db`. While it is open no other process can open it, and so none can use the directory.

    It opens itself, also after an error: a row is written whole, so a `put` that failed can be sent again.
    """

    def __init__(self, directory: Path, vfs: str | None = None) -> None:
        self._path = directory.absolute() / "meta.db"
        self._vfs = vfs
        self._connection: apsw.Connection | None = None

    def load(self) -> list[QueueDefinition]:
        decode = msgspec.msgpack.Decoder(QueueDefinition).decode
        with self._connected() as connection:
            rows: Iterable[Any] = connection.execute(SQL["registry_load"]).fetchall()
        try:
            return [decode(definition) for (definition,) in rows]
        except msgspec.MsgspecError as problem:
            raise StoreFailed(
                f"{self._path} holds a queue that cannot be read ({problem}); upgrade millpond"
            ) from problem

    def put(self, definitions: Sequence[QueueDefinition], entries: Sequence[AuditEntry] = ()) -> None:
        encode = msgspec.msgpack.Encoder().encode
        rows = pack([(one.name,) for one in definitions], [encode(one) for one in definitions])
        if definitions or entries:
            self._write([("registry_put", rows)] if definitions else [], entries)

    def remove(self, name: str, incarnation: str = "", entries: Sequence[AuditEntry] = ()) -> None:
        gone: list[tuple[str, tuple[Any, ...]]] = [("registry_gone_add", (incarnation,))] if incarnation else []
        self._write([("registry_remove", (name,)), *gone], entries)

    def gone(self, incarnations: Sequence[str]) -> list[str]:
        with self._connected() as connection:
            return [one for (one,) in connection.execute(SQL["registry_gone"], (json_array(incarnations),))]

    def audit(self, queue: str, before: int | None, limit: int) -> list[tuple[int, AuditEntry]]:
        decode = msgspec.msgpack.Decoder(AuditEntry).decode
        with self._connected() as connection:
            rows: Iterable[Any] = connection.execute(SQL["audit_page"], (queue, before, limit)).fetchall()
        try:
            return [(number, decode(entry)) for number, entry in rows]
        except msgspec.MsgspecError as problem:
            raise StoreFailed(
                f"{self._path} holds an audit entry that cannot be read ({problem}); upgrade millpond"
            ) from problem

    def _write(self, statements: list[tuple[str, tuple[Any, ...]]], entries: Sequence[AuditEntry]) -> None:
        """All in one commit. One that fails is rolled back as its connection is closed."""
        encode = msgspec.msgpack.Encoder().encode
        if entries:
            rows = pack([(one.queue,) for one in entries], [encode(one) for one in entries])
            statements = [*statements, ("audit_add", rows)]
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement, bindings in statements:
                connection.execute(SQL[statement], bindings)
            connection.execute("COMMIT")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close_quietly(connection)

    @contextmanager
    def _connected(self) -> Iterator[apsw.Connection]:
        try:
            if self._connection is None:
                self._connection = connect(self._path, REGISTRY_UPGRADES, "full", self._vfs)
            yield self._connection
        except (apsw.Error, OSError) as problem:
            full = is_full(problem, self._connection)
            self.close()
            raise (StoreFull if full else StoreFailed)(describe(self._path, problem)) from problem
        except BaseException:
            self.close()
            raise
