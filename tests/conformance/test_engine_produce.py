"""Produce: all or nothing, in one partition, durable; keys, ids and requests that come twice."""

from __future__ import annotations

import pytest

from millpond.errors import InvalidRequest, KeyConflict
from millpond.history.format import Record
from millpond.model import State
from millpond.queue.requests import Complete, Produce
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, keyed, numbered, payloads, request
from tests.drive import definition

WINDOW = 300_000

# ---- a request is one unit --------------------------------------------------------------------------------


def test_produce_returns_the_ids_in_order(pond: SteppedPond) -> None:
    replies = pond.produce(*numbered(5))
    assert [pond.get(reply.id).payload for reply in replies] == numbered(5)


def test_produce_is_answered_only_when_it_is_durable(pond: SteppedPond) -> None:
    produce = pond.submit(request(b"a"))
    jobs = pond.tick()
    assert not produce.answered
    pond.do(jobs)
    assert produce.answered


def test_what_was_answered_survives_a_crash(pond: SteppedPond) -> None:
    ids = [reply.id for reply in pond.produce(*numbered(3))]
    pond.reopen()
    assert [item.id for item in pond.list()] == ids
    assert payloads(pond.lease(10)) == numbered(3)


def test_a_request_lies_wholly_in_one_partition(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=3))
    for _ in range(3):
        replies = pond.produce(*numbered(7))
        assert len({pond.get(reply.id).partition for reply in replies}) == 1
    assert [part.counts[State.READY] for part in pond.stats().partitions] == [7, 7, 7]


