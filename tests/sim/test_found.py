"""Bugs that the simulator found, each as a short way to it: a seed leads elsewhere after any change of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from millpond.clock import ManualClock
from millpond.errors import Conflict, KeyConflict, OutcomeUnknown
from millpond.history.format import Record
from millpond.model import CLAIM_MEMORY_MS, Rebalancing, RedriveFilter, State
from millpond.queue import draining
from millpond.queue import lane as lane_module
from millpond.queue.bodies import Bodies, Budget
from millpond.queue.claims import CLAIM_OPERATIONS
from millpond.queue.dedup import request_digest
from millpond.queue.lane import Job, Lane, meta_lane
from millpond.queue.logical import LogicalQueue
from millpond.queue.requests import (
    AbortStage,
    Arrive,
    Cancel,
    ClaimItems,
    Clear,
    Complete,
    EndClaim,
    Extend,
    Forget,
    GetItem,
    Lease,
    OpenConsumer,
    Produce,
    PublishStage,
    Redrive,
    Request,
    RetryItem,
    RetryItems,
    StageItems,
    Transfer,
)
from millpond.store.base import META_PARTITION
from millpond.store.memory import MemoryStores
from tests.drive import definition
from tests.sim.faults import COMMIT_FAILED, FaultyStore

SECOND = 1_000


class Bench:
    """Queues `q` and `d` with stores that fail on command, and lanes whose jobs can be held back."""

    def __init__(self, partitions: int = 1, body_bytes: int = 1 << 20, **settings: Any) -> None:
        self.clock = ManualClock()
        self.budget = body_bytes
        self.definitions = {
            "q": definition("q", partitions, dead_queue="d", **settings),
            "d": definition("d", partitions, **settings),
        }
        memory = MemoryStores()
        self.stores = {
            (one.name, index): FaultyStore(memory.open(one.incarnation, index, "full"), lambda turn, reported: None)
            for one in self.definitions.values()
            for index in (*range(partitions), META_PARTITION)
        }
        self.held: set[tuple[str, int]] = set()
        self.open()

    def open(self) -> None:
        """Also as after a crash: nothing of memory is left."""
        self.queues: dict[str, LogicalQueue] = {}
        self.jobs: list[tuple[str, Job]] = []
        self.letters: list[Arrive | Forget] = []  # all that were sent
        budget = Budget(self.budget)
        for name, one in self.definitions.items():
            lanes = [Lane(part, self.stores[name, part.partition], Bodies(budget)) for part in one.partitions]
            meta = meta_lane(self.stores[name, META_PARTITION], budget)
            exists, now = self.definitions.__contains__, self.clock.now()
            self.queues[name] = LogicalQueue(one, lanes, meta, Random(0), exists, now)
        self.settle()

    def settle(self) -> None:
        """Run everything that is not held back, at this instant."""
        for _ in range(50):
            wanted = False  # a step that had nothing to read or write is followed by the next
            for name, queue in self.queues.items():
                wake = queue.tick(self.clock.now())
                wanted = wanted or (wake is not None and wake <= self.clock.now())
                self.jobs += [(name, job) for job in queue.jobs]
                queue.jobs = []
                self._deliver(queue)
            ready = [entry for entry in self.jobs if (entry[0], entry[1].lane.index) not in self.held]
            self.jobs = [entry for entry in self.jobs if entry not in ready]
            for name, job in ready:
                job.run()
                self.queues[name].finish(job, self.clock.now())
                self.clock.at_least(self.queues[name].now)
            if not ready and not wanted:
                return

    def _deliver(self, queue: LogicalQueue) -> None:
        outbox, queue.state.outbox = queue.state.outbox, []
        for letter in outbox:
            self.letters.append(letter)
            letter.done = queue.settle
            self.queues[letter.target].submit(letter, self.clock.now())

    def send(self, *requests: Request, queue: str = "q") -> None:
        """All in one tick."""
        for request in requests:
            self.queues[queue].submit(request, self.clock.now())
        self.settle()

    def ask(self, request: Request, queue: str = "q") -> Any:
        self.send(request, queue=queue)
        return answer(request)

    def produce(self, *records: bytes | Record, queue: str = "q", **options: Any) -> Any:
        return self.ask(produce(*records, **options), queue)

    def lease(self, batch: int = 1, queue: str = "q", **options: Any) -> Any:
        return self.ask(Lease(batch, **options), queue)

    def pass_time(self, ms: int) -> None:
        self.clock.advance(ms)
        self.settle()

    def drain(self, index: int) -> None:
        """A rebalance of `q` that removes this partition begins; the caller settles."""
        one = self.definitions["q"]
        places = [replace(place, read_only=place.partition == index) for place in one.partitions]
        removing = tuple(place for place in places if place.read_only)
        status = Rebalancing(partitions=1, added=(), removing=removing, started_at=self.clock.now())
        self.definitions["q"] = replace(one, partitions=tuple(places), rebalance=status)
        self.queues["q"].configure(self.definitions["q"])

    def away(self, lane: int, queue: str = "q") -> None:
        """From the next commit of that lane on, until `back`."""
        store = self.stores[queue, lane]
        store.commit_fault = COMMIT_FAILED
        store.recover_faults = 1_000

    def back(self, lane: int, queue: str = "q") -> None:
        self.stores[queue, lane].heal()
        for _ in range(10):
            self.pass_time(SECOND)


def produce(*records: bytes | Record, **options: Any) -> Produce:
    named = any(isinstance(record, Record) and (record.id or record.key) for record in records)
    return Produce(list(records), 0, named=named, **options)


def answer(request: Request) -> Any:
    assert request.answered
    if request.error is not None:
        raise request.error
    return request.value


def complete(items: Sequence[Any]) -> Complete:
    return Complete([item.lease for item in items])


def keyed(key: str) -> Record:
    return Record(key.encode(), key=key)


def test_a_transfer_is_forgotten_only_once_the_source_has_durably_let_go() -> None:
    """Else a crash in between sends the item again, and the dead queue takes it for a new one."""
    bench = Bench()
    bench.produce(b"bad")
    [item] = bench.lease()
    bench.held.add(("d", 0))
    bench.ask(RetryItems([RetryItem(item.lease, dead=True)]))
    bench.held = {("q", 0)}
    bench.settle()
    bench.settle()
    assert [type(letter) for letter in bench.letters] == [Arrive]
    bench.held.clear()
    bench.settle()
    assert [type(letter) for letter in bench.letters] == [Arrive, Forget]


def test_a_lane_that_was_loaded_again_sends_its_transfers_once() -> None:
    bench = Bench()
    bench.produce(b"bad")
    [item] = bench.lease()
    bench.held.add(("d", 0))
    bench.stores["q", 0].commit_fault = "commit unreported"
    bench.ask(RetryItems([RetryItem(item.lease, dead=True)]))
    assert [type(letter) for letter in bench.letters] == [Arrive]


def test_a_copy_of_a_transfer_in_a_failed_commit_does_not_come_after_it_was_forgotten() -> None:
    bench = Bench(partitions=2)
    first, second = (Transfer(name, Record(name), None, 0, {}, 0) for name in (b"first", b"second"))
    bench.ask(Arrive("d", 0, [1], [first]), queue="d")
    bench.held.add(("d", 1))
    bench.stores["d", 1].commit_fault = COMMIT_FAILED
    both = Arrive("d", 0, [1, 2], [first, second])
    bench.send(both, queue="d")
    bench.send(Forget("d", 0, [b"first"]), queue="d")
    bench.held.clear()
    bench.settle()
    assert both.answered
    assert sorted(item.payload for item in bench.lease(10, queue="d")) == [b"first", b"second"]


def test_a_completed_item_that_is_kept_shows_its_attempt() -> None:
    bench = Bench(completed_retention_ms=60 * SECOND)
    [made] = bench.produce(b"x")
    bench.ask(complete(bench.lease()))
    shown = bench.ask(GetItem(made.id))
    assert (shown.state, shown.attempts, shown.deliveries) == (State.COMPLETED, 1, 1)


def test_a_cancel_that_reached_only_one_partition_does_not_say_that_nothing_was_changed() -> None:
    bench = Bench(partitions=2)
    ids = [bench.produce(b"a")[0].id, bench.produce(b"b")[0].id]
    items = bench.lease(2)
    bench.away(1)
    bench.send(*[Extend([item.lease]) for item in items])
    cancel = Cancel(ids)
    bench.send(cancel)
    bench.pass_time(30 * SECOND)
    with pytest.raises(OutcomeUnknown):
        answer(cancel)


def test_an_item_can_be_shown_by_the_very_turn_that_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot packs the chunks: by the time the record has been read, the item's place is another's."""
    monkeypatch.setattr(lane_module, "SNAPSHOT_ROWS", 1)
    bench = Bench()
    [first] = bench.produce(b"first")
    bench.produce(b"second")
    get, cancel = GetItem(first.id), Cancel([first.id])
    bench.send(get, cancel)
    assert answer(get).payload == b"first"
    assert answer(cancel)[0].ok


