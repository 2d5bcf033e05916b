"""What time does: leases that end, schedules and backoffs that fall due, deadlines that pass."""

from __future__ import annotations

import pytest

from millpond.history.format import Record
from millpond.model import State, to_ms
from millpond.queue.requests import Complete, Extend
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, numbered, payloads, request
from tests.drive import definition

# ---- leases -----------------------------------------------------------------------------------------------


def test_an_expired_lease_returns_to_the_tail(pond: SteppedPond) -> None:
    pond.produce(*numbered(4))
    pond.lease(2)
    pond.produce(b"4")
    pond.advance(30_000)
    items = pond.lease(10)
    assert payloads(items) == [b"2", b"3", b"4", b"0", b"1"]
    assert [item.attempts for item in items] == [1, 1, 1, 2, 2]


def test_a_flood_of_failures_does_not_starve_the_items_behind_it(pond: SteppedPond) -> None:
    pond.produce(*numbered(10))
    seen: set[bytes] = set()
    for _ in range(4):
        seen.update(payloads(pond.lease(3)))
        pond.advance(30_000)
    assert seen == set(numbered(10))


def test_a_lease_is_never_taken_away_while_it_is_alive(make_pond: MakePond) -> None:
    pond = make_pond(definition(max_attempts=1))
    pond.produce(b"a")
    [item] = pond.lease(lease_timeout=1_000)
    pond.advance(999)
    assert pond.get(item.id).state == State.LEASED
    assert pond.complete([item])[0].ok


def test_the_last_attempt_ends_dead_when_its_lease_expires(make_pond: MakePond) -> None:
    pond = make_pond(definition(max_attempts=2))
    [produced] = pond.produce(b"a")
    pond.lease()
    pond.advance(30_000)
    pond.lease()
    pond.advance(29_999)
    assert pond.get(produced.id).state == State.LEASED
    pond.advance(1)
    dead = pond.get(produced.id)
    assert (dead.state, dead.dead_reason, dead.attempts) == (State.DEAD, "max_attempts", 2)
    assert pond.lease() == []


