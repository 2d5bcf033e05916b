"""What a store is: a chunked log, a journal, documents and a snapshot. It orders and persists; it decides nothing.

    chunk(first, count, body)   the records of items first .. first+count-1, packed, as one producing turn wrote them
    journal(turn, at, events)   one row a turn: every transition that the turn made
    doc(number, body)           what an item gathers on its way: state document, last error, result
    snapshot(turn, state)       the partition's state after that turn; recovery replays the journal from there

A store belongs to one partition and is called by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from millpond.model import AuditEntry, QueueDefinition

DRIVERS = ("sqlite", "postgres", "memory")  # see drivers.py, which imports them
DEFAULT = "default"  # the store of the data directory itself, which has the registry and the decisions too
META_PARTITION = -1  # where a queue keeps what it decides over all its partitions: a store like theirs, without items


class StoreFailed(Exception):
    """Reading or writing failed. After a failed commit nobody knows whether it was written: recover to learn."""


class StoreFull(StoreFailed):
    """There is no room. Nothing of the turn was written."""


class StoreRefused(StoreFailed):
    """The store was not reached, or would not have the turn. Nothing of it was written."""


class Chunk(msgspec.Struct, gc=False):
    first: int
    count: int
    body: bytes


class JournalRow(msgspec.Struct, gc=False):
    turn: int
    at: int
    events: bytes


class Trim(msgspec.Struct, gc=False):
    """Drop journal rows older than `before_at` or beyond the newest `keep_bytes`, but none after `keep_from`.

    Nor any that recovery needs: after the snapshot. The oldest go first and a bounded number at a time, so a large
    trim takes several turns.
    """

    before_at: int
    keep_bytes: int
    keep_from: int


class Turn(msgspec.Struct, kw_only=True):
    """One commit: all of it or nothing. Turns of a partition are numbered without gaps.

    `ended` spans the numbers of the items that the turn completed (None if it completed none), so that a
    repeated complete finds its row. `chunks` replace a chunk of the same `first`. Drops come after writes: what a
    turn both writes and drops is gone, and dropping what is not there is fine. `snapshot` is the state after this
    turn.
    """

    number: int
    at: int
    events: bytes
    ended: tuple[int, int] | None = None
    chunks: Sequence[Chunk] = ()
    chunk_drops: Sequence[int] = ()
    docs: dict[int, bytes] = {}
    doc_drops: Sequence[int] = ()
    snapshot: bytes | None = None
    trim: Trim | None = None


class Recovered(msgspec.Struct):
    """`snapshot` of `snapshot_turn` (None and 0 in a new store), and all the journal rows after it, in order."""

    snapshot_turn: int
    snapshot: bytes | None
    rows: list[JournalRow]


class Store(Protocol):
    blocking: bool
    """Whether its calls may wait, for a disk or a network: then they run in a thread of their own."""

    def recover(self) -> Recovered:
        """Open (or open again, dropping whatever an earlier commit left half done) and read what is there.

        All that it returns is durable, also a turn whose commit had failed. Raises StoreFailed.
        """
        ...

    def commit(self, turn: Turn) -> None:
        """Write the turn, durably. Raises StoreFailed or a kind of it, also for a number that is not the next.

        Once it has raised, every call but `recover`, `relieve`, `size` and `close` raises StoreFailed until `recover`.
        """
        ...

    def read(self, chunks: Sequence[int], docs: Sequence[int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Bodies of chunks by `first`, and documents by number; what is not there is left out."""
        ...

    def journal(self, after: int, limit: int) -> list[JournalRow]:
        """Rows with `turn > after`, in order: what history reads."""
        ...

    def ended(self, low: int, high: int, since: int) -> Iterator[JournalRow]:
        """Rows with `at >= since` whose `ended` span holds a number from `low` to `high`, the newest first."""
        ...

    def relieve(self, full: bool) -> bool:
        """`full`: give up the reserve so that completes can go on. Not `full`: take it back; True when it is whole."""
        ...

    def size(self) -> int:
        """Bytes that it occupies."""
        ...

    def check(self) -> list[str]:
        """Problems found in the stored data; empty is good."""
        ...

    def close(self) -> None:
        """Let go of files and connections. `recover` may follow."""
        ...


class Registry(Protocol):
    """The queues that exist, a row each; and all that was done to them by hand, a row each, for ever."""

    def load(self) -> list[QueueDefinition]: ...

    def put(self, definitions: Sequence[QueueDefinition], entries: Sequence[AuditEntry] = ()) -> None:
        """Write these rows, and add these entries, in one durable commit."""
        ...

    def remove(self, name: str, incarnation: str = "", entries: Sequence[AuditEntry] = ()) -> None:
        """Forget the queue, and remember that this incarnation has gone. In one durable commit."""
        ...

    def gone(self, incarnations: Sequence[str]) -> list[str]:
        """Those of them that were removed."""
        ...

    def audit(self, queue: str, before: int | None, limit: int) -> list[tuple[int, AuditEntry]]:
        """Entries of a name with their numbers, the newest first; `before`: those with lower numbers."""
        ...

    def close(self) -> None: ...


class Stores(Protocol):
    """Makes the stores of partitions; one such factory is configured under each store name."""

    def open(self, incarnation: str, partition: int, durability: str) -> Store:
        """A store for that partition, not yet recovered: `recover` creates or opens it."""
        ...

    def incarnations(self) -> list[str]:
        """All the incarnations of queues that have something stored here."""
        ...

    def destroy(self, incarnation: str, partitions: Sequence[int] | None = None) -> None:
        """Remove all that these partitions stored, None: all of them; nothing to remove is fine."""
        ...
