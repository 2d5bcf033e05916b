"""A look that waits for its item to end; items made ready before their time; when an item last changed."""

from __future__ import annotations

import pytest

from millpond.errors import Closed, InternalError, NotFound, Unavailable
from millpond.history.format import Record, encode_state
from millpond.model import DeadReason, Item, RedriveFilter, State, to_datetime
from millpond.queue.requests import Bury, Complete, GetItem, JudgeItem, Redrive, WriteState
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, keyed, numbered, payloads, request
from tests.drive import definition

# ---- waiting for an item to end ---------------------------------------------------------------------------

ENDS = ["complete", "reject", "cancel", "cancel leased", "bury", "expire", "last attempt", "claim", "judge"]


def end(pond: SteppedPond, item_id: str, how: str) -> State:
    """Bring the only item to its end; returns the state that it ends in."""
    if how in ("cancel", "bury"):
        pond.cancel(item_id) if how == "cancel" else pond.ask(Bury([item_id], DeadReason.REJECTED))
    elif how == "expire":
        pond.advance(20_000)
    elif how in ("claim", "judge"):
        pond.claim()
        if how == "judge":
            pond.judge(JudgeItem(item_id, dead=True))
        pond.complete_claim()
    else:
        [item] = pond.lease(lease_timeout=1_000)
        if how == "complete":
            pond.ask(Complete([item.lease], encode_state({"answer": 42})))
        elif how == "reject":
            pond.kill(item)
        elif how == "cancel leased":
            pond.cancel(item_id)
            pond.retry(item)
        else:
            pond.advance(1_000)
    return State.COMPLETED if how in ("complete", "claim") else State.CANCELLED if "cancel" in how else State.DEAD


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("kept", [True, False])
def test_a_look_that_waits_is_told_how_the_item_ends(make_pond: MakePond, how: str, kept: bool) -> None:
    settings = {"completed_retention_ms": 600_000} if kept else {"dead": "delete"}
    pond = make_pond(definition(max_attempts=1, expire_timeout_ms=20_000, **settings))
    [produced] = pond.produce(Record(b"work", kind="job"))
    watch, other = pond.watch(produced.id), pond.watch(produced.id)
    assert not watch.answered
    state = end(pond, produced.id, how)
    item: Item = watch.value
    assert (item.id, item.state, item.payload, item.kind) == (produced.id, state, b"work", "job")
    assert item.ended_at == item.updated_at == to_datetime(pond.clock.now())
    assert item.attempts == (0 if how in ("cancel", "bury", "expire") else 1)
    assert item.result == ({"answer": 42} if how == "complete" else None)
    assert (item.dead_reason is not None) == (state == State.DEAD)
    assert (item.lease_deadline, item.enqueue_at, item.cancel_asked) == (None, None, False)
    assert other.value == item
    if kept:
        assert pond.get(produced.id) == item
    else:
        assert not pond.exists(produced.id)


def test_what_has_ended_is_shown_at_once(make_pond: MakePond) -> None:
    pond = make_pond(definition(completed_retention_ms=60_000))
    [produced] = pond.produce(b"a")
    pond.complete(pond.lease())
    assert pond.ask(GetItem(produced.id, 60_000)).state == State.COMPLETED


