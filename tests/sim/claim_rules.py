"""What a commit may do to claimed items: taken from the head for somebody who asks, ended as was decided for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from millpond.history.format import Event, numbers_of
from millpond.model import DeadReason
from millpond.queue.requests import ClaimItems, JudgeClaim
from tests.sim.asks import CLAIM, VERDICT
from tests.sim.decided import COMPLETED, RELEASED
from tests.sim.nouns import CLAIMED, READY, RETRYING, Hold, Item
from tests.sim.nouns import COMPLETED as DONE

if TYPE_CHECKING:
    from tests.sim.rules import Partition


def claimed(partition: Partition, nonce: bytes, claim_id: str, owner: str, runs: Sequence[int]) -> None:
    asks = [ask for ask in partition.queue.of_kind(CLAIM) if isinstance(ask.request, ClaimItems)]
    asks = [ask for ask in asks if (ask.request.claim_id, ask.request.owner) == (claim_id, owner)]  # type: ignore[attr-defined]
    given_up = partition.queue.given_up.get((claim_id, owner), 0)
    if not asks and not given_up:
        partition.broken(f"claimed for {claim_id} of {owner!r}, which nobody asks for")
    if partition.paused:
        partition.broken("claimed while the queue is paused")
    hold = partition.holds.setdefault(nonce, Hold(nonce, claim_id))
    if hold.sealed:
        partition.broken(f"{claim_id} grew after it was sealed")
    for number in numbers_of(runs):
        item = partition.take_head(number, "claimed")
        partition.to(item, CLAIMED)
        item.hold = hold
        hold.items[number] = item
    most = max([given_up, *(ask.request.max_items for ask in asks)])  # type: ignore[attr-defined]
    taken = sum(len(one.holds[nonce].items) for one in partition.queue.partitions.values() if nonce in one.holds)
    if taken > most:
        partition.broken(f"{taken} items were taken for {claim_id}, of at most {most}")


def unclaimed(partition: Partition, nonce: bytes, runs: Sequence[int]) -> None:
    """What was never sealed, or was released: back to the head in its old order."""
    hold = _hold(partition, nonce)
    numbers = list(numbers_of(runs))
    claim = _claim(partition, hold)
    if claim is not None and (claim.ending != RELEASED or len(numbers) != len(hold.items)):
        partition.broken(f"items {numbers} of {hold.claim_id} were given back, and it was not released")
    if numbers != list(hold.items)[-len(numbers) :]:
        partition.broken(f"{numbers} are not the last items of {hold.claim_id}: {list(hold.items)}")
    front: dict[int, dict[int, Item]] = {}
    for number in numbers:
        item = _leave(hold, number)
        partition.to(item, READY)
        partition.alarm_expiry(item)
        front.setdefault(item.priority, {})[number] = item
    partition.to_front(front)
    if not hold.items:
        del partition.holds[nonce]


def claim_completed(partition: Partition, nonce: bytes, owner: str, runs: Sequence[int], keep_until: int) -> None:
    hold = _ended(partition, nonce)
    kept = partition.settings.completed_retention_ms
    if keep_until != (partition.at + kept if kept else 0):
        partition.broken(f"completed at {partition.at}, kept until {keep_until}")
    for number in numbers_of(runs):
        item = _leave(hold, number, partition)
        if number in hold.judged:
            partition.broken(f"{item} was completed in spite of its verdict")
        _attempted(item)
        item.version, item.docs = 0, [None]
        partition.keep(item, DONE, keep_until)
        _count(partition, hold, 0)
    if hold.items:
        partition.broken(f"{hold.claim_id} is over, and {list(hold.items.values())} are still in it")
    del partition.holds[nonce]


def claim_retried(partition: Partition, nonce: bytes, owner: str, number: int, due: int, error: str | None) -> None:
    hold = _ended(partition, nonce)
    item = _leave(hold, number, partition)
    verdict = hold.judged.get(number)
    if verdict is None or verdict[0] or verdict[2] != error:
        partition.broken(f"{item} was retried ({error}), but the verdict was {verdict}")
    _attempted(item)
    if partition.worn_out(item) or item.expire_deadline <= partition.at:
        partition.broken(f"{item} was retried after its last attempt, {item.attempts}, or its time")
    delay = verdict[1]
    if not partition.due_fits(due, None if delay is None else partition.at + delay, False, item.attempts):
        partition.broken(f"{item} is to be retried at {due}; it is {partition.at}, and the verdict was {verdict}")
    if error is not None:
        item.error = error
    item.due = due
    partition.to(item, RETRYING if due else READY)
    if due:
        partition.alarm(due, item)
    _count(partition, hold, 1)


def claimed_died(partition: Partition, item: Item, why: DeadReason, error: str | None) -> bool:
    """Whether a claimed item may die: by the verdict on it, when the claim was completed."""
    hold = item.hold
    assert hold is not None
    _ended(partition, hold.nonce)
    verdict = hold.judged.get(item.number)
    if verdict is None or verdict[2] != error:
        return False
    _attempted(item)
    _leave(hold, item.number, partition)
    _count(partition, hold, 2)
    if verdict[0]:
        return why == DeadReason.REJECTED
    if partition.worn_out(item):
        return why == DeadReason.MAX_ATTEMPTS
    return why == DeadReason.EXPIRED and item.expire_deadline <= partition.at


def judged(partition: Partition, nonce: bytes, verdicts: Sequence[Sequence[Any]]) -> None:
    hold = _hold(partition, nonce)
    asks = [ask for ask in partition.queue.of_kind(VERDICT) if isinstance(ask.request, JudgeClaim)]
    for number, dead, delay, error in verdicts:
        item = hold.items.get(number)
        if item is None:
            partition.broken(f"a verdict on item {number}, which is not in {hold.claim_id}")
        given = (item.id, dead, delay, error)
        found = [
            ask
            for ask in asks
            if ask.request.claim_id == hold.claim_id  # type: ignore[attr-defined]
            and given in [(one.id, one.dead, one.delay, one.error) for one in ask.request.verdicts]  # type: ignore[attr-defined]
        ]
        if not found:
            partition.broken(f"nobody gave the verdict {given}")
        for ask in found:
            ask.stirred = True
            ask.noted.add(item.id)
        hold.judged[number] = (dead, delay, error)


def _hold(partition: Partition, nonce: bytes) -> Hold:
    hold = partition.holds.get(nonce)
    if hold is None:
        partition.broken("something is done with a claim that has nothing here")
    return hold


def _claim(partition: Partition, hold: Hold) -> Any:
    """The claim as which these items were sealed; None if they never were."""
    claim = partition.queue.decisions.claims.get(hold.claim_id)
    return claim if claim is not None and claim.nonce == hold.nonce else None


def _ended(partition: Partition, nonce: bytes) -> Hold:
    hold = _hold(partition, nonce)
    claim = _claim(partition, hold)
    if claim is None or claim.ending != COMPLETED:
        partition.broken(f"items of {hold.claim_id} ended, and nobody has completed it")
    return hold


def _leave(hold: Hold, number: int, partition: Partition | None = None) -> Item:
    item = hold.items.pop(number, None)
    if item is None:
        assert partition is not None
        partition.broken(f"item {number} is not in {hold.claim_id}")
    item.hold = None
    return item


def _attempted(item: Item) -> None:
    item.attempts += 1
    item.deliveries += 1


def _count(partition: Partition, hold: Hold, place: int) -> None:
    """Completed, retried, dead."""
    _claim(partition, hold).counted[place] += 1


CLAIM_JUDGES: dict[int, Callable[..., None]] = {
    Event.CLAIMED: claimed,
    Event.UNCLAIMED: unclaimed,
    Event.CLAIM_COMPLETED: claim_completed,
    Event.CLAIM_RETRIED: claim_retried,
    Event.JUDGED: judged,
}
