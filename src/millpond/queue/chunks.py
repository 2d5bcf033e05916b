"""What a partition knows of its chunks without reading them: about 9 bytes a chunk, be it of one item.

Numbers and instants only grow, so neighbouring chunks differ by little from each other. They lie in blocks: a block
has the first number, the first instant and the timeout, and for each chunk the differences. Only what is out
of the ordinary, a chunk with some items gone, has an entry of its own; a chunk with none left leaves its block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

import msgspec

from millpond.history.format import RUN_BITS, RUN_MAX

_COUNT_MASK = RUN_MAX - 1
_BLOCK_CHUNKS = 512  # a block's own bytes are one a chunk then, and a chunk leaves it in no time
_BLOCK_SPAN = (1 << 16) - 1_024  # numbers from its first to that of any chunk in it: they fit 16 bits
_BLOCK_MS = (1 << 32) - 1  # likewise for instants, and 32 bits: 49 days
_SPARSE = 4  # a chunk is rewritten when less than one in so many of its stored records is live
_STALE_SLACK = 64  # heap entries of blocks that are gone, before they are shed
_FIRST_BITS = 64


class Block:
    """Neighbouring chunks with the same time to live. `told`: those with a deadline up to then have been popped."""

    __slots__ = ("counts", "created", "first", "offsets", "started", "timeout", "told")

    def __init__(self, first: int, started: int, timeout: int) -> None:
        self.first = first
        self.started = started
        self.timeout = timeout
        self.told = -1
        self.offsets = array("H")  # of a chunk's first number
        self.counts = array("H")
        self.created = array("I")  # since `started`

    def takes(self, first: int, created: int, deadline: int) -> bool:
        """Whether a new chunk can be its last. One that has been popped to its end has no entry in the heap."""
        newest = self.started + self.created[-1] if self.created else None
        return (
            deadline - created == self.timeout
            and created >= (self.started if newest is None else newest)  # what is adopted may be older
            and first - self.first <= _BLOCK_SPAN
            and len(self.offsets) < _BLOCK_CHUNKS
            and created - self.started <= _BLOCK_MS
            and self.told < (deadline if newest is None else newest + self.timeout)
        )

    def deadline(self, index: int) -> int:
        return self.started + self.created[index] + self.timeout

    def next_deadline(self) -> int | None:
        """Of the first chunk that was not popped yet."""
        index = bisect_right(self.created, self.told - self.started - self.timeout)
        return self.deadline(index) if index < len(self.created) else None


class Chunks:
    __slots__ = ("_blocks", "_ended", "_expiry", "_firsts", "_reserved", "_stored", "sparse")

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._firsts: list[int] = []  # the first number of each
        self._ended: dict[int, int] = {}  # chunks (by first) with some items gone -> which, as bits
        self._stored: dict[int, int] = {}  # rewritten chunks -> how many records are left in their bodies
        self.sparse: set[int] = set()  # chunks (by first) that are worth rewriting
        self._expiry: list[int] = []  # a heap with an entry a block: its next deadline << 64 | its first number
        self._reserved = 0  # the last number that was set aside for a chunk to be put in later

    def reserve(self, first: int) -> None:
        """A chunk with this number may be put in later: no block may reach over its place."""
        self._reserved = max(self._reserved, first)

    def put_in(self, first: int, count: int, created: int, deadline: int) -> None:
        """Add a chunk in the place that was reserved for it, as a block of its own."""
        self._append(self._new_block(first, created, deadline), first, count, created, deadline)

    def add(self, first: int, count: int, created: int, deadline: int) -> None:
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.first < self._reserved or not block.takes(first, created, deadline):
            block = self._new_block(first, created, deadline)
        self._append(block, first, count, created, deadline)

    def _new_block(self, first: int, created: int, deadline: int) -> Block:
        if self._blocks and not self._blocks[-1].offsets:  # it was kept to take the next chunk
            del self._blocks[-1], self._firsts[-1]
        block = Block(first, created, deadline - created)
        place = bisect_right(self._firsts, first)
        self._blocks.insert(place, block)
        self._firsts.insert(place, first)
        return block

    def _append(self, block: Block, first: int, count: int, created: int, deadline: int) -> None:
        block.offsets.append(first - block.first)
        block.counts.append(count)
        block.created.append(created - block.started)
        if len(block.offsets) == 1:
            heappush(self._expiry, deadline << _FIRST_BITS | block.first)
            if len(self._expiry) > 2 * len(self._blocks) + _STALE_SLACK:
                self.shed_stale()

    def first_of(self, number: int) -> int:
        block = self._blocks[bisect_right(self._firsts, number) - 1]
        return block.first + block.offsets[bisect_right(block.offsets, number - block.first) - 1]

    def place_of(self, number: int) -> tuple[int, int]:
        """The chunk that an item lies in (by first), and when it was created."""
        block = self._blocks[bisect_right(self._firsts, number) - 1]
        index = bisect_right(block.offsets, number - block.first) - 1
        return block.first + block.offsets[index], block.started + block.created[index]

    def created_of(self, number: int) -> int:
        block = self._blocks[bisect_right(self._firsts, number) - 1]
        return block.started + block.created[bisect_right(block.offsets, number - block.first) - 1]

    def deadline_of(self, number: int) -> int:
        block = self._blocks[bisect_right(self._firsts, number) - 1]
        created = block.created[bisect_right(block.offsets, number - block.first) - 1]
        return block.started + created + block.timeout

    def span(self, first: int) -> range:
        """The numbers of a chunk, whether they have ended or not."""
        block = self._blocks[bisect_right(self._firsts, first) - 1]
        return range(first, first + block.counts[bisect_right(block.offsets, first - block.first) - 1])

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """The chunks that these items lie in: (chunk's first, from, to, created)."""
        end = first + count
        while first < end:
            block = self._blocks[bisect_right(self._firsts, first) - 1]
            offsets = block.offsets
            index = bisect_right(offsets, first - block.first) - 1
            while first < end and index < len(offsets):
                chunk = block.first + offsets[index]
                chunk_end = chunk + block.counts[index]
                if chunk_end > end:
                    chunk_end = end
                yield chunk, first, chunk_end, block.started + block.created[index]
                first = chunk_end
                index += 1

    def pieces_of(self, runs: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """The same of several runs, which mostly lie in few chunks."""
        chunk = chunk_end = created = 0
        for run in runs:
            first, end = run >> RUN_BITS, (run >> RUN_BITS) + (run & _COUNT_MASK) + 1
            if chunk <= first and end <= chunk_end:
                yield chunk, first, end, created
                continue
            for piece in self.pieces(first, end - first):
                yield piece
                chunk, _, _, created = piece
            chunk_end = self.span(chunk).stop

    def holds(self, number: int) -> bool:
        """Whether the item's chunk is still there (the item itself may be gone)."""
        place = bisect_right(self._firsts, number) - 1
        if place < 0:
            return False
        block = self._blocks[place]
        index = bisect_right(block.offsets, number - block.first) - 1
        return index >= 0 and number < block.first + block.offsets[index] + block.counts[index]

    def end(self, first: int, count: int) -> list[int]:
        """These items are gone; returns the chunks (by first) that have none left."""
        drops: list[int] = []
        end = first + count
        while first < end:
            place = bisect_right(self._firsts, first) - 1
            block = self._blocks[place]
            index = over_from = bisect_right(block.offsets, first - block.first) - 1
            while first < end and index < len(block.offsets):
                chunk, size = block.first + block.offsets[index], block.counts[index]
                here = (end if end < chunk + size else chunk + size) - first
                over = here == size or self._end_some(chunk, size, ((1 << here) - 1) << (first - chunk))
                first += here
                if over:
                    drops.append(chunk)
                elif index > over_from:  # only the ends of a run can be parts of chunks: this is the last
                    break
                else:
                    over_from += 1
                index += 1
            if over_from < index:
                self._drop(place, over_from, index)
        if self._ended:  # else none of them was sparse or rewritten
            for chunk in drops:
                self._forget(chunk)
        return drops

    def end_all(self, runs: Sequence[int]) -> list[int]:
        """The same for several runs: those in one chunk go in one step."""
        drops: list[int] = []
        gathered, inside = 0, range(0)  # which items of which chunk, as bits
        for run in runs:
            first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            if not (inside.start <= first and first + count <= inside.stop):
                drops += self._end_gathered(inside, gathered)
                gathered, inside = 0, self.span(self.first_of(first))
                if first + count > inside.stop or count == len(inside):
                    drops += self.end(first, count)
                    inside = range(0)
                    continue
            gathered |= ((1 << count) - 1) << (first - inside.start)
        return drops + self._end_gathered(inside, gathered)

    def _end_gathered(self, chunk: range, items: int) -> list[int]:
        if not items or not self._end_some(chunk.start, len(chunk), items):
            return []
        place = bisect_right(self._firsts, chunk.start) - 1
        index = bisect_right(self._blocks[place].offsets, chunk.start - self._blocks[place].first) - 1
        self._drop(place, index, index + 1)
        self._forget(chunk.start)
        return [chunk.start]

    def rewritten(self, first: int) -> None:
        """The body has only the records of live items now."""
        self._stored[first] = len(self.span(first)) - self._ended.get(first, 0).bit_count()
        self.sparse.discard(first)

    def is_live(self, number: int) -> bool:
        """Whether the item has not ended."""
        place = bisect_right(self._firsts, number) - 1
        if place < 0:
            return False
        block = self._blocks[place]
        index = bisect_right(block.offsets, number - block.first) - 1
        if index < 0:
            return False
        bit = number - block.first - block.offsets[index]
        return bit < block.counts[index] and not self._ended.get(number - bit, 0) >> bit & 1

    def live_numbers(self, first: int) -> Sequence[int]:
        """The items of a chunk that have not ended."""
        return [first + place for place in self.live_places(first)] if first in self._ended else self.span(first)

    def live_places(self, first: int) -> list[int]:
        """The same by their places in the chunk."""
        size, places = len(self.span(first)), list[int]()
        left = ((1 << size) - 1) & ~self._ended.get(first, 0)
        if left.bit_count() * _SPARSE > size:
            return [place for place in range(size) if left >> place & 1]
        while left:
            places.append(left.bit_length() - 1)
            left ^= 1 << places[-1]
        return places[::-1]

    def walk(self, after: int) -> Iterator[int]:
        """All the items above `after` that have not ended, by number."""
        for block in self._blocks[max(0, bisect_right(self._firsts, after) - 1) :]:
            for offset, count in zip(block.offsets, block.counts, strict=True):
                first = block.first + offset
                if first + count <= after + 1:
                    continue
                numbers = self.live_numbers(first) if first in self._ended else range(first, first + count)
                yield from numbers if first > after else (number for number in numbers if number > after)

    def next_deadline(self) -> int | None:
        return self._expiry[0] >> _FIRST_BITS if self._expiry else None

    def shed_stale(self) -> None:
        """After this `next_deadline` is that of a chunk that still has items."""
        deadlines = ((block.next_deadline(), block.first) for block in self._blocks)
        self._expiry = [deadline << _FIRST_BITS | first for deadline, first in deadlines if deadline is not None]
        heapify(self._expiry)

    def pop_expired(self, now: int) -> list[int]:
        """Chunks (by first) with a deadline of `now` or earlier. Each comes once."""
        expired: list[int] = []
        while self._expiry and self._expiry[0] >> _FIRST_BITS <= now:
            first = heappop(self._expiry) & ((1 << _FIRST_BITS) - 1)
            place = bisect_right(self._firsts, first) - 1
            if place < 0 or self._firsts[place] != first:
                continue  # the block is gone
            block = self._blocks[place]
            base = block.started + block.timeout
            low, high = bisect_right(block.created, block.told - base), bisect_right(block.created, now - base)
            expired += [first + offset for offset in block.offsets[low:high]]
            block.told = now
            if (deadline := block.next_deadline()) is not None:
                heappush(self._expiry, deadline << _FIRST_BITS | first)
        return expired

    def dump(self) -> bytes:
        blocks = [
            (b.first, b.started, b.timeout, b.offsets.tobytes(), b.counts.tobytes(), b.created.tobytes())
            for b in self._blocks
        ]
        ended = {first: mask.to_bytes(mask.bit_length() // 8 + 1, "little") for first, mask in self._ended.items()}
        return msgspec.msgpack.encode((blocks, ended, self._stored))

    @classmethod
    def load(cls, dumped: bytes) -> Chunks:
        chunks = cls()
        blocks, ended, chunks._stored = _decode(dumped)
        for first, started, timeout, offsets, counts, created in blocks:
            block = Block(first, started, timeout)
            block.offsets.frombytes(offsets)
            block.counts.frombytes(counts)
            block.created.frombytes(created)
            chunks._blocks.append(block)
            chunks._firsts.append(first)
        chunks._ended = {first: int.from_bytes(mask, "little") for first, mask in ended.items()}
        for first in chunks._ended:
            chunks._end_some(first, len(chunks.span(first)), 0)  # whether it is sparse
        chunks.shed_stale()
        return chunks

    def __len__(self) -> int:
        return sum(len(block.offsets) for block in self._blocks)

    def _end_some(self, chunk: int, size: int, items: int) -> bool:
        """Some items of a chunk, as bits, are gone; whether that leaves none."""
        self._ended[chunk] = ended = self._ended.get(chunk, 0) | items
        left = size - ended.bit_count()
        if left * _SPARSE < self._stored.get(chunk, size):
            self.sparse.add(chunk)
        return not left

    def _drop(self, place: int, low: int, high: int) -> None:
        """These chunks of a block are over. The last block stays, though it be empty: it takes the next chunk."""
        block = self._blocks[place]
        del block.offsets[low:high], block.counts[low:high], block.created[low:high]
        if not block.offsets and place < len(self._blocks) - 1:
            del self._blocks[place], self._firsts[place]

    def _forget(self, chunk: int) -> None:
        self._ended.pop(chunk, None)
        self._stored.pop(chunk, None)
        self.sparse.discard(chunk)


_Blocks = list[tuple[int, int, int, bytes, bytes, bytes]]
_decode = msgspec.msgpack.Decoder(tuple[_Blocks, dict[int, bytes], dict[int, int]]).decode
