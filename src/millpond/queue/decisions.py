"""What a queue has decided over all its partitions: which claims and transactions count.

A claim's items, and a transaction's chunks, lie in several partitions, each with a commit of its own. Whether they
count is one record here, in a store of its own: a part without a decision is undone, one with it is carried
through, whatever crashed in between (`queue.settling`). The transitions work as those of a partition do.
"""

from __future__ import annotations

import enum
import re
from itertools import chain

import msgspec

from millpond.model import CLAIM_MEMORY_MS

_NUMBERED = re.compile(r"(.+):([1-9][0-9]{0,17})")


class Ending(enum.IntEnum):
    """How far a claim has come; the last two are decided, and only their partitions have to follow."""

    OPEN = 0
    COMPLETED = 1
    RELEASED = 2


class ConsumerMark(msgspec.Struct, array_like=True, gc=False):
    epoch: int
    last_completed: int = 0


class ClaimMark(msgspec.Struct, array_like=True):
    """A claim that counts. `nonce` is the name of its parts; a part is a partition, a place there, and a count."""

    nonce: bytes
    claim_id: str
    owner: str
    at: int
    epoch: int | None
    parts: list[tuple[int, int, int]]
    ending: int = Ending.OPEN

    @property
    def items(self) -> int:
        return sum(count for _, _, count in self.parts)

    @property
    def partitions(self) -> set[int]:
        return {partition for partition, _, _ in self.parts}


class Decisions:
    def __init__(self) -> None:
        self.consumers: dict[str, ConsumerMark] = {}
        self.claims: dict[str, ClaimMark] = {}
        self.finished: dict[str, int] = {}  # completed claims that are no consumer's -> when, for CLAIM_MEMORY_MS
        self.deciding: dict[str, dict[str, int]] = {}  # published, and not yet by all partitions -> whose chunks count
        self.published: dict[str, int] = {}  # transactions without a number -> when, for CLAIM_MEMORY_MS
        self.last_published: dict[str, int] = {}  # name -> the highest number of it

    # ---- transitions: the instant first, then the event's arguments ------------------------------------------

    def on_consumer_opened(self, at: int, consumer: str, epoch: int) -> None:
        self.consumers.setdefault(consumer, ConsumerMark(0)).epoch = epoch

    def on_claim_sealed(
        self, at: int, nonce: bytes, claim_id: str, owner: str, epoch: int | None, parts: list[list[int]]
    ) -> None:
        self.claims[claim_id] = ClaimMark(nonce, claim_id, owner, at, epoch, [(p, o, c) for p, o, c in parts])

    def on_claim_ending(self, at: int, claim_id: str, ending: int) -> None:
        self.claims[claim_id].ending = ending
        numbered = self.consumer_of(claim_id)
        if ending == Ending.COMPLETED and numbered is not None:
            self.consumers[numbered[0]].last_completed = numbered[1]

    def on_claim_settled(self, at: int, claim_id: str) -> None:
        claim = self.claims.pop(claim_id)
        if claim.ending == Ending.COMPLETED and self.consumer_of(claim_id) is None:
            _remember(self.finished, claim_id, at)

    def on_stage_decided(self, at: int, txn: str, chunks: dict[str, int]) -> None:
        """`chunks`: those that count, each with the partition whose copy does."""
        self.deciding[txn] = chunks
        numbered = split_number(txn)
        if numbered is None:
            _remember(self.published, txn, at)
        else:
            self.last_published[numbered[0]] = numbered[1]

    def on_stage_settled(self, at: int, txn: str) -> None:
        del self.deciding[txn]

    # ---- looking ------------------------------------------------------------------------------------------

    def consumer_of(self, claim_id: str) -> tuple[str, int] | None:
        """The consumer whose claim this is, and its number; only claims of consumers that were opened are such."""
        numbered = split_number(claim_id)
        return numbered if numbered is not None and numbered[0] in self.consumers else None

    def is_finished(self, claim_id: str) -> bool:
        numbered = self.consumer_of(claim_id)
        if numbered is not None:
            return numbered[1] <= self.consumers[numbered[0]].last_completed
        claim = self.claims.get(claim_id)
        return claim_id in self.finished or (claim is not None and claim.ending == Ending.COMPLETED)

    def is_published(self, txn: str) -> bool:
        numbered = split_number(txn)
        if numbered is None:
            return txn in self.published or txn in self.deciding
        return numbered[1] <= self.last_published.get(numbered[0], -1)

    def claim_of(self, nonce: bytes) -> ClaimMark | None:
        return next((claim for claim in self.claims.values() if claim.nonce == nonce), None)

    # ---- as one value ---------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        return _encode(
            (self.consumers, list(self.claims.values()), self.finished, self.deciding, self.published,
             self.last_published)
        )  # fmt: skip

    def load(self, dumped: bytes) -> None:
        self.consumers, claims, self.finished, self.deciding, self.published, self.last_published = _decode(dumped)
        self.claims = {claim.claim_id: claim for claim in claims}

    def __bool__(self) -> bool:
        """Whether anything was ever decided."""
        return any(chain((self.consumers, self.claims, self.finished), (self.published, self.last_published)))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(
    tuple[
        dict[str, ConsumerMark],
        list[ClaimMark],
        dict[str, int],
        dict[str, dict[str, int]],
        dict[str, int],
        dict[str, int],
    ]
).decode


def split_number(name: str) -> tuple[str, int] | None:
    """`name:seq` in two; None for a name without a number."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else None


def _remember(names: dict[str, int], name: str, at: int) -> None:
    """The oldest come first, and are forgotten when their time is over."""
    names.pop(name, None)
    names[name] = at
    while (oldest := next(iter(names))) != name and names[oldest] + CLAIM_MEMORY_MS < at:
        del names[oldest]
