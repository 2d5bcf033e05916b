"""What a commit may do to the items of a partition: its promises, one rule an event.

Each method named after an event judges it and then changes the items. Nothing here is shared with the queue but the
journal's format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from millpond.history.format import Event, Record, Source, decode_entry, decode_records, numbers_of
from millpond.model import DeadReason, QueueDefinition, QueueSettings
from millpond.queue.requests import Produce
from millpond.store.base import Turn
from tests.sim.asks import (
    BURY,
    CANCEL,
    CLEAR,
    COMPLETE,
    EXTEND,
    MAKE_READY,
    REDRIVE,
    RETRY,
    STATE,
    Ask,
    Batch,
    names_of,
)
from tests.sim.claim_rules import CLAIM_JUDGES, claimed_died
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
    Transfer,
    Violation,
)  # fmt: skip
from tests.sim.rebalance_rules import REBALANCE_JUDGES, fences_of
from tests.sim.stage_rules import STAGE_JUDGES, judge_staged

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
        self._reported = True
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
        self._makes, self._replaced, self._reported, self.fresh_chunks = {}, [], reported, {}
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
                self._arrive(item, self._arrivals[number])
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

    def leased(self, client: str, deadline: int, runs: Sequence[int]) -> None:
        holder = self.queue.clients[client]
        if not holder.asks:
            self.broken(f"leased to {client}, who does not wait")
        if self.paused:
            self.broken("leased while the queue is paused")
        if not any(deadline == self.at + self._timeout(ask) for ask in holder.asks):
            self.broken(f"a lease for {client} made at {self.at} ends at {deadline}")
        for number in numbers_of(runs):
            item = self.take_head(number, "leased")
            token = self.turn + self.fence
            if token <= item.token_floor:
                self.broken(f"fencing token {token} of {item} is not above {item.token_floor}")
            item.token_floor = token
            item.attempts += 1
            item.deliveries += 1
            item.lease = grant = Grant(item, self.turn, holder, deadline)
            grant.fencing_token = token
            grant.in_doubt = not self._reported
            self.to(item, LEASED)
            self.alarm(deadline, item)
            holder.granted.append(grant)
        granted = sum(not (one.over or one.in_doubt) for one in holder.granted)
        if not holder.left and granted > sum(ask.wanted for ask in holder.asks):
            self.broken(f"{client} got more than was asked for")

    def completed(self, client: str, pairs: Sequence[int], keep_until: int, with_result: int) -> None:
        kept = self.settings.completed_retention_ms
        if keep_until != (self.at + kept if kept else 0):
            self.broken(f"completed at {self.at}, kept until {keep_until}")
        for run, grant_number in zip(pairs[::2], pairs[1::2], strict=True):
            for number in numbers_of([run]):
                grant = self._held(number)
                if grant.number != grant_number:
                    self.broken(f"{grant.item} was completed with token {grant_number}, but it is at {grant.number}")
                grant.takers = self._askers(grant, COMPLETE)
                if not grant.takers:
                    self.broken(f"nobody asked in time to complete {grant.item}")
                grant.completed_at = self.at
                grant.item.version, grant.item.docs = 0, [None]
                self._finish(grant, "completed", COMPLETED, keep_until)

    def retried(self, client: str, number: int, due: int, deferred: bool, error: str | None) -> None:
        grant = self._held(number)
        item = grant.item
        grant.takers = [
            ask
            for ask in self._askers(grant, RETRY)
            for retry, of in zip(ask.retries, ask.grants, strict=True)
            if of is grant and (retry.deferred, retry.error, retry.dead) == (deferred, error, False)
            and self.due_fits(due, retry.due, deferred, item.attempts)
        ]  # fmt: skip
        if not grant.takers:
            self.broken(f"nobody asked to retry {item} at {due}; it is {self.at}")
        if item.cancel_asked:
            self.broken(f"{item} was retried although it is cancelled")
        if not deferred and self.worn_out(item):
            self.broken(f"{item} was retried after its last attempt, {item.attempts}")
        if deferred:
            item.attempts -= 1
        if error is not None:
            item.error = error
        self._end_lease(grant, "retried")
        item.due = due
        self.to(item, READY if not due else SCHEDULED if deferred else RETRYING)
        if due:
            self.alarm(due, item)

    def lease_expired(self, runs: Sequence[int]) -> None:
        for number in numbers_of(runs):
            grant = self._held(number)
            item = grant.item
            if item.cancel_asked or self.worn_out(item):
                self.broken(f"{item} came back after its last lease")
            if not self._let_go(grant):
                self.broken(f"the lease of {item} was taken away at {self.at}, before {grant.deadline}")
            self._end_lease(grant, "expired")
            self.to(item, READY)

    def released(self, runs: Sequence[int]) -> None:
        """Back to the head, the attempt given back, because its holder never saw it."""
        front: dict[int, dict[int, Item]] = {}
        for number in numbers_of(runs):
            grant = self._held(number)
            if not self._has_left(grant):
                self.broken(f"{grant.item} was taken from {grant.client.name}, who is still there")
            grant.item.attempts -= 1
            self._end_lease(grant, "released")
            self.to(grant.item, READY)
            front.setdefault(grant.item.priority, {})[number] = grant.item
        self.to_front(front)

    def extended(self, deadline: int, runs: Sequence[int]) -> None:
        for number in numbers_of(runs):
            grant = self._held(number)
            timeout = deadline - self.at
            asks = [ask for ask in self._askers(grant, EXTEND) if self._timeout(ask) == timeout]
            if not asks or timeout <= 0:
                self.broken(f"nobody asked to extend the lease of {grant.item} by {timeout}")
            for ask in asks:
                ask.extended[grant] = deadline
                ask.stirred = True
            grant.deadline = deadline
            self.alarm(deadline, grant.item)

    def state_written(self, number: int, version: int) -> None:
        grant = self._held(number)
        item = grant.item
        asks = [ask for ask in self._askers(grant, STATE) if ask.version == item.version]
        if not asks or version != item.version + 1:
            self.broken(f"nobody asked to write version {version} over {item.version} of {item}")
        item.version = version
        item.docs = [ask.document for ask in asks]
        for ask in asks:
            ask.stirred = True

    def due(self, numbers: Sequence[int]) -> None:
        """By its time, in that order, or because somebody asked for it."""
        items = [self._item(number) for number in numbers]
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
            item = self._item(number)
            if item.state != state or not self._may_die(item, why, error):
                self.broken(f"{item} died ({why}) at {self.at}: {item.attempts} attempts, {item.expire_deadline}")
            if item.lease is not None:
                self._end_lease(item.lease, "dead")
            if error is not None:
                item.error = error
            item.reason = str(why)
            item.ended_as = DEAD
            self.to(item, GONE if fate == DELETE else DEAD)
            if target is not None:
                self._send(item, target)

    def cancelled(self, state: str, runs: Sequence[int], keep_until: int) -> None:
        kept = self.settings.completed_retention_ms
        if keep_until != (self.at + kept if kept else 0):
            self.broken(f"cancelled at {self.at}, kept until {keep_until}")
        for number in numbers_of(runs):
            item = self._item(number)
            if item.state != state:
                self.broken(f"{item} was cancelled as {state}")
            if item.lease is not None:
                grant = item.lease
                over = self._has_left(grant) or self._let_go(grant) or self._askers(grant, RETRY)
                if not item.cancel_asked or not over:
                    self.broken(f"{item} was cancelled in the middle of its lease")
                grant.takers = [*self._leavers(grant), *self._askers(grant, RETRY)]
                self._finish(grant, "cancelled", CANCELLED, keep_until)
            else:
                self._asked_to_cancel(item)
                self.keep(item, CANCELLED, keep_until)

    def cancel_marked(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            item = self._held(number).item
            self._asked_to_cancel(item)
            item.cancel_asked = True

    def cleared(self, state: str, runs: Sequence[int]) -> None:
        asks = [ask for ask in self.queue.of_kind(CLEAR) if state in ask.states]
        if not asks:
            self.broken(f"nobody asked to clear what is {state}")
        for number in numbers_of(runs):
            item = self._item(number)
            if item.state != state or item.moving_to is not None or state == LEASED:
                self.broken(f"{item} was cleared as {state}")
            self.to(item, GONE)
            for ask in asks:
                ask.cleared[state] = ask.cleared.get(state, 0) + 1
                ask.stirred = True

    def replaced(self, state: str, number: int) -> None:
        item = self._item(number)
        if item.state not in WAITING:
            self.broken(f"{item} was replaced")
        self.to(item, GONE)
        self._replaced.append(item)

    def redriven(self, numbers: Sequence[int], deadline: int) -> None:
        asks = self._redrivers()
        for number in numbers:
            item = self._item(number)
            if item.state != DEAD or item.moving_to is not None:
                self.broken(f"{item} was redriven")
            self._redrive(item, asks)
            item.attempts = 0
            item.expire_deadline = deadline
            item.reason = item.record.source.reason if item.record.source else None
            self.to(item, READY)
            self.alarm_expiry(item)

    def purged(self, runs: Sequence[int]) -> None:
        for number in numbers_of(runs):
            item = self._item(number)
            if item.state not in (COMPLETED, CANCELLED) or item.kept_until > self.at:
                self.broken(f"{item} was purged at {self.at}, to be kept until {item.kept_until}")
            self.to(item, GONE)

    def moving(self, state: str, runs: Sequence[int], target: str) -> None:
        asks = [ask for ask in self._redrivers() if ask.letters]
        for number in numbers_of(runs):
            item = self._item(number)
            source = item.record.source
            if item.state != state or item.state not in (*WAITING, DEAD):
                self.broken(f"{item} was redriven as {state}")
            if item.moving_to is not None or source is None or source.queue != target:
                self.broken(f"{item} was sent to {target} as {state}")
            self._redrive(item, asks)
            item.reason = source.reason
            item.returns = True
            self.to(item, DEAD)
            self._send(item, target)

    def moved(self, numbers: Sequence[int], names: Sequence[bytes], target: str) -> None:
        for number, name in zip(numbers, names, strict=True):
            item = self._item(number)
            transfer = self.queue.model.queues[target].transfers.get(name)
            if transfer is None or transfer.source is not item:
                self.broken(f"{item} was let go before {target} had it")
            transfer.moved = True
            self.queue.model.on_their_way[item.payload].remove(item)
            self.to(item, GONE)

    def kept(self, numbers: Sequence[int], reason: int) -> None:
        self.broken("a move was given up although its target exists")

    def forgotten(self, names: Sequence[bytes]) -> None:
        """The sender's last word; a target that forgot, or never knew, is as good."""

    def forgot(self, names: Sequence[bytes]) -> None:
        for name in names:
            if not self.queue.transfers[name].moved:
                self.broken(f"{self.queue.transfers[name].item} may come again: its transfer was forgotten too early")
            self.queue.transfers[name].forgot = True

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

    def _arrive(self, item: Item, name: bytes) -> None:
        """An item from another queue: all that it was, its id where that is free, and never twice."""
        queue = self.queue
        if name in queue.transfers:
            self.broken(f"{item} arrived twice, first as {queue.transfers[name].item}")
        on_their_way = queue.model.on_their_way.get(item.payload, ())
        expected = [one for one in on_their_way if one.moving_to == queue.name and not one.arrived]
        source = next((one for one in expected if _is_from(item, one)), None)
        if source is None:
            self.broken(f"{item} arrived from nowhere, or for the second time")
        source.arrived = True
        queue.transfers[name] = Transfer(source, item)
        source.correlation_id = source.correlation_id or item.record.correlation_id
        self._judge_arrival(item, source)
        item.version, item.docs, item.error = source.version, source.docs, source.error
        item.token_floor = source.token_floor
        item.reason = item.record.source.reason if item.record.source else None
        self.has_letters |= item.record.source is not None and item.record.source.letter

    def _judge_arrival(self, item: Item, source: Item) -> None:
        old, new = source.record, item.record
        same = ("payload", "kind", "encoding", "reference", "priority")
        if any(getattr(old, field) != getattr(new, field) for field in same):
            self.broken(f"{item} is not what {source} was")
        if new.correlation_id != source.correlation_id:
            self.broken(f"{item} has the correlation id {new.correlation_id}, {source} had {source.correlation_id}")
        home = old.source if source.returns else None
        if home is None:
            wanted = Source(
                source.partition.queue.name, source.id, source.attempts, source.reason, old.key, letter=True
            )
            wanted.max_attempts = old.max_attempts
            if new.source != wanted or new.id is not None or new.key is not None:
                self.broken(f"{item} came with {new.source}, not {wanted}")
            return
        self._judge_return(item, home)

    def _judge_return(self, item: Item, home: Source) -> None:
        record = item.record
        if record.id == home.id:
            if any(one.ended_at is None and not one.arrived for one in self.queue.by_id.get(home.id, ())):
                self.broken(f"{item} came back under an id that is taken")
        else:
            if not self._taken(self.queue.by_id.get(home.id, ())):
                self.broken(f"{item} came back under another id although {home.id} is free")
            if record.id is not None or record.source is None or record.source.id != home.id:
                self.broken(f"{item} does not tell that it was {home.id}")
        if home.key is None:
            return
        holders = self.queue.holders.get(("key", home.key), ())
        if record.key is not None and (record.key != home.key or any(one.ended_at is None for one in holders)):
            self.broken(f"{item} came back with the key {record.key!r}")
        if record.key is None and not self._taken(holders):
            self.broken(f"{item} came back without its key {home.key!r}")

    def _taken(self, holders: Sequence[Item]) -> bool:
        """Or by itself, as long as the queue it left has not let go of it. What has moved on guards no names."""
        window = self.queue.window
        return any(
            one.was_there(self.at) or (not one.arrived and one.ended_at is not None and one.ended_at + window > self.at)
            for one in holders
        )

    # ---- what the rules share -----------------------------------------------------------------------------

    def broken(self, what: str) -> NoReturn:
        raise Violation(f"{self.queue.name}/{self.index}, turn {self.turn}: {what}")

    def _item(self, number: int) -> Item:
        item = self.items.get(number)
        if item is None:
            self.broken(f"item {number} has ended, or never was, and something is done with it")
        return item

    def take_head(self, number: int, how: str) -> Item:
        """An item that leaves the line must stand at its head, and be in time."""
        item = self._item(number)
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

    def _held(self, number: int) -> Grant:
        item = self._item(number)
        if item.state != LEASED or item.lease is None:
            self.broken(f"{item} is not leased")
        return item.lease

    def _askers(self, grant: Grant, kind: str) -> list[Ask]:
        """Who asked for this with the delivery's token while its lease was alive."""
        asks = [ask for ask in grant.asks if ask.kind == kind and ask.waits_for(grant)]
        return [ask for ask in asks if self.in_time(ask, grant.deadline)]

    def in_time(self, ask: Ask, deadline: int) -> bool:
        return max(ask.at, self.mark) < deadline

    def _timeout(self, ask: Ask) -> int:
        return self.settings.lease_timeout_ms if ask.timeout is None else ask.timeout

    def _let_go(self, grant: Grant) -> bool:
        """Whether the lease is over: by time, unless its holder spoke in time, or because its holder said so."""
        grant.takers = self._leavers(grant)
        if grant.deadline <= self.at:
            late = [ask for ask in grant.asks if self.in_time(ask, grant.deadline) and ask.waits_for(grant)]
            late = [ask for ask in late if ask.kind != STATE]
            if late and not any(ask.kind in (EXTEND, RETRY) for ask in late):
                self.broken(f"the lease of {grant.item} was taken away although {late} came in time")
            return True
        return bool(grant.takers)

    def _leavers(self, grant: Grant) -> list[Ask]:
        """Who gave it back by an extend of 0."""
        return [ask for ask in self._askers(grant, EXTEND) if self._timeout(ask) == 0]

    def _has_left(self, grant: Grant) -> bool:
        """Whether the caller for whom this delivery was made never saw it."""
        return grant.given_up or (grant.token is None and (grant.client.left or grant.in_doubt))

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
            for ask in self._askers(grant, RETRY)
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
        over = error is None and self._let_go(grant)
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

    def _redrivers(self) -> list[Ask]:
        return [ask for ask in self.queue.of_kind(REDRIVE) if not ask.dry_run]

    def _redrive(self, item: Item, asks: list[Ask]) -> None:
        asks = [ask for ask in asks if fits(item, ask)]
        if not asks:
            self.broken(f"nobody asked to redrive {item}")
        for ask in asks:
            ask.moved += 1
            ask.stirred = True

    def _send(self, item: Item, target: str) -> None:
        item.moving_to = target
        self.queue.model.on_their_way.setdefault(item.payload, []).append(item)

    def _end_lease(self, grant: Grant, how: str) -> None:
        grant.over = how
        grant.item.lease = None

    def _finish(self, grant: Grant, how: str, state: str, keep_until: int) -> None:
        self._end_lease(grant, how)
        self.keep(grant.item, state, keep_until)

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


