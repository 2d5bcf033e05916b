"""Lets partitions follow what the queue has decided, and undo what it has not.

Requests do this themselves; here is what they leave when they, or the process, end on the way. It runs at the start of
a turn, when all that is in the memory of a free lane is durable, before anything changes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from millpond.errors import Unavailable
from millpond.history.format import Event, Record, run_of, run_span, runs_of
from millpond.model import STAGE_TIMEOUT_MS, DeadReason, State
from millpond.queue.backoff import backoff_ms
from millpond.queue.decisions import Decisions, Ending
from millpond.queue.dedup import split
from millpond.queue.drive import Operation
from millpond.queue.lane import NEVER, Lane
from millpond.queue.lifecycle import bury, kept_until
from millpond.queue.named import Named
from millpond.queue.names import Held, are_unheard, name_taken
from millpond.queue.partition import ERROR_PART, Hold, Judgement, Partition, Piece
from millpond.queue.state import QueueState
from millpond.queue.tokens import read_id

PUBLISH_NAMED_MAX = 50_000  # items with a key or the like in one turn: a tenth of a second at worst; the next goes on

Chosen = Mapping[str, int]  # the chunks of a transaction that count -> the partition of each


class Shown(NamedTuple):
    """How many items a publish brought in, how many were duplicates, and whether there are more to come."""

    items: int
    duplicates: int
    more: bool


def claim_key(claim_id: str) -> str:
    return f"claim {claim_id!r}"


def txn_key(txn: str) -> str:
    return f"transaction {txn!r}"


def alone(queue: QueueState, key: str, operation: Operation) -> Operation:
    """One request at a time has a claim or transaction in hand; what it leaves undone is settled after it."""
    if key in queue.making:
        operation.close()
        raise Unavailable(f"another request has {key} in hand; ask again in a moment")
    queue.making.add(key)
    try:
        return (yield from operation)
    finally:
        queue.making.discard(key)
        queue.unsettled = True


def settle(queue: QueueState, now: int) -> None:
    queue.unsettled, queue.sweep_at = False, NEVER
    meta = queue.meta
    sweeps: list[int | None] = []
    if not meta.free:  # it is looked at again when its job is done
        return
    decisions = meta.partition.decisions
    _forget_settled(queue, decisions)
    for lane in queue.free:
        for hold in list(lane.partition.claims.values()):
            _follow_claim(queue, lane, hold, decisions, now)
        for txn in list(lane.partition.staged):
            if txn_key(txn) not in queue.making:
                _follow_stage(queue, lane, txn, decisions, now)
        sweeps.append(next_sweep(lane.partition))
    # What should be swept and was not, a request has in hand, or a lane that is away: there will be another turn.
    queue.sweep_at = min([at for at in sweeps if at is not None and at > now], default=NEVER)


def next_sweep(partition: Partition) -> int | None:
    """When something that was staged here has lain long enough."""
    return min((at + STAGE_TIMEOUT_MS for at in map(_staged_at, partition.staged.values())), default=None)


def _staged_at(chunks: dict[str, list[Piece]]) -> int:
    """When the transaction last grew: its newest chunk is the last one."""
    return next(reversed(chunks.values()))[-1].at


def _forget_settled(queue: QueueState, decisions: Decisions) -> None:
    """Decisions that all their partitions have followed."""
    change = queue.meta.partition.change
    for claim in list(decisions.claims.values()):
        key = claim_key(claim.claim_id)
        if claim.ending == Ending.OPEN or key in queue.making:
            continue
        holding = {lane.index for lane in queue.free if claim.nonce in lane.partition.claims}
        if _all_followed(queue, key, claim.partitions, holding):
            change(Event.CLAIM_SETTLED, claim.claim_id)
    for txn in list(decisions.deciding):
        key = txn_key(txn)
        if key in queue.making:
            continue
        holding = {lane.index for lane in queue.free if txn in lane.partition.staged}
        if _all_followed(queue, key, queue.lanes, holding):
            change(Event.STAGE_SETTLED, txn)


def _all_followed(queue: QueueState, key: str, partitions: Iterable[int], holding: set[int]) -> bool:
    """Whether each of these was seen without what was decided on; not all of them are free at a time."""
    followed = queue.confirmed.setdefault(key, set())
    followed |= {lane.index for lane in queue.free} - holding
    if any(partition in queue.lanes and partition not in followed for partition in partitions):
        return False
    del queue.confirmed[key]
    return True


def _follow_claim(queue: QueueState, lane: Lane, hold: Hold, decisions: Decisions, now: int) -> None:
    claim = decisions.claim_of(hold.nonce)
    if hold.nonce in queue.taking or (claim is not None and claim_key(claim.claim_id) in queue.making):
        return
    if claim is None or claim.ending == Ending.RELEASED:
        release_in(queue, lane, hold.nonce, now)
    elif claim.ending == Ending.COMPLETED:
        complete_in(queue, lane, hold.nonce, now)


def _follow_stage(queue: QueueState, lane: Lane, txn: str, decisions: Decisions, now: int) -> None:
    if txn in decisions.deciding:
        with suppress(Held):  # the lane that it waits for is busy, or away: there will be another turn
            publish_in(queue, lane, txn, decisions.deciding[txn], now)
    elif decisions.is_published(txn) or _staged_at(lane.partition.staged[txn]) + STAGE_TIMEOUT_MS <= now:
        drop_in(lane, txn)


# ---- what a decision means in one partition: done again, each does nothing -----------------------------------


def release_in(queue: QueueState, lane: Lane, nonce: bytes, now: int, keep: int = 0) -> int:
    """A claim's items, all but the first `keep`, back to the head; those whose time is over meanwhile die."""
    partition = lane.partition
    hold = partition.claims.get(nonce)
    if hold is None:
        return 0
    runs = slice_runs(hold.runs, keep, hold.items)
    partition.change(Event.UNCLAIMED, nonce, runs)
    expired = runs_of(_expired(partition, runs, now))
    if expired:
        bury(queue, lane, DeadReason.EXPIRED, State.READY, expired, now)
    return sum(len(run_span(run)) for run in runs)


