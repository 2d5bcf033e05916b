"""Restart and recovery: what the journal replays, what a snapshot holds, and that the two agree."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

import millpond.queue.lane
from millpond.history.format import Record, encode_state, numbers_of
from millpond.model import RedriveFilter, State
from millpond.queue.decisions import Decisions
from millpond.queue.lane import Lane
from millpond.queue.partition import Partition
from millpond.queue.requests import (
    AbortStage,
    Cancel,
    ClaimItems,
    Clear,
    Complete,
    EndClaim,
    Extend,
    JudgeClaim,
    JudgeItem,
    Lease,
    MakeReady,
    OpenConsumer,
    PublishStage,
    Redrive,
    RetryItem,
    RetryItems,
    StageItems,
    WriteState,
)
from millpond.queue.snapshot import COLUMNS, Snapshot, recover_partition, take_snapshot
from millpond.store.base import Recovered
from tests.conformance.conftest import MakePond
from tests.conformance.engine import SteppedPond, keyed, numbered, payloads, request
from tests.drive import definition
from tests.seeds import seeds

# ---- a snapshot holds what the journal replays ------------------------------------------------------------


def state_of(partition: Partition) -> dict[str, Any]:
    """The partition's state in a form that does not depend on how it was grouped."""
    dump = msgspec.structs.asdict(msgspec.msgpack.decode(take_snapshot(partition), type=Snapshot))
    for column in COLUMNS:
        dump[column] = dict(getattr(partition, column).items())
    chunks, dedup = partition.chunks, partition.dedup
    dump["chunks"] = {
        number: (chunks.first_of(number), chunks.created_of(number), chunks.deadline_of(number))
        for number in chunks.walk(0)
    }
    dump["leased"] = {number: partition.leased[number] for number in partition.leased}
    del dump["granted"]  # the leases have it
    dump["names"] = (dedup.live, dict(dedup.names.items()))
    dump["moving"] = {
        number: (target, redrive, turn) for target, redrive, turn, runs in dump["moving"] for number in numbers_of(runs)
    }
    dump["ready"] = {priority: list(numbers_of(runs)) for priority, runs in partition.ready.runs().items()}
    dump["cancel_asked"] = sorted(dump["cancel_asked"])
    dump["documents"] = {number: has for number, has in dump["documents"].items() if has}
    return dump | {"turn": partition.turn}


