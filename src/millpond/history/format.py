"""The journal's format: what a turn did, as recovery replays it and as history reads it.

A journal row is MessagePack: `[version, next_number, events]`. An event is an array whose first element is
its kind; the rest are the arguments of the partition's transition of that name. Items go by number; a turn's
number is also the grant number of the leases made in it; a *run* is one int, `first << 20 | count - 1`. Old
versions stay readable for ever: a change of shape adds a version here and an `upgrade` beside it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import msgspec
from msgspec.structs import replace

from millpond.model import PlainItems

JOURNAL_VERSION = 1
CHUNK_VERSION = 2
_OF_RECORDS, _OF_PAYLOADS = b"\x01", b"\x02"  # the versions of a chunk's body: both are written
_COUNT = struct.Struct("<I")
RUN_BITS = 20
RUN_MAX = 1 << RUN_BITS
TRIES_BITS = 32  # attempts << 32 | deliveries
NUMBER_MAX = 1 << 44  # with a run's 20 bits it fills a 64-bit int


class Event(enum.IntEnum):
    """Kinds of events; each is the name, in lower case, of a transition of `queue.partition.Partition`."""

    PRODUCED = 1
    LEASED = 2
    COMPLETED = 3
    RETRIED = 4
    LEASE_EXPIRED = 5
    RELEASED = 6
    EXTENDED = 7
    STATE_WRITTEN = 8
    DUE = 9
    DIED = 10
    CANCELLED = 11
    CANCEL_ASKED = 12
    CLEARED = 13
    REPLACED = 14
    REDRIVEN = 15
    PURGED = 16
    MOVING = 17
    MOVED = 18
    FORGOTTEN = 19
    FORGOT = 20
    KEPT = 21
    REMEMBERED = 22
    CLAIMED = 23
    UNCLAIMED = 24
    CLAIM_COMPLETED = 25
    CLAIM_RETRIED = 26
    JUDGED = 27
    STAGED = 28
    PUBLISHED = 29
    UNSTAGED = 30
    # What a queue decides over all its partitions; see `queue.decisions`.
    CONSUMER_OPENED = 31
    CLAIM_SEALED = 32
    CLAIM_ENDING = 33
    CLAIM_SETTLED = 34
    STAGE_DECIDED = 35
    STAGE_SETTLED = 36
    # What a rebalance carries from a partition that is to go to another of the same queue; see `queue.draining`.
    CARRYING = 37
    ADOPTED = 38
    LEFT = 39
    ENTRUSTED = 40


class Source(msgspec.Struct, array_like=True, gc=False):
    """Whence a transferred item came, why it died there, and what it needs to go back as it was."""

    queue: str
    id: str
    attempts: int
    reason: str | None
    key: str | None = None
    max_attempts: int = -1
    letter: bool = False  # it came here dead; else it came back and found its id taken


class Record(msgspec.Struct, array_like=True, gc=False):
    """An item as it was produced, for ever unchanged. One with nothing but a payload is stored as bare bytes.

    `expire_deadline` 0 means the chunk's, `enqueue_at` 0 at once, `max_attempts` -1 the queue's.
    """

    payload: bytes = b""
    id: str | None = None
    key: str | None = None
    kind: str = ""
    encoding: str = ""
    reference: str = ""
    priority: int = 0
    enqueue_at: int = 0
    max_attempts: int = -1
    expire_deadline: int = 0
    correlation_id: str | None = None
    source: Source | None = None


class Payloads(list[Any]):
    """Records that are nothing but payloads. It is told where they come in: to look at each costs 20 ns, every time."""

    __slots__ = ()


class JournalEntry(msgspec.Struct, array_like=True):
    version: int
    next_number: int
    events: list[list[Any]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JournalEntry).decode
_decode_records = msgspec.msgpack.Decoder(list[bytes | Record | None]).decode
_decode_meta = msgspec.msgpack.Decoder(list[Record | None]).decode


def encode_entry(next_number: int, events: list[Any]) -> bytes:
    return _encode((JOURNAL_VERSION, next_number, events))


def decode_entry(row: bytes) -> JournalEntry:
    entry = _decode(row)
    if entry.version != JOURNAL_VERSION:
        raise ValueError(f"journal row of version {entry.version}; this millpond reads up to {JOURNAL_VERSION}")
    return entry


def encode_records(records: list[bytes | Record | None]) -> bytes:
    """A chunk's body: a byte of version, then the records. None marks one that is gone."""
    return _OF_RECORDS + _encode(records)


