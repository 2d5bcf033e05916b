"""Rewrites chunks of which little is left, so that one dead item does not keep a thousand bodies on disk.

One chunk at a time and a lane, in two turns: the first reads it, the second writes it back without the records that
are gone. Numbers do not change, so nothing else notices.
"""

from __future__ import annotations

from millpond.history.format import encode_records
from millpond.queue.bodies import Records
from millpond.queue.lane import NEVER, Lane, Part, TurnJob
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
        return NEVER


class RewritePart(Part):
    __slots__ = ("_first", "_records")

    def __init__(self, first: int, records: Records) -> None:
        self._first = first
        self._records = records

    def apply(self, lane: Lane, now: int) -> None:
        chunks = lane.partition.chunks
        lane.compacting = False
        if self._first not in chunks.sparse:
            return
        records: Records = [None] * len(self._records)
        for place in chunks.live_places(self._first):
            records[place] = self._records[place]
        lane.draft.chunks.append(Chunk(self._first, len(records), encode_records(records)))
        lane.bodies.drop(self._first)
        chunks.rewritten(self._first)

    def again(self, lane: Lane) -> None:
        """As with reading: what was not written is found anew."""

    def deadline(self) -> int:
        return NEVER


def compact(lane: Lane) -> None:
    """Start on a sparse chunk, if there is one and none is under way."""
    sparse = lane.partition.chunks.sparse
    if sparse and not lane.compacting:
        lane.compacting = True
        first = min(sparse)
        lane.want(first, 1)
        lane.draft.parts.append(ReadPart(first))