class Workload:
    """Does one thing after another at random, on a queue with a dead queue."""

    def __init__(self, pond: SteppedPond, seed: int) -> None:
        self.pond = pond
        self.rng = Random(seed)
        self.later = Random(seed)  # for what was thought of later: the rest stays as it was
        self.tokens: list[str] = []
        self.ids: list[str] = []

    def step(self) -> None:
        rng, pond = self.rng, self.pond
        act = rng.choices(
            (self.produce, self.lease, self.complete, self.retry, self.extend, self.write, self.cancel, self.time,
             self.clear, self.redrive, self.gone, self.claim, self.judge, self.end_claim, self.stage, self.publish),
            (30, 25, 20, 12, 8, 8, 4, 10, 1, 2, 3, 8, 6, 5, 8, 4),
        )[0]  # fmt: skip
        act()
        if self.ids and self.later.random() < 0.03:
            pond.submit(MakeReady(self.later.sample(self.ids, min(len(self.ids), 5))))
        pond.run()

    def produce(self) -> None:
        records = [self.record() for _ in range(self.rng.randint(1, 4))]
        name = b"r%d" % self.rng.randint(0, 30) if self.rng.random() < 0.3 else None
        conflict = self.rng.choice(["ignore", "ignore", "replace", "reject"])
        asked = self.pond.submit(request(*records, name=name, on_conflict=conflict))
        self.pond.run()
        if asked.error is None:
            self.ids += [reply.id for reply in asked.value]

    def record(self) -> bytes | Record:
        rng, now = self.rng, self.pond.clock.now()
        if rng.random() < 0.5:
            return b"p%d" % rng.randint(0, 99)
        return Record(
            b"r%d" % rng.randint(0, 99),
            id=f"own{rng.randint(0, 40)}" if rng.random() < 0.2 else None,
            key=f"k{rng.randint(0, 20)}" if rng.random() < 0.3 else None,
            kind=rng.choice(["", "mail"]),
            priority=rng.choice([0, 0, -1, 3]),
            enqueue_at=now + rng.randint(1, 20_000) if rng.random() < 0.3 else 0,
            max_attempts=rng.choice([-1, -1, 0, 1, 2]),
            expire_deadline=now + rng.randint(1, 60_000) if rng.random() < 0.2 else 0,
            correlation_id=f"c{rng.randint(0, 99)}" if rng.random() < 0.2 else None,
        )

    def lease(self) -> None:
        timeout = self.rng.choice([None, 500, 5_000])
        lease = self.pond.submit(Lease(self.rng.randint(1, 6), lease_timeout=timeout, client=self.rng.choice("ab")))
        self.pond.run()
        self.tokens += [item.lease for item in lease.value]

    def gone(self) -> None:
        lease = self.pond.submit(Lease(self.rng.randint(1, 6)))
        self.pond.run()
        self.pond.queues["q"].withdraw(lease)

    def some(self) -> list[str]:
        return self.rng.sample(self.tokens, min(len(self.tokens), self.rng.randint(1, 5)))

    def complete(self) -> None:
        tokens = self.some()
        result = encode_state("done") if len(tokens) == 1 and self.rng.random() < 0.5 else None
        self.pond.submit(Complete(tokens, result))

    def retry(self) -> None:
        rng, now = self.rng, self.pond.clock.now()
        self.pond.submit(
            RetryItems(
                [
                    RetryItem(
                        token,
                        deferred=rng.random() < 0.4,
                        due=rng.choice([None, 0, now + rng.randint(1, 9_000)]),
                        error=rng.choice([None, "boom"]),
                        dead=rng.random() < 0.15,
                    )
                    for token in self.some()
                ]
            )
        )

    def extend(self) -> None:
        self.pond.submit(Extend(self.some(), self.rng.choice([0, 1_000, 20_000])))

    def write(self) -> None:
        for token in self.some()[:1]:
            self.pond.submit(WriteState(token, self.rng.randint(0, 2), encode_state({"n": self.rng.random()})))

    def cancel(self) -> None:
        if self.ids:
            self.pond.submit(Cancel(self.rng.sample(self.ids, min(len(self.ids), 2))))

    def clear(self) -> None:
        self.pond.submit(Clear([self.rng.choice([State.READY, State.SCHEDULED, State.RETRYING, State.DEAD])]))

    def redrive(self) -> None:
        self.pond.submit(Redrive(None, RedriveFilter()))
        if "dq" in self.pond.queues:
            self.pond.submit(Redrive(None, RedriveFilter()), "dq")

    def claim(self) -> None:
        if self.rng.random() < 0.2:
            self.pond.submit(OpenConsumer("s"))
        consumer = self.meta.consumers.get("s")
        if consumer is not None and self.rng.random() < 0.3:
            self.pond.submit(ClaimItems(f"s:{consumer.last_completed + 1}", 5, epoch=consumer.epoch))
        else:
            self.pond.submit(ClaimItems(f"c{self.rng.randint(0, 99)}", self.rng.randint(1, 9), parts=2))

    def judge(self) -> None:
        items = self.pond.list(State.CLAIMED)
        for claim_id in list(self.meta.claims)[:3]:
            chosen = self.rng.sample(items, min(len(items), 3))
            verdicts = [JudgeItem(item.id, self.rng.random() < 0.3, error="judged") for item in chosen]
            self.pond.submit(JudgeClaim(claim_id, verdicts))

    def end_claim(self) -> None:
        for claim_id in list(self.meta.claims)[:1]:
            self.pond.submit(EndClaim(claim_id, self.rng.random() < 0.6))

    def stage(self) -> None:
        records = [self.record() for _ in range(self.rng.randint(1, 4))]
        self.pond.submit(StageItems(self.txn(), f"c{self.rng.randint(0, 2)}", records, 0))

    def publish(self) -> None:
        if self.rng.random() < 0.1:
            self.pond.submit(AbortStage(self.txn()))
        else:
            self.pond.submit(PublishStage(self.txn(), [f"c{self.rng.randint(0, 2)}"]))

    def txn(self) -> str:
        return f"{self.rng.choice(('t', 't:'))}{self.rng.randint(1, 6)}"

    @property
    def meta(self) -> Decisions:
        meta = self.pond.queues["q"].state.meta
        return meta.partition.decisions if meta.known else Decisions()

    def time(self) -> None:
        self.pond.advance(self.rng.choice([1, 700, 6_000, 400_000]))


