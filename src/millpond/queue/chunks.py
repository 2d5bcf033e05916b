"""What a partition knows of its chunks without reading them: arrays, 30 bytes a chunk.

Numbers are dense and grow, so the chunk of an item is found by bisection.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush

import msgspec

_COMPACT_SLACK = 1_024  # dead entries to leave before the arrays are packed
_SPARSE = 4  # a chunk is rewritten when less than one in so many of its stored records is live


class Chunks:
    __slots__ = (
        *("_counts", "_created", "_dead", "_deadlines", "_ended", "_expired_at", "_expiry", "_firsts", "_live"),
        *("_stored", "sparse"),
    )

    def __init__(self) -> None:
        self._firsts = array("q")
        self._counts = array("H")
        self._live = array("H")
        self._stored = array("H")  # records that the chunk's body still has
        self._created = array("q")
        self._deadlines = array("q")
        self._dead = 0
        self._ended: dict[int, int] = {}  # chunks (by first) with some items gone -> which, as bits
        self.sparse: set[int] = set()  # chunks (by first) that are worth rewriting
        # One heap entry (deadline << 64 | first) for each stretch of chunks whose deadlines do not fall: with a
        # steady expire_timeout that is one entry in all.
        self._expiry: list[int] = []
        self._expired_at = -1  # chunks with a deadline up to this instant have been popped

    def add(self, first: int, count: int, created: int, deadline: int) -> None:
        if not self._deadlines or not self._expired_at < self._deadlines[-1] <= deadline:
            heappush(self._expiry, deadline << 64 | first)
        self._firsts.append(first)
        self._counts.append(count)
        self._live.append(count)
        self._stored.append(count)
        self._created.append(created)
        self._deadlines.append(deadline)

    def first_of(self, number: int) -> int:
        return self._firsts[self._index(number)]

    def created_of(self, number: int) -> int:
        return self._created[self._index(number)]

    def deadline_of(self, number: int) -> int:
        return self._deadlines[self._index(number)]

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """The chunks that these items lie in: (chunk's first, from, to, created)."""
        index = self._index(first)
        end = first + count
        while first < end:
            chunk_end = min(end, self._firsts[index] + self._counts[index])
            yield self._firsts[index], first, chunk_end, self._created[index]
            first = chunk_end
            index += 1

    def holds(self, number: int) -> bool:
        """Whether the item's chunk is still there (the item itself may be gone)."""
        index = self._index(number)
        return index >= 0 and self._live[index] > 0 and number < self._firsts[index] + self._counts[index]

    def end(self, first: int, count: int) -> list[int]:
        """These items are gone; returns the chunks (by first) that have none left."""
        drops: list[int] = []
        index = self._index(first)
        while count:
            chunk_end = self._firsts[index] + self._counts[index]
            here = min(count, chunk_end - first)
            left = self._live[index] - here
            self._live[index] = left
            chunk = self._firsts[index]
            if not left:
                drops.append(chunk)
                self.sparse.discard(chunk)
                self._ended.pop(chunk, None)
            else:
                self._ended[chunk] = self._ended.get(chunk, 0) | ((1 << here) - 1) << (first - chunk)
                if left * _SPARSE < self._stored[index]:
                    self.sparse.add(chunk)
            count -= here
            first += here
            index += 1
        self._dead += len(drops)
        if self._dead > _COMPACT_SLACK and self._dead * 2 > len(self._firsts):
            self._compact()
        return drops

    def rewritten(self, first: int) -> None:
        """The body has only the records of live items now."""
        index = self._index(first)
        self._stored[index] = self._live[index]
        self.sparse.discard(first)

    def is_live(self, number: int) -> bool:
        """Whether the item has not ended."""
        if not self.holds(number):
            return False
        chunk = self.first_of(number)
        return not self._ended.get(chunk, 0) >> (number - chunk) & 1

    def live_numbers(self, first: int) -> list[int]:
        """The items of a chunk that have not ended."""
        ended = self._ended.get(first, 0)
        span = self.span(first)
        return [number for number in span if not ended >> (number - first) & 1] if ended else list(span)

    def walk(self, after: int) -> Iterator[int]:
        """All the items above `after` that have not ended, by number."""
        index = max(0, self._index(after))
        while index < len(self._firsts):
            if self._live[index]:
                yield from (number for number in self.live_numbers(self._firsts[index]) if number > after)
            index += 1

    def span(self, first: int) -> range:
        return range(first, first + self._counts[self._index(first)])

    def next_deadline(self) -> int | None:
        return self._expiry[0] >> 64 if self._expiry else None

    def shed_stale(self) -> None:
        """After this `next_deadline` is that of a chunk that still has items."""
        self._compact()

    def pop_expired(self, now: int) -> list[int]:
        """Chunks (by first) with a deadline of `now` or earlier. Each comes once."""
        expired: list[int] = []
        self._expired_at = max(self._expired_at, now)
        while self._expiry and self._expiry[0] >> 64 <= now:
            head = heappop(self._expiry)
            deadline, index = head >> 64, bisect_left(self._firsts, head & ((1 << 64) - 1))
            while index < len(self._firsts) and deadline <= self._deadlines[index]:
                deadline = self._deadlines[index]
                if deadline > now:
                    heappush(self._expiry, deadline << 64 | self._firsts[index])
                    break
                if self._live[index]:
                    expired.append(self._firsts[index])
                index += 1
        return expired

    def dump(self) -> tuple[bytes, ...]:
        self._compact()
        columns = (self._firsts, self._counts, self._live, self._stored, self._created, self._deadlines)
        ended = {first: mask.to_bytes(mask.bit_length() // 8 + 1, "little") for first, mask in self._ended.items()}
        return *(column.tobytes() for column in columns), msgspec.msgpack.encode(ended)

    @classmethod
    def load(cls, columns: tuple[bytes, ...]) -> Chunks:
        chunks = cls()
        mine = (chunks._firsts, chunks._counts, chunks._live, chunks._stored, chunks._created, chunks._deadlines)
        for column, stored in zip(mine, columns[:-1], strict=True):
            column.frombytes(stored)
        ended = msgspec.msgpack.decode(columns[-1], type=dict[int, bytes])
        chunks._ended = {first: int.from_bytes(mask, "little") for first, mask in ended.items()}
        for first, live, kept in zip(chunks._firsts, chunks._live, chunks._stored, strict=True):
            if live * _SPARSE < kept:
                chunks.sparse.add(first)
        chunks._find_stretches()
        return chunks

    def __len__(self) -> int:
        return len(self._firsts) - self._dead

    def _index(self, number: int) -> int:
        return bisect_right(self._firsts, number) - 1

    def _compact(self) -> None:
        if not self._dead:
            return
        keep = [index for index, live in enumerate(self._live) if live]
        self._firsts = array("q", [self._firsts[i] for i in keep])
        self._counts = array("H", [self._counts[i] for i in keep])
        self._live = array("H", [self._live[i] for i in keep])
        self._stored = array("H", [self._stored[i] for i in keep])
        self._created = array("q", [self._created[i] for i in keep])
        self._deadlines = array("q", [self._deadlines[i] for i in keep])
        self._dead = 0
        self._find_stretches()

    def _find_stretches(self) -> None:
        """Make the heap anew: the chunk that an entry names may have gone."""
        self._expiry = []
        last = self._expired_at
        for first, deadline in zip(self._firsts, self._deadlines, strict=True):
            if deadline > self._expired_at and not self._expired_at < last <= deadline:
                heappush(self._expiry, deadline << 64 | first)
            last = deadline
