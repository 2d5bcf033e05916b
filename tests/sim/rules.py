"""What a commit may do to the items of a partition: its promises, one rule an event.

Each method named after an event judges it and then changes the items; those of leases, transfers, claims, transactions
and rebalances are functions in files of their own. Nothing here is shared with the queue but the journal's format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from millpond.history.format import Event, Record, decode_entry, decode_records, numbers_of
from millpond.model import DeadReason, QueueDefinition, QueueSettings
from millpond.queue.requests import Produce
from millpond.store.base import Turn
from tests.sim.asks import (
    BURY,
    CANCEL,
    CLEAR,
    MAKE_READY,
    RETRY,
    Ask,
    Batch,
    names_of,
)
from tests.sim.claim_rules import CLAIM_JUDGES, claimed_died
from tests.sim.lease_rules import LEASE_JUDGES, askers, end_lease, finish, has_left, held, leavers, let_go
from tests.sim.nouns import (
    CANCELLED,
    CLAIMED,
    COMPLETED,
    DEAD,
    GONE,
    LEASED,
    READY,
    RETRYING,
    SCHEDULED,
    STATES,
    WAITING,
    Chunk,
    Grant,
    Hold,
    Item,
    Make,
    Violation,
)  # fmt: skip
from tests.sim.rebalance_rules import REBALANCE_JUDGES, fences_of
from tests.sim.stage_rules import STAGE_JUDGES, judge_staged
from tests.sim.transfer_rules import TRANSFER_JUDGES, arrive, send

if TYPE_CHECKING:
    from tests.sim.model import Queue

EXPIRY_SLACK_MS = 60_000  # an expired item is moved within a minute
KEEP, DELETE, MOVE = range(3)


class Partition:
    """The items of one partition, and the rules for what a commit may do to them."""

    def __init__(self, queue: Queue, index: int) -> None:
        self.queue = queue
        self.index = index
        self.turn = 0
        self.fence = 0
        self.at = 0
        self.next_number = 1
        self.items: dict[int, Item] = {}
        self.ready: dict[int, dict[int, Item]] = {}
        self.counts = dict.fromkeys(STATES, 0)
        self.alarms: list[tuple[int, int, Item]] = []
        self.orphans: dict[Grant, None] = {}  # deliveries that reached nobody
        self.holds: dict[bytes, Hold] = {}  # what was taken for claims, by nonce
        self.staged: dict[str, dict[str, Chunk]] = {}  # transaction -> chunk
        self.fresh_chunks: dict[tuple[str, str], Chunk] = {}  # staged by this commit
        self.read_only = False
        self.draining = False
        self.definition: QueueDefinition | None = None  # that it last committed under
        self.leaving: dict[int, tuple[Item, str]] = {}  # that another partition has, and this one still: as it was
        self.has_letters = False  # or had
        self.mark = 0  # the time on disk when the queue was opened: nothing counts as having come before it
        self.settings = QueueSettings()
        self.paused = False
        self.reported = True
        self._order = count()
        self._bodies: dict[int, list[bytes | Record | None]] = {}
        self._arrivals: dict[int, bytes] = {}  # items from other queues, by the names of their transfers
        self._makes: dict[Batch, Make] = {}
        self._replaced: list[Item] = []

    # ---- a commit -----------------------------------------------------------------------------------------

    def commit(self, turn: Turn, definition: QueueDefinition, reported: bool) -> None:
        """Judge one durable turn, made under `definition`, and `reported` to the queue or said to have failed."""
        self.queue.model.step += 1
        if turn.number != self.turn + 1:
            self.broken(f"turn {turn.number} follows turn {self.turn}")
        if turn.at < self.at:
            self.broken(f"time went back from {self.at} to {turn.at}")
        self.turn, self.at = turn.number, turn.at
        self.settings, self.paused = definition.settings, definition.paused
        self.read_only = any(one.partition == self.index and one.read_only for one in definition.partitions)
        running = definition.rebalance is not None and not definition.rebalance.finished_at
        self.draining = self.read_only and running
        self.definition = definition
        self._bodies = {chunk.first: decode_records(chunk.body) for chunk in turn.chunks}
        self._makes, self._replaced, self.reported, self.fresh_chunks = {}, [], reported, {}
        entry = decode_entry(turn.events)
        produced = [event for event in entry.events if event[0] == Event.PRODUCED]
        self._arrivals = {number: name for event in produced for name, number, *_ in event[6]}
        self.fence = max([self.fence, *(fence for event in produced for *_, fence in event[6])])
        self.fence = max([self.fence, *fences_of(entry.events)])
        for event in entry.events:
            JUDGES[event[0]](self, *event[1:])
        if entry.next_number != self.next_number:
            self.broken(f"numbers go on at {entry.next_number} instead of {self.next_number}")
        for batch, make in self._makes.items():
            self._judge_make(batch, make)
        for (txn, chunk), kept in self.fresh_chunks.items():
            judge_staged(self, txn, chunk, kept)
        for item in self._replaced:
            if not any(make.takers for make in self._makes.values()):
                self.broken(f"{item} was replaced by nothing")

    def overdue(self, now: int) -> None:
        """To be called when the partition is at rest: whatever was due must be done."""
        while self.alarms and self.alarms[0][0] <= now:
            item = heappop(self.alarms)[2]
            if item.partition is not self or item.carried:
                continue
            if item.state == LEASED and item.lease is not None and item.lease.deadline <= now:
                self.broken(f"{item} still has a lease that ended at {item.lease.deadline}; it is {now}")
            elif item.state in (SCHEDULED, RETRYING) and item.due <= now:
                self.broken(f"{item} was due at {item.due} and left behind; it is {now}")
            elif item.state in WAITING and item.expire_deadline + EXPIRY_SLACK_MS <= now:
                self.broken(f"{item} expired at {item.expire_deadline} and is still there; it is {now}")
            elif item.state in (COMPLETED, CANCELLED) and item.kept_until + EXPIRY_SLACK_MS <= now:
                self.broken(f"{item} was to be kept until {item.kept_until} and is still there; it is {now}")
        for grant in self.orphans:
            if not grant.over:
                self.broken(f"{grant.item} is leased to {grant.client.name}, who was not given it, or has gone")
        self.orphans.clear()

    def check_wake(self, wake: int | None) -> None:
        """To be called when the queue is at rest: it must not sleep beyond the first instant at which it has to act."""
        if self.alarms:
            at, _, item = self.alarms[0]
            if (wake is None or wake > at) and item.partition is self and not item.carried and at in _bounds(item):
                self.broken(f"the queue sleeps until {wake}, and {item} needs it by {at}")

    def ready_count(self) -> int:
        """Those that can be leased."""
        return sum(map(len, self.ready.values()))

    # ---- events: each must be allowed, and then changes the items -----------------------------------------

    def produced(
        self, first: int, number_of: int, deadline: int, meta: bytes | None, requests: Any, arrivals: Sequence[Any]
    ) -> None:
        if first != self.next_number:
            self.broken(f"item {first} follows item {self.next_number - 1}")
        self.next_number = first + number_of
        self.remembered(requests)
        if deadline != self.at + self.settings.expire_timeout_ms:
            self.broken(f"expire deadline {deadline} at {self.at}")
        for number, stored in enumerate(self.body(first, number_of), first):
            record = stored if isinstance(stored, Record) else Record(stored)
            item = Item(self, number, record, deadline)
            if number in self._arrivals:
                arrive(self, item, self._arrivals[number])
            else:
                self._make(item, stored)
            self.enter(item)

    def remembered(self, requests: Sequence[Sequence[Any]]) -> None:
        """Produces that were carried out. Those with new items are judged by these; here are those without any."""
        for digest, _, new_items, _ in requests:
            if new_items:
                continue
            found = False
            for ask in list(self.queue.flying.values()):
                batch = ask.batch
                if batch is None or not isinstance(ask.request, Produce) or ask.request.request != digest:
                    continue
                if batch.on_conflict != "ignore":
                    continue
                if all(self.conflicts(batch, index, ask.at) for index in range(len(batch.records))):
                    found = True
                    self._makes.setdefault(batch, Make(self.at, self, list(batch.asks)))
            if not found:
                self.broken("a produce was carried out without adding anything, and nothing stood in its way")

    def due(self, numbers: Sequence[int]) -> None:
        """By its time, in that order, or because somebody asked for it."""
        items = [self.item(number) for number in numbers]
        order = [(item.due, item.number) for item in items]
        early = any(due > self.at for due, _ in order) or order != sorted(order)
        asks = [ask for ask in self.queue.of_kind(MAKE_READY) if {item.id for item in items} <= set(ask.ids)]
        if early and not asks:
            self.broken(f"{items} became ready at {self.at}, due in the order {order}")
        for ask in asks if early else ():
            ask.stirred = True
        for item in items:
            if item.state not in (SCHEDULED, RETRYING):
                self.broken(f"{item} became ready at {self.at}")
            self.to(item, READY)

    def died(
        self, reason: int, state: str, runs: Sequence[int], fate: int, target: str | None, error: str | None
    ) -> None:
        why = list(DeadReason)[reason]
        settings = self.settings
        expected = MOVE if settings.dead_queue is not None else DELETE if settings.dead == "delete" else KEEP
        if fate != expected or target != settings.dead_queue:
            self.broken(f"the dead go to {target} ({fate}), not to {settings.dead_queue} ({expected})")
        for number in numbers_of(runs):
            item = self.item(number)
            if item.state != state or not self._may_die(item, why, error):
                self.broken(f"{item} died ({why}) at {self.at}: {item.attempts} attempts, {item.expire_deadline}")
            if item.lease is not None:
                end_lease(item.lease, "dead")
            if error is not None:
                item.error = error
            item.reason = str(why)
            item.ended_as = DEAD
            self.to(item, GONE if fate == DELETE else DEAD)
            if target is not None:
                send(self, item, target)

    def cancelled(self, state: str, runs: Sequence[int], keep_until: int) -> None:
        kept = self.settings.completed_retention_ms
        if keep_until != (self.at + kept if kept else 0):
            self.broken(f"cancelled at {self.at}, kept until {keep_until}")
        for number in numbers_of(runs):
            item = self.item(number)
            if item.state != state:
                self.broken(f"{item} was cancelled as {state}")
            if item.lease is not None:
                grant = item.lease
                over = has_left(grant) or let_go(self, grant) or askers(self, grant, RETRY)
                if not item.cancel_asked or not over:
                    self.broken(f"{item} was cancelled in the middle of its lease")
                grant.takers = [*leavers(self, grant), *askers(self, grant, RETRY)]
                finish(self, grant, "cancelled", CANCELLED, keep_until)
            else:
                self._asked_to_cancel(item)
                self.keep(item, CANCELLED, keep_until)

    def cancel_marked(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            item = held(self, number).item
            self._asked_to_cancel(item)
            item.cancel_asked = True

    def cleared(self, state: str, runs: Sequence[int]) -> None:
        asks = [ask for ask in self.queue.of_kind(CLEAR) if state in ask.states]
        if not asks:
            self.broken(f"nobody asked to clear what is {state}")
        for number in numbers_of(runs):
            item = self.item(number)
            if item.state != state or item.moving_to is not None:
                self.broken(f"{item} was cleared as {state}")
            if item.lease is not None:
                end_lease(item.lease, "cleared")
            self.to(item, GONE)
            for ask in asks:
                ask.cleared[state] = ask.cleared.get(state, 0) + 1
                ask.stirred = True

    def replaced(self, state: str, number: int) -> None:
        item = self.item(number)
        if item.state not in WAITING:
            self.broken(f"{item} was replaced")
        self.to(item, GONE)
        self._replaced.append(item)

    def purged(self, runs: Sequence[int]) -> None:
        for number in numbers_of(runs):
            item = self.item(number)
            if item.state not in (COMPLETED, CANCELLED) or item.kept_until > self.at:
                self.broken(f"{item} was purged at {self.at}, to be kept until {item.kept_until}")
            self.to(item, GONE)

    # ---- what a new item must be --------------------------------------------------------------------------

    def body(self, first: int, count: int) -> list[bytes | Record]:
        """The records that this commit stores under these numbers."""
        records = self._bodies[first]
        if len(records) != count:
            self.broken(f"{count} items with {len(records)} records")
        whole = [record for record in records if record is not None]
        if len(whole) < len(records):
            self.broken(f"an item from {first} on has no record")
        return whole

    def enter(self, item: Item) -> None:
        record = item.record
        for name in names_of(record):
            self.queue.holders.setdefault(name, []).append(item)
        self.queue.by_id.setdefault(item.id, []).append(item)
        self.items[item.number] = item
        if record.enqueue_at:
            item.due = record.enqueue_at
            self.to(item, SCHEDULED)
            self.alarm(item.due, item)
        else:
            self.to(item, READY)
        self.alarm_expiry(item)

    def _make(self, item: Item, stored: bytes | Record) -> None:
        batch, index = self.queue.origins[item.payload]
        if stored != batch.records[index]:
            self.broken(f"{item} is not what was produced: {stored!r}, {batch.records[index]!r}")
        if self.read_only and batch.on_conflict != "replace":
            self.broken(f"{item} was produced into a read-only partition")
        make = self._makes.get(batch)
        if make is None:
            make = self._makes[batch] = Make(self.at, self, list(batch.asks))
        if make.items and max(make.items) >= index:
            self.broken(f"{item} is out of the order of its request")
        make.items[index] = item
        for name in names_of(item.record):
            holder = self.queue.taken(name, self.at + 1, self.at)
            if holder is not None and (holder.ended_at is None or batch.on_conflict != "replace"):
                self.broken(f"{item} has the {name[0]} {name[1]!r} of {holder}")

    def _judge_make(self, batch: Batch, make: Make) -> None:
        """All of a request or nothing, and once."""
        if not make.takers:
            self.broken(f"nobody asks any more for {list(make.items.values())}")
        if batch.request_id is not None:
            made = self.queue.requests.setdefault(batch.request_id, [])
            window, elapsed = self.queue.window, self.queue.model.elapsed
            recent = [one for _, one in made if abs(self.at - one.at) < window and elapsed - one.elapsed < window]
            earlier = [one.at for one in recent if one.items]
            if make.items and earlier:
                self.broken(f"request {batch.request_id} was carried out twice, at {earlier} and {self.at}")
            made.append((batch, make))
        elif batch.makes:
            self.broken(f"a request was carried out twice: {list(make.items.values())}")
        batch.makes.append(make)
        since = min(ask.at for ask in make.takers)
        for index in range(len(batch.records)):
            if index not in make.items and not self.conflicts(batch, index, since):
                self.broken(f"item {index} of a request is missing beside {list(make.items.values())}")

    def conflicts(self, batch: Batch, index: int, since: int) -> bool:
        """Whether this item of a request may be a duplicate."""
        names = batch.names(index)
        earlier = {name for place in range(index) for name in batch.names(place)}
        return any(name in earlier or self.queue.taken(name, since, self.queue.model.now) for name in names)

    # ---- what the rules share -----------------------------------------------------------------------------

    def broken(self, what: str) -> NoReturn:
        raise Violation(f"{self.queue.name}/{self.index}, turn {self.turn}: {what}")

    def item(self, number: int) -> Item:
        item = self.items.get(number)
        if item is None:
            self.broken(f"item {number} has ended, or never was, and something is done with it")
        return item

    def take_head(self, number: int, how: str) -> Item:
        """An item that leaves the line must stand at its head, and be in time."""
        item = self.item(number)
        if item.state != READY:
            self.broken(f"{item} was {how}")
        head = next(iter(self.ready[min(self.ready)].values()))
        if item is not head:
            self.broken(f"{item} was {how} before {head}, which stands before it")
        if item.expire_deadline <= self.at:
            self.broken(f"{item} was {how} at {self.at}, after it expired at {item.expire_deadline}")
        return item

    def to_front(self, front: dict[int, dict[int, Item]]) -> None:
        """Ready items, by priority: to the head, in this order."""
        for priority, items in front.items():
            others = {n: item for n, item in self.ready[priority].items() if n not in items}
            self.ready[priority] = items | others

    def in_time(self, ask: Ask, deadline: int) -> bool:
        return max(ask.at, self.mark) < deadline

    def due_fits(self, due: int, asked: int | None, deferred: bool, attempts: int) -> bool:
        if asked is not None or deferred:
            return due == (asked if asked is not None and asked > self.at else 0)
        policy = self.settings.backoff
        wait = min(policy.cap_ms, policy.base**attempts * 1000)
        if not wait:
            return due == 0
        low, high = wait * (1 - policy.jitter), min(policy.cap_ms, wait * (1 + policy.jitter))
        return low - 1 <= due - self.at <= high + 1

    def _limit(self, item: Item) -> int:
        own = item.record.max_attempts
        return own if own >= 0 else self.settings.max_attempts

    def worn_out(self, item: Item) -> bool:
        limit = self._limit(item)
        return limit > 0 and item.attempts >= limit

    def _may_die(self, item: Item, why: DeadReason, error: str | None) -> bool:
        if item.state == CLAIMED:
            return claimed_died(self, item, why, error)
        if item.state != LEASED or item.lease is None:
            expired = why == DeadReason.EXPIRED and error is None and item.expire_deadline <= self.at
            return item.state in WAITING and (expired or self._buried(item, why, error))
        if item.cancel_asked:
            return False
        grant = item.lease
        retries = [
            (ask, retry)
            for ask in askers(self, grant, RETRY)
            for retry, of in zip(ask.retries, ask.grants, strict=True)
            if of is grant and retry.error == error
        ]
        if why == DeadReason.REJECTED:
            grant.takers = [ask for ask, retry in retries if retry.dead]
            return bool(grant.takers)
        if why == DeadReason.MAX_ATTEMPTS:
            retries = [(ask, retry) for ask, retry in retries if not retry.deferred]
            if not self.worn_out(item):
                return False
        elif item.expire_deadline > self.at:
            return False
        over = error is None and let_go(self, grant)
        grant.takers += [ask for ask, _ in retries]
        return over or bool(retries)

    def _buried(self, item: Item, why: DeadReason, error: str | None) -> bool:
        asks = [ask for ask in self.queue.of_kind(BURY) if item.id in ask.ids]
        asks = [ask for ask in asks if (ask.request.reason, ask.request.text) == (why, error)]  # type: ignore[attr-defined]
        for ask in asks:
            ask.stirred = True
        return bool(asks)

    def _asked_to_cancel(self, item: Item) -> None:
        asks = [ask for ask in self.queue.of_kind(CANCEL) if item.id in ask.ids]
        if not asks:
            self.broken(f"nobody asked to cancel {item}")
        for ask in asks:
            ask.stirred = True

    def keep(self, item: Item, state: str, keep_until: int) -> None:
        item.ended_as = state
        if not keep_until:
            self.to(item, GONE)
            return
        item.kept_until = keep_until
        item.ended_at = self.at
        self.to(item, state)
        self.alarm(keep_until + EXPIRY_SLACK_MS, item)

    def to(self, item: Item, state: str) -> None:
        old = item.state
        if old == READY:
            line = self.ready[item.priority]
            del line[item.number]
            if not line:
                del self.ready[item.priority]
        if old:
            self.counts[old] -= 1
        item.state = state
        item.changed_at = self.at
        item.changes.append((self.queue.model.step, state))
        if state == GONE:
            del self.items[item.number]
            if item.ended_at is None:
                item.ended_at = self.at
            return
        self.counts[state] += 1
        if state == READY:
            self.ready.setdefault(item.priority, {})[item.number] = item

    def alarm_expiry(self, item: Item) -> None:
        self.alarm(item.expire_deadline + EXPIRY_SLACK_MS, item)

    def alarm(self, at: int, item: Item) -> None:
        heappush(self.alarms, (at, next(self._order), item))


def _bounds(item: Item) -> tuple[int, ...]:
    """By when something must have been done to it."""
    if item.state == LEASED:
        return () if item.lease is None else (item.lease.deadline,)
    if item.state in (COMPLETED, CANCELLED):
        return (item.kept_until + EXPIRY_SLACK_MS,)
    expiry = item.expire_deadline + EXPIRY_SLACK_MS
    if item.state in (SCHEDULED, RETRYING):
        return item.due, expiry
    return (expiry,) if item.state in WAITING else ()


JUDGES: dict[int, Callable[..., None]] = {
    Event.PRODUCED: Partition.produced,
    Event.DUE: Partition.due,
    Event.DIED: Partition.died,
    Event.CANCELLED: Partition.cancelled,
    Event.CANCEL_ASKED: Partition.cancel_marked,
    Event.CLEARED: Partition.cleared,
    Event.REPLACED: Partition.replaced,
    Event.PURGED: Partition.purged,
    Event.REMEMBERED: Partition.remembered,
    **LEASE_JUDGES,
    **TRANSFER_JUDGES,
    **CLAIM_JUDGES,
    **STAGE_JUDGES,
    **REBALANCE_JUDGES,
}