def lanes_of(pond: SteppedPond) -> dict[tuple[str, int], Lane]:
    """Those of the decisions too, where they are in use."""
    lanes = {(name, lane.index): lane for name, queue in pond.queues.items() for lane in queue.state.everyone}
    return {place: lane for place, lane in lanes.items() if lane.known}


@pytest.mark.parametrize("dead_queue", [None, "dq"])
@pytest.mark.parametrize("retention", [0, 50_000])
@pytest.mark.parametrize("seed", seeds(3, fast=1))
def test_memory_journal_and_snapshot_are_the_same_state(
    make_pond: MakePond, monkeypatch: pytest.MonkeyPatch, dead_queue: str | None, retention: int, seed: int
) -> None:
    """At many points: what is in memory, what a replay of all rows gives, and what a snapshot and the rest give."""
    monkeypatch.setattr(millpond.queue.lane, "SNAPSHOT_ROWS", 1_000_000)
    queues = [definition(dead_queue=dead_queue, completed_retention_ms=retention, max_attempts=3)]
    if dead_queue:
        queues.append(definition(dead_queue))
    pond = make_pond(*queues)
    work = Workload(pond, seed)
    snapshots: dict[tuple[str, int], tuple[int, bytes]] = {}
    for step in range(1, 321):
        work.step()
        if step % 60 == 20:
            lanes = lanes_of(pond).items()
            snapshots = {name: (lane.partition.turn, take_snapshot(lane.partition)) for name, lane in lanes}
        if step % 60 == 0:
            for name, lane in lanes_of(pond).items():
                rows = lane.store.journal(0, 100_000)
                turn, snapshot = snapshots.get(name, (0, None))
                later = [row for row in rows if row.turn > turn]
                for recovered in (Recovered(0, None, rows), Recovered(turn, snapshot, later)):
                    again = recover_partition(lane.partition.incarnation, 0, 300_000, recovered)
                    again.at = lane.partition.at  # in memory it moves on with turns that have nothing to write
                    assert state_of(again) == state_of(lane.partition)
    assert sum(pond.stats().totals.values()) > 300


@pytest.mark.parametrize("seed", range(3))
def test_a_crash_between_any_two_steps_changes_nothing(make_pond: MakePond, seed: int) -> None:
    pond = make_pond(definition(dead_queue="dq", partitions=2, max_attempts=3), definition("dq"))
    work = Workload(pond, seed)
    for step in range(120):
        work.step()
        if step % 12 == 11:
            before = [pond.list(queue=name) for name in pond.queues]
            pond.reopen()
            assert [pond.list(queue=name) for name in pond.queues] == before
            for name in pond.queues:
                for lane in pond.queues[name].state.lanes.values():
                    assert lane.store.check() == []


