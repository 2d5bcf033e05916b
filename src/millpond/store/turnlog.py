"""Turns on their way into a partition's tables: a file beside the database that is written over, round after round.

SQLite writes a turn page by page, with work around it that takes as long as the disk's sync. Here a turn is one record,
written and synced. The tables take all that has gathered, as one turn, when the file is full; what was stored and
dropped in between never gets there.

A record counts if its checksum is right and its turn follows the one before it, the first one the tables' last. Turns
only grow, so whatever an earlier round left behind counts for nothing. The last record may be torn, as its sync may not
have ended; a later one behind it is a sign of damage, and refused. Each begins with a mark that the file was given at
random: no payload can pass for a record, and none is overlooked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from threading import Semaphore
from typing import NamedTuple
from zlib import crc32

import msgspec

from millpond.store.base import Chunk, JournalRow, StoreFailed, Turn
from millpond.store.disk import PRIVATE_FILE, bytes_of, sync_directory, write_all

TURNS_SUFFIX = "-turns"
MAGIC = b"millpond turns 1"  # with the version of what follows it,
HEADER = Struct("<16sI8sI")  # the bytes that the file was made with, its mark, and the checksum of these three
RECORD = Struct("<8sII")  # before each turn: the mark, its checksum and its bytes
MARK_BYTES = 8
FILE_BYTES = 2 << 20  # measured: what the tables take at a time then costs little beside the syncs of the turns
TURN_BYTES_MAX = FILE_BYTES // 8  # a larger turn costs the tables little more
TURNS_MAX = 128  # bounds what is asked of the tables at a time
TURNS_BEFORE = 64  # since a partition was opened: one that does little needs no such file
LOGS_MAX = 64  # at a time in a directory: 128 MiB of the disk, and of memory what has gathered in them

_encode = msgspec.msgpack.Encoder(enc_hook=list).encode  # numbers may come as arrays and ranges
_decode = msgspec.msgpack.Decoder(Turn).decode


class Row(NamedTuple):
    """Of the table `journal`, in the order of its columns."""

    turn: int
    at: int
    ended_lo: int | None
    ended_hi: int | None
    total: int
    events: bytes

    def journalled(self) -> JournalRow:
        return JournalRow(self.turn, self.at, self.events)


def row_of(turn: Turn, total: int) -> Row:
    ended_lo, ended_hi = turn.ended or (None, None)
    return Row(turn.number, turn.at, ended_lo, ended_hi, total, turn.events)


class Gathered:
    """What the turns that the tables lack amount to."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._last: Turn | None = None
        self._chunks: dict[int, Chunk] = {}
        self._chunk_drops: set[int] = set()
        self._docs: dict[int, bytes] = {}
        self._doc_drops: set[int] = set()

    def add(self, turn: Turn, total: int) -> None:
        self._last = turn
        self.rows.append(row_of(turn, total))
        for chunk in turn.chunks:
            self._chunks[chunk.first] = chunk
            self._chunk_drops.discard(chunk.first)
        for first in turn.chunk_drops:
            self._chunks.pop(first, None)
            self._chunk_drops.add(first)
        for number, body in turn.docs.items():
            self._docs[number] = body
            self._doc_drops.discard(number)
        for number in turn.doc_drops:
            self._docs.pop(number, None)
            self._doc_drops.add(number)

    @property
    def drops(self) -> int:
        return len(self._chunk_drops) + len(self._doc_drops)

    def as_one(self) -> Turn:
        """The turn that was added last, with what all of them amount to."""
        assert self._last is not None
        return msgspec.structs.replace(
            self._last,
            chunks=list(self._chunks.values()),
            chunk_drops=list(self._chunk_drops),
            docs=self._docs,
            doc_drops=list(self._doc_drops),
        )

    def read_chunks(self, firsts: Sequence[int]) -> tuple[dict[int, bytes], list[int]]:
        """The bodies of those that are here, and which of the others may be in the tables."""
        found = {first: self._chunks[first].body for first in firsts if first in self._chunks}
        return found, [first for first in firsts if first not in found and first not in self._chunk_drops]

    def read_docs(self, numbers: Sequence[int]) -> tuple[dict[int, bytes], list[int]]:
        """The same for documents."""
        found = {number: self._docs[number] for number in numbers if number in self._docs}
        return found, [number for number in numbers if number not in found and number not in self._doc_drops]

    def ended(self, low: int, high: int, since: int) -> list[JournalRow]:
        """As a store's `ended`."""
        return [
            row.journalled()
            for row in reversed(self.rows)
            if row.at >= since and row.ended_lo is not None and row.ended_hi is not None
            if row.ended_lo <= high and row.ended_hi >= low
        ]


