"""Rebalance, below the manager: partitions come, drain, and go, and nothing is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.errors import KeyConflict, NotFound
from millpond.history.format import Record
from millpond.model import DeadReason, State
from millpond.queue.draining import CARRY_BATCH
from millpond.queue.pace import CARRIED_A_SECOND, QUIET_MS
from millpond.queue.requests import Bury, Complete, ReadJournal
from millpond.store.base import Stores
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, keyed, payloads, request
from tests.drive import definition

GRACE = 300_000


def moved(pond: SteppedPond, add: int = 1, remove: tuple[int, ...] = (0,)) -> SteppedPond:
    pond.rebalance(add, remove)
    return pond


def finish(pond: SteppedPond) -> list[int]:
    pond.run()
    pond.advance(GRACE)
    return pond.sweep()


# ---- draining through consumers ---------------------------------------------------------------------------


def test_new_items_go_to_the_new_partition_and_old_ones_are_served_first(pond: SteppedPond) -> None:
    pond.produce(b"old")
    moved(pond)
    [new] = pond.produce(b"new")
    assert new.id == "incq-1-1"
    assert payloads(pond.lease(2)) == [b"old", b"new"]


def test_an_empty_partition_is_removed_with_its_data(pond: SteppedPond, stores: Stores) -> None:
    pond.produce(b"old")
    moved(pond)
    pond.complete(pond.lease())
    assert pond.sweep() == [0, 1], "a complete that is sent again must find its row"
    assert finish(pond) == [1]
    opened = stores.open("incq", 0, "full")
    recovered = opened.recover()
    opened.close()
    assert not recovered.rows
    assert recovered.snapshot is None


def test_a_leased_item_holds_its_partition_until_it_is_completed(pond: SteppedPond) -> None:
    pond.produce(b"held")
    items = pond.lease(lease_timeout=10 * GRACE)
    moved(pond)
    assert finish(pond) == [0, 1]
    assert pond.complete(items)[0].ok
    assert finish(pond) == [1]


def test_completing_again_works_until_the_partition_is_gone_and_then_the_lease_is_lost(pond: SteppedPond) -> None:
    pond.produce(b"x")
    items = pond.lease()
    moved(pond)
    pond.complete(items)
    pond.advance(GRACE - 1)
    assert pond.complete(items)[0].ok
    assert finish(pond) == [1]
    [result] = pond.complete(items)
    assert result.error is not None
    assert result.error.code == "lease_lost"


def test_a_claim_holds_its_partition(pond: SteppedPond) -> None:
    pond.produce(b"x", b"y")
    pond.claim()
    moved(pond)
    assert finish(pond) == [0, 1]
    assert payloads(pond.read()) == [b"x", b"y"]
    pond.complete_claim()
    assert finish(pond) == [1]


def test_what_is_staged_holds_its_partition_and_new_chunks_go_to_the_new_one(pond: SteppedPond) -> None:
    pond.stage("a", b"1")
    moved(pond)
    pond.stage("b", b"2")
    assert not pond.partition(index=0).staged["t"].keys() - {"a"}
    assert finish(pond) == [0, 1]
    assert pond.publish("a", "b").items == 2
    assert sorted(payloads(pond.lease(5))) == [b"1", b"2"]


# ---- what is carried over ---------------------------------------------------------------------------------


def test_a_scheduled_item_is_carried_over_under_its_id(pond: SteppedPond) -> None:
    [made] = pond.produce(Record(b"later", enqueue_at=pond.clock.now() + 10 * GRACE, kind="k", priority=3))
    before = pond.get(made.id)
    moved(pond)
    after = pond.get(made.id)
    assert after.partition == 1
    after.partition = 0
    assert after == before
    assert finish(pond) == [1]
    pond.advance(10 * GRACE)
    [item] = pond.lease()
    assert (item.id, item.correlation_id, item.payload, item.created_at) == (
        made.id, made.correlation_id, b"later", before.created_at,
    )  # fmt: skip


def test_a_retrying_item_keeps_its_attempts_state_and_error(pond: SteppedPond) -> None:
    [made] = pond.produce(b"x")
    [item] = pond.lease()
    pond.write_state(item, 0, {"page": 3})
    fence = item.fencing_token
    pond.retry(item, due=pond.clock.now() + 10 * GRACE, error="boom")
    before = pond.get(made.id)
    moved(pond)
    after = pond.get(made.id)
    assert (after.partition, after.state, after.last_error) == (1, State.RETRYING, "boom")
    after.partition = 0
    assert after == before
    assert finish(pond) == [1]
    pond.advance(10 * GRACE)
    [again] = pond.lease()
    assert (again.id, again.attempts, again.state_doc, again.state_version) == (made.id, 2, {"page": 3}, 1)
    assert again.fencing_token > fence


def test_dead_items_are_carried_over_and_can_be_redriven(pond: SteppedPond) -> None:
    [made] = pond.produce(keyed("k", b"x"))
    pond.kill(pond.lease()[0], error="bad")
    before = pond.get(made.id)
    moved(pond)
    assert finish(pond) == [1]
    after = pond.get(made.id)
    after.partition = 0
    assert after == before
    assert pond.redrive([made.id]).moved == 1
    assert payloads(pond.lease()) == [b"x"]


def test_what_is_kept_is_carried_over_until_its_retention_is_over(make_pond: MakePond) -> None:
    pond = make_pond(definition(completed_retention_ms=10 * GRACE))
    [done, cancelled] = pond.produce(Record(b"x", id="own"), b"y")
    pond.ask(Complete([pond.lease()[0].lease], b"\x01"))
    pond.cancel(cancelled.id)
    before = [pond.get(done.id), pond.get(cancelled.id)]
    moved(pond)
    assert finish(pond) == [1]
    after = [pond.get(done.id), pond.get(cancelled.id)]
    for item in after:
        item.partition = 0
    assert after == before
    assert after[0].result == 1
    pond.advance(10 * GRACE)
    assert not pond.exists(done.id)
    assert not pond.exists(cancelled.id)


def test_letters_that_nobody_consumes_are_carried_over(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead_queue="d"), definition("d"))
    [made] = pond.produce(b"x")
    pond.kill(pond.lease()[0])
    pond.rebalance(1, (0,), "d")
    pond.advance(GRACE)
    assert pond.sweep("d") == [1]
    [letter] = pond.list(queue="d")
    assert (letter.source_id, letter.state) == (made.id, State.READY)
    assert pond.redrive(queue="d").moved == 1
    assert pond.lease()[0].id == made.id


def test_an_item_can_be_cancelled_buried_and_made_ready_after_it_was_carried(pond: SteppedPond) -> None:
    at = pond.clock.now() + 10 * GRACE
    made = pond.produce(*[Record(b"%d" % n, enqueue_at=at) for n in range(3)])
    moved(pond)
    assert finish(pond) == [1]
    assert pond.cancel(made[0].id)[0].ok
    assert pond.ask(Bury([made[1].id], DeadReason.REJECTED))[0].ok
    assert pond.make_ready(made[2].id)[0].ok
    assert [item.id for item in pond.lease(5)] == [made[2].id]
    assert pond.counts() == {"leased": 1, "dead": 1}


def test_more_items_than_one_batch_are_carried(pond: SteppedPond) -> None:
    at = pond.clock.now() + 10 * GRACE
    for start in range(0, 1_000, 100):
        pond.produce(*[Record(b"%d" % n, enqueue_at=at + n) for n in range(start, start + 100)])
    moved(pond, add=2)
    pond.advance(2_000)  # at a pace
    assert finish(pond) == [1, 2]
    pond.advance(10 * GRACE)
    assert sorted(int(p) for p in payloads(pond.lease(1_000))) == list(range(1_000))


def test_a_partition_out_of_which_all_was_carried_stays_until_its_journal_can_be_exported(pond: SteppedPond) -> None:
    pond.produce(Record(b"later", enqueue_at=pond.clock.now() + 10 * GRACE))
    moved(pond)
    pond.run()
    assert pond.counts() == {"scheduled": 1}
    assert pond.sweep() == [0, 1]
    assert finish(pond) == [1]


def scheduled(pond: SteppedPond, count: int, **options: Any) -> None:
    at = pond.clock.now() + 10 * GRACE
    pond.produce(*[Record(b"%d" % n, enqueue_at=at, **options) for n in range(count)])


def keep_asking(pond: SteppedPond, ms: int) -> None:
    for _ in range(0, ms, QUIET_MS // 2):
        pond.lease()
        pond.advance(QUIET_MS // 2)


def left(pond: SteppedPond) -> int:
    return len(pond.partition().waiting)


def test_while_somebody_asks_items_are_carried_at_their_pace(pond: SteppedPond) -> None:
    scheduled(pond, 2_000)
    moved(pond)
    begun = left(pond)
    assert begun > 1_000, "not all at once"
    keep_asking(pond, 1_000)
    assert begun - left(pond) == pytest.approx(CARRIED_A_SECOND, abs=CARRY_BATCH)
    wake = pond.queues["q"].tick(pond.clock.now())
    assert wake is not None
    assert wake <= pond.clock.now() + CARRY_BATCH * 1_000 // CARRIED_A_SECOND, "it goes on by itself"
    assert not pond.queues["q"].idle, "it must not sleep before it is done"


def test_once_nobody_asks_all_items_are_carried_at_once(pond: SteppedPond) -> None:
    scheduled(pond, 2_000)
    moved(pond)
    assert left(pond)
    pond.advance(QUIET_MS)
    assert not left(pond)
    assert pond.queues["q"].idle


def test_a_batch_of_names_is_entrusted_at_the_pace_of_items(pond: SteppedPond, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.queue.draining.NAMES_BATCH", 1)
    pond.produce(*[keyed(f"key {n}") for n in range(20)])
    pond.complete(pond.lease(20))
    moved(pond)
    new = pond.partition(index=1).dedup.ended

    def entrusted() -> int:
        return len(new.dump(pond.clock.now(), GRACE))

    begun = entrusted()
    keep_asking(pond, 1_000)
    assert entrusted() - begun == pytest.approx(CARRIED_A_SECOND / CARRY_BATCH, abs=1)
    pond.advance(QUIET_MS)
    assert entrusted() == 20


def test_an_item_that_has_expired_on_the_way_dies(pond: SteppedPond) -> None:
    now = pond.clock.now()
    [made] = pond.produce(Record(b"x", enqueue_at=now + 10 * GRACE, expire_deadline=now + 1_000))
    pond.rebalance(1, (0,))
    pond.advance(1_000)
    assert pond.get(made.id).state == State.DEAD
    assert finish(pond) == [1]
    assert pond.get(made.id).dead_reason == "expired"


def test_who_waits_for_a_carried_item_learns_of_its_end(pond: SteppedPond) -> None:
    [made] = pond.produce(Record(b"x", enqueue_at=pond.clock.now() + GRACE))
    watch = pond.watch(made.id, wait=10 * GRACE)
    moved(pond)
    pond.advance(GRACE)
    pond.complete(pond.lease())
    pond.run()
    assert watch.answered
    assert watch.value.state == State.COMPLETED


# ---- names ------------------------------------------------------------------------------------------------


def test_a_key_is_unique_during_the_rebalance_and_after_it(make_pond: MakePond) -> None:
    pond = make_pond(definition(dedup_window_ms=10 * GRACE))
    at = pond.clock.now() + 10 * GRACE
    [ready, later, done] = pond.produce(keyed("r"), keyed("l", enqueue_at=at), keyed("d", priority=-1))
    pond.complete(pond.lease())
    moved(pond)
    for _ in range(2):
        again = pond.produce(keyed("r"), keyed("l"), keyed("d"))
        assert [(one.id, one.correlation_id, one.duplicate) for one in again] == [
            (one.id, one.correlation_id, True) for one in (ready, later, done)
        ]
        for item in pond.lease(5):
            pond.complete([item])
        finish(pond)
    assert [p.partition for p in pond.definitions["q"].partitions] == [1]
    with pytest.raises(KeyConflict):
        pond.produce(keyed("l"), on_conflict="reject")


def test_names_are_entrusted_again_when_their_new_partition_goes_too(make_pond: MakePond) -> None:
    pond = make_pond(definition(dedup_window_ms=100 * GRACE))
    [made] = pond.ask(request(b"x", name=b"r" * 15))
    [own] = pond.produce(keyed("k"))
    pond.complete(pond.lease(2))
    for index in range(3):
        moved(pond, remove=(index,))
        assert finish(pond) == [index + 1]
        [again] = pond.ask(request(b"x", name=b"r" * 15))
        assert (again.id, again.correlation_id) == (made.id, made.correlation_id)
        assert pond.produce(keyed("k"))[0].id == own.id
    pond.reopen()
    assert pond.ask(request(b"x", name=b"r" * 15))[0].id == made.id


def test_an_older_use_of_a_key_does_not_shorten_the_window_of_a_newer_one(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2, dedup_window_ms=2 * GRACE, completed_grace_ms=0))
    first = pond.produce(keyed("k"))[0].id
    pond.clear(State.READY)
    pond.advance(2 * GRACE)
    second = pond.produce(b"fill", keyed("k"))[1].id if first.startswith("incq-1") else pond.produce(keyed("k"))[0].id
    pond.clear(State.READY)
    pond.advance(GRACE)
    moved(pond, add=0, remove=(int(first.split("-")[1]),))
    pond.run()
    assert len(pond.sweep()) == 1
    pond.advance(GRACE - 1)
    assert pond.produce(keyed("k"))[0].id == second
    pond.advance(1)
    assert not pond.produce(keyed("k"))[0].duplicate


def test_replacing_a_carried_item_replaces_it_where_it_is(pond: SteppedPond) -> None:
    at = pond.clock.now() + 10 * GRACE
    pond.produce(keyed("k", b"old", enqueue_at=at))
    moved(pond)
    assert finish(pond) == [1]
    pond.produce(keyed("k", b"new"), on_conflict="replace")
    assert payloads(pond.list()) == [b"new"]


def test_a_letter_comes_back_under_its_id_after_its_partition_has_gone(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead_queue="d"), definition("d"))
    [made] = pond.produce(b"x")
    pond.kill(pond.lease()[0])
    moved(pond)
    assert finish(pond) == [1]
    assert pond.redrive(queue="d").moved == 1
    assert pond.lease()[0].id == made.id


def test_fewer_partitions_carry_what_they_had_to_those_that_stay(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=4))
    at = pond.clock.now() + 10 * GRACE
    made = [pond.produce(Record(b"%d" % n, enqueue_at=at))[0].id for n in range(12)]
    moved(pond, add=0, remove=(1, 2, 3))
    assert finish(pond) == [0]
    assert {pond.get(item).partition for item in made} == {0}


def test_counters_and_looks_of_a_partition_that_is_gone_say_so(pond: SteppedPond) -> None:
    moved(pond)
    assert finish(pond) == [1]
    with pytest.raises(NotFound, match="no partition 0"):
        pond.ask(ReadJournal(0, 0, 10))
    assert [one.partition for one in pond.stats().partitions] == [1]


# ---- crashes and failures ---------------------------------------------------------------------------------


def story(pond: SteppedPond) -> list[str]:
    """Items of all kinds in a partition that is about to go."""
    at = pond.clock.now() + GRACE
    made = pond.produce(keyed("a", b"a", enqueue_at=at), b"dead", b"ready", Record(b"own", id="own", enqueue_at=at))
    pond.kill(next(item for item in pond.lease(2) if item.payload == b"dead"))
    return [one.id for one in made]


def told(pond: SteppedPond) -> dict[str, Any]:
    return {item.id: (item.payload, str(item.state), item.attempts) for item in pond.list()}


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
def test_a_crash_at_any_step_loses_and_doubles_nothing(make_pond: MakePond, backwards: bool) -> None:
    pond = make_pond(definition(lease_timeout_ms=1_000_000))
    ids = story(pond)
    before = told(pond)
    steps = 0
    for cut in range(1, 200):
        pond.begin_rebalance(1, [p.partition for p in pond.definitions["q"].partitions])
        walk = pond.steps(backwards=backwards)
        steps = sum(1 for _ in zip(range(cut), walk, strict=False))
        pond.reopen()
        assert told(pond) == before
        if steps < cut:
            break
    assert steps > 5
    assert pond.produce(keyed("a"))[0].id == ids[0]


@pytest.mark.parametrize("fault", ["lose", "hide"])
@pytest.mark.parametrize("partition", [0, 1])
@pytest.mark.parametrize("after", range(3))
def test_a_commit_that_fails_loses_and_doubles_nothing(
    make_pond: MakePond, faulty: FaultyStores, fault: str, partition: int, after: int
) -> None:
    pond = make_pond(definition(lease_timeout_ms=1_000_000), on=faulty)
    story(pond)
    before = told(pond)
    faulty.of(partition).spare = after
    setattr(faulty.of(partition), fault, 1)
    pond.rebalance(1, (0,))
    for _ in range(20):
        pond.advance(100)
    assert not faulty.of(partition).spare
    assert told(pond) == before
    assert {item.partition for item in pond.list() if item.payload != b"ready"} == {1}


def test_items_wait_in_their_partition_while_the_new_one_is_away(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(definition(lease_timeout_ms=1_000_000), on=faulty)
    ids = story(pond)
    before = told(pond)
    faulty.of(1).away = True
    moved(pond)
    assert told(pond) == before
    assert pond.get(ids[0]).partition == 0
    faulty.of(1).away = False
    for _ in range(5):
        pond.advance(100)
    assert told(pond) == before
    assert pond.get(ids[0]).partition == 1