def encode_plain(items: PlainItems, low: int, high: int) -> bytes:
    """The body of a chunk of some of these: a byte of version, their number, their offsets and one more, the payloads.

    The offsets are as they were given, so that none of them has to be looked at.
    """
    offsets = items.offsets[low : high + 1]
    return b"".join((_OF_PAYLOADS, _COUNT.pack(high - low), offsets, items.data[offsets[0] : offsets[-1]]))


def decode_records(body: bytes) -> list[bytes | Record | None]:
    if body[:1] == _OF_RECORDS:
        return _decode_records(memoryview(body)[1:])
    if body[:1] != _OF_PAYLOADS:
        raise ValueError(f"chunk of version {body[0]}; this millpond reads up to {CHUNK_VERSION}")
    [count] = _COUNT.unpack_from(body, 1)
    offsets = struct.unpack_from(f"<{count + 1}I", body, 1 + _COUNT.size)
    start = 1 + _COUNT.size * (count + 2) - offsets[0]
    return [body[start + one : start + other] for one, other in pairwise(offsets)]


def are_plain(records: Sequence[bytes | Record | None]) -> bool:
    """Whether they are nothing but payloads, be it that nobody has said so."""
    return type(records) is Payloads or set(map(type, records)) == {bytes}


def encode_meta(records: list[bytes | Record]) -> bytes | None:
    """What the journal keeps of a chunk's records: all but the payloads; None when they are all bare."""
    kinds = set(map(type, records))
    if kinds == {bytes}:
        return None
    if kinds == {Record}:
        return _encode([replace(record, payload=b"") for record in records])  # type: ignore[type-var]
    return _encode([replace(record, payload=b"") if isinstance(record, Record) else None for record in records])


def decode_meta(meta: bytes) -> list[Record | None]:
    return _decode_meta(meta)


def encode_state(document: Any) -> bytes:
    """A state document or a result: any JSON value, or bytes."""
    return _encode(document)


def decode_state(document: bytes | None) -> Any:
    return None if document is None else msgspec.msgpack.decode(document)


def run_of(first: int, count: int) -> int:
    return first << RUN_BITS | (count - 1)


def run_span(run: int) -> range:
    first = run >> RUN_BITS
    return range(first, first + (run & (RUN_MAX - 1)) + 1)


def continues(run: int, next_run: int) -> bool:
    """Whether the two can be written as one run."""
    count, more = (run & (RUN_MAX - 1)) + 1, (next_run & (RUN_MAX - 1)) + 1
    return (run >> RUN_BITS) + count == next_run >> RUN_BITS and count + more <= RUN_MAX


def runs_of(numbers: Iterable[int]) -> list[int]:
    """Fold numbers, in their order, into runs."""
    if isinstance(numbers, list | range) and _is_one_run(numbers):
        return [run_of(numbers[0], len(numbers))]
    runs: list[int] = []
    first = expected = -1
    for number in numbers:
        if number != expected or number - first >= RUN_MAX:
            if first >= 0:
                runs.append(first << RUN_BITS | (expected - first - 1))
            first = number
        expected = number + 1
    if first >= 0:
        runs.append(first << RUN_BITS | (expected - first - 1))
    return runs


def _is_one_run(numbers: list[int] | range) -> bool:
    """The usual case, told at the speed of C."""
    if not 0 < len(numbers) <= RUN_MAX:
        return False
    run = range(numbers[0], numbers[0] + len(numbers))
    return numbers == (run if isinstance(numbers, range) else list(run))


def numbers_of(runs: Iterable[int]) -> Iterator[int]:
    return chain.from_iterable(map(run_span, runs))


def items_in(runs: Iterable[int]) -> int:
    return sum([(run & (RUN_MAX - 1)) + 1 for run in runs])
