"""Connections to SQLite: how files are opened, brought up to date and made durable, and what their errors mean."""

from __future__ import annotations

import errno
import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec

from millpond.store.base import StoreFailed
from millpond.store.disk import (
    NO_FILES,
    PRIVATE,
    bytes_of,
    make_directory,
    make_private_file,
    out_of_files,
    sync_directory,
)

PAGE_BYTES = 8192  # measured: a chunk of 100 small items is three pages
CHECKPOINT_PAGES = 2000  # 16 MB of log between checkpoints
LOG_BYTES_MAX = 2 * CHECKPOINT_PAGES * PAGE_BYTES  # a log that a huge snapshot blew up is cut back to this
CACHE_KIB = 1024  # thousands of partitions are open at a time, and the engine has a cache of its own
COPY_BYTES = 64 << 10  # a SQLite file takes less than 128 KiB at a time
SYNCHRONOUS = {"full": "FULL", "relaxed": "NORMAL"}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


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
    """Opens or creates the file, of the newest version, with nothing in it that a power cut could undo.

    Step n of `upgrades` brings a file of version n to n + 1; a new file is of version 0.
    """
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
        drop(connection)
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
    write_again(log_of(path), vfs)
    try:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.Error as problem:
        if not is_full(problem, connection):
            raise
        # There was no room to move it into the file, but it is synced.


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


def drop(connection: apsw.Connection) -> None:
    """Closes it after an error, with SQLite's log left as it is. A close would move that into the file; but after a
    failed sync it need not be on disk, and a power cut in between would leave a part of it.
    """
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    close_quietly(connection)


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