def test_when_the_wait_is_over_the_item_is_shown_as_it_is_then(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    watch = pond.watch(produced.id, 5_000)
    [item] = pond.lease()
    pond.retry(item, due=pond.clock.now() + 60_000, error="not yet")
    pond.advance(4_999)
    assert not watch.answered
    pond.advance(1)
    assert (watch.value.state, watch.value.attempts, watch.value.last_error) == (State.RETRYING, 1, "not yet")


def test_a_retry_or_a_lost_lease_is_no_end(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    watch = pond.watch(produced.id)
    pond.retry(pond.lease()[0], deferred=True)
    pond.lease(lease_timeout=1_000)
    pond.advance(1_000)
    assert not watch.answered
    pond.complete(pond.lease())
    assert (watch.value.state, watch.value.attempts) == (State.COMPLETED, 2)


def test_an_item_that_ends_as_it_is_looked_at_is_not_missed(pond: SteppedPond) -> None:
    """The look and the end are of one turn, and nothing of the item is kept."""
    pond.produce(b"a")
    [item] = pond.lease()
    watch = pond.submit(GetItem(item.id, 60_000))
    complete = pond.submit(Complete([item.lease], encode_state("done")))
    pond.run()
    assert complete.value[0].ok
    assert (watch.value.state, watch.value.result) == (State.COMPLETED, "done")


def test_the_state_document_is_gone_with_completion(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    pond.write_state(item, 0, {"step": 1})
    watch = pond.watch(item.id)
    pond.complete([item])
    assert (watch.value.state_doc, watch.value.state_version) == (None, 0)


def test_a_document_that_comes_and_goes_in_one_turn_is_not_shown(make_pond: MakePond) -> None:
    pond = make_pond(definition(completed_retention_ms=60_000))
    pond.produce(b"a")
    [item] = pond.lease()
    requests = [WriteState(item.lease, 0, encode_state(1)), GetItem(item.id), Complete([item.lease]), GetItem(item.id)]
    _, before, _, after = [pond.submit(one) for one in requests]
    pond.run()
    assert (before.value.state, before.value.state_doc) == (State.LEASED, 1)
    assert (after.value.state, after.value.state_doc, after.value.state_version) == (State.COMPLETED, None, 0)


def test_the_error_of_one_that_is_deleted_as_it_dies_is_told(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead="delete"))
    pond.produce(b"a")
    [item] = pond.lease()
    pond.write_state(item, 0, {"step": 1})
    watch = pond.watch(item.id)
    pond.kill(item, error="no good")
    assert (watch.value.last_error, watch.value.dead_reason) == ("no good", "rejected")
    assert (watch.value.state_doc, watch.value.state_version) == ({"step": 1}, 1)


def test_one_that_goes_to_the_dead_queue_has_died(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead_queue="dq"), definition("dq"))
    [produced] = pond.produce(b"a")
    watch = pond.watch(produced.id)
    pond.kill(pond.lease()[0], error="no good")
    assert (watch.value.state, watch.value.last_error) == (State.DEAD, "no good")
    [letter] = pond.list(queue="dq")
    back = pond.watch(letter.id, queue="dq")
    pond.ask(Redrive(None, RedriveFilter()), "dq")
    assert back.answered
    again = pond.watch(produced.id)
    assert not again.answered
    pond.complete(pond.lease())
    assert again.value.state == State.COMPLETED


def test_one_that_is_removed_is_not_found(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    watch = pond.watch(produced.id)
    pond.clear(State.READY)
    assert isinstance(watch.error, NotFound)


def test_an_id_that_passes_to_another_item_is_waited_for_there(pond: SteppedPond) -> None:
    pond.produce(Record(b"old", id="own", key="k"))
    watch = pond.watch("own")
    pond.ask(request(Record(b"new", id="own", key="k"), on_conflict="replace"))
    assert not watch.answered
    pond.complete(pond.lease())
    assert (watch.value.state, watch.value.payload) == (State.COMPLETED, b"new")


def test_an_unknown_item_is_not_waited_for(pond: SteppedPond) -> None:
    with pytest.raises(NotFound):
        pond.ask(GetItem("nothing", 60_000))


def test_a_caller_who_leaves_is_not_waited_with(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    watch = pond.watch(produced.id)
    queue = pond.queues["q"]
    idle = [queue.idle]
    queue.withdraw(watch)
    pond.run()
    assert isinstance(watch.error, Unavailable)
    assert [*idle, queue.idle] == [False, True]
    assert not queue.state.lanes[0].watched


def test_of_many_who_wait_only_those_whose_item_ends_are_touched(pond: SteppedPond) -> None:
    ids = [one.id for one in pond.produce(*numbered(200))]
    watches = [pond.submit(GetItem(item_id, 60_000)) for item_id in ids]
    pond.run()
    pond.complete(pond.lease(3))
    assert [watch.answered for watch in watches] == [True] * 3 + [False] * 197
    pond.complete(pond.lease(197))
    assert [watch.value.id for watch in watches] == ids
    lane = pond.queues["q"].state.lanes[0]
    assert not lane.watched
    assert lane.partition.watch is None


@pytest.mark.parametrize("fault", ["lose", "hide"])
@pytest.mark.parametrize("retention", [0, 60_000])
@pytest.mark.parametrize("looking", [False, True])
def test_who_waits_is_answered_once_after_a_failed_commit(
    make_pond: MakePond, faulty: FaultyStores, fault: str, retention: int, looking: bool
) -> None:
    pond = make_pond(definition(completed_retention_ms=retention), on=faulty)
    pond.produce(b"a", b"b")
    item, other = pond.lease(2)
    watch, bystander = pond.submit(GetItem(item.id, 60_000)), pond.watch(other.id)
    if looking:  # as it ends
        watch = pond.submit(GetItem(item.id, 60_000))
    setattr(faulty.of(), fault, 1)
    pond.submit(Complete([item.lease], encode_state("done")))
    pond.run()
    assert (watch.value.state, watch.value.result) == (State.COMPLETED, "done")
    assert not bystander.answered
    pond.complete([other])
    assert bystander.value.state == State.COMPLETED


def test_a_partition_that_is_away_for_a_while_still_answers(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(definition(completed_retention_ms=60_000), on=faulty)
    pond.produce(b"a")
    [item] = pond.lease()
    watch, short = pond.watch(item.id, 600_000), pond.watch(item.id, 1_000)
    faulty.of().away = True
    complete = pond.submit(Complete([item.lease]))
    pond.run()
    pond.advance(20_000)
    assert complete.answered
    assert isinstance(short.error, Unavailable)
    assert not watch.answered
    faulty.of().away = False
    pond.advance(60_000)
    assert not watch.answered, "the commit had not been written"
    pond.complete(pond.lease())
    assert watch.value.state == State.COMPLETED


@pytest.mark.parametrize("deleting", [False, True])
def test_closing_sends_those_who_wait_away(pond: SteppedPond, deleting: bool) -> None:
    [produced] = pond.produce(b"a")
    watch, looking = pond.watch(produced.id), pond.submit(GetItem(produced.id, 60_000))
    pond.queues["q"].deleting = deleting
    pond.close()
    assert isinstance(watch.error, NotFound if deleting else Closed)
    assert isinstance(looking.error, Closed)


def test_after_a_bug_those_who_wait_are_told(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    watch = pond.watch(produced.id)
    queue = pond.queues["q"]
    queue.panic(ValueError("oops"), pond.clock.now())
    assert isinstance(watch.error, InternalError)
    pond.run()
    assert not queue.state.lanes[0].watched
    assert pond.get(produced.id).state == State.READY


# ---- making items ready -----------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True])
def test_what_waits_for_its_time_can_be_made_ready(pond: SteppedPond, crash: bool) -> None:
    later = pond.clock.now() + 60_000
    [retried, _] = pond.produce(b"retried", b"first")
    pond.retry(pond.lease()[0], due=later, error="x")
    [scheduled] = pond.produce(Record(b"scheduled", enqueue_at=later))
    results = pond.make_ready(scheduled.id, retried.id)
    assert [(result.ok, result.correlation_id) for result in results] == [
        (True, scheduled.correlation_id),
        (True, retried.correlation_id),
    ]
    if crash:
        pond.reopen()
    item = pond.get(retried.id)
    assert (item.state, item.attempts, item.last_error, item.enqueue_at) == (State.READY, 1, "x", None)
    assert payloads(pond.lease(3)) == [b"first", b"scheduled", b"retried"]
    pond.advance(20_000)
    assert pond.counts() == {"leased": 3}, "its old time means nothing any more"


def test_make_ready_answers_for_each_id(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2, completed_retention_ms=60_000))
    [done] = pond.produce(b"done")
    pond.complete(pond.lease())
    [dead] = pond.produce(b"dead")
    pond.kill(pond.lease()[0])
    [leased] = pond.produce(b"leased")
    pond.lease()
    [ready] = pond.produce(b"ready")
    results = pond.make_ready(ready.id, done.id, "nothing", dead.id, leased.id, ready.id)
    codes = [None if result.ok else result.error.code for result in results]
    assert codes == [None, "conflict", "not_found", "conflict", "conflict", None]


def test_one_made_ready_wakes_a_lease(pond: SteppedPond) -> None:
    [produced] = pond.produce(Record(b"a", enqueue_at=pond.clock.now() + 60_000))
    lease = pond.park()
    pond.make_ready(produced.id)
    assert payloads(lease.value) == [b"a"]


# ---- when it changed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True])
def test_an_item_tells_when_its_state_last_changed(make_pond: MakePond, crash: bool) -> None:
    pond = make_pond(definition(completed_retention_ms=600_000))
    start = pond.clock.now()

    def changed(item_id: str) -> tuple[float, float | None]:
        if crash:
            pond.reopen()
        item = pond.get(item_id)
        ended = None if item.ended_at is None else (item.ended_at - to_datetime(start)).total_seconds()
        return (item.updated_at - to_datetime(start)).total_seconds(), ended

    [a] = pond.produce(Record(b"a", enqueue_at=start + 1_000))
    assert changed(a.id) == (0, None)
    pond.advance(2_000)
    assert changed(a.id)[0] == 2, "it fell due"
    pond.advance(1_000)
    [item] = pond.lease()
    pond.advance(1_000)
    pond.extend(item, 10_000)
    assert changed(a.id) == (3, None)
    pond.advance(10_000)
    assert changed(a.id)[0] == 14, "the lease ran out"
    [item] = pond.lease()
    pond.advance(1_000)
    pond.retry(item, deferred=True)
    assert changed(a.id) == (15, None)
    [item] = pond.lease()
    pond.advance(1_000)
    pond.complete([item])
    pond.advance(1_000)
    assert changed(a.id) == (16, 16)


def test_a_snapshot_keeps_when_items_changed(make_pond: MakePond) -> None:
    pond = make_pond(definition(completed_retention_ms=600_000))
    pond.produce(*numbered(40), keyed("k"))
    pond.advance(1_000)
    leased = pond.lease(30)
    pond.advance(1_000)
    pond.complete(leased[:5])
    pond.cancel(pond.list(State.READY)[0].id)
    pond.kill(leased[6])
    before = pond.list()
    pond.close()
    pond.open()
    assert pond.list() == before
    assert {item.updated_at for item in before} == {to_datetime(pond.clock.now() - ago) for ago in (0, 1_000, 2_000)}