def test_a_repeated_complete_that_comes_late_shares_the_turn_of_the_first() -> None:
    bench = Bench()
    bench.produce(b"x")
    items = bench.lease(lease_timeout=SECOND)
    first, second = complete(items), complete(items)
    bench.held.add(("q", 0))
    bench.send(produce(b"keeps the lane busy"))
    bench.send(first)
    bench.pass_time(2 * SECOND)
    bench.send(second)
    bench.held.clear()
    bench.settle()
    assert answer(first)[0].ok
    assert answer(second)[0].ok


def test_after_a_failed_commit_earlier_requests_still_come_before_later_ones() -> None:
    bench = Bench()
    bench.produce(b"x")
    items = bench.lease(lease_timeout=SECOND)
    first, second = complete(items), complete(items)
    bench.stores["q", 0].commit_fault = COMMIT_FAILED
    bench.held.add(("q", 0))
    bench.send(first)
    bench.pass_time(2 * SECOND)
    bench.send(second)
    bench.held.clear()
    bench.settle()
    assert answer(first)[0].ok
    assert answer(second)[0].ok


def test_a_key_is_not_taken_over_in_another_partition_before_its_release_is_durable() -> None:
    bench = Bench(partitions=2, dedup_window_ms=0)
    bench.produce(keyed("k"), b"so that", b"the other has fewer")
    items = bench.lease()
    bench.away(0)
    again = produce(keyed("k"))
    bench.send(complete(items), again)
    assert not again.answered
    bench.back(0)
    assert [item.key for item in bench.lease(10)].count("k") == 1