def test_a_lease_that_ran_out_during_a_downtime_has_ended(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    pond.drop()
    pond.clock.advance(30_000)
    pond.open()
    assert not pond.complete([item])[0].ok
    assert pond.lease()[0].attempts == 2


def test_a_lease_still_alive_after_a_restart_is_left_alone(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    pond.drop()
    pond.clock.advance(29_999)
    pond.open()
    assert pond.lease() == []
    assert pond.complete([item])[0].ok


def test_what_a_holder_asks_for_comes_before_time_takes_the_lease_away(pond: SteppedPond) -> None:
    pond.produce(b"a", b"b")
    one, two = pond.lease(2, lease_timeout=1_000)
    pond.clock.advance(999)
    complete, extend = pond.submit(Complete([one.lease])), pond.submit(Extend([two.lease], 5_000))
    pond.clock.advance(1)
    pond.run()
    assert complete.value[0].ok
    assert extend.value[0].ok
    assert pond.lease(2) == []


def test_a_new_max_attempts_applies_to_items_that_exist(make_pond: MakePond) -> None:
    pond = make_pond(definition(max_attempts=5))
    ids = [reply.id for reply in pond.produce(b"a", b"b")]
    [item, _] = pond.lease(2)
    pond.queues["q"].configure(definition(max_attempts=1))
    pond.retry(item)
    pond.advance(30_000)
    assert [pond.get(one).state for one in ids] == [State.DEAD, State.DEAD]


# ---- schedules --------------------------------------------------------------------------------------------


def test_a_scheduled_item_is_never_early_and_never_left_behind(pond: SteppedPond) -> None:
    start = pond.clock.now()
    delays = [5_000, 1, 70_000, 1_000, 1_000, 3_600_000]
    pond.produce(*(Record(b"%d" % delay, enqueue_at=start + delay) for delay in delays))
    assert pond.stats().counts[State.SCHEDULED] == 6
    got = []
    for delay in sorted(set(delays)):
        pond.clock.advance(start + delay - 1 - pond.clock.now())
        pond.run()
        assert pond.lease(10) == []
        pond.advance(1)
        got += payloads(pond.lease(10, lease_timeout=10_000_000))
    assert got == [b"%d" % delay for delay in sorted(delays)]


def test_items_that_fell_due_are_leased_in_due_order_then_produce_order(pond: SteppedPond) -> None:
    now = pond.clock.now()
    dues = [(b"a", 300), (b"b", 100), (b"c", 200), (b"d", 100), (b"e", 300)]
    pond.produce(*(Record(name, enqueue_at=now + due) for name, due in dues))
    pond.reopen()
    pond.advance(1_000)
    assert payloads(pond.lease(10)) == [b"b", b"d", b"c", b"a", b"e"]


def test_due_order_holds_for_schedules_and_backoffs_alike(pond: SteppedPond) -> None:
    pond.produce(b"retried")
    pond.retry(pond.lease()[0])  # due in 2 s
    now = pond.clock.now()
    pond.produce(Record(b"late", enqueue_at=now + 3_000), Record(b"early", enqueue_at=now + 1_000))
    pond.advance(5_000)
    assert payloads(pond.lease(10)) == [b"early", b"retried", b"late"]


def test_due_items_stand_behind_those_that_were_ready_before(pond: SteppedPond) -> None:
    pond.produce(Record(b"scheduled", enqueue_at=pond.clock.now() + 1_000), b"ready")
    pond.advance(1_000)
    assert payloads(pond.lease(10)) == [b"ready", b"scheduled"]


def test_an_item_scheduled_for_the_past_is_leasable_at_once(pond: SteppedPond) -> None:
    lease = pond.park()
    pond.produce(Record(b"a", enqueue_at=pond.clock.now() - 1))
    assert payloads(lease.value) == [b"a"]


def test_a_schedule_due_during_a_downtime_is_ready_after_it(pond: SteppedPond) -> None:
    pond.produce(Record(b"a", enqueue_at=pond.clock.now() + 1_000))
    pond.drop()
    pond.clock.advance(1_000)
    pond.open()
    assert payloads(pond.lease()) == [b"a"]


# ---- deadlines --------------------------------------------------------------------------------------------


def test_the_deadline_is_the_instant_of_produce_plus_the_timeout(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=60_000))
    [produced] = pond.produce(b"a")
    assert to_ms(pond.get(produced.id).expire_deadline) == pond.clock.now() + 60_000


@pytest.mark.parametrize("state", [State.READY, State.SCHEDULED, State.RETRYING])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("crash", [False, True])
def test_a_waiting_item_past_its_deadline_is_dead(make_pond: MakePond, state: State, own: bool, crash: bool) -> None:
    pond = make_pond(definition(expire_timeout_ms=3_600_000 if own else 10_000))
    now = pond.clock.now()
    due = now + 100_000 if state == State.SCHEDULED else 0
    [produced, _] = pond.produce(
        Record(b"a", expire_deadline=now + 10_000 if own else 0, enqueue_at=due), Record(b"b", enqueue_at=now + 99_000)
    )
    if state == State.RETRYING:
        pond.retry(pond.lease()[0], due=now + 100_000)
    assert pond.get(produced.id).state == state
    if crash:
        pond.reopen()
    pond.advance(9_999)
    assert pond.get(produced.id).state == state
    pond.advance(1)
    dead = pond.get(produced.id)
    assert (dead.state, dead.dead_reason) == (State.DEAD, "expired")
    pond.advance(1_000_000)
    assert produced.id not in [item.id for item in pond.lease(10)]


def test_an_item_is_not_leased_from_the_very_instant_of_its_deadline(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=10_000))
    pond.produce(b"a")
    pond.clock.advance(10_000)
    assert pond.lease() == []


def test_items_produced_after_others_have_expired_expire_too(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=10_000))
    for count in range(1, 5):
        pond.produce(b"a")
        pond.advance(10_000)
        assert pond.stats().counts[State.DEAD] == count


def test_items_expire_when_the_timeout_is_lowered_and_raised_between_them(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=20_000))
    for timeout in (20_000, 5_000, 15_000, 1_000, 30_000):
        pond.queues["q"].configure(definition(expire_timeout_ms=timeout))
        pond.produce(b"%d" % timeout)
    for timeout in (1_000, 5_000, 15_000, 20_000, 30_000):
        pond.clock.advance(1_700_000_000_000 + timeout - 1 - pond.clock.now())
        pond.run()
        assert b"%d" % timeout in payloads(pond.list(State.READY))
        pond.advance(1)
        assert b"%d" % timeout in payloads(pond.list(State.DEAD))


