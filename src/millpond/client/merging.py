"""Small calls that are made at once go as one request. What may go together, and how the reply comes apart. No I/O.

All of a caller's items are in one request, so all or none of them are produced. If the server refuses the request
for what somebody in it sent, everybody sends its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from msgspec import Struct

from millpond.client.asks import Ask
from millpond.client.http1 import WRONG
from millpond.errors import BadReply, MillpondError, TooManyRequests, Unauthorized
from millpond.model import PRODUCE_BATCH_MAX

SMALL_ENTRIES_MAX = 100  # larger calls gain nothing by company, and would wait for it
SMALL_BYTES_MAX = 256 << 10
MERGED_BYTES_MAX = 4 << 20  # a request that is well below the server's limit, and not too long under way
MERGED_ENTRIES_MAX = PRODUCE_BATCH_MAX  # the limit of tokens is the same


class Part(Struct, frozen=True):
    """One caller's call: those with the same `key` may go together, unless one must go `alone`."""

    key: Hashable
    entries: list[Any]
    size: int
    build: Callable[[list[Any]], Ask[Sequence[Any]]]
    alone: bool = False

    @property
    def small(self) -> bool:
        return not self.alone and len(self.entries) <= SMALL_ENTRIES_MAX and self.size <= SMALL_BYTES_MAX

    def ask(self) -> Ask[Sequence[Any]]:
        return self.build(self.entries)


def take(waiting: deque[Any]) -> list[Any]:
    """Callers from the front, as many as fit into one request."""
    taken: list[Any] = []
    entries = size = 0
    while waiting:
        part: Part = waiting[0].part
        entries, size = entries + len(part.entries), size + part.size
        if taken and (entries > MERGED_ENTRIES_MAX or size > MERGED_BYTES_MAX):
            break
        taken.append(waiting.popleft())
    return taken


def merged(parts: Sequence[Part]) -> Ask[Sequence[Any]]:
    if len(parts) == 1:
        return parts[0].ask()
    return parts[0].build([entry for part in parts for entry in part.entries])


def split(parts: Sequence[Part], replies: Sequence[Any]) -> list[Sequence[Any]]:
    expected = sum(len(part.entries) for part in parts)
    if len(replies) != expected:
        raise BadReply(f"{len(replies)} answers came to {expected} entries; {WRONG}")
    shares, begin = [], 0
    for part in parts:
        shares.append(replies[begin : begin + len(part.entries)])
        begin += len(part.entries)
    return shares


def is_somebodys(error: MillpondError) -> bool:
    """Whether one caller's items may be to blame, and nothing was done. 501: an item wants what is not built."""
    if isinstance(error, Unauthorized | TooManyRequests):
        return False
    return 400 <= error.status < 500 or error.status == 501