def test_a_guarded_key_stays_guarded_while_a_turn_that_took_it_over_is_in_doubt() -> None:
    bench = Bench(partitions=2, body_bytes=0)
    bench.produce(keyed("k"))
    bench.ask(complete(bench.lease()))
    bench.produce(b"in 0")
    bench.produce(b"in 1", b"in 1 too")
    bench.stores["q", 0].read_faults = 1
    bench.stores["q", 0].recover_faults = 1_000
    replace, other = produce(keyed("k"), on_conflict="replace"), produce(keyed("k"))
    bench.send(replace, Lease(3))
    bench.send(other)
    assert not replace.answered
    assert not other.answered
    bench.back(0)
    assert not answer(replace)[0].duplicate
    assert answer(other)[0].duplicate
    assert answer(other)[0].id == answer(replace)[0].id


def test_due_items_come_in_due_order_after_a_restart() -> None:
    """What an earlier wait of the same item has left in the journal must not bring it forward."""
    bench = Bench(max_attempts=0)
    bench.produce(b"1", b"2")
    one, two = bench.lease(2)
    bench.ask(RetryItems([RetryItem(one.lease, due=bench.clock.now() + SECOND)]))
    bench.pass_time(SECOND)
    [one] = bench.lease()
    bench.ask(RetryItems([RetryItem(one.lease, due=bench.clock.now() + 10 * SECOND)]))
    bench.ask(RetryItems([RetryItem(two.lease, due=bench.clock.now() + 9 * SECOND)]))
    bench.clock.advance(10 * SECOND)
    bench.open()
    assert [item.payload for item in bench.lease(2)] == [b"2", b"1"]


def test_a_request_is_not_repeated_because_the_clock_was_set_back_over_a_restart() -> None:
    bench = Bench(partitions=2, dedup_window_ms=20 * SECOND)
    bench.produce(b"in 0")
    once = bench.produce(b"in 1", request=request_digest("r"))
    bench.clock = ManualClock(bench.clock.now() - 60 * SECOND)
    bench.stores["q", 1].recover_faults = 1_000
    bench.open()
    again = produce(b"in 1", request=request_digest("r"))
    bench.send(again)
    assert not again.answered
    bench.back(1)
    assert [one.id for one in answer(again)] == [one.id for one in once]


def test_an_id_that_a_replacement_does_not_take_over_stays_guarded() -> None:
    bench = Bench()
    bench.produce(Record(b"old", id="i", key="k"))
    bench.produce(Record(b"new", key="k"), on_conflict="replace")
    with pytest.raises(KeyConflict):
        bench.produce(Record(b"third", id="i"), on_conflict="reject")


def test_clearing_a_completed_item_does_not_guard_its_key_for_longer() -> None:
    bench = Bench(completed_retention_ms=60 * SECOND, dedup_window_ms=10 * SECOND)
    bench.produce(keyed("k"))
    bench.ask(complete(bench.lease()))
    bench.pass_time(9 * SECOND)
    bench.ask(Clear([State.COMPLETED]))
    bench.pass_time(2 * SECOND)
    assert not bench.produce(keyed("k"))[0].duplicate


