"""Reads a partition's journal from about an instant on, without reading what was before.

A queue's journal is trimmed after a week, or when it is too large: what an older item did first may be gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from millpond.api import Api
from millpond.history.format import Event, decode_entry, decode_meta
from millpond.model import Item, JournalTurn, to_ms

PAGE_ROWS = 500  # asked for at a time: some hundred KB
ROWS_MAX = 100_000  # read for one question: some seconds


class Turn(msgspec.Struct, frozen=True):
    """A row of the journal. `at` in ms."""

    turn: int
    at: int
    events: Sequence[Sequence[Any]]


class Start(msgspec.Struct, frozen=True):
    """Where to begin. `oldest`: the instant (ms) of the oldest row, if that is later than what was asked for."""

    after: int
    oldest: int | None = None


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """What is needed to find an item in the journal, also when it is gone."""

    id: str
    partition: int
    created_at: datetime


async def find_start(api: Api, queue: str, partition: int, at: int) -> Start:
    """The last turn before the instant `at` (ms), by halving: some twenty rows are read, however many there are."""
    page = await api.read_journal(queue, partition=partition, limit=1)
    if not page.rows or page.rows[0].at >= at:
        oldest = page.rows[0].at if page.rows else None
        return Start(0, None if oldest is None or oldest == at else oldest)
    low, high = page.rows[0].turn, page.last_turn
    while low + 1 < high:
        middle = (low + high) // 2
        row = await _row_after(api, queue, partition, middle)
        if row is None or row.at >= at:
            high = middle
        else:
            low = row.turn
    return Start(low)


async def _row_after(api: Api, queue: str, partition: int, turn: int) -> JournalTurn | None:
    page = await api.read_journal(queue, partition=partition, after=turn, limit=1)
    return page.rows[0] if page.rows else None


async def turns(api: Api, queue: str, partition: int, after: int, limit: int = ROWS_MAX) -> AsyncIterator[Turn]:
    """Those after that turn, at most `limit`."""
    left = limit
    while left > 0:
        page = await api.read_journal(queue, partition=partition, after=after, limit=min(PAGE_ROWS, left))
        if not page.rows:
            return
        for row in page.rows:
            yield Turn(row.turn, row.at, decode_entry(row.events).events)
        left -= len(page.rows)
        after = page.rows[-1].turn


def number_in(turn: Turn, item: Item | Origin, incarnation: str) -> int | None:
    """The item's number, if it was produced in this turn. One that came back has its old id as its own."""
    if turn.at != to_ms(item.created_at):
        return None
    derived = derived_number(item, incarnation)
    for event in turn.events:
        if event[0] == Event.PRODUCED:
            first, count, _, meta = event[1:5]
        elif event[0] == Event.PUBLISHED:
            first, count, _, meta = event[3:7]
        else:
            continue
        records = [] if meta is None else decode_meta(meta)
        for number, record in enumerate(records, first):
            if record is not None and record.id == item.id:
                return number
        if derived is not None and first <= derived < first + count:
            record = records[derived - first] if records else None
            if record is None or record.id is None:
                return derived
    return None


def derived_number(item: Item | Origin, incarnation: str) -> int | None:
    """What an id says that this queue may have assigned."""
    prefix = f"{incarnation}-{item.partition}-"
    rest = item.id.removeprefix(prefix)
    return int(rest) if rest != item.id and rest.isascii() and rest.isdecimal() and len(rest) <= 14 else None
