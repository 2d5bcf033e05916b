"""What a queue decides over all its partitions: its promises, one rule an event, as `rules` has them for items.

The decisions are the commits of a store of their own. What the partitions then do with claims and with staged chunks
is judged by `claim_rules` and `stage_rules`, against the state that is built here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from millpond.history.format import Event, decode_entry
from millpond.queue.requests import ClaimItems, EndClaim, OpenConsumer, PublishStage
from millpond.store.base import Turn
from tests.sim.asks import CLAIM, CLAIM_END, CONSUMER, PUBLISH, Ask
from tests.sim.nouns import Claim, Hold, Violation

if TYPE_CHECKING:
    from tests.sim.model import Queue

OPEN, COMPLETED, RELEASED = range(3)


class Decisions:
    """Consumers, claims and transactions of one queue."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.turn = 0
        self.at = 0
        self.memory = 0  # ms for which ended claims and published transactions are remembered
        self.epochs: dict[str, int] = {}
        self.last_completed: dict[str, int] = {}
        self.claims: dict[str, Claim] = {}  # not settled yet
        self.history: dict[str, list[Claim]] = {}  # all there ever were, the last one last
        self.finished: dict[str, int] = {}  # when
        self.decided: dict[str, dict[str, int]] = {}  # transactions -> their chunks, and whose copy counts
        self.decided_at: dict[str, int] = {}
        self.settled: set[str] = set()
        self.shown: dict[tuple[str, str], tuple[int, int]] = {}  # published chunks -> partition and turn
        self.counted: dict[str, list[int]] = {}  # transactions -> items that came in, and duplicates
        self.last_published: dict[str, int] = {}

    def commit(self, turn: Turn) -> None:
        self.queue.model.step += 1
        if turn.number != self.turn + 1:
            self.broken(f"turn {turn.number} follows turn {self.turn}")
        if turn.at < self.at:
            self.broken(f"time went back from {self.at} to {turn.at}")
        self.turn, self.at = turn.number, turn.at
        for event in decode_entry(turn.events).events:
            JUDGES[event[0]](self, *event[1:])

    # ---- events ---------------------------------------------------------------------------------------------

    def consumer_opened(self, consumer: str, epoch: int) -> None:
        if epoch != self.epochs.get(consumer, 0) + 1:
            self.broken(f"epoch {epoch} of {consumer} follows {self.epochs.get(consumer)}")
        asks = [ask for ask in self.queue.of_kind(CONSUMER) if _about(ask, OpenConsumer).consumer == consumer]
        if not asks:
            self.broken(f"nobody asked to open {consumer}")
        self.epochs[consumer] = epoch
        for ask in asks:
            ask.opened[epoch] = self.last_completed.setdefault(consumer, 0)

    def claim_sealed(
        self, nonce: bytes, claim_id: str, owner: str, epoch: int | None, parts: Sequence[Sequence[int]]
    ) -> None:
        asks = [ask for ask in self.queue.of_kind(CLAIM) if _makes(ask, claim_id, owner) and ask.epoch == epoch]
        if not asks:
            self.broken(f"nobody asks any more for claim {claim_id}")
        if claim_id in self.claims or self.is_finished(claim_id):
            self.broken(f"claim {claim_id} was made although it is there, or finished")
        if (numbered := split(claim_id)) is not None:
            consumer, number = numbered
            if epoch != self.epochs.get(consumer) or number != self.last_completed[consumer] + 1:
                self.broken(f"claim {claim_id} was made by epoch {epoch}, after {self.last_completed[consumer]}")
        claim = Claim(nonce, claim_id, self.queue.model.step, self._cut(nonce, parts))
        items = [item for part in claim.parts for item in part]
        for ask in asks:
            ask.stirred = True
        if not items or not any(_fits(ask, items) for ask in asks):
            self.broken(f"claim {claim_id} has {len(items)} items, which is not what was asked for")
        self.claims[claim_id] = claim
        self.history.setdefault(claim_id, []).append(claim)

    def _cut(self, nonce: bytes, parts: Sequence[Sequence[int]]) -> list[list[Any]]:
        """The items of each part. All that was taken for the claim, and durably so, is in it."""
        cut, places = [], dict.fromkeys(self.queue.partitions, 0)
        for partition, start, count in parts:
            hold = self.queue.partitions[partition].holds.get(nonce)
            if hold is None or start != places[partition] or not count:
                self.broken(f"part {partition}, {start}, {count} of a claim is not what was taken for it: {hold}")
            places[partition] += count
            cut.append(list(hold.items.values())[start : start + count])
            if len(cut[-1]) != count:
                self.broken(f"a claim has {count} items from {start} on in {partition}, of {len(hold.items)}")
        for index, one in self.queue.partitions.items():
            hold = one.holds.get(nonce)
            if hold is not None and len(hold.items) != places[index]:
                self.broken(f"{len(hold.items)} items of {index} were taken for a claim of which {places[index]} are")
            if hold is not None:
                hold.sealed = True
        return cut

    def claim_ending(self, claim_id: str, ending: int) -> None:
        claim = self.claims.get(claim_id)
        if claim is None or claim.ending != OPEN:
            self.broken(f"claim {claim_id} ended, but there is no such claim")
        asks = [ask for ask in self.queue.of_kind(CLAIM_END) if _ends(ask, claim_id, ending)]
        numbered = split(claim_id)
        if numbered is not None:
            asks = [ask for ask in asks if ask.epoch in (None, self.epochs[numbered[0]])]
        if not asks:
            self.broken(f"nobody asked, with the right to, to end claim {claim_id}")
        for ask in asks:
            ask.stirred = True
        claim.ending, claim.ended_step = ending, self.queue.model.step
        if ending == COMPLETED and numbered is not None:
            self.last_completed[numbered[0]] = numbered[1]

    def claim_settled(self, claim_id: str) -> None:
        claim = self.claims.pop(claim_id, None)
        if claim is None or claim.ending == OPEN or self.holds(claim):
            self.broken(f"claim {claim_id} was forgotten before all its partitions had followed")
        if claim.ending == COMPLETED and split(claim_id) is None:
            self.finished[claim_id] = self.at

    def stage_decided(self, txn: str, chunks: dict[str, int]) -> None:
        asks = [ask for ask in self.queue.of_kind(PUBLISH) if _publishes(ask, txn, chunks)]
        if not asks:
            self.broken(f"nobody asks any more to publish {txn} with {chunks}")
        if self.is_published(txn) and not self._forgotten(self.decided_at.get(txn)):
            self.broken(f"{txn} was published twice")
        for chunk, partition in chunks.items():
            if chunk not in self.queue.partitions[partition].staged.get(txn, {}):
                self.broken(f"chunk {chunk} of {txn} was published, and {partition} does not have it")
            self.shown.pop((txn, chunk), None)
        for ask in asks:
            ask.stirred = True
        self.decided[txn], self.decided_at[txn] = chunks, self.at
        self.counted[txn] = [0, 0]
        self.settled.discard(txn)
        if (numbered := split(txn)) is not None:
            self.last_published[numbered[0]] = numbered[1]

    def stage_settled(self, txn: str) -> None:
        if self.unshown(txn):
            self.broken(f"{txn} was forgotten before {self.unshown(txn)} were shown")
        self.settled.add(txn)

    # ---- looking --------------------------------------------------------------------------------------------

    def is_finished(self, claim_id: str) -> bool:
        numbered = split(claim_id)
        if numbered is not None:
            return numbered[1] <= self.last_completed.get(numbered[0], 0)
        claim = self.claims.get(claim_id)
        if claim is not None:
            return claim.ending == COMPLETED
        return claim_id in self.finished and not self._forgotten(self.finished[claim_id])

    def may_be_finished(self, claim_id: str) -> bool:
        """It is remembered for some time at least, and longer if nothing comes after it."""
        return self.is_finished(claim_id) or claim_id in self.finished

    def is_published(self, txn: str) -> bool:
        numbered = split(txn)
        if numbered is not None:
            return numbered[1] <= self.last_published.get(numbered[0], 0)
        return txn in self.decided

    def _forgotten(self, at: int | None) -> bool:
        return at is not None and at + self.memory < self.at

    def unshown(self, txn: str) -> list[str]:
        return [chunk for chunk in self.decided.get(txn, ()) if (txn, chunk) not in self.shown]

    def holds(self, claim: Claim) -> list[Hold]:
        holds = [partition.holds.get(claim.nonce) for partition in self.queue.partitions.values()]
        return [hold for hold in holds if hold is not None]

    def open_claims(self) -> list[Claim]:
        return [claim for claim in self.claims.values() if claim.ending == OPEN]

    def left(self) -> list[str]:
        """What should have been carried through, or undone, when nobody is at it."""
        making = {_about(ask, ClaimItems).claim_id for ask in self.queue.of_kind(CLAIM)}
        making |= {_about(ask, EndClaim).claim_id for ask in self.queue.of_kind(CLAIM_END)}
        publishing = {_about(ask, PublishStage).txn for ask in self.queue.of_kind(PUBLISH)}
        left = []
        for partition in self.queue.partitions.values():
            for hold in partition.holds.values():
                claim = self.claims.get(hold.claim_id)
                mine = claim is not None and claim.nonce == hold.nonce and claim.ending == OPEN
                if not mine and hold.claim_id not in making:
                    left.append(f"{partition.index} holds {len(hold.items)} items for {hold.claim_id}")
        for txn in self.decided:
            if self.unshown(txn) and txn not in publishing:
                left.append(f"{txn} is published, but {self.unshown(txn)} are not shown")
        return left

    def broken(self, what: str) -> NoReturn:
        raise Violation(f"{self.queue.name}/decisions, turn {self.turn}: {what}")