def test_an_item_is_not_said_to_be_gone_before_that_is_durable() -> None:
    bench = Bench()
    bench.produce(Record(b"x", id="i"))
    items = bench.lease(lease_timeout=60 * SECOND)
    bench.stores["q", 0].commit_fault = COMMIT_FAILED
    bench.stores["q", 0].recover_faults = 1_000
    bench.held.add(("q", 0))
    done, get, cancel = complete(items), GetItem("i"), Cancel(["i"])
    bench.send(done)
    bench.send(get, cancel)
    bench.held.clear()
    bench.settle()
    assert not get.answered
    assert not cancel.answered


def test_an_id_that_is_used_again_stands_for_the_item_that_lives() -> None:
    bench = Bench(partitions=2, completed_retention_ms=60 * SECOND, dedup_window_ms=SECOND)
    bench.produce(Record(b"old", id="i"), b"so that", b"the other has fewer")
    bench.ask(complete(bench.lease()))
    bench.pass_time(2 * SECOND)
    bench.produce(Record(b"new", id="i"))
    assert bench.ask(GetItem("i")).payload == b"new"


def test_a_completed_dead_letter_is_not_redriven_by_its_id() -> None:
    bench = Bench(completed_retention_ms=60 * SECOND)
    bench.produce(b"bad")
    bench.ask(RetryItems([RetryItem(bench.lease()[0].lease, dead=True)]))
    [letter] = bench.lease(queue="d")
    bench.ask(complete([letter]), queue="d")
    done = bench.ask(Redrive([letter.id], RedriveFilter()), queue="d")
    assert (done.matched, done.moved) == (0, 0)
    assert not bench.lease()


def test_items_of_a_caller_who_left_come_back_once_a_brimful_disk_has_room() -> None:
    bench = Bench()
    store = bench.stores["q", 0]
    bench.produce(b"x")
    lease = Lease(1, lease_timeout=3_600 * SECOND)
    bench.send(lease)
    store.full = store.brimful = True
    bench.queues["q"].withdraw(lease)
    for _ in range(5):
        bench.pass_time(SECOND)
    store.full = store.brimful = False
    for _ in range(5):
        bench.pass_time(60 * SECOND)
    [item] = bench.lease()
    assert (item.attempts, item.deliveries) == (1, 2)


def test_a_published_transaction_is_not_forgotten_while_a_partition_has_to_follow() -> None:
    """What is published waits for a partition that may have one of its names, however long that is away."""
    bench = Bench(partitions=2)
    bench.produce(keyed("k"))
    bench.ask(StageItems("t", "x", [keyed("k"), b"free"], 0))
    bench.stores["q", 0].recover_faults = 1_000
    bench.open()
    publish = PublishStage("t", ["x"])
    bench.send(publish)
    for _ in range(3):
        bench.pass_time(10 * SECOND)
    assert isinstance(publish.error, OutcomeUnknown)
    bench.pass_time(CLAIM_MEMORY_MS + 1)
    bench.ask(StageItems("other", "x", [b"other"], 0))
    bench.ask(PublishStage("other", ["x"]))
    with pytest.raises(Conflict):
        bench.ask(AbortStage("t"))
    bench.back(0)
    bench.back(0)
    assert sorted(item.payload for item in bench.lease(10)) == [b"free", b"k", b"other"]


def test_an_abort_does_not_drop_what_is_being_published() -> None:
    bench = Bench(partitions=2)
    for abort_first in (True, False):
        txn = f"t{abort_first}"
        bench.ask(StageItems(txn, "x", [txn.encode()], 0))
        abort, publish = AbortStage(txn), PublishStage(txn, ["x"])
        bench.send(*(abort, publish) if abort_first else (publish, abort))
        shown = [item.payload for item in bench.lease(10)]
        assert (abort.error is None) != (publish.error is None)
        assert shown == ([] if publish.error is not None else [txn.encode()])


def test_claims_that_come_together_get_what_the_first_has_left() -> None:
    bench = Bench(partitions=3)
    for number in range(6):
        bench.produce(b"%d" % number)
    claims = [ClaimItems(name, 4) for name in "ab"]
    bench.send(*claims)
    assert [answer(claim).items for claim in claims] == [4, 2]