def test_many_requests_share_one_commit(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(on=faulty)
    requests = [pond.submit(request(b"%d" % number)) for number in range(50)]
    before = faulty.of().commits
    pond.run()
    assert all(one.answered for one in requests)
    assert faulty.of().commits == before + 1


def test_produce_goes_to_the_partition_with_the_fewest_items(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    pond.produce(*numbered(10))
    for _ in range(9):
        pond.produce(b"x")
    assert [part.counts[State.READY] for part in pond.stats().partitions] == [10, 9]


def test_produce_goes_to_the_partition_with_the_fewest_failures(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(definition(partitions=2), on=faulty)
    faulty.of(0).lose = 1
    pond.produce(b"a")  # the first partition failed, and is back
    pond.produce(*numbered(10))
    pond.produce(*numbered(10))
    assert [part.failures for part in pond.stats().partitions] == [1, 0]
    assert pond.stats().partitions[1].counts[State.READY] == 21


def test_large_requests_are_cut_into_chunks_and_come_out_whole(pond: SteppedPond) -> None:
    bodies = [bytes([number]) * 300_000 for number in range(10)]
    replies = pond.ask(Produce(list(bodies), sum(map(len, bodies))))
    pond.reopen()
    items = pond.lease(20)
    assert payloads(items) == bodies
    assert [item.id for item in items] == [reply.id for reply in replies]


# ---- what an item carries ---------------------------------------------------------------------------------


def test_a_leased_item_carries_what_was_produced(pond: SteppedPond) -> None:
    record = Record(
        b"p", id="mine", key="k", kind="mail", encoding="gzip", reference="s3://x", priority=-3, correlation_id="c-1"
    )
    pond.produce(record)
    [item] = pond.lease()
    assert (item.id, item.key, item.kind, item.encoding, item.reference) == ("mine", "k", "mail", "gzip", "s3://x")
    assert (item.payload, item.priority, item.correlation_id) == (b"p", -3, "c-1")


def test_every_operation_returns_the_correlation_id(pond: SteppedPond) -> None:
    for own in ("given", None):
        [produced] = pond.produce(Record(b"a", kind="k", correlation_id=own))
        assert produced.correlation_id == own or own is None
        [item] = pond.lease()
        assert item.correlation_id == produced.correlation_id == pond.get(item.id).correlation_id
        assert pond.extend(item).correlation_id == produced.correlation_id
        assert pond.write_state(item, 0, 1).correlation_id == produced.correlation_id
        assert pond.cancel(item.id)[0].correlation_id == produced.correlation_id
        assert pond.complete([item])[0].correlation_id == produced.correlation_id
        assert pond.complete([item])[0].correlation_id == produced.correlation_id
        assert pond.retry(item).correlation_id == produced.correlation_id


def test_generated_correlation_ids_are_distinct_uuids_of_version_7(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    made = [reply.correlation_id for _ in range(4) for reply in pond.produce(b"a", b"b")]
    assert len(set(made)) == 8
    for correlation_id in made:
        assert correlation_id is not None
        parts = correlation_id.split("-")
        assert [len(part) for part in parts] == [8, 4, 4, 4, 12]
        assert (parts[2][0], parts[3][0]) == ("7", "8")
        assert int(parts[0] + parts[1], 16) == pond.clock.now()


# ---- keys -------------------------------------------------------------------------------------------------


def test_a_key_that_is_live_returns_the_existing_id(pond: SteppedPond) -> None:
    [first] = pond.produce(keyed("k", b"1", correlation_id="c"))
    [again] = pond.produce(keyed("k", b"2"))
    assert (again.id, again.correlation_id, again.duplicate) == (first.id, "c", True)
    assert payloads(pond.list()) == [b"1"]


@pytest.mark.parametrize("on_conflict", ["ignore", "reject"])
def test_keys_are_unique_over_all_partitions(make_pond: MakePond, on_conflict: str) -> None:
    pond = make_pond(definition(partitions=3))
    firsts = [pond.produce(keyed(f"k{number}"))[0] for number in range(9)]
    assert len({pond.get(first.id).partition for first in firsts}) == 3
    for number, first in enumerate(firsts):
        if on_conflict == "ignore":
            assert pond.produce(keyed(f"k{number}"))[0].id == first.id
        else:
            with pytest.raises(KeyConflict):
                pond.produce(keyed(f"k{number}"), on_conflict="reject")
    assert len(pond.list()) == 9


def test_a_key_stays_taken_for_the_window_after_its_item_ended(pond: SteppedPond) -> None:
    [first] = pond.produce(keyed("k"))
    pond.complete(pond.lease())
    pond.advance(WINDOW - 1)
    [again] = pond.produce(keyed("k"))
    assert (again.id, again.duplicate) == (first.id, True)
    with pytest.raises(KeyConflict):
        pond.produce(keyed("k"), on_conflict="reject")
    pond.advance(1)
    [fresh] = pond.produce(keyed("k"))
    assert not fresh.duplicate
    assert fresh.id != first.id


@pytest.mark.parametrize("end", ["cancel", "clear", "delete"])
def test_a_key_stays_taken_however_its_item_ended(make_pond: MakePond, end: str) -> None:
    pond = make_pond(definition(dead="delete"))
    [first] = pond.produce(keyed("k"))
    if end == "cancel":
        pond.cancel(first.id)
    elif end == "clear":
        pond.clear(State.READY)
    else:
        pond.kill(pond.lease()[0])
    assert not pond.list()
    assert pond.produce(keyed("k"))[0].duplicate
    pond.advance(WINDOW)
    assert not pond.produce(keyed("k"))[0].duplicate


def test_a_completed_item_that_is_kept_guards_its_key_no_longer_than_the_window(make_pond: MakePond) -> None:
    pond = make_pond(definition(completed_retention_ms=86_400_000))
    [first] = pond.produce(Record(b"", id="x", key="k"))
    pond.complete(pond.lease())
    pond.advance(WINDOW - 1)
    assert pond.produce(keyed("k"))[0].id == first.id
    pond.advance(1)
    assert pond.get("x").state == State.COMPLETED
    assert not pond.produce(keyed("k"))[0].duplicate
    pond.reopen()
    assert pond.produce(keyed("k"))[0].duplicate
    pond.advance(86_400_000)
    assert not pond.exists("x")
    assert pond.produce(keyed("k"))[0].duplicate


def test_keys_survive_a_restart_in_life_and_in_the_window(pond: SteppedPond) -> None:
    pond.produce(keyed("live"), keyed("ended"))
    items = {item.key: item for item in pond.lease(2)}
    pond.complete([items["ended"]])
    pond.reopen()
    assert [one.duplicate for one in pond.produce(keyed("live"), keyed("ended"))] == [True, True]


def test_reject_refuses_the_whole_request(pond: SteppedPond) -> None:
    pond.produce(keyed("k"))
    with pytest.raises(KeyConflict):
        pond.produce(b"plain", keyed("new"), keyed("k"), on_conflict="reject")
    assert len(pond.list()) == 1
    assert not pond.produce(keyed("new"))[0].duplicate


def test_duplicates_inside_one_request_are_one_item(pond: SteppedPond) -> None:
    replies = pond.produce(keyed("a", b"1"), b"plain", keyed("a", b"2"), keyed("b", b"3"), keyed("a", b"4"))
    assert [reply.duplicate for reply in replies] == [False, False, True, False, True]
    assert replies[2].id == replies[4].id == replies[0].id
    assert payloads(pond.list()) == [b"1", b"plain", b"3"]


def test_duplicates_inside_one_request_are_refused_with_reject(pond: SteppedPond) -> None:
    with pytest.raises(KeyConflict):
        pond.produce(keyed("a"), keyed("a"), on_conflict="reject")
    assert not pond.list()


def test_the_same_key_twice_at_the_same_instant_is_one_item(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    requests = [pond.submit(request(keyed("k", b"%d" % number))) for number in range(4)]
    pond.run()
    assert len({one.value[0].id for one in requests}) == 1
    assert [one.value[0].duplicate for one in requests] == [False, True, True, True]


# ---- replace ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.READY, State.SCHEDULED, State.RETRYING])
def test_replace_puts_the_new_item_in_the_place_of_a_waiting_one(make_pond: MakePond, state: State) -> None:
    pond = make_pond(definition(partitions=2))
    later = pond.clock.now() + 5_000
    pond.produce(keyed("k", b"old", enqueue_at=later if state == State.SCHEDULED else 0))
    if state == State.RETRYING:
        pond.retry(pond.lease()[0], due=later)
    assert pond.list()[0].state == state
    [new] = pond.produce(keyed("k", b"new"), on_conflict="replace")
    assert not new.duplicate
    assert [(item.id, item.payload) for item in pond.list()] == [(new.id, b"new")]
    pond.advance(10_000)
    assert payloads(pond.lease(10)) == [b"new"]


def test_replace_is_refused_while_the_item_is_leased(pond: SteppedPond) -> None:
    pond.produce(keyed("k", b"old"))
    [item] = pond.lease()
    with pytest.raises(KeyConflict):
        pond.produce(keyed("k", b"new"), on_conflict="replace")
    assert pond.complete([item])[0].ok
    assert not pond.produce(keyed("k", b"new"), on_conflict="replace")[0].duplicate


def test_a_replaced_item_leaves_one_live_holder_of_the_key_over_partitions(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    pond.produce(keyed("k", b"1"))
    pond.complete(pond.lease())
    pond.produce(b"ballast", b"ballast")  # so that the next one goes to the other partition
    pond.produce(keyed("k", b"2"), on_conflict="replace")
    [last] = pond.produce(keyed("k", b"3"), on_conflict="replace")
    assert [(item.id, item.payload) for item in pond.list() if item.key == "k"] == [(last.id, b"3")]
    assert pond.produce(keyed("k", b"4"))[0].id == last.id


def test_replace_of_two_items_by_one_leaves_no_key_held_twice(pond: SteppedPond) -> None:
    pond.produce(keyed("k", b"1"), Record(b"2", id="x"))
    [new] = pond.produce(Record(b"3", id="x", key="k"), on_conflict="replace")
    assert [(item.id, item.key, item.payload) for item in pond.list()] == [("x", "k", b"3")]
    assert new.id == "x"


# ---- own ids ----------------------------------------------------------------------------------------------


def test_an_own_id_never_changes(pond: SteppedPond) -> None:
    assert pond.produce(Record(b"a", id="mine"))[0].id == "mine"
    [item] = pond.lease()
    pond.retry(item, deferred=True)
    assert pond.lease()[0].id == "mine"
    pond.advance(30_000)
    assert pond.lease()[0].id == "mine"
    pond.reopen()
    assert pond.get("mine").payload == b"a"


def test_an_own_id_is_unique_like_a_key(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    pond.produce(Record(b"1", id="x"))
    assert pond.produce(Record(b"2", id="x"))[0].duplicate
    with pytest.raises(KeyConflict):
        pond.produce(Record(b"2", id="x"), on_conflict="reject")
    pond.complete(pond.lease())
    assert pond.produce(Record(b"2", id="x"))[0].duplicate
    pond.advance(WINDOW)
    assert not pond.produce(Record(b"2", id="x"))[0].duplicate


def test_an_id_and_a_key_of_the_same_text_do_not_conflict(pond: SteppedPond) -> None:
    replies = pond.produce(Record(b"1", id="x"), keyed("x", b"2"))
    assert [reply.duplicate for reply in replies] == [False, False]


def test_an_own_id_that_the_queue_gave_to_another_item_is_a_duplicate(pond: SteppedPond) -> None:
    [given] = pond.produce(b"a")
    assert pond.produce(Record(b"b", id=given.id))[0].duplicate
    with pytest.raises(InvalidRequest):
        pond.produce(Record(b"b", id="incq-0-99"))


# ---- request ids ------------------------------------------------------------------------------------------


def test_a_request_sent_again_returns_the_same_ids_and_adds_nothing(pond: SteppedPond) -> None:
    first = pond.ask(request(*numbered(3), name=b"r"))
    assert pond.ask(request(*numbered(3), name=b"r")) == first
    assert len(pond.list()) == 3


@pytest.mark.parametrize("crash", [False, True])
def test_a_request_is_remembered_for_the_window(pond: SteppedPond, crash: bool) -> None:
    first = pond.ask(request(b"a", Record(b"b", correlation_id="c"), keyed("k"), name=b"r"))
    pond.complete(pond.lease(10))
    if crash:
        pond.reopen()
    pond.advance(WINDOW - 1)
    assert pond.ask(request(b"a", Record(b"b"), keyed("k"), name=b"r")) == first
    pond.advance(1)
    again = pond.ask(request(b"a", Record(b"b"), keyed("k"), name=b"r"))
    assert {one.id for one in again}.isdisjoint({one.id for one in first})


def test_a_request_sent_again_while_in_flight_adds_nothing(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=3))
    one, two = pond.submit(request(b"a", name=b"r")), pond.submit(request(b"a", name=b"r"))
    jobs = pond.tick()
    three = pond.submit(request(b"a", name=b"r"))
    jobs += pond.tick()
    assert not one.answered
    pond.do(jobs)
    pond.run()
    assert one.value == two.value == three.value
    assert len(pond.list()) == 1


def test_a_request_of_nothing_but_duplicates_is_remembered_too(pond: SteppedPond) -> None:
    pond.produce(keyed("k"))
    pond.complete(pond.lease())
    pond.advance(WINDOW - 1)
    first = pond.ask(request(keyed("k"), name=b"r"))
    assert first[0].duplicate
    pond.advance(1_000)
    assert pond.ask(request(keyed("k"), name=b"r")) == first
    pond.reopen()
    assert pond.ask(request(keyed("k"), name=b"r")) == first
    assert not pond.list()


def test_a_request_of_nothing_but_duplicates_sent_twice_at_once_is_answered_twice(pond: SteppedPond) -> None:
    pond.produce(keyed("k"))
    one, two = pond.submit(request(keyed("k"), name=b"r")), pond.submit(request(keyed("k"), name=b"r"))
    pond.run()
    assert one.value == two.value


def test_different_requests_with_the_same_payload_are_different_items(pond: SteppedPond) -> None:
    pond.ask(request(b"a", name=b"r1"))
    pond.ask(request(b"a", name=b"r2"))
    assert len(pond.list()) == 2


# ---- nothing is left behind -------------------------------------------------------------------------------


def test_completed_items_leave_nothing_in_the_store(pond: SteppedPond) -> None:
    pond.produce(*numbered(5), keyed("k"), Record(b"r", kind="x"))
    items = pond.lease(10)
    pond.write_state(items[0], 0, {"a": 1})
    pond.retry(items[1], error="boom", due=0)
    [again] = pond.lease()
    pond.ask(Complete([item.lease for item in [items[0], *items[2:], again]]))
    store = pond.queues["q"].state.lanes[0].store
    assert store.read(list(range(1, 20)), list(range(100))) == ({}, {})
    assert len(pond.partition().chunks) == 0


def test_a_deleted_dead_item_leaves_no_error_document(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead="delete"))
    pond.produce(b"a")
    pond.kill(pond.lease()[0], error="boom")
    store = pond.queues["q"].state.lanes[0].store
    assert store.read([1], list(range(16))) == ({}, {})
