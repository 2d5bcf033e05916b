"""The state of a partition and its transitions.

Every change of state is one of the `on_…` methods, called in the same way when it happens
(`change`, which also notes it for the journal) and when the journal is replayed, so that the two cannot
differ. No policy in here: who may do what, and when, is decided by `holders`, `produce`, `lease` and `lifecycle`.

A plain ready item costs nothing of its own: only what is leased, waiting, dead, kept, or has a priority, a
key, a limit, an expiry or a document of its own has entries, in the columns below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby, repeat
from sys import intern
from typing import Any

import msgspec

from millpond.history.format import (
    RUN_BITS,
    RUN_MAX,
    TRIES_BITS,
    Event,
    Record,
    decode_entry,
    items_in,
    numbers_of,
    run_of,
    run_span,
    runs_of,
)
from millpond.model import DeadReason, State
from millpond.queue.chunks import Chunks
from millpond.queue.columns import IntColumn
from millpond.queue.decisions import Decisions
from millpond.queue.dedup import Dedup, Ended, Request
from millpond.queue.leases import Lease, Leases, Spans
from millpond.queue.named import Named
from millpond.queue.ready import Ready
from millpond.queue.timers import Timers
from millpond.queue.tokens import Mint
from millpond.store.base import JournalRow

_COUNT_MASK = RUN_MAX - 1
_DELIVERIES_BITS = TRIES_BITS
_DELIVERIES_MASK = (1 << _DELIVERIES_BITS) - 1
_FEW = 8  # times the size of a page: fewer items than that are sorted to find one
_ALIKE = 8  # neighbours that are asked one by one for their priority; of more, those with one are looked for
_STRIDE_BITS = 10  # neighbours with the rest of their number in common are looked at together

REASONS = list(DeadReason)
KEEP, DELETE, MOVE = range(3)  # what becomes of the dead

# An item's documents are rows of their own in the store, keyed `number << 2 | part`, and its entry in the column
# `documents` says which there are and the version of the state part.
STATE_PART, ERROR_PART, RESULT_PART = range(3)
HAS_STATE, HAS_ERROR, HAS_RESULT = 1, 2, 4
VERSION_BITS = 3


class Move(msgspec.Struct, frozen=True, gc=False):
    """Items on their way to another queue since `turn`: the dead to their dead queue, or back from it."""

    target: str
    redrive: bool
    turn: int


class Judgement(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What completing a claim does to one of its items instead. `delay` in ms; None is the queue's backoff."""

    dead: bool
    delay: int | None
    error: str | None


class Hold(msgspec.Struct, array_like=True):
    """This partition's share of a claim, in the order in which it is read."""

    nonce: bytes
    claim_id: str
    owner: str
    runs: list[int]
    judged: dict[int, Judgement]

    @property
    def items(self) -> int:
        return items_in(self.runs)