def test_a_chunk_sent_again_while_its_transaction_is_decided_is_not_shown_twice() -> None:
    """It was let through just before the decision, and comes to its partition just after that has shown it."""
    bench = Bench(partitions=2)
    bench.ask(StageItems("t", "x", [b"x"], 0))
    bench.ask(StageItems("t", "y", [b"y"], 0))
    bench.produce(b"in 0", b"in 0 too")
    bench.held = {("q", 1)}
    bench.send(produce(b"in 1"))
    publish, again = PublishStage("t", ["x", "y"]), StageItems("t", "x", [b"x"], 0)
    bench.send(publish)
    bench.held.add(("q", META_PARTITION))
    bench.send(OpenConsumer("s"))
    bench.send(again)
    bench.held.discard(("q", 1))
    bench.settle()
    bench.held.add(("q", 1))
    bench.send(produce(b"in 1 too"))
    [(_, opened)] = [entry for entry in bench.jobs if entry[1].lane.index == META_PARTITION]
    bench.jobs = [entry for entry in bench.jobs if entry[1] is not opened]
    opened.run()
    bench.queues["q"].finish(opened, bench.clock.now())
    bench.settle()
    bench.queues["q"].withdraw(publish)
    bench.held.discard(("q", META_PARTITION))
    bench.settle()
    bench.held.clear()
    bench.settle()
    assert answer(again).items == 0
    shown = sorted(item.payload for item in bench.lease(10))
    assert shown == [b"in 0", b"in 0 too", b"in 1", b"in 1 too", b"x", b"y"]


def test_what_a_failed_claim_has_left_is_not_kept_from_the_next_claim_of_its_name() -> None:
    """The partition comes back while that one waits, and what it still holds for the first is what it waits for."""
    bench = Bench()
    bench.produce(b"x")
    bench.ask(OpenConsumer("s"))
    store = bench.stores["q", 0]
    store.commit_fault, store.recover_faults = "commit unreported", 1_000
    first, second = ClaimItems("c", 10), ClaimItems("c", 10, wait=60 * SECOND)
    bench.send(first)
    bench.pass_time(10 * SECOND)
    assert isinstance(first.error, OutcomeUnknown)
    bench.send(second)
    bench.back(0)
    assert answer(second).items == 1


def test_what_a_claim_leaves_behind_is_settled_though_nobody_asks_for_anything() -> None:
    bench = Bench()
    bench.produce(b"x")
    claim = ClaimItems("c", 10)
    bench.held.add(("q", 0))
    bench.send(claim)
    bench.queues["q"].withdraw(claim)
    bench.held.clear()
    bench.settle()
    assert [item.payload for item in bench.lease()] == [b"x"]


def test_an_id_is_not_said_to_be_gone_while_the_turn_that_gives_it_up_is_only_about_to_begin() -> None:
    bench = Bench(partitions=2, completed_retention_ms=2 * SECOND)
    for name in "ij":
        bench.produce(Record(b"x", id=name))
    i, j = bench.lease(2)
    bench.ask(complete([i]))
    bench.pass_time(SECOND)
    bench.ask(complete([j]))
    bench.held = {("q", 0)}
    bench.pass_time(SECOND)  # i is given up
    cancel = Cancel(["i", "j"])
    bench.send(cancel)
    [(_, job)] = bench.jobs
    job.run()
    bench.queues["q"].finish(job, bench.clock.now())
    bench.jobs = []
    bench.away(1)
    bench.pass_time(SECOND)  # the cancel goes on in the turn in which j is given up
    assert not cancel.answered


def test_a_claim_ends_although_its_partitions_are_gone() -> None:
    bench = Bench()
    bench.produce(b"x")
    bench.ask(ClaimItems("c", 1))
    state = bench.queues["q"].state
    end = CLAIM_OPERATIONS[EndClaim](state, EndClaim("c", True, None))
    next(end)
    claim = state.meta.partition.decisions.claims["c"]
    state.lanes.clear()  # while that is written
    assert end.send((claim, None)) == []
    with pytest.raises(StopIteration) as stop:
        end.send([])
    assert stop.value.value.items == 0


def test_a_queue_closes_while_a_paced_redrive_is_about_to_wait_for_an_item_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining, "CARRY_BATCH", 1)
    bench = Bench(partitions=2)
    one = bench.definitions["q"]
    bench.definitions["q"] = replace(one, settings=replace(one.settings, dead_queue=None))
    bench.queues["q"].configure(bench.definitions["q"])
    ids = [one.id for one in bench.produce(b"x", b"y")]
    bench.ask(RetryItems([RetryItem(item.lease, dead=True) for item in bench.lease(2)]))
    bench.held.add(("q", 1))
    bench.drain(0)
    bench.settle()
    redrive = Redrive(ids, RedriveFilter(), rate=1)
    bench.send(redrive)
    assert len(bench.queues["q"].state.lanes[0].partition.carried) == 1
    assert not redrive.answered
    bench.queues["q"].close(bench.clock.now())
    assert redrive.answered