def _expired(partition: Partition, runs: Iterable[int], now: int) -> list[int]:
    """Those of these items that are past their deadline: their chunk's, or one of their own."""
    expired: list[int] = []
    for run in runs:
        span = run_span(run)
        for _, low, high, _ in partition.chunks.pieces(span.start, len(span)):
            own = set(partition.expiries.within(low, high - low))
            late = partition.chunks.deadline_of(low) <= now
            if late or own:
                expired += [
                    n for n in range(low, high) if (partition.expiries.get(n, now + 1) <= now if n in own else late)
                ]
    return expired


def complete_in(queue: QueueState, lane: Lane, nonce: bytes, now: int) -> tuple[int, int, int]:
    """The claim is over: items with a verdict get it, the others are done. How many were done, retried, and died."""
    hold = lane.partition.claims.get(nonce)
    if hold is None:
        return 0, 0, 0
    dead = sum([_carry_out(queue, lane, hold, number, verdict, now) for number, verdict in hold.judged.items()])
    runs = _without(hold.runs, sorted(hold.judged))
    lane.partition.change(Event.CLAIM_COMPLETED, nonce, hold.owner, runs, kept_until(queue, now))
    done = sum(len(run_span(run)) for run in runs)
    queue.rates.count("completed", done, now)
    return done, len(hold.judged) - dead, dead


def _without(runs: list[int], numbers: list[int]) -> list[int]:
    """Runs with these numbers cut out of them: a few in a million cost no walk over all."""
    if not numbers:
        return runs
    left: list[int] = []
    for run in runs:
        span = run_span(run)
        start = span.start
        for number in numbers[bisect_left(numbers, start) : bisect_left(numbers, span.stop)]:
            if start < number:
                left.append(run_of(start, number - start))
            start = number + 1
        if start < span.stop:
            left.append(run_of(start, span.stop - start))
    return left


def _carry_out(queue: QueueState, lane: Lane, hold: Hold, number: int, verdict: Judgement, now: int) -> bool:
    """Whether the item died of it."""
    if verdict.error is not None:
        lane.draft.documents[number << 2 | ERROR_PART] = verdict.error.encode()
    reason = _fatal(queue, lane.partition, number, verdict, now)
    if reason is not None:
        bury(queue, lane, reason, State.CLAIMED, [run_of(number, 1)], now, verdict.error)
        return True
    delay = verdict.delay
    if delay is None:
        delay = backoff_ms(queue.settings.backoff, lane.partition.attempts(number) + 1, queue.rng)
    due = now + delay if delay else 0
    lane.partition.change(Event.CLAIM_RETRIED, hold.nonce, hold.owner, number, due, verdict.error)
    queue.rates.count("retried", 1, now)
    return False


