"""Stores in PostgreSQL: one schema for the partitions of many queues, and one round trip a turn.

A whole turn is one call of the function `commit_turn` (see postgres.sql), a transaction of its own: none is open while
anybody works. `recover` makes its store the partition's owner with a higher epoch, which every commit names: whoever
was the owner before can write no more, and what was under way is either seen by `recover` or refused.

There is no reserve for a full disk: the disk is the server's. And nobody is notified of anything: the logical queue
owns its partitions, so nothing changes that it has not changed itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.types.numeric import Int4, Int8

from millpond.store.base import JournalRow, Recovered, Store, StoreFailed, Turn
from millpond.store.postgres_connections import CONNECTIONS_MAX, SQL, Connection, Connections, one
from millpond.store.postgres_values import Bodies, Numbers

TRIM_ROWS_MAX = 2000  # bounds what a trim adds to its commit
ENDED_ROWS, ENDED_ROWS_MAX = 1, 64  # rows a round trip: the newest is most often the one that is looked for
DESTROY_ROWS = 2000  # at a time, so that no statement takes long
DESTROY = ("destroy_chunks", "destroy_docs", "destroy_journal", "destroy_snapshots")


class Held:
    """What the owner of a partition knows of it, and nobody else may change."""

    __slots__ = ("epoch", "last_turn", "oldest_turn", "place", "snapshot_turn", "total")

    def __init__(self, place: int, epoch: int) -> None:
        self.place = place
        self.epoch = epoch
        self.last_turn = 0
        self.snapshot_turn = 0
        self.oldest_turn = 1  # in the journal, if there is any
        self.total = 0  # bytes of events so far


class PostgresStore:
    """A partition's store. After an error it is closed: only `recover` opens it again."""

    blocking = True

    def __init__(self, connections: Connections, key: tuple[str, int], relaxed: bool) -> None:
        self._connections = connections
        self._key = key
        self._relaxed = relaxed
        self._held: Held | None = None

    def recover(self) -> Recovered:
        self.close()
        with self._connections.take() as connection:
            held = self._take_over(connection)
            with connection.transaction():
                execute(connection, "one_view")
                recovered = self._read_state(connection, held)
        self._held = held
        return recovered

    def commit(self, turn: Turn) -> None:
        held = self._open()
        if turn.number != held.last_turn + 1:
            self.close()
            raise StoreFailed(f"{self._name}: turn {turn.number} cannot follow {held.last_turn}; recover, then go on")
        self.close()  # until it is known that the turn was written
        total = held.total + len(turn.events)
        arguments = arguments_of(turn, held, total, self._relaxed)
        with self._connections.take() as connection:
            connection.warned = None
            held.oldest_turn = one(execute(connection, "commit", arguments))[0]
            if connection.warned is not None:
                raise StoreFailed(f"{self._name}: {connection.warned}; see to the standby, then recover")
        held.last_turn, held.total = turn.number, total
        if turn.snapshot is not None:
            held.snapshot_turn = turn.number
        self._held = held

    def read(self, chunks: Sequence[int], docs: Sequence[int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        found: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        with self._reading() as (connection, place):
            wanted = {"place": place, "chunks": Numbers(chunks), "docs": Numbers(docs)}
            for kind, number, body in execute(connection, "read", wanted):
                found[kind][number] = body
        return found

    def journal(self, after: int, limit: int) -> list[JournalRow]:
        with self._reading() as (connection, place):
            return journal_rows(execute(connection, "journal_page", (place, Int8(after), Int8(limit))))

    def ended(self, low: int, high: int, since: int) -> Iterator[JournalRow]:
        """No connection is held between rows."""
        with self._reading() as (connection, place):
            found = execute(connection, "journal_ended", (place, Int8(since), Int8(high), Int8(low)))
            turns = [turn for (turn,) in found]
        page = ENDED_ROWS
        while turns:
            with self._reading() as (connection, place):
                rows = journal_rows(execute(connection, "journal_rows", (place, Numbers(turns[:page]))))
            yield from rows
            turns, page = turns[page:], min(8 * page, ENDED_ROWS_MAX)

    def relieve(self, full: bool) -> bool:
        """There is no reserve: it is always whole, and giving it up changes nothing."""
        return not full

    def size(self) -> int:
        """Of what is stored, not of the files, which all partitions share."""
        with self._connections.take() as connection:
            row = execute(connection, "size", self._key).fetchone()
        return int(row[0]) if row is not None else 0

    def check(self) -> list[str]:
        self._open()
        problems = []
        try:
            with self._reading() as (connection, place):
                for statement in ("check_chunks", "check_journal"):
                    problems += [line for (line,) in execute(connection, statement, {"place": place})]
        except StoreFailed as problem:
            return [str(problem)]
        return problems

    def close(self) -> None:
        self._held = None

    # ---- inside ----

    @property
    def _name(self) -> str:
        incarnation, partition = self._key
        return f"{self._connections.name}, partition {partition} of {incarnation}"

    def _open(self) -> Held:
        if self._held is None:
            raise StoreFailed(f"{self._name} is not open; recover it first")
        return self._held

    @contextmanager
    def _reading(self) -> Iterator[tuple[Connection, int]]:
        """A connection and the place to read from; an error closes the store."""
        place = self._open().place
        try:
            with self._connections.take() as connection:
                yield connection, place
        except StoreFailed:
            self.close()
            raise

    def _take_over(self, connection: Connection) -> Held:
        try:
            return Held(*one(take_over(connection, self._key)))
        except psycopg.errors.LockNotAvailable:
            execute(connection, "end_holders", self._key)  # their commits are undone, if they had not ended
            raise

    def _read_state(self, connection: Connection, held: Held) -> Recovered:
        turn, state = execute(connection, "snapshot", (held.place,)).fetchone() or (0, None)
        rows = journal_rows(execute(connection, "journal_after", (held.place, Int8(turn))))
        if rows and rows[-1].turn - turn != len(rows):
            raise StoreFailed(f"{self._name} lacks turns after turn {turn}; restore it from a backup")
        held.snapshot_turn = turn
        held.last_turn = rows[-1].turn if rows else turn
        oldest, total = one(execute(connection, "journal_ends", {"place": held.place}))
        held.oldest_turn, held.total = oldest or held.last_turn + 1, total or 0
        return Recovered(snapshot_turn=turn, snapshot=state, rows=rows)


def execute(connection: Connection, statement: str, arguments: Any = None) -> psycopg.Cursor[tuple[Any, ...]]:
    return connection.execute(SQL[statement], arguments, binary=True)


def take_over(connection: Connection, key: tuple[str, int]) -> psycopg.Cursor[tuple[Any, ...]]:
    incarnation, partition = key
    return execute(connection, "take_over", (incarnation, Int4(partition)))


def journal_rows(cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[JournalRow]:
    return [JournalRow(turn, at, events) for turn, at, events in cursor]


def arguments_of(turn: Turn, held: Held, total: int, relaxed: bool) -> tuple[Any, ...]:
    """Those of commit_turn, in order."""
    snapshot_turn = held.snapshot_turn if turn.snapshot is None else turn.number
    trim = turn.trim
    return (
        *(Int4(held.place), Int8(held.epoch), Int8(turn.number), Int8(turn.at), Int8(total), turn.events),
        Numbers(turn.ended or ()),
        Numbers([chunk.first for chunk in turn.chunks]),
        Numbers([chunk.count for chunk in turn.chunks]),
        Bodies([chunk.body for chunk in turn.chunks]),
        Numbers(turn.chunk_drops),
        Numbers(list(turn.docs)),
        Bodies(list(turn.docs.values())),
        Numbers(turn.doc_drops),
        Bodies([] if turn.snapshot is None else [turn.snapshot]),
        Int8(held.snapshot_turn),
        Numbers((trim.before_at, trim.keep_bytes, min(trim.keep_from, snapshot_turn), TRIM_ROWS_MAX) if trim else ()),
        Int8(held.oldest_turn),
        relaxed,
    )


class PostgresStores:
    """A schema of a database. Only `settle_in` makes it: stores that seem empty would take items in the wrong place."""

    def __init__(self, url: str, connections_max: int = CONNECTIONS_MAX) -> None:
        """Nothing is asked of the server yet. Raises InvalidRequest if the url cannot be read."""
        self._connections = Connections(url, connections_max)

    def settle_in(self) -> None:
        """Makes the schema, if there is none."""
        with self._connections.take(make=True):
            pass

    def open(self, incarnation: str, partition: int, durability: str) -> Store:
        return PostgresStore(self._connections, (incarnation, partition), durability == "relaxed")

    def incarnations(self) -> list[str]:
        with self._connections.take() as connection:
            return [name for (name,) in execute(connection, "incarnations")]

    def destroy(self, incarnation: str, partitions: Sequence[int] | None = None) -> None:
        with self._connections.take() as connection:
            for partition, place in execute(connection, "places", (incarnation,)).fetchall():
                if partitions is None or partition in partitions:
                    take_over(connection, (incarnation, partition))  # nothing is added any more
                    self._destroy(connection, place)

    def close(self) -> None:
        """Lets go of the connections; the stores can still be used."""
        self._connections.close()

    def _destroy(self, connection: Connection, place: int) -> None:
        for statement in DESTROY:
            while execute(connection, statement, {"place": place, "limit": DESTROY_ROWS}).rowcount == DESTROY_ROWS:
                pass
        execute(connection, "destroy_owner", (place,))
