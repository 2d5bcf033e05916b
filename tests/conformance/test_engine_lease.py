"""Lease: order, sharing, waiting, waking, and the client that has gone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from millpond.history.format import Record
from millpond.model import State, to_ms
from millpond.queue.requests import Cancel, Lease
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, numbered, payloads, request
from tests.drive import definition

# ---- order ------------------------------------------------------------------------------------------------


def test_one_partition_and_one_consumer_is_strict_fifo(pond: SteppedPond) -> None:
    for start in range(0, 60, 6):
        pond.produce(*numbered(6, start))
    got: list[bytes] = []
    for batch in (1, 5, 7, 20, 3, 24):
        items = pond.lease(batch)
        got += payloads(items)
        pond.complete(items)
    assert got == numbered(60)


def test_fifo_survives_a_restart(pond: SteppedPond) -> None:
    for start in range(0, 30, 3):
        pond.produce(*numbered(3, start))
    pond.complete(pond.lease(7))
    pond.reopen()
    assert payloads(pond.lease(100)) == numbered(23, 7)


def test_lower_priority_goes_first_and_fifo_within_a_priority(pond: SteppedPond) -> None:
    for number, priority in enumerate([5, 0, -2, 5, 0, -2, 0]):
        pond.produce(Record(b"%d" % number, priority=priority))
    assert payloads(pond.lease(3)) == [b"2", b"5", b"1"]
    pond.reopen()
    assert payloads(pond.lease(10)) == [b"4", b"6", b"0", b"3"]


def test_a_retried_item_keeps_its_priority(pond: SteppedPond) -> None:
    pond.produce(Record(b"urgent", priority=-1), b"a", b"b")
    [item] = pond.lease()
    pond.retry(item, deferred=True)
    assert payloads(pond.lease(3)) == [b"urgent", b"a", b"b"]


def test_a_lease_goes_on_to_the_next_partition_until_the_batch_is_full(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=20))
    for number in range(60):
        pond.produce(b"%d" % number)
    items = pond.lease(50)
    assert len(items) == 50
    assert len({pond.get(item.id).partition for item in items}) >= 17
    assert sorted(payloads([*items, *pond.lease(50)])) == sorted(numbered(60))


def test_a_lease_serves_read_only_partitions_first_then_the_best_priority_then_the_fullest(
    make_pond: MakePond,
) -> None:
    pond = make_pond(definition(partitions=4))
    for records in ([b"0"], [b"1a", b"1b", b"1c"], [Record(b"2", priority=-1)], [b"3a", b"3b"]):
        pond.produce(*records)
    assert [len(pond.partition(index=index).chunks) for index in range(4)] == [1, 1, 1, 1]
    lane = pond.queues["q"].state.lanes[0]
    lane.definition = replace(lane.definition, read_only=True)
    assert payloads(pond.lease(4)) == [b"0", b"2", b"1a", b"1b"]


def test_the_best_priority_is_served_from_all_partitions_before_the_next(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    pond.produce(Record(b"a0"), Record(b"a9", priority=9), Record(b"a9", priority=9))
    pond.produce(Record(b"b1", priority=1))
    assert payloads(pond.lease(4)) == [b"a0", b"b1", b"a9", b"a9"]


# ---- waiting ----------------------------------------------------------------------------------------------


def test_a_partial_batch_returns_at_once(pond: SteppedPond) -> None:
    pond.produce(*numbered(3))
    assert payloads(pond.lease(10, wait=60_000)) == numbered(3)


def test_a_waiting_lease_gets_a_partial_batch_at_the_first_item(pond: SteppedPond) -> None:
    lease = pond.park(10)
    pond.produce(b"a", b"b")
    assert payloads(lease.value) == [b"a", b"b"]


def test_an_empty_lease_is_answered_with_no_items_when_its_wait_is_over(pond: SteppedPond) -> None:
    assert pond.lease() == []
    lease = pond.park(wait=5_000)
    pond.advance(4_999)
    assert not lease.answered
    pond.advance(1)
    assert lease.value == []
    pond.produce(b"a")
    assert pond.stats().counts[State.READY] == 1


def test_waiters_share_arriving_items_one_at_a_time_in_contiguous_runs(pond: SteppedPond) -> None:
    leases = [pond.park(batch) for batch in (20, 6, 1)]
    pond.produce(*numbered(23))
    assert [len(lease.value) for lease in leases] == [16, 6, 1]
    assert [item for lease in leases for item in payloads(lease.value)] == numbered(23)


def test_waiters_with_different_clients_and_timeouts_share_alike(pond: SteppedPond) -> None:
    leases = [
        pond.park(20, client="a", lease_timeout=1_000),
        pond.park(6, client="b"),
        pond.park(1, client="a", lease_timeout=1_000),
    ]
    pond.produce(*numbered(23))
    assert [len(lease.value) for lease in leases] == [16, 6, 1]
    assert [item for lease in leases for item in payloads(lease.value)] == numbered(23)
    assert [pond.get(lease.value[0].id).client_id for lease in leases] == ["a", "b", "a"]
    now = pond.clock.now()
    assert [to_ms(lease.value[0].lease_deadline) - now for lease in leases] == [1_000, 30_000, 1_000]


def test_waiters_share_what_arrives_in_several_partitions(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=3))
    leases = [pond.park(batch) for batch in (20, 6, 1)]
    for start in range(0, 24, 8):
        pond.submit(request(*numbered(8 if start < 16 else 7, start)))
    pond.run()
    assert [len(lease.value) for lease in leases] == [16, 6, 1]
    assert sorted(item for lease in leases for item in payloads(lease.value)) == sorted(numbered(23))


def test_fewer_items_than_waiters_go_to_those_who_waited_longest(pond: SteppedPond) -> None:
    leases = [pond.park(10) for _ in range(5)]
    pond.produce(*numbered(2))
    assert [lease.answered for lease in leases] == [True, True, False, False, False]
    pond.produce(b"c")
    assert payloads(leases[2].value) == [b"c"]


# ---- waking -----------------------------------------------------------------------------------------------


def test_produce_wakes_a_waiting_lease(pond: SteppedPond) -> None:
    lease = pond.park()
    pond.produce(b"a")
    assert payloads(lease.value) == [b"a"]


def test_the_expiry_of_another_lease_wakes_a_waiting_lease(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pond.lease(lease_timeout=10_000)
    lease = pond.park()
    pond.advance(9_999)
    assert not lease.answered
    pond.advance(1)
    assert [item.attempts for item in lease.value] == [2]


def test_a_due_schedule_wakes_a_waiting_lease(pond: SteppedPond) -> None:
    lease = pond.park()
    pond.produce(Record(b"a", enqueue_at=pond.clock.now() + 1_000))
    pond.advance(999)
    assert not lease.answered
    pond.advance(1)
    assert payloads(lease.value) == [b"a"]


def test_a_due_backoff_wakes_a_waiting_lease(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pond.retry(pond.lease()[0])
    lease = pond.park()
    pond.advance(1_999)
    assert not lease.answered
    pond.advance(1)
    assert payloads(lease.value) == [b"a"]


def test_a_defer_wakes_a_waiting_lease(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    lease = pond.park()
    pond.retry(item, deferred=True)
    assert [one.attempts for one in lease.value] == [1]


def test_a_release_wakes_a_waiting_lease(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    lease = pond.park()
    pond.extend(item, 0)
    assert payloads(lease.value) == [b"a"]


def test_arriving_dead_letters_wake_a_waiting_lease(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead_queue="dq"), definition("dq"))
    lease = pond.park(queue="dq")
    pond.produce(b"a")
    pond.kill(pond.lease()[0])
    assert payloads(lease.value) == [b"a"]


def test_a_redrive_wakes_a_waiting_lease(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pond.kill(pond.lease()[0])
    lease = pond.park()
    pond.redrive()
    assert payloads(lease.value) == [b"a"]


def test_resume_wakes_a_waiting_lease(make_pond: MakePond) -> None:
    pond = make_pond(replace(definition(), paused=True))
    pond.produce(b"a")
    lease = pond.park()
    assert not lease.answered
    pond.queues["q"].configure(definition())
    pond.run()
    assert payloads(lease.value) == [b"a"]


def test_a_partition_that_comes_back_wakes_a_waiting_lease(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(on=faulty)
    pond.produce(b"a")
    faulty.of().away = True
    pond.reopen()
    lease = pond.park()
    pond.advance(5_000)
    assert not lease.answered
    faulty.of().away = False
    pond.advance(30_000)
    assert payloads(lease.value) == [b"a"]


# ---- pause ------------------------------------------------------------------------------------------------


def test_a_paused_queue_takes_items_and_grants_no_leases(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [held] = pond.lease()
    pond.queues["q"].configure(replace(definition(), paused=True))
    pond.produce(b"b")
    lease = pond.park(wait=5_000)
    assert pond.complete([held])[0].ok
    pond.advance(5_000)
    assert lease.value == []
    assert pond.stats().paused
    assert payloads(pond.list(State.READY)) == [b"b"]


# ---- what a lease says ------------------------------------------------------------------------------------


def test_attempts_and_deliveries_grow_when_the_item_is_leased(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    assert (pond.get(produced.id).attempts, pond.get(produced.id).deliveries) == (0, 0)
    [item] = pond.lease()
    assert (item.attempts, item.deliveries) == (1, 1)
    assert (pond.get(item.id).attempts, pond.get(item.id).deliveries) == (1, 1)
    pond.retry(item, deferred=True)
    [item] = pond.lease()
    assert (item.attempts, item.deliveries) == (1, 2)
    pond.advance(30_000)
    [item] = pond.lease()
    assert (item.attempts, item.deliveries) == (2, 3)
    pond.reopen()
    assert (pond.get(item.id).attempts, pond.get(item.id).deliveries) == (2, 3)


def test_the_fencing_token_grows_with_every_lease_of_an_item(pond: SteppedPond) -> None:
    pond.produce(b"a")
    tokens = []
    for crash in (False, True, False, True):
        [item] = pond.lease()
        tokens.append(item.fencing_token)
        assert pond.get(item.id).fencing_token == item.fencing_token
        if crash:
            pond.reopen()
        pond.retry(item, deferred=True)
    assert tokens == sorted(set(tokens))


def test_a_lease_has_the_timeout_asked_for_or_the_queues(make_pond: MakePond) -> None:
    pond = make_pond(definition(lease_timeout_ms=7_000))
    pond.produce(b"a", b"b")
    [one] = pond.lease()
    [two] = pond.lease(lease_timeout=1_234)
    now = pond.clock.now()
    assert (to_ms(one.lease_deadline), to_ms(two.lease_deadline)) == (now + 7_000, now + 1_234)


# ---- the client that has gone -----------------------------------------------------------------------------


def leased_and_gone(pond: SteppedPond, batch: int) -> Lease:
    """A lease whose client goes while the commit is under way."""
    lease = pond.submit(Lease(batch))
    jobs = pond.tick()
    pond.queues["q"].withdraw(lease)
    pond.do(jobs)
    pond.run()
    return lease  # type: ignore[no-any-return]


def test_a_client_gone_before_its_reply_has_its_items_returned_to_the_head(pond: SteppedPond) -> None:
    pond.produce(*numbered(5))
    lease = leased_and_gone(pond, 3)
    assert lease.value == []
    items = pond.lease(5)
    assert payloads(items) == numbered(5)
    assert [item.attempts for item in items] == [1] * 5
    assert [item.deliveries for item in items] == [2, 2, 2, 1, 1]


def test_a_client_gone_after_the_answer_but_before_the_reply_was_written_has_its_items_returned(
    pond: SteppedPond,
) -> None:
    pond.produce(*numbered(3))
    lease = pond.submit(Lease(2))
    pond.run()
    pond.queues["q"].withdraw(lease)
    pond.run()
    items = pond.lease(5)
    assert payloads(items) == numbered(3)
    assert [item.attempts for item in items] == [1, 1, 1]


def test_items_from_a_partition_that_was_quicker_than_the_client_are_returned_too(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    pond.produce(b"a")
    pond.produce(b"b")
    lease = pond.submit(Lease(2))
    first, second = pond.tick()
    pond.do([first])
    pond.queues["q"].withdraw(lease)
    pond.do([second])
    pond.run()
    assert pond.stats().counts[State.READY] == 2
    assert sorted(payloads(pond.lease(2))) == [b"a", b"b"]


def test_items_returned_from_a_client_that_has_gone_wake_other_waiters(pond: SteppedPond) -> None:
    pond.produce(b"a")
    lease = pond.submit(Lease(1))
    jobs = pond.tick()
    other = pond.submit(Lease(1, wait=60_000))
    pond.queues["q"].withdraw(lease)
    pond.do(jobs)
    pond.run()
    assert [(item.payload, item.attempts) for item in other.value] == [(b"a", 1)]


def test_a_waiting_client_that_goes_takes_nothing(pond: SteppedPond) -> None:
    lease = pond.park()
    pond.queues["q"].withdraw(lease)
    assert lease.value == []
    early = Lease(1, wait=1_000)
    pond.submit(early)
    pond.queues["q"].withdraw(early)
    pond.run()
    assert early.value == []
    pond.produce(b"a")
    assert pond.stats().counts[State.READY] == 1


def test_an_item_cancelled_while_its_client_went_does_not_come_back(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    lease = pond.submit(Lease(1))
    jobs = pond.tick()
    cancel = pond.submit(Cancel([produced.id]))
    pond.tick()
    pond.queues["q"].withdraw(lease)
    pond.do(jobs)
    pond.run()
    assert cancel.value[0].ok
    assert pond.lease() == []
    assert not pond.exists(produced.id)


def test_an_item_returned_after_its_deadline_is_dead(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=1_000))
    pond.produce(b"a")
    lease = pond.submit(Lease(1))
    jobs = pond.tick()
    pond.queues["q"].withdraw(lease)
    pond.clock.advance(1_000)
    pond.do(jobs)
    pond.run()
    assert pond.stats().counts[State.DEAD] == 1


@pytest.mark.parametrize("batch", [1, 1_000])
def test_a_lease_of_more_than_there_is_takes_what_there_is(pond: SteppedPond, batch: int) -> None:
    pond.produce(*numbered(1_000))
    pond.produce(*numbered(500))
    assert len(pond.lease(batch)) == batch
    assert len(pond.lease(1_000)) == (1_000 if batch == 1 else 500)


def test_leases_whose_callers_went_together_give_their_items_back_in_the_old_order(pond: SteppedPond) -> None:
    for number in range(9):
        pond.produce(b"%d" % number)
    queue, leases = pond.queues["q"], [Lease(3) for _ in range(3)]
    for lease in leases[:2]:
        queue.submit(lease, pond.clock.now())
    pond.run()
    queue.submit(leases[2], pond.clock.now())
    pond.run()
    for lease in leases:
        queue.withdraw(lease)
    pond.run()
    assert payloads(pond.lease(9)) == [b"%d" % number for number in range(9)]
