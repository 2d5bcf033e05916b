"""Stores in SQLite: a file a partition, with others beside it for what comes often and for what comes in bulk.

The turns of a busy partition gather in a log of their own, see turnlog.py, and the tables take many of them at a time.
What the tables take is one INSERT into a temporary view, whose trigger (see sqlite.sql) writes them: a small view if it
is a turn like most, a large one if not. So it is one call and one transaction of its own: it gives up the GIL once, and
there is nothing to roll back by hand. Each file has one connection, which holds its lock for as long as it is open.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore
from typing import Any

import apsw

from millpond.store.base import META_PARTITION, Chunk, JournalRow, Recovered, Store, StoreFailed, StoreFull, Turn
from millpond.store.bulk import BULK_BYTES_MIN, BULK_SUFFIX, BulkFiles, Extent, Share
from millpond.store.disk import Reserve, bytes_of, sync_directory
from millpond.store.sqlite_connections import (
    CHECKPOINT_PAGES,
    NO_ROOM,
    PAGE_BYTES,
    SQL,
    close_quietly,
    connect,
    describe,
    drop,
    is_full,
    json_array,
    log_of,
    pack,
)
from millpond.store.turnlog import LOGS_MAX, TURNS_BEFORE, TURNS_SUFFIX, Gathered, Row, TurnLog

CHECKPOINT, CHECKPOINT_TO_NOTHING = apsw.SQLITE_CHECKPOINT_PASSIVE, apsw.SQLITE_CHECKPOINT_TRUNCATE
CHECKPOINT_PAGES_RELIEVED = 100  # when the reserve is given up, many stores' logs must fit into it
GROW_PAGES_MIN, GROW_PAGES_MAX = 64, 512  # allocated beyond what is needed, by the size of the file: 4 MB at most
GATHERED_PAGES_MAX = 256  # that the tables change at a time: on a full disk the log makes as much room as that takes
TREE_PAGES_MAX = 2  # that a turn adds to the trees above what it stores, on the average
TRIM_ROWS_MAX = 2000  # bounds what a trim adds to its commit
BODY_COLUMNS = 16  # of the view that takes a turn: more than there are chunks in a full request of a batch writer
RESERVE_BYTES = 8 << 20  # room for the logs of some ten busy partitions on a full disk
SHRINK_FREE_BYTES = 32 << 20  # fewer free pages are left for new items
SHRINK_LIVE_BYTES = 16 << 20  # shrinking copies what is live: a tenth of a second at most

NO_CHUNK: tuple[int | None, int | None, bytes | None] = (None, None, None)
PLAIN_DROPS_MAX = 4  # of the view that takes a plain turn: more than consumers side by side mostly finish at a time
NO_DROPS = (None,) * PLAIN_DROPS_MAX
PARTITION_UPGRADES = ("partition_1", "partition_2", "partition_3")


class SqliteStore:
    """A partition's store. After an error it is closed: only `recover` opens it again."""

    blocking = True

    def __init__(
        self,
        path: Path,
        durability: str,
        reserve: Reserve,
        logs: Semaphore,
        vfs: str | None = None,
        bulk_bytes_min: int = BULK_BYTES_MIN,
        turns_before: int = TURNS_BEFORE,
    ) -> None:
        """`logs`: so many more may be made. A turn goes into one after `turns_before` others since it was opened."""
        self._path = path
        self._durability = durability
        self._reserve = reserve
        self._vfs = vfs
        self._bulk = BulkFiles(path, bulk_bytes_min, durable=durability == "full")
        self._log = TurnLog(path, logs)
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
            if self._has_room(connection, self._descriptor):
                self._connection = None
                close_quietly(connection)  # with SQLite's log, which may count on it
                self._connection = connection = self._connect()
            sync_directory(self._path.parent)  # no such log must come back, nor one of a commit that failed
            self._cut_back(connection, self._descriptor)
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
            if self._give_back_room(self._connection, self._descriptor):
                connection, self._connection = self._connection, None
                close_quietly(connection)
        self._abandon()

    # ---- inside ----

    def _abandon(self) -> None:
        """Closes, as after an error: no more is asked of the connection."""
        connection, self._connection = self._connection, None
        if connection is not None and self._durability == "full":
            close_quietly(connection)  # all of SQLite's log is durable, but for the turn that failed, if one did
        elif connection is not None:
            drop(connection)
        self._log.close()
        self._gathered = Gathered()
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
        except BaseException:
            self._abandon()
            raise

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
            sync_directory(self._path.parent)  # as in `recover`
            last = int(connection.execute(SQL["last_turn"]).get)
            return last + len(self._log.load(last))
        except (apsw.Error, OSError, StoreFailed):
            return unknown
        finally:
            self._log.close()
            close_quietly(connection)

    @property
    def _may_log(self) -> bool:
        return self._durability == "full" and self._reserve.held

    def _count(self, turn: Turn, snapshot_turn: int) -> None:
        self._last_turn, self._snapshot_turn = turn.number, snapshot_turn
        self._total += len(turn.events)

    def _write_log(self, connection: apsw.Connection, turn: Turn) -> bool:
        """Whether it could go there. Room for it in the tables is made first: they must have it one day."""
        if not self._log.made or not self._may_log:
            return False
        pages = pages_of(turn, turn.chunks)
        drops = self._gathered.drops + len(turn.chunk_drops) + len(turn.doc_drops)
        if self._gathered_pages + pages + drops > GATHERED_PAGES_MAX:
            return False
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
        pages = pages_of(turn, share.chunks) + 2 * sum([len(row.events) for row in earlier]) // PAGE_BYTES
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
        if self._may_log and self._log.may_stay:
            self._log.begin()
        else:
            self._let_go_of_log()

    def _let_go_of_log(self) -> None:
        if self._durability == "full":
            self._log.remove()
        else:
            self._log.close()  # a power cut may undo what the tables took: the next load sees to the file

    def _make_log(self) -> None:
        if self._may_log:
            self._turns_to_log -= 1
            if self._turns_to_log < 0 and not self._log.make():
                self._turns_to_log = TURNS_BEFORE

    def _empty_log(self, connection: apsw.Connection) -> None:
        """Ten thousand queues that sleep should not have such a file each."""
        try:
            if self._gathered.rows:
                self._insert(connection, self._gathered.as_one(), self._total, self._snapshot_turn)
            self._let_go_of_log()
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

        It is not synced, so no log may count on it: SQLite refuses a file that is much shorter than its log says. As
        long as the log says nothing, SQLite takes the file's size for the database's.
        """
        assert self._descriptor is not None
        used, free = connection.execute(SQL["pages"]).get
        size = os.fstat(self._descriptor).st_size // PAGE_BYTES
        self._room_pages = size - used + free - self._gathered_pages
        missing = pages - self._room_pages
        if missing > 0:
            if not bytes_of(log_of(self._path)):
                connection.execute(SQL["log_size"])
            ahead = min(GROW_PAGES_MAX, max(GROW_PAGES_MIN, used // 2)) if self._reserve.held else 0
            self._room_pages = pages + ahead
            try:
                os.posix_fallocate(self._descriptor, size * PAGE_BYTES, (missing + ahead) * PAGE_BYTES)
            except OSError as problem:
                if problem.errno in NO_ROOM:
                    raise
                # Not every file system can do it; then this precaution is not to be had.

    def _has_room(self, connection: apsw.Connection, descriptor: int) -> bool:
        """At the file's end, as after a crash."""
        used, _ = connection.execute(SQL["pages"]).get
        return os.fstat(descriptor).st_size > int(used) * PAGE_BYTES

    def _give_back_room(self, connection: apsw.Connection, descriptor: int) -> bool:
        """Ten thousand queues that sleep should not hold on to it. False: the next opening does it."""
        try:
            connection.wal_checkpoint(mode=CHECKPOINT_TO_NOTHING)
            self._cut_back(connection, descriptor)
        except (apsw.Error, OSError):
            return False
        return True

    def _cut_back(self, connection: apsw.Connection, descriptor: int) -> None:
        """The file to what is used, unless a log may count on more."""
        if not bytes_of(log_of(self._path)):
            used, _ = connection.execute(SQL["pages"]).get
            os.ftruncate(descriptor, used * PAGE_BYTES)

    def _checkpoint(self, connection: apsw.Connection) -> None:
        """Also cuts the file back to what is used: room has to be made again. On a full disk others need the log's."""
        self._room_pages = self._logged_pages = 0
        try:
            connection.wal_checkpoint(mode=CHECKPOINT if self._reserve.held else CHECKPOINT_TO_NOTHING)
        except apsw.Error as problem:
            if self._durability != "full" and not is_full(problem, connection):
                raise  # the log may be in memory only, and the next checkpoint would take it for durable
            # The turn is in the log, and safe; a later checkpoint moves it.

    def _shrink(self, connection: apsw.Connection) -> None:
        """Gives the disk back what a long backlog took, once it is drained and the partition is opened again."""
        free = connection.pragma("freelist_count") * PAGE_BYTES
        live = connection.pragma("page_count") * PAGE_BYTES - free
        if free >= SHRINK_FREE_BYTES and live <= SHRINK_LIVE_BYTES:
            try:
                connection.execute("VACUUM")
                connection.wal_checkpoint(mode=CHECKPOINT_TO_NOTHING)
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


def spread(chunks: Sequence[Chunk]) -> tuple[Any, ...]:
    """As `pack`, for chunks, of which most turns have few: a body with a column of its own is not copied on its way."""
    bodies: list[bytes | None] = [chunk.body for chunk in chunks[:BODY_COLUMNS]]
    bodies += [None] * (BODY_COLUMNS - len(bodies))
    index: list[tuple[int, ...]] = [(chunk.first, chunk.count) for chunk in chunks]
    others = chunks[BODY_COLUMNS:]
    place = 1
    for number, chunk in enumerate(others, BODY_COLUMNS):
        index[number] += (place, len(chunk.body))
        place += len(chunk.body)
    return json_array(index), *bodies, b"".join([chunk.body for chunk in others]) if others else None


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
        self._logs = Semaphore(LOGS_MAX)

    def open(self, incarnation: str, partition: int, durability: str) -> Store:
        path = self._path(incarnation, partition)
        ways = self._vfs, self._bulk_bytes_min, self._turns_before
        return SqliteStore(path, durability, self._reserve, self._logs, *ways)

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