def _fatal(queue: QueueState, partition: Partition, number: int, verdict: Judgement, now: int) -> DeadReason | None:
    """Why the item may not be tried again."""
    if verdict.dead:
        return DeadReason.REJECTED
    limit = partition.limits.get(number, queue.settings.max_attempts)
    if limit and partition.attempts(number) + 1 >= limit:
        return DeadReason.MAX_ATTEMPTS
    return DeadReason.EXPIRED if partition.expire_deadline(number) <= now else None


def publish_in(queue: QueueState, lane: Lane, txn: str, chosen: Chosen, now: int) -> Shown:
    """Show what counts of a transaction and drop the rest, as much as one turn has time for.

    Raises Held, with nothing changed, where it cannot be told yet whether a name is taken.
    """
    names: set[bytes] = set()
    pieces: list[tuple[str, Piece, list[int] | None]] = []
    named = 0
    for chunk, of_chunk in lane.partition.staged.get(txn, {}).items():
        if named >= PUBLISH_NAMED_MAX:
            break
        counts = chosen.get(chunk) == lane.index
        pieces += [(chunk, piece, _taken(queue, lane, piece, names, now) if counts else None) for piece in of_chunk]
        named += sum(piece.count for piece in of_chunk if counts and piece.meta is not None)
    deadline = now + queue.settings.expire_timeout_ms
    items = duplicates = 0
    for chunk, piece, taken in pieces:
        if taken is None:
            lane.partition.change(Event.UNSTAGED, txn, chunk, piece.first)
            continue
        event = (txn, chunk, piece.first, piece.count, deadline, piece.meta, taken)
        lane.partition.change(Event.PUBLISHED, *event)
        items += piece.count - len(taken)
        duplicates += len(taken)
    lane.draft.names |= names
    queue.rates.count("produced", items, now)
    return Shown(items, duplicates, more=txn in lane.partition.staged)


def _taken(queue: QueueState, lane: Lane, piece: Piece, names: set[bytes], now: int) -> list[int]:
    """Items with a key or an id that another has; `names` gathers those of the others."""
    if piece.meta is None:
        return []
    at_hand = lane.partition.at_hand
    named = at_hand[piece.first] = at_hand.get(piece.first) or Named.read(piece.meta)
    named.free = not named.names or _are_free(queue, named, names)
    if named.free:
        names.update(named.names)
        return []
    taken: list[int] = []
    for number, (record, joined) in enumerate(zip(named.records, named.joined, strict=True), piece.first):
        mine = split(joined)
        if not mine:
            continue
        assert isinstance(record, Record)
        if not names.isdisjoint(mine) or name_taken(queue, record, mine, now):
            taken.append(number)
        else:
            names.update(mine)
    return taken


def _are_free(queue: QueueState, named: Named, names: set[bytes]) -> bool:
    """Whether it can be told at once that nobody has any of the names. An id may also be one that a queue assigns."""
    if any(item_id is not None and read_id(queue.incarnation, item_id) is not None for _, item_id, _ in named.own):
        return False
    return named.distinct and names.isdisjoint(named.names) and are_unheard(queue, named.names)


def drop_in(lane: Lane, txn: str) -> int:
    """Nothing of the transaction counts."""
    dropped = 0
    for chunk, pieces in list(lane.partition.staged.get(txn, {}).items()):
        for piece in pieces:
            lane.partition.change(Event.UNSTAGED, txn, chunk, piece.first)
            dropped += piece.count
    return dropped


def slice_runs(runs: Iterable[int], start: int, stop: int) -> list[int]:
    """The items from place `start` to `stop` of these runs, as runs."""
    chosen: list[int] = []
    for run in runs:
        span = run_span(run)
        part = span[max(0, start) : max(0, stop)]
        if part:
            chosen.append(run_of(part.start, len(part)))
        start -= len(span)
        stop -= len(span)
        if stop <= 0:
            break
    return chosen
