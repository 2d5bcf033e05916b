"""What the holder of a lease may do: complete, retry, extend, write state; and what a stale token gets."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.errors import LeaseLost, VersionConflict
from millpond.history.format import Record, encode_state
from millpond.model import Backoff, LeasedItem, State, to_ms
from millpond.queue.requests import Complete, Extend, RetryItem, RetryItems, WriteState
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, numbered, payloads
from tests.drive import definition

GRACE = 300_000


def lost(result: Any) -> bool:
    return not result.ok and result.error.code == "lease_lost"


# ---- tokens -----------------------------------------------------------------------------------------------


def stale_token(pond: SteppedPond, how: str) -> LeasedItem:
    """An item of which the first delivery is over."""
    pond.produce(b"a")
    [item] = pond.lease()
    if how == "expired":
        pond.advance(30_000)
    elif how == "retried":
        pond.retry(item, due=pond.clock.now() + 60_000)
    elif how == "deferred":
        pond.retry(item, deferred=True)
    elif how == "handed on":
        pond.retry(item, deferred=True)
        pond.lease()
    elif how == "dead":
        pond.kill(item)
    elif how == "released":
        pond.extend(item, 0)
    else:
        pond.clear(State.LEASED)
    return item


STALE = ["expired", "retried", "deferred", "handed on", "dead", "released", "cleared"]


@pytest.mark.parametrize("how", STALE)
@pytest.mark.parametrize("crash", [False, True])
def test_a_stale_token_is_lease_lost(pond: SteppedPond, how: str, crash: bool) -> None:
    item = stale_token(pond, how)
    if crash:
        pond.reopen()
    before = [(one.id, one.state, one.attempts) for one in pond.list()]
    assert lost(pond.complete([item])[0])
    assert lost(pond.retry(item))
    assert lost(pond.extend(item))
    with pytest.raises(LeaseLost):
        pond.write_state(item, 0, "x")
    assert [(one.id, one.state, one.attempts) for one in pond.list()] == before


def test_good_tokens_of_a_batch_take_effect_and_bad_ones_say_why(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=3))
    for number in range(6):
        pond.produce(b"%d" % number)
    items = pond.lease(6)
    pond.retry(items[2], deferred=True)
    tokens = [item.lease for item in items]
    tokens.insert(1, "nonsense")
    tokens.insert(4, tokens[0][:-1] + ("0" if tokens[0][-1] != "0" else "1"))
    results = pond.ask(Complete(tokens))
    expected = [None, "invalid", None, "lease_lost", "invalid", None, None, None]
    assert [result.error.code if result.error else None for result in results] == expected
    assert [result.ok for result in results] == [code is None for code in expected]
    assert payloads(pond.list()) == [items[2].payload]


def test_tokens_of_one_lease_are_judged_by_themselves(pond: SteppedPond) -> None:
    pond.produce(*(b"%d" % number for number in range(40)))
    items = pond.lease(40)
    pond.retry(items[20], deferred=True)
    results = pond.ask(Complete([item.lease for item in items]))
    assert [result.correlation_id for result in results] == [item.correlation_id for item in items]
    assert [item.payload for item, result in zip(items, results, strict=True) if not result.ok] == [b"20"]
    assert lost(results[20])
    again = pond.ask(Complete([item.lease for item in items]))
    assert [result.ok for result in again] == [result.ok for result in results]
    assert (payloads(pond.list()), pond.stats().totals["completed"]) == ([b"20"], 39)


def test_a_batch_of_retries_and_extends_answers_per_token(pond: SteppedPond) -> None:
    pond.produce(*numbered(4))
    one, two, three, four = pond.lease(4)
    pond.complete([two])
    extended = pond.ask(Extend([one.lease, two.lease, three.lease], 60_000))
    assert [result.ok for result in extended] == [True, False, True]
    retries = [RetryItem(item.lease, deferred=True) for item in (one, two, three)]
    assert [result.ok for result in pond.ask(RetryItems(retries))] == [True, False, True]
    assert pond.complete([four])[0].ok


def test_the_token_of_another_queue_or_incarnation_is_void(make_pond: MakePond) -> None:
    pond = make_pond(definition(), definition("r"))
    pond.produce(b"a")
    pond.produce(b"a", queue="r")
    [item] = pond.lease()
    [other] = pond.lease(queue="r")
    assert not pond.complete([item], queue="r")[0].ok
    assert not pond.extend(item, queue="r").ok
    with pytest.raises(LeaseLost):
        pond.write_state(item, 0, 1, queue="r")
    assert pond.complete([item])[0].ok
    assert pond.complete([other], queue="r")[0].ok


def test_a_token_is_good_until_its_deadline_and_not_from_it_on(pond: SteppedPond) -> None:
    pond.produce(b"a", b"b")
    one, two = pond.lease(2, lease_timeout=1_000)
    pond.clock.advance(999)
    assert pond.complete([one])[0].ok
    pond.clock.advance(1)
    assert lost(pond.complete([two])[0])


def test_a_request_counts_as_of_its_arrival(make_pond: MakePond, faulty: FaultyStores) -> None:
    """A holder who asked in time is not late because the server was."""
    pond = make_pond(on=faulty)
    pond.produce(b"a")
    [item] = pond.lease(lease_timeout=1_000)
    faulty.of().away = True
    complete = pond.submit(Complete([item.lease]))
    pond.run()
    pond.advance(500)
    faulty.of().away = False
    pond.advance(5_000)
    assert complete.value[0].ok
    assert not pond.list()


# ---- complete ---------------------------------------------------------------------------------------------


def test_a_completed_item_is_gone(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    assert pond.complete(pond.lease())[0].ok
    assert not pond.exists(produced.id)
    pond.reopen()
    assert not pond.exists(produced.id)
    assert pond.lease() == []


def test_complete_is_answered_only_when_it_is_durable(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    complete = pond.submit(Complete([item.lease]))
    jobs = pond.tick()
    assert not complete.answered
    pond.do(jobs)
    assert complete.value[0].ok


@pytest.mark.parametrize("retention", [0, 86_400_000])
@pytest.mark.parametrize("crash", [False, True])
def test_completing_twice_is_success_twice_for_the_grace(make_pond: MakePond, retention: int, crash: bool) -> None:
    pond = make_pond(definition(completed_retention_ms=retention))
    pond.produce(*numbered(10))
    items = pond.lease(10)
    pond.complete(items[2:7])
    if crash:
        pond.reopen()
    pond.advance(1)
    assert all(result.ok for result in pond.complete(items[2:7]))
    pond.advance(GRACE - 1)
    assert pond.complete([items[4]])[0].ok
    pond.advance(1)
    assert lost(pond.complete([items[4]])[0])


def test_completing_twice_is_answered_from_the_journal_also_after_a_clean_restart(pond: SteppedPond) -> None:
    pond.produce(b"a", b"b")
    items = pond.lease(2)
    pond.complete(items[:1])
    pond.close()
    pond.open()
    assert [result.ok for result in pond.complete(items[:1])] == [True]


def test_the_same_token_twice_in_one_request_is_success_twice(pond: SteppedPond) -> None:
    pond.produce(b"a", b"b")
    one, two = pond.lease(2)
    results = pond.ask(Complete([one.lease, two.lease, one.lease]))
    assert [result.ok for result in results] == [True, True, True]
    assert pond.stats().totals["completed"] == 2


def test_the_same_token_twice_in_one_turn_is_success_twice(pond: SteppedPond) -> None:
    pond.produce(b"a", b"b")
    one, two = pond.lease(2)
    first = pond.submit(Complete([one.lease]))
    between = pond.submit(Extend([two.lease]))
    second = pond.submit(Complete([one.lease]))
    pond.run()
    assert (first.value[0].ok, between.value[0].ok, second.value[0].ok) == (True, True, True)
    assert pond.stats().totals["completed"] == 1


def test_a_retry_after_a_complete_in_the_same_turn_is_lost(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    complete = pond.submit(Complete([item.lease]))
    retry = pond.submit(RetryItems([RetryItem(item.lease, deferred=True)]))
    pond.run()
    assert complete.value[0].ok
    assert lost(retry.value[0])
    assert pond.lease() == []


def test_a_complete_after_a_retry_in_the_same_turn_is_lost(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    retry = pond.submit(RetryItems([RetryItem(item.lease, deferred=True)]))
    complete = pond.submit(Complete([item.lease]))
    pond.run()
    assert retry.value[0].ok
    assert lost(complete.value[0])
    assert pond.lease()[0].attempts == 1


def test_an_earlier_delivery_of_a_completed_item_is_still_lost(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [first] = pond.lease()
    pond.retry(first, deferred=True)
    [second] = pond.lease()
    pond.complete([second])
    assert lost(pond.complete([first])[0])
    assert pond.complete([second])[0].ok


def test_completed_items_are_kept_for_the_retention_with_their_result(make_pond: MakePond) -> None:
    pond = make_pond(definition(completed_retention_ms=10_000))
    [produced] = pond.produce(b"a")
    [item] = pond.lease()
    pond.ask(Complete([item.lease], encode_state({"done": 1})))
    pond.reopen()
    kept = pond.get(produced.id)
    assert (kept.state, kept.result, kept.payload) == (State.COMPLETED, {"done": 1}, b"a")
    assert kept.keep_until is not None
    assert to_ms(kept.keep_until) == pond.clock.now() + 10_000
    assert pond.lease() == []
    pond.advance(10_000)
    assert not pond.exists(produced.id)
    assert pond.queues["q"].state.lanes[0].store.read([1], list(range(16))) == ({}, {})


# ---- retry ------------------------------------------------------------------------------------------------


def test_a_failed_item_waits_two_four_then_eight_seconds(pond: SteppedPond) -> None:
    pond.produce(b"a")
    for attempt, wait in enumerate([2_000, 4_000, 8_000], 1):
        [item] = pond.lease()
        assert item.attempts == attempt
        pond.retry(item)
        assert pond.get(item.id).state == State.RETRYING
        pond.advance(wait - 1)
        assert pond.lease() == []
        pond.advance(1)
    assert pond.lease()[0].attempts == 4


def test_the_backoff_has_a_cap_and_survives_a_restart(make_pond: MakePond) -> None:
    pond = make_pond(definition(backoff=Backoff(base=10.0, cap_ms=5_000)))
    pond.produce(b"a")
    pond.retry(pond.lease()[0])
    pond.reopen()
    pond.advance(4_999)
    assert pond.lease() == []
    pond.advance(1)
    assert len(pond.lease()) == 1


def test_a_failed_item_waits_until_the_retry_at_given(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pond.retry(pond.lease()[0], due=pond.clock.now() + 100_000)
    pond.advance(99_999)
    assert pond.lease() == []
    pond.advance(1)
    assert pond.lease()[0].attempts == 2


def test_a_retried_item_joins_the_tail(pond: SteppedPond) -> None:
    pond.produce(*numbered(3))
    pond.retry(pond.lease()[0])
    pond.produce(b"3")
    pond.advance(2_000)
    assert payloads(pond.lease(10)) == [b"1", b"2", b"3", b"0"]


def test_a_deferred_item_is_leasable_at_once_at_the_tail_with_its_attempt_back(pond: SteppedPond) -> None:
    pond.produce(*numbered(3))
    pond.retry(pond.lease()[0], deferred=True)
    items = pond.lease(10)
    assert payloads(items) == [b"1", b"2", b"0"]
    assert (items[2].attempts, items[2].deliveries) == (1, 2)


def test_a_deferred_item_waits_as_long_as_asked(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pond.retry(pond.lease()[0], deferred=True, due=pond.clock.now() + 5_000)
    pond.advance(4_999)
    assert pond.lease() == []
    pond.advance(1)
    assert pond.lease()[0].attempts == 1


def test_defers_never_kill(make_pond: MakePond) -> None:
    pond = make_pond(definition(max_attempts=2))
    pond.produce(b"a")
    for _ in range(10):
        pond.retry(pond.lease()[0], deferred=True)
    [item] = pond.lease()
    assert (item.attempts, item.deliveries) == (1, 11)


def test_an_item_dies_at_max_attempts_including_the_first(make_pond: MakePond) -> None:
    pond = make_pond(definition(max_attempts=3))
    [produced] = pond.produce(b"a")
    for attempt in (1, 2, 3):
        [item] = pond.lease()
        assert item.attempts == attempt
        pond.retry(item, error=f"failure {attempt}")
        pond.advance(60_000)
    dead = pond.get(produced.id)
    assert (dead.state, dead.dead_reason, dead.attempts, dead.last_error) == ("dead", "max_attempts", 3, "failure 3")
    assert pond.lease() == []


def test_an_items_own_max_attempts_goes_before_the_queues_and_zero_is_unlimited(make_pond: MakePond) -> None:
    pond = make_pond(definition(max_attempts=2))
    ids = [reply.id for reply in pond.produce(Record(b"0", max_attempts=0), Record(b"1", max_attempts=1), b"2")]
    for _ in range(5):
        for item in pond.lease(10):
            pond.retry(item, due=0)
    assert [pond.get(one).state for one in ids] == [State.READY, State.DEAD, State.DEAD]
    assert [pond.get(one).attempts for one in ids] == [5, 1, 2]


def test_a_rejected_item_is_dead_at_once(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    assert pond.retry(pond.lease()[0], dead=True, error="bad input").ok
    dead = pond.get(produced.id)
    assert (dead.state, dead.dead_reason, dead.last_error) == (State.DEAD, "rejected", "bad input")


def test_the_last_error_travels_to_the_next_holder(pond: SteppedPond) -> None:
    pond.produce(b"a")
    assert pond.lease()[0].last_error is None
    pond.advance(30_000)
    [item] = pond.lease()
    pond.retry(item, error="broken: é", due=0)
    pond.reopen()
    assert pond.lease()[0].last_error == "broken: é"


def test_a_retry_given_twice_counts_once(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    results = pond.ask(RetryItems([RetryItem(item.lease, due=0), RetryItem(item.lease, due=0)]))
    assert [result.ok for result in results] == [True, False]
    assert pond.lease()[0].attempts == 2


# ---- extend -----------------------------------------------------------------------------------------------


def test_extend_moves_the_deadline(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease(lease_timeout=10_000)
    pond.advance(9_000)
    result = pond.extend(item, 20_000)
    assert result.lease_deadline is not None
    assert to_ms(result.lease_deadline) == pond.clock.now() + 20_000
    pond.reopen()
    pond.advance(19_999)
    assert pond.lease() == []
    assert pond.get(item.id).state == State.LEASED
    pond.advance(1)
    assert pond.lease()[0].attempts == 2


def test_extend_can_shorten_a_lease(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease(lease_timeout=60_000)
    pond.extend(item, 1_000)
    pond.advance(1_000)
    assert pond.lease()[0].attempts == 2


def test_extend_without_a_timeout_takes_the_queues(make_pond: MakePond) -> None:
    pond = make_pond(definition(lease_timeout_ms=7_000))
    pond.produce(b"a")
    [item] = pond.lease(lease_timeout=1_000)
    deadline = pond.extend(item).lease_deadline
    assert deadline is not None
    assert to_ms(deadline) == pond.clock.now() + 7_000


def test_extend_of_some_of_a_grant_leaves_the_others_to_expire(pond: SteppedPond) -> None:
    pond.produce(*numbered(5))
    items = pond.lease(5, lease_timeout=1_000)
    pond.ask(Extend([items[1].lease, items[3].lease], 10_000))
    pond.advance(1_000)
    assert payloads(pond.lease(5)) == [b"0", b"2", b"4"]


def test_extend_by_zero_releases_the_item_at_once(pond: SteppedPond) -> None:
    pond.produce(*numbered(2))
    [item] = pond.lease()
    assert pond.extend(item, 0).ok
    assert payloads(pond.lease(2)) == [b"1", b"0"]


def test_a_token_stays_good_after_an_extend(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease(lease_timeout=1_000)
    for _ in range(5):
        pond.advance(900)
        assert pond.extend(item, 1_000).ok
    assert pond.complete([item])[0].ok


# ---- state documents --------------------------------------------------------------------------------------


def test_a_state_document_is_written_with_a_version_check(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    assert (item.state_doc, item.state_version) == (None, 0)
    assert pond.write_state(item, 0, {"step": 1}).version == 1
    assert pond.write_state(item, 1, {"step": 2}).version == 2
    with pytest.raises(VersionConflict) as error:
        pond.write_state(item, 1, {"step": 3})
    assert error.value.details["version"] == 2
    shown = pond.get(item.id)
    assert (shown.state_doc, shown.state_version) == ({"step": 2}, 2)


def test_two_writes_of_one_version_in_one_turn_conflict(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    one = pond.submit(WriteState(item.lease, 0, encode_state(1)))
    two = pond.submit(WriteState(item.lease, 0, encode_state(2)))
    pond.run()
    assert one.value.version == 1
    assert isinstance(two.error, VersionConflict)
    assert pond.get(item.id).state_doc == 1


@pytest.mark.parametrize("document", [None, 0, "", b"\x00\xff", [1, {"a": None}], {"x": 1.5}])
def test_a_state_document_is_any_json_value_or_bytes(pond: SteppedPond, document: Any) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    pond.write_state(item, 0, document)
    assert pond.get(item.id).state_doc == document


@pytest.mark.parametrize("way", ["retry", "defer", "expiry", "release", "backoff"])
@pytest.mark.parametrize("crash", [False, True])
def test_a_state_document_survives_the_way_back(pond: SteppedPond, way: str, crash: bool) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    pond.write_state(item, 0, {"step": 1})
    if way == "retry":
        pond.retry(item, due=0, error="x")
    elif way == "defer":
        pond.retry(item, deferred=True)
    elif way == "expiry":
        pond.advance(30_000)
    elif way == "backoff":
        pond.retry(item)
        pond.advance(2_000)
    else:
        pond.extend(item, 0)
    if crash:
        pond.reopen()
    [again] = pond.lease()
    assert (again.state_doc, again.state_version) == ({"step": 1}, 1)
    assert pond.write_state(again, 1, {"step": 2}).version == 2


def test_a_state_document_is_gone_on_complete(make_pond: MakePond) -> None:
    pond = make_pond(definition(completed_retention_ms=60_000))
    pond.produce(b"a")
    [item] = pond.lease()
    pond.write_state(item, 0, {"step": 1})
    pond.complete([item])
    assert pond.get(item.id).state == State.COMPLETED
    assert pond.get(item.id).state_doc is None
    pond.reopen()
    assert (pond.get(item.id).state_doc, pond.get(item.id).state_version) == (None, 0)
    assert pond.queues["q"].state.lanes[0].store.read([], list(range(16)))[1] == {}


def test_a_state_document_written_and_completed_in_one_turn_is_gone(pond: SteppedPond) -> None:
    pond.produce(b"a", b"b")
    [item] = pond.lease()
    write = pond.submit(WriteState(item.lease, 0, encode_state(1)))
    complete = pond.submit(Complete([item.lease]))
    pond.run()
    assert write.value.version == 1
    assert complete.value[0].ok
    assert pond.queues["q"].state.lanes[0].store.read([], list(range(16)))[1] == {}


def test_a_state_write_does_not_move_the_deadline(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease(lease_timeout=1_000)
    pond.advance(900)
    pond.write_state(item, 0, 1)
    pond.advance(100)
    assert pond.lease()[0].attempts == 2