class TurnLog:
    """The file of one partition. It is made when there is much to do, and removed when the tables have all of it."""

    def __init__(self, database: Path, places: Semaphore) -> None:
        """Of the `places`, each log that is to stay takes one."""
        self._database = database
        self._places = places
        self.may_stay = False
        self._path = database.with_name(database.name + TURNS_SUFFIX)
        self._descriptor: int | None = None
        self._mark = b""
        self._end = self._turns = 0  # of this round

    @property
    def made(self) -> bool:
        return self._descriptor is not None

    def load(self, after: int) -> list[Turn]:
        """The turns after the tables' last one, durable even if the sync of one had failed. Raises OSError."""
        self.close()
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        if self._is_whole(data):
            turns, self._end = self._read(data, after)
        else:
            turns = []
        if not turns:
            self.remove()
            return []
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self.may_stay = self._places.acquire(blocking=False)
        write_all(self._descriptor, [data], 0)  # see write_again in sqlite_connections.py
        os.fdatasync(self._descriptor)
        self._turns = len(turns)
        return turns

    def make(self) -> bool:
        """False if that cannot be done now."""
        if not self._places.acquire(blocking=False):
            return False
        self.may_stay = True
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
            try:
                # Written whole, as a sync that has to allocate takes twice as long.
                mark = os.urandom(MARK_BYTES)
                write_all(descriptor, [header_of(FILE_BYTES, mark), bytes(FILE_BYTES - HEADER.size)], 0)
                os.fsync(descriptor)
                sync_directory(self._path.parent)
            except OSError:
                os.close(descriptor)
                raise
            self._descriptor, self._mark = descriptor, mark
            self.begin()
            return True
        self.remove()
        return False

    def write(self, turn: Turn) -> bool:
        """Durably. False: it is not for this file, or does not fit. Raises OSError; then nobody knows."""
        if self._descriptor is None or self._turns >= TURNS_MAX or not is_small(turn):
            return False
        data = _encode(turn)
        end = self._end + RECORD.size + len(data)
        if end > FILE_BYTES:
            return False
        write_all(self._descriptor, [RECORD.pack(self._mark, crc32(data), len(data)), data], self._end)
        os.fdatasync(self._descriptor)
        self._end = end
        self._turns += 1
        return True

    def begin(self) -> None:
        """The tables have all that is here: a new round."""
        self._end, self._turns = HEADER.size, 0

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        if self.may_stay:
            self.may_stay = False
            self._places.release()

    def remove(self) -> None:
        """The tables have all that is here, durably, or there is nothing."""
        self.close()
        with suppress(OSError):  # the next load tries again
            os.unlink(self._path)

    def size(self) -> int:
        return bytes_of(self._path)

    def _is_whole(self, data: bytes) -> bool:
        """False: it was never made to the end, and so has no turns."""
        if not data[HEADER.size :].strip(b"\0"):
            return False
        if len(data) < HEADER.size:
            raise self._damaged("is not whole, or of another version")
        _, size, mark, _ = HEADER.unpack_from(data)
        if data[: HEADER.size] != header_of(size, mark) or len(data) < size:
            raise self._damaged("is not whole, or of another version")
        self._mark = mark
        return True

    def _read(self, data: bytes, after: int) -> tuple[list[Turn], int]:
        """The turns after that one, and where they end."""
        turns: list[Turn] = []
        end = place = HEADER.size
        while (found := self._record(data, place)) is not None:
            turn, place = found
            if turn.number > after + len(turns) + 1:
                raise self._damaged(f"goes on at turn {turn.number}, but {self._database.name} ends at turn {after}")
            if turn.number > after + len(turns):
                turns.append(turn)
                end = place
        # The one that was written last may be torn, for each was synced before the next was written.
        while (place := data.find(self._mark, place + 1)) >= 0:
            found = self._record(data, place)
            if found is not None and found[0].number > after + len(turns):
                raise self._damaged(f"has turn {found[0].number} behind one that cannot be read")
        return turns, end

    def _record(self, data: bytes, place: int) -> tuple[Turn, int] | None:
        """The turn there, and where it ends. None if there is none, or not all of it."""
        if place + RECORD.size > len(data):
            return None
        mark, checksum, size = RECORD.unpack_from(data, place)
        start, end = place + RECORD.size, place + RECORD.size + size
        if mark != self._mark or end > len(data) or crc32(data[start:end]) != checksum:
            return None
        try:
            return _decode(data[start:end]), end
        except msgspec.MsgspecError as problem:
            raise self._damaged(f"has a turn that is none ({problem})") from problem

    def _damaged(self, what: str) -> StoreFailed:
        return StoreFailed(f"{self._path} {what}; restore it and {self._database.name} from one copy")


def header_of(size: int, mark: bytes) -> bytes:
    unchecked = HEADER.pack(MAGIC, size, mark, 0)
    return HEADER.pack(MAGIC, size, mark, crc32(unchecked))


def is_small(turn: Turn) -> bool:
    if turn.snapshot is not None or turn.trim is not None:
        return False
    size = len(turn.events)
    for chunk in turn.chunks:
        size += len(chunk.body)
    for doc in turn.docs.values():
        size += len(doc)
    return size <= TURN_BYTES_MAX