def split(name: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"(.+):([0-9]+)", name)
    return (found[1], int(found[2])) if found else None


def _about(ask: Ask, kind: Any) -> Any:
    assert isinstance(ask.request, kind)
    return ask.request


def _makes(ask: Ask, claim_id: str, owner: str) -> bool:
    request: ClaimItems = _about(ask, ClaimItems)
    return (request.claim_id, request.owner) == (claim_id, owner)


def _fits(ask: Ask, items: Sequence[Any]) -> bool:
    request: ClaimItems = _about(ask, ClaimItems)
    size = sum(len(item.payload) for item in items)
    small = request.max_bytes is None or size <= request.max_bytes or len(items) == 1
    return len(items) <= request.max_items and small


def _ends(ask: Ask, claim_id: str, ending: int) -> bool:
    request: EndClaim = _about(ask, EndClaim)
    return request.claim_id == claim_id and request.completed == (ending == COMPLETED)


def _publishes(ask: Ask, txn: str, chunks: dict[str, int]) -> bool:
    request: PublishStage = _about(ask, PublishStage)
    return request.txn == txn and set(request.chunks) == set(chunks)


JUDGES: dict[int, Callable[..., None]] = {
    Event.CONSUMER_OPENED: Decisions.consumer_opened,
    Event.CLAIM_SEALED: Decisions.claim_sealed,
    Event.CLAIM_ENDING: Decisions.claim_ending,
    Event.CLAIM_SETTLED: Decisions.claim_settled,
    Event.STAGE_DECIDED: Decisions.stage_decided,
    Event.STAGE_SETTLED: Decisions.stage_settled,
}
