"""Random requests of every kind, from producers and consumers that remember what they were told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from millpond.history.format import Payloads, Record, are_plain, encode_state
from millpond.model import LeasedItem, OnConflict, RedriveFilter, State
from millpond.queue.dedup import request_digest
from millpond.queue.requests import (
    Cancel,
    Clear,
    Complete,
    Extend,
    GetItem,
    GetStats,
    Lease,
    ListItems,
    MakeReady,
    Produce,
    Redrive,
    Request,
    RetryItem,
    RetryItems,
    WriteState,
)
from tests.sim import asks
from tests.sim.asks import Ask, Batch, Client
from tests.sim.batch_callers import WEIGHTS as BATCH_WEIGHTS
from tests.sim.batch_callers import BatchCallers, copy
from tests.sim.model import Model
from tests.sim.nouns import Grant

MANGLED = "not-a-token"
KEYS = 12  # so few that they meet
POPULATION = 120  # items above which less is produced
REPEATS = 20  # batches and old tokens remembered, to be sent again

# How often each kind is asked for; the weights were chosen so that all pairs with faults are met.
WEIGHTS = {
    asks.PRODUCE: 14, asks.PRODUCE_NAMED: 10, asks.LEASE: 14, asks.LEASE_WAIT: 10, asks.COMPLETE: 18, asks.RETRY: 9,
    asks.EXTEND: 6, asks.STATE: 6, asks.CANCEL: 3, asks.CLEAR: 0.7, asks.GET: 3, asks.LIST: 1.5, asks.STATS: 3,
    asks.REDRIVE: 2, asks.GET_WAIT: 5, asks.MAKE_READY: 2,
}  # fmt: skip


class Consumers:
    """All the callers of one queue."""

    def __init__(self, queue: str, model: Model, rng: Random) -> None:
        self.queue = queue
        self.model = model
        self.rng = rng
        self.held: list[Grant] = []
        self.old: deque[Grant] = deque(maxlen=REPEATS)
        self.batches: deque[Batch] = deque(maxlen=REPEATS)
        self.replies: deque[tuple[Sequence[LeasedItem], list[Grant]]] = deque(maxlen=REPEATS)
        self.now = 0
        self._numbers = 0
        self._makers: dict[str, Callable[[], Ask]] = {
            asks.PRODUCE: self._produce,
            asks.PRODUCE_NAMED: self._produce_named,
            asks.LEASE: self._lease,
            asks.LEASE_WAIT: self._lease_wait,
            asks.COMPLETE: self._complete,
            asks.RETRY: self._retry,
            asks.EXTEND: self._extend,
            asks.STATE: self._state,
            asks.CANCEL: self._cancel,
            asks.CLEAR: self._clear,
            asks.GET: self._get,
            asks.GET_WAIT: self._get_wait,
            asks.MAKE_READY: self._make_ready,
            asks.LIST: self._list,
            asks.STATS: self._stats,
            asks.REDRIVE: self._redrive,
        }
        self.batch_callers = BatchCallers(self)
        self._makers |= self.batch_callers.makers
        weights = WEIGHTS | BATCH_WEIGHTS
        self._kinds = list(weights)
        total = 0.0
        self._cumulative = [total := total + weight for weight in weights.values()]

    def next(self, now: int) -> Ask:
        self.now = now
        kind = self.rng.choices(self._kinds, cum_weights=self._cumulative)[0]
        if kind in (asks.PRODUCE, asks.PRODUCE_NAMED, asks.STAGE) and self._population() > POPULATION:
            kind = asks.LEASE
        return self._makers[kind]()

    def took(self, reply: Sequence[LeasedItem], grants: list[Grant]) -> None:
        """Deliveries that were handed out."""
        self.held += grants
        self.replies.append((reply, list(grants)))

    def completing(self, grants: list[Grant]) -> Ask:
        return self._with_grants(asks.COMPLETE, Complete([self._token(grant) for grant in grants]), list(grants))

    def review(self) -> list[Ask]:
        """Requests that tell all there is to know."""
        everything = self.ask(asks.LIST, ListItems(None, None, None, (0, 0), 1_000))
        return [self._stats(), everything, self.batch_callers.listing()]

    def ask(self, kind: str, request: Request) -> Ask:
        self._numbers += 1
        return Ask(self._numbers, kind, self.queue, request)

    def _population(self) -> int:
        return sum(len(one.items) for one in self.model.queues[self.queue].partitions.values())

    # ---- produce ------------------------------------------------------------------------------------------

    def _produce(self) -> Ask:
        rng = self.rng
        if self.batches and rng.random() < 0.15:
            return self._again(rng.choice(self.batches))
        records: list[bytes | Record] = []
        for _ in range(self.few(6)):
            records.append(self.payload() if rng.random() < 0.7 else self._record())
        return self._batch(records, "ignore")

    def _produce_named(self) -> Ask:
        rng = self.rng
        records: list[bytes | Record] = []
        for _ in range(self.few(3)):
            records.append(self.named_record(0.7, 0.4))
        on_conflict: OnConflict = rng.choice(("ignore", "ignore", "reject", "replace"))
        return self._batch(records, on_conflict)

    def named_record(self, with_key: float, with_id: float) -> Record:
        """With a key and an id of its own, with these probabilities."""
        rng, record = self.rng, self._record()
        if rng.random() < with_key:
            record.key = f"k{rng.randrange(KEYS)}"
        if rng.random() < with_id:
            record.id = f"i{rng.randrange(KEYS)}"
        return record

    def payload(self) -> bytes:
        self._numbers += 1
        return f"{self.queue}{self._numbers}".encode()

    def _record(self) -> Record:
        rng = self.rng
        record = Record(self.payload())
        if rng.random() < 0.3:
            record.priority = rng.choice((-1, 0, 1, 1, 5))
        if rng.random() < 0.2:
            record.enqueue_at = self.now + rng.choice((1, 500, 2_000, 8_000))
        if rng.random() < 0.2:
            record.max_attempts = rng.choice((0, 1, 2, 3))
        if rng.random() < 0.1:
            record.expire_deadline = self.now + rng.choice((300, 3_000, 20_000))
        if rng.random() < 0.2:
            record.correlation_id = f"corr {self._numbers}"
        if rng.random() < 0.2:
            record.kind, record.encoding, record.reference = rng.choice(("red", "blue")), "text", "ref"
        return record

    def _batch(self, records: list[bytes | Record], on_conflict: OnConflict) -> Ask:
        request_id = None
        if self.rng.random() < 0.5:
            self._numbers += 1
            request_id = f"r{self._numbers}"
            if self.rng.random() < 0.1 and self.batches:
                request_id = self.rng.choice(self.batches).request_id or request_id  # another request of that name
        batch = Batch(records, on_conflict, request_id)
        origins = self.model.queues[self.queue].origins
        for index, record in enumerate(records):
            origins[record.payload if isinstance(record, Record) else record] = (batch, index)
        if request_id is not None:
            self.batches.append(batch)
        return self._again(batch)

    def _again(self, batch: Batch) -> Ask:
        named = any(isinstance(record, Record) and (record.id or record.key) for record in batch.records)
        copies = [copy(record) for record in batch.records]
        records = Payloads(copies) if are_plain(copies) else copies
        name = None if batch.request_id is None else request_digest(batch.request_id)
        request = Produce(records, 30 * len(records), batch.on_conflict, name, named)
        ask = self.ask(asks.PRODUCE_NAMED if named else asks.PRODUCE, request)
        ask.batch = batch
        return ask

    # ---- lease --------------------------------------------------------------------------------------------

    def _lease(self) -> Ask:
        return self.leasing(asks.LEASE, 0, self._batch_size(), self._lease_timeout())

    def _lease_wait(self) -> Ask:
        wait = self.rng.choice((1, 200, 1_000, 5_000, 20_000))
        return self.leasing(asks.LEASE_WAIT, wait, self._batch_size(), self._lease_timeout())

    def _batch_size(self) -> int:
        return self.rng.choice((1, 1, 2, 3, 5, 10))

    def _lease_timeout(self) -> int | None:
        return self.rng.choice((None, None, 200, 2_000, 60_000))

    def leasing(self, kind: str, wait: int, batch: int, timeout: int | None) -> Ask:
        clients = self.model.queues[self.queue].clients
        self._numbers += 1
        if self.rng.random() < 0.3:  # neighbours of one name are served together
            name, timeout = f"s{self._numbers // 20}", None
        else:
            name = f"c{self._numbers}"
        client = clients.setdefault(name, Client(name))
        ask = self.ask(kind, Lease(batch, wait, timeout, name))
        ask.client, ask.wanted, ask.timeout = client, batch, timeout
        return ask

    # ---- tokens -------------------------------------------------------------------------------------------

    def _choose(self, limit: int, keep: float) -> list[Grant | None]:
        """Tokens of deliveries in hand (kept in hand with that probability), old ones, and mangled ones."""
        rng = self.rng
        chosen: list[Grant | None] = []
        for _ in range(self.few(limit)):
            dice = rng.random()
            if dice < 0.85 and self.held:
                place = rng.randrange(len(self.held))
                grant = self.held[place]
                if rng.random() >= keep:
                    self.held[place] = self.held[-1]
                    self.held.pop()
                    self.old.append(grant)
                chosen.append(grant)
            elif dice < 0.97 and self.old:
                chosen.append(rng.choice(self.old))
            else:
                chosen.append(None)
        return chosen

    def _complete(self) -> Ask:
        if self.replies and self.rng.random() < 0.4:
            return self._complete_reply()
        grants = self._choose(6, keep=0.1)
        result = encode_state({"n": self._numbers}) if self.rng.random() < 0.3 else None
        return self._with_grants(asks.COMPLETE, Complete([self._token(grant) for grant in grants], result), grants)

    def _complete_reply(self) -> Ask:
        """What one lease handed out, given back whole, or some of its items in any order."""
        rng, (leases, grants) = self.rng, self.rng.choice(self.replies)
        if rng.random() < 0.5:
            pairs = list(zip(leases, grants, strict=True))
            pairs = rng.choices(pairs, k=len(pairs)) if rng.random() < 0.3 else rng.sample(pairs, self.few(len(pairs)))
            leases, grants = [item for item, _ in pairs], [grant for _, grant in pairs]
        return self._with_grants(asks.COMPLETE, Complete(leases), list(grants))

    def _retry(self) -> Ask:
        rng = self.rng
        grants = self._choose(3, keep=0.1)
        items = []
        for grant in grants:
            item = RetryItem(self._token(grant))
            item.deferred = rng.random() < 0.3
            if rng.random() < 0.4:
                item.due = self.now + rng.choice((-1_000, 0, 1, 700, 5_000))
            if rng.random() < 0.5:
                item.error = self.error()
            item.dead = rng.random() < 0.2
            items.append(item)
        ask = self._with_grants(asks.RETRY, RetryItems(items), grants)
        ask.retries = items
        return ask

    def error(self) -> str:
        self._numbers += 1
        return f"error {self._numbers} {self.rng.choice(('timeout', 'refused'))}"

    def _extend(self) -> Ask:
        grants = self._choose(3, keep=0.8)
        timeout = self.rng.choice((None, 0, 500, 5_000, 60_000))
        ask = self._with_grants(asks.EXTEND, Extend([self._token(grant) for grant in grants], timeout), grants)
        ask.timeout = timeout
        return ask

    def _state(self) -> Ask:
        rng = self.rng
        grant = self._choose(1, keep=0.95)[0]
        version = grant.item.version if grant is not None else 0
        if rng.random() < 0.2:
            version = rng.choice((0, version + 1, max(0, version - 1)))
        self._numbers += 1
        document = {"at": self._numbers}
        ask = self._with_grants(
            asks.STATE, WriteState(self._token(grant), version, encode_state(document)), [grant]
        )  # fmt: skip
        ask.version, ask.document = version, document
        return ask

    def _with_grants(self, kind: str, request: Request, grants: list[Grant | None]) -> Ask:
        ask = self.ask(kind, request)
        ask.grants = grants
        return ask

    def _token(self, grant: Grant | None) -> str:
        if grant is not None:
            assert grant.token is not None
            return grant.token
        if self.held and self.rng.random() < 0.7:
            token = self.rng.choice(self.held).token
            assert token is not None
            place = self.rng.randrange(len(token))
            other = "0" if token[place] != "0" else "1"
            return f"{token[:place]}{other}{token[place + 1 :]}"
        return MANGLED

    # ---- by id and over all -------------------------------------------------------------------------------

    def an_id(self) -> str:
        rng, queue = self.rng, self.model.queues[self.queue]
        items = queue.partitions[rng.choice(list(queue.partitions))].items
        if items and rng.random() < 0.8:
            return items[rng.choice(list(items))].id
        if queue.by_id and rng.random() < 0.7:
            return rng.choice(list(queue.by_id))
        return rng.choice(("nothing", f"i{rng.randrange(KEYS)}", f"{queue.incarnation}-1-999999"))

    def _cancel(self) -> Ask:
        ids = list({self.an_id(): None for _ in range(self.few(4))})
        ask = self.ask(asks.CANCEL, Cancel(ids))
        ask.ids = ids
        return ask

    def _clear(self) -> Ask:
        choices = [state for state in State if state != State.CLAIMED]
        states = self.rng.sample(choices, self.few(3))
        ask = self.ask(asks.CLEAR, Clear(states))
        ask.states = [str(state) for state in states]
        return ask

    def _get(self) -> Ask:
        item_id = self.an_id()
        ask = self.ask(asks.GET, GetItem(item_id))
        ask.ids = [item_id]
        return ask

    def _get_wait(self) -> Ask:
        """Mostly for one that is held: those end soonest."""
        held = [grant.item.id for grant in self.held if not grant.over]
        item_id = self.rng.choice(held) if held and self.rng.random() < 0.6 else self.an_id()
        ask = self.ask(asks.GET_WAIT, GetItem(item_id, self.rng.choice((1, 500, 5_000, 60_000))))
        ask.ids = [item_id]
        return ask

    def _make_ready(self) -> Ask:
        ids = list({self.an_id(): None for _ in range(self.few(6))})
        ask = self.ask(asks.MAKE_READY, MakeReady(ids))
        ask.ids = ids
        return ask

    def _list(self) -> Ask:
        state = self.rng.choice((None, *State))
        limit = self.rng.choice((1, 5, 1_000, 1_000))
        ask = self.ask(asks.LIST, ListItems(state, None, None, (0, 0), limit))
        ask.state = None if state is None else str(state)
        return ask

    def _stats(self) -> Ask:
        return self.ask(asks.STATS, GetStats())

    def _redrive(self) -> Ask:
        rng = self.rng
        letters = self.queue == "d"
        chosen = RedriveFilter()
        if rng.random() < 0.3:
            chosen = rng.choice(
                (
                    RedriveFilter(dead_reason="rejected"),
                    RedriveFilter(kind="red"),
                    RedriveFilter(error_contains="timeout"),
                    RedriveFilter(source_queue="q"),
                )
            )
        ids = None
        if rng.random() < 0.3:
            ids = list({self.an_id(): None for _ in range(self.few(4))})
        rate = rng.choice((None, None, None, 2.0, 50.0))
        ask = self.ask(asks.REDRIVE, Redrive(ids, chosen, rate, rng.random() < 0.2))
        assert isinstance(ask.request, Redrive)
        ask.ids, ask.chosen, ask.letters, ask.dry_run = ids or (), chosen, letters, ask.request.dry_run
        return ask

    def few(self, limit: int) -> int:
        return min(limit, 1 + int(self.rng.expovariate(0.8)))