def test_snapshots_and_trims_in_the_middle_of_the_work_lose_nothing(
    make_pond: MakePond, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(millpond.queue.lane, "SNAPSHOT_ROWS", 7)
    monkeypatch.setattr(millpond.queue.lane, "TRIM_INTERVAL_MS", 1)
    pond = make_pond(definition(journal_bytes_max=0, journal_retention_ms=0, max_attempts=3))
    work = Workload(pond, 5)
    for step in range(150):
        work.step()
        if step % 10 == 9:
            at, live = pond.partition().at, state_of(pond.partition())
            pond.reopen()
            pond.partition().at = at
            assert state_of(pond.partition()) == live
    assert len(pond.queues["q"].state.lanes[0].store.journal(0, 1_000)) < 100


# ---- what a restart keeps ---------------------------------------------------------------------------------


def test_numbers_and_ids_are_never_used_again(pond: SteppedPond) -> None:
    ids = [reply.id for reply in pond.produce(*numbered(3))]
    pond.complete(pond.lease(10))
    for clean in (False, True):
        if clean:
            pond.close()
            pond.open()
        else:
            pond.reopen()
        [reply] = pond.produce(b"a")
        assert reply.id not in ids
        ids.append(reply.id)


def test_a_crash_in_the_middle_of_a_commit_loses_only_what_was_not_answered(pond: SteppedPond) -> None:
    pond.produce(b"acknowledged")
    produce = pond.submit(request(b"in flight"))
    pond.tick()
    pond.reopen()
    assert not produce.answered
    assert payloads(pond.list()) == [b"acknowledged"]


def test_what_was_completed_is_never_revived(pond: SteppedPond) -> None:
    pond.produce(*numbered(10))
    pond.complete(pond.lease(4))
    for _ in range(3):
        pond.reopen()
        pond.advance(30_000)
        items = pond.lease(10)
        assert set(payloads(items)) == set(numbered(6, 4))


def test_leases_survive_a_restart_with_their_tokens(pond: SteppedPond) -> None:
    pond.produce(b"a", b"b", keyed("k", b"c"))
    items = pond.lease(3, client="me")
    pond.reopen()
    assert pond.lease(3) == []
    assert pond.get(items[0].id).client_id == "me"
    assert pond.extend(items[1], 60_000).ok
    assert all(result.ok for result in pond.complete(items))


def test_the_order_after_a_restart_is_the_order_before(pond: SteppedPond) -> None:
    pond.produce(*numbered(6))
    one, two, _ = pond.lease(3)
    pond.retry(two, deferred=True)
    pond.retry(one, deferred=True)
    pond.produce(Record(b"first", priority=-1))
    pond.reopen()
    assert payloads(pond.lease(10)) == [b"first", b"3", b"4", b"5", b"1", b"0"]


def test_the_last_items_of_a_large_chunk_survive_its_rewriting(pond: SteppedPond) -> None:
    ids = [reply.id for reply in pond.produce(*numbered(1_000), keyed("k", b"keyed"))]
    items = pond.lease(1_001)
    pond.complete([item for item in items if int(item.id.rsplit("-", 1)[1]) % 50])
    kept = [item.id for item in pond.list()]
    assert len(kept) == 20
    for start in range(0, 100, 10):
        pond.produce(*numbered(10, start))  # turns in which it may be done
        pond.advance(1_000)
    pond.reopen()
    assert [pond.get(item_id).payload for item_id in kept] == [b"%d" % ids.index(item_id) for item_id in kept]
    pond.advance(30_000)
    again = {item.id: item for item in pond.lease(1_000)}
    assert [again[item_id].attempts for item_id in kept] == [2] * 20
    assert pond.queues["q"].state.lanes[0].store.check() == []


@pytest.mark.parametrize("clean", [False, True])
def test_relaxed_queues_come_back_too(make_pond: MakePond, clean: bool) -> None:
    pond = make_pond(definition(durability="relaxed"))
    pond.produce(*numbered(3))
    if clean:
        pond.close()
        pond.open()
    else:
        pond.reopen()
    assert payloads(pond.lease(5)) == numbered(3)