def test_a_live_lease_is_left_alone_by_the_deadline_until_it_ends(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=10_000))
    [a, b, c] = pond.produce(b"a", b"b", b"c")
    items = pond.lease(3, lease_timeout=20_000)
    pond.advance(15_000)
    assert pond.get(a.id).state == State.LEASED
    assert pond.extend(items[0], 20_000).ok
    assert pond.complete([items[0]])[0].ok
    pond.retry(items[1], deferred=True)
    assert (pond.get(b.id).state, pond.get(b.id).dead_reason) == (State.DEAD, "expired")
    pond.advance(5_000)
    assert (pond.get(c.id).state, pond.get(c.id).dead_reason) == (State.DEAD, "expired")


def test_an_item_whose_deadline_passed_while_its_produce_waited_is_never_leased(
    make_pond: MakePond, faulty: FaultyStores
) -> None:
    pond = make_pond(on=faulty)
    faulty.of().away = True
    pond.reopen()
    produce = pond.submit(request(Record(b"late", expire_deadline=pond.clock.now() + 1_000), b"good"))
    lease = pond.park(10)
    pond.advance(500)
    faulty.of().away = False
    pond.advance(5_000)
    assert produce.answered
    assert payloads(lease.value) == [b"good"]
    assert payloads(pond.list(State.DEAD)) == [b"late"]


def test_dead_delete_removes_what_expires(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=10_000, dead="delete"))
    [produced] = pond.produce(b"a")
    pond.advance(10_000)
    assert not pond.exists(produced.id)
    assert pond.stats().totals["dead"] == 1


# ---- the clock --------------------------------------------------------------------------------------------


def test_a_clock_stepping_back_does_not_stop_leases_from_expiring(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pond.lease()
    pond.clock.step(-3_600_000)
    pond.advance(30_000)
    assert pond.lease()[0].attempts == 2


def test_a_clock_that_went_back_over_a_restart_revives_no_lease(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    pond.advance(30_000)
    pond.drop()
    pond.clock = type(pond.clock)(pond.clock.now() - 3_600_000)
    pond.open()
    assert not pond.complete([item])[0].ok
    assert not pond.extend(item).ok
    assert pond.lease()[0].attempts == 2


@pytest.mark.parametrize("ask", [Complete, Extend])
def test_a_request_sent_before_the_mark_is_known_revives_no_lease(
    make_pond: MakePond, faulty: FaultyStores, ask: type[Complete] | type[Extend]
) -> None:
    pond = make_pond(on=faulty)
    pond.produce(b"a")
    [item] = pond.lease()
    pond.clock.advance(30_000)  # nobody looks: the close is what finds the lease over
    pond.close()
    pond.clock = type(pond.clock)(pond.clock.now() - 20_000)
    faulty.of().away = True
    pond.open()
    asked = pond.submit(ask([item.lease]))
    faulty.of().away = False
    pond.advance(200)
    assert not asked.value[0].ok
    assert pond.lease()[0].attempts == 2


def test_time_goes_on_from_the_high_water_mark_after_a_restart(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pond.advance(50_000)
    pond.produce(b"b")
    mark = pond.clock.now()
    pond.drop()
    pond.clock = type(pond.clock)(mark - 3_600_000)
    pond.open()
    [item] = pond.lease()
    assert to_ms(item.lease_deadline) == mark + 30_000
    [produced] = pond.produce(b"c")
    assert to_ms(pond.get(produced.id).created_at) == mark


def test_a_clock_that_went_back_loses_no_item(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    now = pond.clock.now()
    pond.produce(b"a", Record(b"b", enqueue_at=now + 1_000))
    pond.drop()
    pond.clock = type(pond.clock)(now - 3_600_000)
    pond.open()
    pond.produce(b"c")
    assert sorted(payloads(pond.lease(10))) == [b"a", b"c"]
    pond.advance(3_601_000)
    assert b"b" in payloads(pond.lease(10))
