"""The bare tables that the engine stands on, driven by a fixed loop that knows no queue: the rate to compare with.

A turn is one durable commit: a packed chunk of N payloads goes in, the payloads of the turn before are unpacked for
whoever leases them, a journal row names the items that were produced, leased and completed, each by its number, and
the chunk whose items are done goes. That is what any program does for N items on these tables, with no queue around
them: no ids, leases, deadlines, retries, callers or replies. On one thread, for the loop has nothing else to do.

`floor` is the same without a look at any item: runs in the journal, and nobody gets the payloads. No consumer could
live on that; it is there to see how much of the time is the disk's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import msgspec

from benchmarks.meter import Meter, payloads

BACKLOG_CHUNK = 1_000  # items; what the engine makes of produces of 1,000

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[bytes]).decode


def connect(path: Path) -> apsw.Connection:
    """With the engine's own settings, full durability among them."""
    connection = apsw.Connection(str(path))
    connection.pragma("page_size", 8192)
    connection.pragma("locking_mode", "EXCLUSIVE")
    connection.pragma("journal_mode", "WAL")
    connection.pragma("synchronous", "FULL")
    connection.pragma("secure_delete", 0)
    connection.wal_autocheckpoint(2000)
    connection.execute(
        "CREATE TABLE IF NOT EXISTS chunk (no INTEGER PRIMARY KEY, n INTEGER NOT NULL, body BLOB NOT NULL);"
        "CREATE TABLE IF NOT EXISTS journal (turn INTEGER PRIMARY KEY, events BLOB NOT NULL)"
    )
    return connection


def write_turn(connection: apsw.Connection, turn: int, n: int, body: bytes, events: bytes, drop: int | None) -> None:
    execute = connection.execute
    execute("BEGIN IMMEDIATE")
    execute("INSERT INTO chunk VALUES (?, ?, ?)", (turn, n, body))
    execute("INSERT INTO journal VALUES (?, ?)", (turn, events))
    if drop is not None:
        execute("DELETE FROM chunk WHERE no = ?", (drop,))
    execute("COMMIT")


def fill(path: str, items: int) -> dict[str, Any]:
    """A backlog, as an earlier run of the loop would have left it."""
    connection = connect(Path(path))
    bodies = payloads(BACKLOG_CHUNK)
    for turn in range(1, items // BACKLOG_CHUNK + 1):
        events = _pack([("produced", turn, BACKLOG_CHUNK)])
        write_turn(connection, turn, BACKLOG_CHUNK, _pack(bodies), events, None)
    connection.close()
    return {"items": items}


def cycle(path: str, batch: int, seconds: float) -> dict[str, Any]:
    """From empty: a turn leases what the one before produced, and completes what that one leased."""
    connection = connect(Path(path))
    bodies = payloads(batch)
    meter = Meter(seconds)
    produced, leased, completed = numbers(3, batch), numbers(2, batch), numbers(1, batch)
    body = _pack(bodies)
    turn = 2
    while not meter.is_done():
        turn += 1
        handed_out = _unpack(body)  # the body is still in memory, the items are made anew for their consumer
        body = _pack(bodies)
        events = _pack([("produced", produced), ("leased", leased), ("completed", completed)])
        write_turn(connection, turn, batch, body, events, turn - 2)
        meter.add(len(handed_out))
        produced, leased, completed = numbers(turn + 1, batch), produced, leased
    connection.close()
    return meter.result()


def numbers(turn: int, batch: int) -> list[int]:
    return list(range(turn * batch, (turn + 1) * batch))


def floor(path: str, batch: int, seconds: float) -> dict[str, Any]:
    connection = connect(Path(path))
    bodies = payloads(batch)
    meter = Meter(seconds)
    turn = 0
    while not meter.is_done():
        turn += 1
        events = _pack([("produced", turn, batch), ("leased", turn, batch), ("completed", turn - 1, batch)])
        write_turn(connection, turn, batch, _pack(bodies), events, turn - 1)
        meter.add(batch)
    connection.close()
    return meter.result()


def cycle_backlog(path: str, batch: int, seconds: float, items_max: int) -> dict[str, Any]:
    """On a backlog: what is leased is read from the oldest chunk, which goes when all of it is done."""
    connection = connect(Path(path))
    bodies = payloads(batch)
    turn = connection.execute("SELECT max(no) FROM chunk").get
    meter = Meter(seconds, items_max)
    chunk, held = 0, list[bytes]()
    while not meter.is_done():
        turn += 1
        produced, leased, completed = numbers(turn, batch), numbers(chunk, batch), numbers(chunk, batch)
        events = _pack([("produced", produced), ("leased", leased), ("completed", completed)])
        drop = None
        left = batch
        while left > len(held):
            left -= len(held)
            drop = chunk
            chunk, body = connection.execute(
                "SELECT no, body FROM chunk WHERE no > ? ORDER BY no LIMIT 1", (chunk,)
            ).get
            held = _unpack(body)
        held = held[left:]
        write_turn(connection, turn, batch, _pack(bodies), events, drop)
        meter.add(batch)
    connection.close()
    return meter.result()
