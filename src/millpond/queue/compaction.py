"""Rewrites chunks of which little is left, so that one dead item does not keep a thousand bodies on disk.

One chunk at a time and a lane, in two turns: the first reads it, the second writes it back without the records that
are gone. Numbers do not change, so nothing else notices.
"""

from __future__ import annotations

from millpond.history.format import encode_records
from millpond.queue.bodies import Records
from millpond.queue.lane import Lane, Part, TurnJob
from millpond.store.base import Chunk


class ReadPart(Part):
    __slots__ = ("_first",)

    def __init__(self, first: int) -> None:
        self._first = first

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        lane.waiting.append(RewritePart(self._first, job.records[self._first]))

    def again(self, lane: Lane) -> None:
        """The lane was loaded again and finds its sparse chunks anew."""

    def deadline(self) -> int:
        return 1 << 62


class RewritePart(Part):
    __slots__ = ("_first", "_records")

    def __init__(self, first: int, records: Records) -> None:
        self._first = first
        self._records = records

    def apply(self, lane: Lane, now: int) -> None:
        chunks = lane.partition.chunks
        lane.compacting = False
        live = _live(lane, self._first) if self._first in chunks.sparse else None
        if live is None:
            return
        numbers = chunks.span(self._first)
        records = [record if number in live else None for number, record in zip(numbers, self._records, strict=True)]
        lane.draft.chunks.append(Chunk(self._first, len(records), encode_records(records)))
        lane.bodies.drop(self._first)
        chunks.rewritten(self._first)

    def again(self, lane: Lane) -> None:
        """As with reading: what was not written is found anew."""

    def deadline(self) -> int:
        return 1 << 62


def _live(lane: Lane, first: int) -> set[int] | None:
    """The items left in a chunk, None if some of them are ready.

    Those would have to be searched for, and are about to be leased anyway: the chunk comes up again when they end.
    """
    chunks, partition = lane.partition.chunks, lane.partition
    live = {number for number in chunks.span(first) if partition.is_set_aside(number)}
    if len(live) == chunks.live_in(first):
        return live
    chunks.sparse.discard(first)
    return None


def compact(lane: Lane) -> None:
    """Start on a sparse chunk, if there is one and none is under way."""
    sparse = lane.partition.chunks.sparse
    if sparse and not lane.compacting:
        first = min(sparse)
        if _live(lane, first) is not None:
            lane.compacting = True
            lane.want(first, 1)
            lane.draft.parts.append(ReadPart(first))
