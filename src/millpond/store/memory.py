"""Stores in memory: the same promises, but a restart of the process forgets them. For tests and for measuring.

The data belong to the factory, so that closing a store and recovering it finds them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from millpond.model import AuditEntry, QueueDefinition
from millpond.store.base import Chunk, JournalRow, Recovered, Store, StoreFailed, StoreFull, Trim, Turn

TRIM_ROWS_MAX = 2000  # as in the other stores, so that tests meet it


class Entry(msgspec.Struct):
    """A journal row with what the protocol asks about it. `total` is the bytes of events up to and with it."""

    row: JournalRow
    ended: tuple[int, int] | None
    total: int


class Contents(msgspec.Struct, kw_only=True):
    """What one partition has stored. `journal` holds the turns from `oldest` to `last_turn`, all of them."""

    chunks: dict[int, Chunk] = {}
    docs: dict[int, bytes] = {}
    journal: dict[int, Entry] = {}
    oldest: int = 1
    last_turn: int = 0
    total: int = 0
    snapshot_turn: int = 0
    snapshot: bytes | None = None
    size: int = 0

    def apply(self, turn: Turn) -> None:
        self.size += bytes_of(turn)
        for chunk in turn.chunks:
            if chunk.first in self.chunks:
                self._drop_chunk(chunk.first)
            self.chunks[chunk.first] = chunk
        for first in turn.chunk_drops:
            self._drop_chunk(first)
        if turn.docs:
            for number in turn.docs:
                self._drop_doc(number)
            self.docs |= turn.docs
        for number in turn.doc_drops:
            self._drop_doc(number)
        self.total += len(turn.events)
        self.last_turn = turn.number
        self.journal[turn.number] = Entry(JournalRow(turn.number, turn.at, turn.events), turn.ended, self.total)
        if turn.snapshot is not None:
            self.size -= len(self.snapshot or b"")
            self.snapshot_turn, self.snapshot = turn.number, turn.snapshot
        if turn.trim is not None:
            self._trim(turn.trim)

    def _drop_chunk(self, first: int) -> None:
        chunk = self.chunks.pop(first, None)
        if chunk is not None:
            self.size -= len(chunk.body)

    def _drop_doc(self, number: int) -> None:
        self.size -= len(self.docs.pop(number, b""))

    def _trim(self, trim: Trim) -> None:
        end = min(self.oldest + TRIM_ROWS_MAX, min(trim.keep_from, self.snapshot_turn) + 1)
        while self.oldest < end:
            entry = self.journal[self.oldest]
            newest_bytes = self.total - entry.total + len(entry.row.events)
            if entry.row.at >= trim.before_at and newest_bytes <= trim.keep_bytes:
                break
            del self.journal[self.oldest]
            self.size -= len(entry.row.events)
            self.oldest += 1


def bytes_of(turn: Turn) -> int:
    """What a turn adds, before its drops are taken off."""
    size = len(turn.events) + len(turn.snapshot or b"")
    for chunk in turn.chunks:
        size += len(chunk.body)
    for doc in turn.docs.values():
        size += len(doc)
    return size


class Room:
    """All the partitions of a factory, and their quota in bytes, of which a reserve is held back."""

    def __init__(self, quota: int | None, reserve_bytes: int) -> None:
        self.quota = quota
        self.reserve_bytes = reserve_bytes
        self.held = True
        self.partitions: dict[tuple[str, int], Contents] = {}

    def used(self) -> int:
        return sum(contents.size for contents in list(self.partitions.values()))

    def refuses(self, turn: Turn) -> bool:
        """As on a disk, what a turn drops makes room only for the turns after it."""
        if self.quota is None:
            return False
        return self.used() + bytes_of(turn) > self.quota - (self.reserve_bytes if self.held else 0)

    def relieve(self, full: bool) -> bool:
        """As much again as the reserve must be free for it to be taken back, or it would be given up again at once."""
        if full:
            self.held = False
        elif self.quota is None or self.used() + 2 * self.reserve_bytes <= self.quota:
            self.held = True
        return self.held


class MemoryStore:
    """After an error it is closed: only `recover` opens it again."""

    blocking = False

    def __init__(self, key: tuple[str, int], room: Room) -> None:
        self._key = key
        self._room = room
        self._contents: Contents | None = None

    def recover(self) -> Recovered:
        self._contents = contents = self._room.partitions.setdefault(self._key, Contents())
        turns = range(max(contents.snapshot_turn + 1, contents.oldest), contents.last_turn + 1)
        rows = [contents.journal[turn].row for turn in turns]
        return Recovered(snapshot_turn=contents.snapshot_turn, snapshot=contents.snapshot, rows=rows)

    def commit(self, turn: Turn) -> None:
        contents = self._open_contents()
        if turn.number != contents.last_turn + 1:
            self.close()
            raise StoreFailed(f"turn {turn.number} cannot follow {contents.last_turn}; recover, then go on")
        if self._room.refuses(turn):
            self.close()
            raise StoreFull("the quota of the store is used up; complete some items")
        contents.apply(turn)

    def read(self, chunks: Sequence[int], docs: Sequence[int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        contents = self._open_contents()
        return (
            {first: chunk.body for first in chunks if (chunk := contents.chunks.get(first)) is not None},
            {number: body for number in docs if (body := contents.docs.get(number)) is not None},
        )

    def journal(self, after: int, limit: int) -> list[JournalRow]:
        contents = self._open_contents()
        start = max(after + 1, contents.oldest)
        return [contents.journal[turn].row for turn in range(start, min(start + limit, contents.last_turn + 1))]

    def ended(self, low: int, high: int, since: int) -> Iterator[JournalRow]:
        contents = self._open_contents()
        for turn in range(contents.last_turn, contents.oldest - 1, -1):
            entry = contents.journal.get(turn)
            if entry is None or entry.row.at < since:
                return
            if entry.ended is not None and entry.ended[0] <= high and low <= entry.ended[1]:
                yield entry.row

    def relieve(self, full: bool) -> bool:
        return self._room.relieve(full)

    def size(self) -> int:
        contents = self._room.partitions.get(self._key)
        return contents.size if contents is not None else 0

    def check(self) -> list[str]:
        contents = self._open_contents()
        problems, edge = [], 0
        for first, chunk in sorted(contents.chunks.items()):
            if first < edge:
                problems.append(f"chunk {first} begins inside the chunk before it, which reaches to {edge - 1}")
            edge = first + chunk.count
        return problems

    def close(self) -> None:
        self._contents = None

    def _open_contents(self) -> Contents:
        if self._contents is None:
            raise StoreFailed("the store is not open; recover it first")
        return self._contents


class MemoryStores:
    def __init__(self, quota: int | None = None, reserve_bytes: int = 0) -> None:
        self._room = Room(quota, reserve_bytes)

    def open(self, incarnation: str, partition: int, durability: str) -> Store:
        return MemoryStore((incarnation, partition), self._room)

    def incarnations(self) -> list[str]:
        return sorted({incarnation for incarnation, _ in self._room.partitions})

    def destroy(self, incarnation: str, partitions: Sequence[int] | None = None) -> None:
        for key in [key for key in self._room.partitions if key[0] == incarnation]:
            if partitions is None or key[1] in partitions:
                del self._room.partitions[key]


class MemoryRegistry:
    def __init__(self) -> None:
        self._definitions: dict[str, QueueDefinition] = {}
        self._entries: list[AuditEntry] = []
        self._gone: set[str] = set()

    def load(self) -> list[QueueDefinition]:
        return [self._definitions[name] for name in sorted(self._definitions)]

    def put(self, definitions: Sequence[QueueDefinition], entries: Sequence[AuditEntry] = ()) -> None:
        self._definitions.update((one.name, one) for one in definitions)
        self._entries += entries

    def remove(self, name: str, incarnation: str = "", entries: Sequence[AuditEntry] = ()) -> None:
        self._definitions.pop(name, None)
        if incarnation:
            self._gone.add(incarnation)
        self._entries += entries

    def gone(self, incarnations: Sequence[str]) -> list[str]:
        return [one for one in incarnations if one in self._gone]

    def audit(self, queue: str, before: int | None, limit: int) -> list[tuple[int, AuditEntry]]:
        numbered = list(enumerate(self._entries, 1))[: None if before is None else max(before - 1, 0)]
        return [(number, entry) for number, entry in reversed(numbered) if entry.queue == queue][:limit]

    def close(self) -> None:
        pass