class Piece(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Staged records: stored like any chunk, under numbers of their own, and known to nobody."""

    first: int
    count: int
    meta: bytes | None
    at: int


class Partition:
    # Of an object with more than 30 attributes of its own, CPython 3.11 finds methods only slowly: not with slots.
    __slots__ = (
        "_columns", "_transitions", "at", "at_hand", "cancel_asked", "carried", "changed", "chunk_drops", "chunks",
        "claimed", "claims", "confirming", "dead", "decisions", "dedup", "dedup_window", "document_drops", "documents",
        "due_timers", "events", "expiries", "expiry_timers", "fence", "finish_timers", "finished", "incarnation",
        "index", "lease_timers", "leased", "limits", "mint", "moving", "next_number", "priorities", "ready", "staged",
        "staged_count", "timers", "totals", "tries", "turn", "waiting", "watch",
    )  # fmt: skip

    def __init__(self, incarnation: str, index: int, dedup_window: int = 300_000) -> None:
        self.index = index
        self.incarnation = incarnation
        self.mint = Mint(incarnation, index)
        self.dedup_window = dedup_window
        self.turn = 0  # the last turn that is in this state
        self.at = 0  # the instant of that turn: the high-water mark of time
        self.fence = 0  # added to a grant for its fencing token, so that it grows for items that come from elsewhere
        self.next_number = 1
        self.chunks = Chunks()
        self.ready = Ready()
        self.leased = Leases()
        self.lease_timers = Timers()
        self.waiting = IntColumn()  # due << 1 | is retrying
        self.due_timers = Timers()
        self.tries = IntColumn()  # attempts << 32 | deliveries, those that are over
        self.priorities = IntColumn()  # other than 0
        self.limits = IntColumn()  # own max_attempts
        self.expiries = IntColumn()  # own expire_deadline
        self.expiry_timers = Timers()
        self.documents = IntColumn()  # state version << 3 | which parts there are
        self.dead = IntColumn()  # died at << 8 | reason
        self.finished = IntColumn()  # kept until << 1 | was cancelled
        self.changed = IntColumn()  # when the state last changed, of what has come back from a lease, or has ended
        self.finish_timers = Timers()
        self.timers = (self.lease_timers, self.due_timers, self.expiry_timers, self.finish_timers)
        self.cancel_asked: set[int] = set()
        self.claims: dict[bytes, Hold] = {}  # by nonce
        self.claimed: Spans[Hold] = Spans()
        self.staged: dict[str, dict[str, list[Piece]]] = {}  # transaction -> chunk -> its records
        self.staged_count = 0
        self.at_hand: dict[int, Named] = {}  # of chunks by their first number, those that need not be read again
        self.decisions = Decisions()  # only in the store that has no items
        self.moving: dict[int, Move] = {}
        self.confirming: dict[bytes, str] = {}  # transfers that their target has not forgotten yet -> target
        # Items on their way to another partition of this queue -> the turn in which they were sent. They look as they
        # did, but nothing is done to them here: the target "" of their transfers is this queue.
        self.carried: dict[int, int] = {}
        self.dedup = Dedup()
        self.totals: dict[str, int] = {}
        # What the running turn gathers for its commit.
        self.events: list[tuple[Any, ...]] = []
        self.watch: Callable[[Event, Sequence[Any]], None] | None = None  # who is told of a change before it is made
        self.chunk_drops: list[int] = []
        self.document_drops: list[int] = []
        self._columns = (
            self.tries,
            self.priorities,
            self.limits,
            self.expiries,
            self.dead,
            self.finished,
            self.changed,
        )  # nothing ends while it waits: it leaves that column first
        self._transitions: dict[int, Callable[..., None]] = {
            event: getattr(self, f"on_{event.name.lower()}", None) or self._decision(event) for event in Event
        }

    def _decision(self, event: Event) -> Callable[..., None]:
        decide = getattr(self.decisions, f"on_{event.name.lower()}")
        return lambda *arguments: decide(self.at, *arguments)

    def change(self, event: Event, *arguments: Any) -> None:
        if self.watch is not None:
            self.watch(event, arguments)
        self.events.append((event, *arguments))
        self._transitions[event](*arguments)

    def begin(self, now: int) -> None:
        """Start a turn: everything that `change` notes from here on is of this turn and this instant."""
        self.turn += 1
        if now > self.at:
            self.at = now
        self.dedup.uncommitted.clear()

    def replay(self, row: JournalRow) -> None:
        entry = decode_entry(row.events)
        self.turn, self.at = row.turn, row.at
        for event in entry.events:
            self._transitions[event[0]](*event[1:])
        self.next_number = entry.next_number
        self.chunk_drops.clear()
        self.document_drops.clear()
        self.dedup.uncommitted.clear()

    def set_timers(self) -> None:
        """All the timers: after this none is stale. It takes as long as there are items with a time of their own."""
        self._set_lease_timers()
        for timers, column, bits in self._timed():
            _set(timers, column, bits)

    def shed_stale_timers(self) -> None:
        """Those only that are stale: items that ended leave their entries behind, and work that is done would fill the
        memory."""
        if self.lease_timers.stale(len(self.leased)):
            self._set_lease_timers()
        for timers, column, bits in self._timed():
            if timers.stale(len(column)):
                _set(timers, column, bits)

    def _timed(self) -> Iterable[tuple[Timers, IntColumn, int]]:
        """With the bits of a value below its instant."""
        return (
            (self.due_timers, self.waiting, 1),
            (self.expiry_timers, self.expiries, 0),
            (self.finish_timers, self.finished, 1),
        )

    def _set_lease_timers(self) -> None:
        spans = list(self.leased.spans())
        self.lease_timers.rebuild(
            [lease.deadline for _, _, lease in spans], [run_of(n, count) for n, count, _ in spans]
        )

    # ---- transitions --------------------------------------------------------------------------------------

    def on_produced(
        self,
        first: int,
        count: int,
        deadline: int,
        meta: bytes | None,
        requests: Sequence[Sequence[Any]],
        arrivals: Sequence[Sequence[Any]],
    ) -> None:
        self.chunks.add(first, count, self.at, deadline)
        self.next_number = first + count
        self._count("produced", count)
        if meta is None:
            self.ready.push(0, first, count)
        else:
            self._place_all(first, Named.read(meta))
        if requests:
            self.on_remembered(requests)
        for name, number, documents, fence in arrivals:
            self.dedup.arrivals[name] = number
            self.fence = max(self.fence, fence)
            if documents:
                self.documents[number] = documents

    def on_remembered(self, requests: Sequence[Sequence[Any]]) -> None:
        """Produce requests that were carried out, some with nothing new in them."""
        for name, first, count, reply in requests:
            self.dedup.requests.put(name, Request(self.at, first, count, reply), self.dedup_window)

    def on_leased(self, client: str, deadline: int, runs: Sequence[int]) -> None:
        lease = Lease(intern(client), self.turn, deadline, self.fence, self.at)
        for run in runs:
            first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            self.ready.remove(self.priorities.get(first, 0), run)
            self.leased.add(first, count, lease)
            self.lease_timers.push(deadline, run)
        self._count("leased", items_in(runs))

    def on_completed(self, client: str, pairs: Sequence[int], keep_until: int, with_result: int) -> None:
        """`pairs`: run, grant, run, grant, … in the order of completion; `with_result`: the item that has one."""
        runs = pairs[::2]
        for run in runs:
            self.leased.remove(run >> RUN_BITS, (run & _COUNT_MASK) + 1)
        if self.cancel_asked:
            self.cancel_asked.difference_update(numbers_of(runs))
        self._complete(runs, keep_until)
        if with_result >= 0 and any(with_result in run_span(run) for run in runs):
            self.documents[with_result] = self.documents.get(with_result, 0) | HAS_RESULT

    def on_retried(self, client: str, number: int, due: int, deferred: bool, error: str | None) -> None:
        """`due` 0: leasable at once, at the tail."""
        self.leased.remove(number, 1)
        self.changed[number] = self.at
        self._delivered(number, attempted=not deferred)
        if error is not None:
            self.documents[number] = self.documents.get(number, 0) | HAS_ERROR
        if due:
            self._wait(number, due, retrying=not deferred)
        else:
            self.ready.push(self.priorities.get(number, 0), number, 1)
        self._count("retried", 1)

    def on_lease_expired(self, runs: Sequence[int]) -> None:
        self._return(runs, attempted=True)
        for run in runs:
            self.changed.fill(run >> RUN_BITS, (run & _COUNT_MASK) + 1, self.at)
            for first, count, priority in self._by_priority(run):
                self.ready.push(priority, first, count)

    def on_released(self, runs: Sequence[int]) -> None:
        """Items that never reached their consumer go back to where they were: the head."""
        self._return(runs, attempted=False)
        for run in reversed(runs):
            for first, count, priority in reversed(self._by_priority(run)):
                self.ready.push_front(priority, first, count)

    def on_extended(self, deadline: int, runs: Sequence[int]) -> None:
        renewed: dict[tuple[str, int], Lease] = {}
        for run in runs:
            first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            together = self.leased.whole(first, count) is not None
            for part in (run,) if together else map(run_of, range(first, first + count), repeat(1)):
                self._renew(part, deadline, renewed)
            self.lease_timers.push(deadline, run)

    def _renew(self, run: int, deadline: int, renewed: dict[tuple[str, int], Lease]) -> None:
        """Items of one grant share the new lease as they did the old one."""
        first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
        lease = self.leased[first]
        grant = (lease.client, lease.grant)
        if grant not in renewed:
            renewed[grant] = Lease(lease.client, lease.grant, deadline, lease.fence, lease.at)
        self.leased.remove(first, count)
        self.leased.add(first, count, renewed[grant])

    def on_state_written(self, number: int, version: int) -> None:
        has = self.documents.get(number, 0) & (HAS_ERROR | HAS_RESULT) | HAS_STATE
        self.documents[number] = version << VERSION_BITS | has

    def on_due(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.waiting.pop(number, None)
            self.changed[number] = self.at
            self.ready.push(self.priorities.get(number, 0), number, 1)

    def on_died(
        self, reason: int, state: str, runs: Sequence[int], fate: int, target: str | None, error: str | None
    ) -> None:
        self._leave(state, runs)
        move = Move(target, False, self.turn) if target is not None else None
        for run in runs:
            first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            self._count("dead", count)
            numbers = range(first, first + count)
            if error is not None:
                for number in numbers:
                    self.documents[number] = self.documents.get(number, 0) | HAS_ERROR
            if fate == DELETE:
                self._end(first, count)
                continue
            self.dead.fill(first, count, self.at << 8 | reason)
            if move is not None:
                self.moving.update(dict.fromkeys(numbers, move))

    def on_cancelled(self, state: str, runs: Sequence[int], keep_until: int) -> None:
        self._leave(state, runs)
        for run in runs:
            first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            if keep_until:
                self._finish(first, count, keep_until << 1 | 1)
            else:
                self._end(first, count)
            self._count("cancelled", count)

    def on_cancel_asked(self, numbers: Sequence[int]) -> None:
        self.cancel_asked.update(numbers)

    def on_cleared(self, state: str, runs: Sequence[int]) -> None:
        self._leave(state, runs)
        for run in runs:
            self._end(run >> RUN_BITS, (run & _COUNT_MASK) + 1)

    def on_replaced(self, state: str, number: int) -> None:
        """Its names pass to the item that replaces it; one that this does not want is guarded like any other's."""
        self._leave(state, [run_of(number, 1)])
        self._end(number, 1)

    def on_redriven(self, numbers: Sequence[int], deadline: int) -> None:
        """The dead, back to life in place, with no attempts behind them and time before them."""
        for number in numbers:
            del self.dead[number]
            if number in self.tries:
                self.tries[number] = self.deliveries(number)
            self.expiries[number] = deadline
            self.expiry_timers.push(deadline, run_of(number, 1))
            self.changed[number] = self.at
            self.ready.push(self.priorities.get(number, 0), number, 1)

    def on_purged(self, runs: Sequence[int]) -> None:
        for run in runs:
            self._end(run >> RUN_BITS, (run & _COUNT_MASK) + 1)

    def on_moving(self, state: str, runs: Sequence[int], target: str) -> None:
        """On their way back out of a dead queue."""
        self._leave(state, runs)
        move = Move(target, True, self.turn)
        self.moving.update(dict.fromkeys(numbers_of(runs), move))

    def on_moved(self, numbers: Sequence[int], names: Sequence[bytes], target: str) -> None:
        for number in numbers:
            self._end(number, 1, moved=True)
        self.confirming.update(dict.fromkeys(names, target))

    def on_kept(self, numbers: Sequence[int]) -> None:
        """A move without a target any more: the dead stay dead, a letter on its way back stays a letter."""
        for number in numbers:
            del self.moving[number]
            if number not in self.dead:
                self.ready.push(self.priorities.get(number, 0), number, 1)

    def on_forgotten(self, names: Sequence[bytes]) -> None:
        """The target no longer remembers these transfers, so neither need we."""
        for name in names:
            self.confirming.pop(name, None)

    def on_forgot(self, names: Sequence[bytes]) -> None:
        """We took these transfers in and their source has confirmed it."""
        for name in names:
            self.dedup.arrivals.pop(name, None)

    # ---- transitions of what is carried over by a rebalance -----------------------------------------------

    def on_carrying(self, state: str, runs: Sequence[int]) -> None:
        """Those that wait for their time, are kept or dead stay what they are; the ready ones, letters, lie nowhere."""
        if state == State.READY:
            self._leave(state, runs)
        self.carried.update(dict.fromkeys(numbers_of(runs), self.turn))

    def on_left(self, numbers: Sequence[int], names: Sequence[bytes]) -> None:
        """Another partition has them, and their names."""
        for run in runs_of(numbers):
            first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            for number in range(first, first + count):
                del self.carried[number]
            self.waiting.discard(first, count)
            for number in self.dedup.digests.within(first, count):
                self.dedup.release(number)
            self._end(first, count)
        self.confirming.update(dict.fromkeys(names, ""))

    def on_adopted(
        self, first: int, count: int, created: int, deadline: int, meta: bytes, items: Sequence[Sequence[Any]]
    ) -> None:
        """Items of another partition, as they were there; all of them have an id and a correlation id of their own."""
        self.chunks.add(first, count, created, deadline)
        self.next_number = first + count
        named = self.at_hand.pop(first, None) or Named.read(meta)
        each = zip(named.records, named.joined, items, strict=True)
        for number, (record, names, item) in enumerate(each, first):
            assert record is not None
            self._adopt(number, record, names, *item)

    def _adopt(
        self, number: int, record: Record, names: bytes, name: bytes, state: str, value: int, tries: int,
        changed: int, documents: int, fence: int,
    ) -> None:  # fmt: skip
        assert record.id is not None
        assert record.correlation_id is not None
        self.dedup.arrivals[name] = number
        self.fence = max(self.fence, fence)
        for column, own in ((self.tries, tries), (self.changed, changed), (self.documents, documents)):
            if own:
                column[number] = own
        if record.priority:
            self.priorities[number] = record.priority
        if record.max_attempts >= 0:
            self.limits[number] = record.max_attempts
        if record.expire_deadline:
            self.expiries[number] = record.expire_deadline
            self.expiry_timers.push(record.expire_deadline, run_of(number, 1))
        if record.source is not None and record.source.letter:
            self._count("letters", 1)
        if state in (State.COMPLETED, State.CANCELLED):
            self.dedup.add_kept(number, record.id, record.key, record.correlation_id)
            self.finished[number] = value
            self.finish_timers.push(value >> 1, run_of(number, 1))
            return
        self.dedup.add(number, record.id, record.key, record.correlation_id, names)
        if state in (State.SCHEDULED, State.RETRYING):
            self._wait(number, value >> 1, retrying=bool(value & 1))
        elif state == State.DEAD:
            self.dead[number] = value
        else:
            self.ready.push(record.priority, number, 1)

    def on_entrusted(
        self,
        partition: int,
        ended: Sequence[Sequence[Any]],
        requests: Sequence[Sequence[Any]],
        arrivals: Sequence[bytes],
    ) -> None:
        """What must not happen twice, by a partition that is to be removed."""
        for name, at, number, created, own, moved, origin in ended:
            entry = Ended(at, number, created, own, moved, partition if origin < 0 else origin)
            self.dedup.ended.put_older(name, entry, self.dedup_window)
        for name, at, first, count, reply, origin in requests:
            request = Request(at, first, count, reply, partition if origin < 0 else origin)
            self.dedup.requests.put_older(name, request, self.dedup_window)
        for name in arrivals:
            self.dedup.arrivals[name] = 0

    # ---- transitions of claims ----------------------------------------------------------------------------

    def on_claimed(self, nonce: bytes, claim_id: str, owner: str, runs: Sequence[int]) -> None:
        hold = self.claims.get(nonce)
        if hold is None:
            hold = self.claims[nonce] = Hold(nonce, claim_id, owner, [], {})
        hold.runs += runs
        for run in runs:
            first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            self.ready.remove(self.priorities.get(first, 0), run)
            self.claimed.add(first, count, hold)
            self._count("claimed", count)

    def on_unclaimed(self, nonce: bytes, runs: Sequence[int]) -> None:
        """The last of a claim's items, or all of them, back to where they were: the head."""
        hold = self.claims[nonce]
        hold.runs = _without_tail(hold.runs, items_in(runs))
        if not hold.runs:
            del self.claims[nonce]
        for run in reversed(runs):
            self.claimed.remove(run >> RUN_BITS, (run & _COUNT_MASK) + 1)
            for first, count, priority in reversed(self._by_priority(run)):
                self.ready.push_front(priority, first, count)

    def on_claim_completed(self, nonce: bytes, owner: str, runs: Sequence[int], keep_until: int) -> None:
        """The claim is over: these are done, and the others have left it by a verdict."""
        del self.claims[nonce]
        for run in runs:
            self.claimed.remove(run >> RUN_BITS, (run & _COUNT_MASK) + 1)
        self._complete(runs, keep_until)

    def on_claim_retried(self, nonce: bytes, owner: str, number: int, due: int, error: str | None) -> None:
        self._leave(State.CLAIMED, [run_of(number, 1)])
        self.changed[number] = self.at
        if error is not None:
            self.documents[number] = self.documents.get(number, 0) | HAS_ERROR
        if due:
            self._wait(number, due, retrying=True)
        else:
            self.ready.push(self.priorities.get(number, 0), number, 1)
        self._count("retried", 1)

    def on_judged(self, nonce: bytes, verdicts: Sequence[Sequence[Any]]) -> None:
        judged = self.claims[nonce].judged
        for number, dead, delay, error in verdicts:
            judged[number] = Judgement(dead, delay, error)

    # ---- transitions of what is staged --------------------------------------------------------------------

    def on_staged(self, txn: str, chunk: str, first: int, count: int, meta: bytes | None) -> None:
        self.chunks.reserve(first)
        self.next_number = first + count
        self.staged.setdefault(txn, {}).setdefault(chunk, []).append(Piece(first, count, meta, self.at))
        self.staged_count += count

    def on_published(
        self, txn: str, chunk: str, first: int, count: int, deadline: int, meta: bytes | None, dropped: Sequence[int]
    ) -> None:
        """`dropped` had a name that was taken. The time that an item was given counts from now."""
        named = self.at_hand.get(first)
        later = self.at - self._unstage(txn, chunk, first).at
        self.chunks.put_in(first, count, self.at, deadline)
        self._count("produced", count - len(dropped))
        if meta is None:
            self.ready.push(0, first, count)
            return
        self._place_all(first, named or Named.read(meta), later, set(dropped))
        for number in dropped:
            self._end(number, 1)

    def on_unstaged(self, txn: str, chunk: str, first: int) -> None:
        self._unstage(txn, chunk, first)
        self.chunk_drops.append(first)

    def _unstage(self, txn: str, chunk: str, first: int) -> Piece:
        chunks = self.staged[txn]
        [piece] = [piece for piece in chunks[chunk] if piece.first == first]
        chunks[chunk] = [other for other in chunks[chunk] if other is not piece]
        if not chunks[chunk]:
            del chunks[chunk]
        if not chunks:
            del self.staged[txn]
        self.staged_count -= piece.count
        self.at_hand.pop(first, None)
        return piece

    # ---- what the transitions share -----------------------------------------------------------------------

    def _place_all(self, first: int, named: Named, later: int = 0, gone: Collection[int] = ()) -> None:
        """Neighbours, as they were produced, without those that are `gone`."""
        if not gone and named.simple and (named.free or (named.distinct and not self.dedup.has_any(named.names))):
            self._push_all(first, named.priorities or [0] * len(named.joined))
            self.dedup.add_all(first, named.joined, named.own, single=named.names is named.joined)
            return
        for number, (record, names) in enumerate(zip(named.records, named.joined, strict=True), first):
            if number in gone:
                continue
            if record is None:
                self.ready.push(0, number, 1)
            else:
                self._place(number, record, names, later)

    def _push_all(self, first: int, priorities: Sequence[int]) -> None:
        for priority, alike in groupby(priorities):
            count = len(list(alike))
            if priority:
                self.priorities.fill(first, count, priority)
            self.ready.push(priority, first, count)
            first += count

    def _place(self, number: int, record: Record, names: bytes, later: int = 0) -> None:
        if record.priority:
            self.priorities[number] = record.priority
        if record.max_attempts >= 0:
            self.limits[number] = record.max_attempts
        if record.expire_deadline:
            self.expiries[number] = deadline = record.expire_deadline + later
            self.expiry_timers.push(deadline, run_of(number, 1))
        if record.id is not None or record.key is not None:
            self.dedup.add(number, record.id, record.key, record.correlation_id, names)
        if record.source is not None and record.source.letter:
            self._count("letters", 1)
        if record.enqueue_at:
            self._wait(number, record.enqueue_at, retrying=False)
        else:
            self.ready.push(record.priority, number, 1)

    def _wait(self, number: int, due: int, *, retrying: bool) -> None:
        self.waiting[number] = due << 1 | retrying
        self.due_timers.push(due, run_of(number, 1))

    def _return(self, runs: Iterable[int], *, attempted: bool) -> None:
        for run in runs:
            first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
            self.leased.remove(first, count)
            for number in range(first, first + count):
                self._delivered(number, attempted=attempted)

    def _delivered(self, number: int, *, attempted: bool) -> None:
        self.tries.add(number, (attempted << _DELIVERIES_BITS) + 1)

    def _by_priority(self, run: int) -> list[tuple[int, int, int]]:
        """A run as (first, count, priority) pieces of one priority each."""
        first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
        if not self.priorities or (count > _ALIKE and not self.priorities.within(first, count)):
            return [(first, count, 0)]
        pieces: list[tuple[int, int, int]] = []
        for number in range(first, first + count):
            priority = self.priorities.get(number, 0)
            if pieces and pieces[-1][2] == priority:
                start, length, _ = pieces[-1]
                pieces[-1] = (start, length + 1, priority)
            else:
                pieces.append((number, 1, priority))
        return pieces

    def _leave(self, state: str, runs: Sequence[int]) -> None:
        """Take items out of what keeps them in `state`; the columns of `_columns` are swept by `_end`."""
        if state == State.READY:
            for run in runs:
                for first, count, priority in self._by_priority(run):
                    self.ready.remove(priority, run_of(first, count))
        elif state == State.LEASED:
            self._return(runs, attempted=True)
            self.cancel_asked.difference_update(numbers_of(runs))
        elif state == State.CLAIMED:
            for run in runs:
                first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
                self.claimed.remove(first, count)
                for number in range(first, first + count):
                    self._delivered(number, attempted=True)
        elif state in (State.SCHEDULED, State.RETRYING):
            for number in numbers_of(runs):
                del self.waiting[number]
        elif state == State.DEAD:
            for number in numbers_of(runs):
                del self.dead[number]
        else:
            for number in numbers_of(runs):
                del self.finished[number]
                self.dedup.release(number)  # its window has been running since it ended

    def _finish(self, first: int, count: int, kept: int) -> None:
        for number in self.dedup.digests.within(first, count):
            self.dedup.retire(number, self.at, self.chunks.created_of(number), self.dedup_window)
        self.finished.fill(first, count, kept)
        self.changed.fill(first, count, self.at)
        self.finish_timers.push(kept >> 1, run_of(first, count))

    def _drop_states(self, first: int, count: int) -> None:
        for number in self.documents.within(first, count):
            if self.documents[number] & HAS_STATE:
                self.documents[number] &= HAS_ERROR | HAS_RESULT
                self.document_drops.append(number << 2 | STATE_PART)

    def _complete(self, runs: Sequence[int], keep_until: int) -> None:
        """Nobody holds these any more."""
        if not keep_until:
            self._end_all(runs)
        else:
            for run in runs:
                first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
                for number in range(first, first + count):
                    self._delivered(number, attempted=True)
                self._finish(first, count, keep_until << 1)
                self._drop_states(first, count)
        self._count("completed", items_in(runs))

    def _end_all(self, runs: Sequence[int]) -> None:
        """As `_end`, but if they have nothing besides their places, as most, that is told once for all of them."""
        if len(runs) > 1 and not self.moving:
            columns, numbers = (*self._columns, self.dedup.digests, self.documents), list(numbers_of(runs))
            if not any(column.has_any(runs, numbers) for column in columns):
                self.chunk_drops += self.chunks.end_all(runs)
                return
        for run in runs:
            self._end(run >> RUN_BITS, (run & _COUNT_MASK) + 1)

    def _end(self, first: int, count: int, *, moved: bool = False) -> None:
        digests, documents = self.dedup.digests, self.documents
        if digests.alone or digests.pages:
            self._end_names(first, count, moved)
        for column in self._columns:
            if count == 1:
                column.pop(first, None)
            elif column.alone or column.pages:
                column.discard(first, count)
        if self.moving:
            for number in range(first, first + count):
                self.moving.pop(number, None)
        if documents.alone or documents.pages:
            for number, parts in documents.discard(first, count):
                self.document_drops += document_keys(number, parts)
        self.chunk_drops += self.chunks.end(first, count)

    def _end_names(self, first: int, count: int, moved: bool) -> None:
        if count > 1 and not self.finished and not moved:
            for _, low, high, created in self.chunks.pieces(first, count):
                self.dedup.end_all(low, high - low, self.at, created, self.dedup_window)
            return
        for number in self.dedup.digests.within(first, count):
            if number in self.finished:
                self.dedup.release(number)
            else:
                created = self.chunks.created_of(number)
                self.dedup.end(number, self.at, created, self.dedup_window, moved=moved)

    def _count(self, name: str, by: int) -> None:
        self.totals[name] = self.totals.get(name, 0) + by

    # ---- looking ------------------------------------------------------------------------------------------

    def attempts(self, number: int) -> int:
        """Deliveries that count and are over; a lease in force adds one."""
        return self.tries.get(number, 0) >> _DELIVERIES_BITS

    def deliveries(self, number: int) -> int:
        return self.tries.get(number, 0) & _DELIVERIES_MASK

    def tried(self, number: int) -> tuple[int, int]:
        """Attempts and deliveries."""
        tries = self.tries.get(number, 0)
        return tries >> _DELIVERIES_BITS, tries & _DELIVERIES_MASK

    def set_aside(self, first: int, count: int) -> set[int]:
        """Those of these neighbours that are neither ready nor gone, told without searching the ready ones."""
        return _within(self._columns_of(State.READY), first, count)

    def expire_deadline(self, number: int) -> int:
        return self.expiries.get(number) or self.chunks.deadline_of(number)

    def standing(self, number: int) -> tuple[State, int]:
        """What a carried item is, and its value in the column that says so."""
        for column, plain, odd in self.resting:
            if (value := column.get(number)) is not None:
                return odd if value & 1 else plain, value
        return State.READY, 0

    @property
    def resting(self) -> Iterable[tuple[IntColumn, State, State]]:
        """The columns of items that no consumer has or can have, and what these are by the lowest bit."""
        yield self.waiting, State.SCHEDULED, State.RETRYING
        yield self.dead, State.DEAD, State.DEAD
        yield self.finished, State.COMPLETED, State.CANCELLED

    def is_empty(self) -> bool:
        """Nothing is here, and nothing is on its way."""
        if self.ready.count or self.carried:  # the usual cases first: it is asked in every turn
            return False
        on_its_way = self.staged or self.claims or self.confirming
        return not (on_its_way or self.live_count() or len(self.finished))

    def states(self, numbers: Iterable[int]) -> dict[int, State]:
        """The states of those items that exist."""
        found: dict[int, State] = {}
        for number in numbers:
            if number in self.leased:
                found[number] = State.LEASED
            elif (due := self.waiting.get(number)) is not None:
                found[number] = State.RETRYING if due & 1 else State.SCHEDULED
            elif self.dead.get(number) is not None or number in self.moving:
                found[number] = State.DEAD
            elif (kept := self.finished.get(number)) is not None:
                found[number] = State.CANCELLED if kept & 1 else State.COMPLETED
            elif self.claims and number in self.claimed:
                found[number] = State.CLAIMED
            elif number > 0 and self.chunks.is_live(number):
                found[number] = State.READY
        return found

    def numbers_in(self, state: State, after: int, limit: int) -> list[int]:
        """The first `limit` items of a state numbered above `after`, by number.

        Few of a state are sorted; of many, and of the ready ones, a page is found by walking along the numbers.
        """
        columns = self._columns_of(state)
        if state != State.READY and sum(map(len, columns)) <= _FEW * limit:
            few = {number for column in columns for number in column if number > after}
            return [number for number in sorted(few) if self._is_in(number, state)][:limit]
        found: list[int] = []
        for stride, numbers in groupby(self.chunks.walk(after), lambda number: number >> _STRIDE_BITS):
            held = _within(columns, stride << _STRIDE_BITS, 1 << _STRIDE_BITS)
            if state == State.READY:
                found += [number for number in numbers if number not in held]
            else:
                found += [number for number in numbers if number in held and self._is_in(number, state)]
            if len(found) >= limit:
                break
        return found[:limit]

    def _columns_of(self, state: State) -> Sequence[IntColumn | Spans[Any] | dict[int, Move]]:
        """Those that hold the items of a state; of the ready ones, those that hold all the others."""
        if state == State.LEASED:
            return [self.leased]
        if state in (State.SCHEDULED, State.RETRYING):
            return [self.waiting]
        if state == State.DEAD:
            return [self.dead, self.moving]
        if state == State.READY:
            return [self.leased, self.waiting, self.dead, self.moving, self.finished, self.claimed]
        if state == State.CLAIMED:
            return [self.claimed]
        return [self.finished]

    def _is_in(self, number: int, state: State) -> bool:
        """Tells apart the two states that share a column."""
        if state in (State.SCHEDULED, State.RETRYING):
            return bool(self.waiting[number] & 1) == (state == State.RETRYING)
        if state in (State.COMPLETED, State.CANCELLED):
            return bool(self.finished[number] & 1) == (state == State.CANCELLED)
        return True

    def counts(self) -> dict[str, int]:
        retrying = self.waiting.count_odd()
        cancelled = self.finished.count_odd()
        redriving = sum(1 for number in self.moving if number not in self.dead)
        return {
            State.SCHEDULED: len(self.waiting) - retrying,
            State.READY: self.ready.count + self.carried_letters(),
            State.LEASED: len(self.leased),
            State.RETRYING: retrying,
            State.COMPLETED: len(self.finished) - cancelled,
            State.CLAIMED: len(self.claimed),
            State.DEAD: len(self.dead) + redriving,
            State.CANCELLED: cancelled,
        }

    def carried_letters(self) -> int:
        """Ready items that are on their way to another partition: they lie in no column."""
        if not self.totals.get("letters"):
            return 0
        return sum([self.standing(number)[0] == State.READY for number in self.carried])

    def live_count(self) -> int:
        """Items that somebody still waits for: what placement and deletion look at."""
        held = len(self.leased) + len(self.claimed)
        return self.ready.count + held + len(self.waiting) + len(self.dead) + len(self.moving)


def _set(timers: Timers, column: IntColumn, bits: int) -> None:
    timers.rebuild([at >> bits for at in column.values()], [n << RUN_BITS for n in column.numbers()])


def _without_tail(runs: list[int], count: int) -> list[int]:
    """Runs without their last `count` items."""
    runs = runs.copy()
    while count:
        items = (runs[-1] & _COUNT_MASK) + 1
        if items > count:
            runs[-1] -= count
            break
        runs.pop()
        count -= items
    return runs


def _within(columns: Iterable[IntColumn | Spans[Any] | dict[int, Move]], first: int, count: int) -> set[int]:
    """Those of these neighbours that one of the columns has."""
    held: set[int] = set()
    for column in columns:
        within = (
            column.keys() & range(first, first + count) if isinstance(column, dict) else column.within(first, count)
        )
        held.update(within)
    return held


def document_keys(number: int, documents: int) -> list[int]:
    return [number << 2 | part for part in range(3) if documents >> part & 1]