JUDGES: dict[int, Callable[..., None]] = {
    Event.PRODUCED: Partition.produced,
    Event.LEASED: Partition.leased,
    Event.COMPLETED: Partition.completed,
    Event.RETRIED: Partition.retried,
    Event.LEASE_EXPIRED: Partition.lease_expired,
    Event.RELEASED: Partition.released,
    Event.EXTENDED: Partition.extended,
    Event.STATE_WRITTEN: Partition.state_written,
    Event.DUE: Partition.due,
    Event.DIED: Partition.died,
    Event.CANCELLED: Partition.cancelled,
    Event.CANCEL_ASKED: Partition.cancel_marked,
    Event.CLEARED: Partition.cleared,
    Event.REPLACED: Partition.replaced,
    Event.REDRIVEN: Partition.redriven,
    Event.PURGED: Partition.purged,
    Event.MOVING: Partition.moving,
    Event.MOVED: Partition.moved,
    Event.FORGOTTEN: Partition.forgotten,
    Event.FORGOT: Partition.forgot,
    Event.KEPT: Partition.kept,
    Event.REMEMBERED: Partition.remembered,
    **CLAIM_JUDGES,
    **STAGE_JUDGES,
    **REBALANCE_JUDGES,
}


def _is_from(item: Item, source: Item) -> bool:
    """Whether an arrived item is that one: a letter names it, and what comes back has its first id or tells of it."""
    letter, home = item.record.source, source.record.source
    if source.correlation_id not in (None, item.record.correlation_id):
        return False
    if source.returns:
        assert home is not None
        return home.id in (item.record.id, letter and letter.id)
    return letter is not None and letter.id == source.id


def fits(item: Item, ask: Ask) -> bool:
    """Whether a redrive means this item. A letter may have died a second time since it was chosen."""
    if ask.ids and item.id not in ask.ids:
        return False
    chosen = ask.chosen
    source = item.record.source
    return chosen is None or (
        (chosen.source_queue is None or (source is not None and source.queue == chosen.source_queue))
        and (chosen.dead_reason is None or chosen.dead_reason in (item.reason, source and source.reason))
        and (chosen.kind is None or item.record.kind == chosen.kind)
        and (chosen.error_contains is None or chosen.error_contains in (item.error or ""))
    )
