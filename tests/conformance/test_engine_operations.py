"""Calls by id and over many items: cancel, clear, get, list, stats; and closing."""

from __future__ import annotations

import pytest

from millpond.errors import Closed, NotFound, OutcomeUnknown
from millpond.history.format import Record
from millpond.model import Item, ItemPage, RedriveFilter, State
from millpond.queue.requests import Complete, GetItem, Lease, ListItems, Produce, Redrive
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, numbered, payloads
from tests.drive import definition

# ---- cancel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.READY, State.SCHEDULED, State.RETRYING])
def test_cancel_ends_a_waiting_item(pond: SteppedPond, state: State) -> None:
    later = pond.clock.now() + 1_000
    [produced, _] = pond.produce(Record(b"a", enqueue_at=later if state == State.SCHEDULED else 0), b"b")
    if state == State.RETRYING:
        pond.retry(pond.lease()[0], due=later)
    assert pond.get(produced.id).state == state
    assert pond.cancel(produced.id)[0].ok
    assert not pond.exists(produced.id)
    pond.reopen()
    pond.advance(10_000)
    assert payloads(pond.lease(10)) == [b"b"]


def test_a_leased_item_is_marked_and_its_holder_learns_of_it(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    assert not pond.extend(item).cancelled
    assert not pond.write_state(item, 0, 1).cancelled
    assert pond.cancel(item.id)[0].ok
    assert pond.get(item.id).state == State.LEASED
    assert pond.get(item.id).cancel_asked
    pond.reopen()
    assert pond.extend(item).cancelled
    assert pond.write_state(item, 1, 2).cancelled


@pytest.mark.parametrize("end", ["expiry", "retry", "defer", "release", "complete", "reject"])
@pytest.mark.parametrize("crash", [False, True])
def test_a_cancelled_leased_item_ends_when_the_lease_does(make_pond: MakePond, end: str, crash: bool) -> None:
    pond = make_pond(definition(dead_queue="dq"), definition("dq"))
    pond.produce(b"a")
    [item] = pond.lease()
    pond.cancel(item.id)
    if crash:
        pond.reopen()
    if end == "expiry":
        pond.advance(30_000)
    elif end == "complete":
        assert pond.complete([item])[0].ok
    elif end == "release":
        assert pond.extend(item, 0).ok
    else:
        assert pond.retry(item, deferred=end == "defer", dead=end == "reject").ok
    assert not pond.exists(item.id)
    pond.advance(100_000)
    assert pond.lease() == []
    assert pond.list(queue="dq") == []


def test_a_cancelled_item_is_kept_for_the_retention(make_pond: MakePond) -> None:
    pond = make_pond(definition(completed_retention_ms=10_000))
    [produced] = pond.produce(b"a")
    pond.cancel(produced.id)
    assert pond.get(produced.id).state == State.CANCELLED
    assert pond.lease() == []
    pond.advance(10_000)
    assert not pond.exists(produced.id)


def test_cancel_answers_per_id(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    [a] = pond.produce(Record(b"a", id="own"))
    [b] = pond.produce(b"b")
    [dead] = pond.produce(Record(b"dead", priority=-1))
    pond.kill(pond.lease()[0])
    results = pond.cancel(a.id, "unknown", dead.id, b.id, a.id)
    assert [result.error.code if result.error else None for result in results] == [
        None, "not_found", "conflict", None, None,
    ]  # fmt: skip
    assert [item.id for item in pond.list()] == [dead.id]


# ---- clear ------------------------------------------------------------------------------------------------


def one_of_each(pond: SteppedPond) -> None:
    """Two items in each state that an item can wait in."""
    later = pond.clock.now() + 60_000
    for state in (State.LEASED, State.RETRYING, State.DEAD, State.COMPLETED, State.CANCELLED):
        replies = pond.produce(Record(state.encode(), kind=state), Record(state.encode(), kind=state))
        items = [] if state == State.CANCELLED else pond.lease(2, lease_timeout=1_000_000)
        if state == State.CANCELLED:
            pond.cancel(*(reply.id for reply in replies))
        elif state == State.COMPLETED:
            pond.complete(items)
        else:
            for item in items if state != State.LEASED else []:
                pond.retry(item, due=later, dead=state == State.DEAD)
    pond.produce(Record(b"scheduled", enqueue_at=later), Record(b"scheduled", enqueue_at=later))
    pond.produce(b"ready", b"ready")


STATES = [
    State.SCHEDULED, State.READY, State.LEASED, State.RETRYING, State.COMPLETED, State.DEAD, State.CANCELLED,
]  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_clear_removes_the_items_of_the_states_asked_for_and_no_others(make_pond: MakePond, state: State) -> None:
    pond = make_pond(definition(partitions=2, completed_retention_ms=1_000_000))
    one_of_each(pond)
    assert pond.clear(state) == {state: 2}
    counts = {one: count for one, count in pond.stats().counts.items() if one != State.CLAIMED}
    assert counts == {one: 0 if one == state else 2 for one in STATES}
    pond.reopen()
    assert pond.list(state) == []
    assert len(pond.list()) == 12


# ---- get and list -----------------------------------------------------------------------------------------


def test_looking_leases_nothing(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    for _ in range(3):
        assert pond.get(produced.id).attempts == 0
        assert len(pond.list()) == 1
    assert pond.lease()[0].attempts == 1


@pytest.mark.parametrize("item_id", ["nothing", "incq-0-7", "incq-9-1", "incq-0-01", "inc-0-1"])
def test_an_unknown_id_is_not_found(pond: SteppedPond, item_id: str) -> None:
    pond.produce(b"a")
    with pytest.raises(NotFound):
        pond.get(item_id)


@pytest.mark.parametrize("state", STATES)
def test_list_shows_the_items_of_a_state(make_pond: MakePond, state: State) -> None:
    pond = make_pond(definition(completed_retention_ms=1_000_000))
    one_of_each(pond)
    listed = pond.list(state)
    assert [item.state for item in listed] == [state, state]
    assert payloads(listed) == [state.encode(), state.encode()]
    assert [pond.get(item.id) for item in listed] == listed


def test_list_pages_through_every_item_once(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=3))
    for start in range(0, 60, 5):
        pond.produce(*numbered(5, start))
    seen: list[Item] = []
    after = (0, 0)
    while True:
        page: ItemPage = pond.ask(ListItems(None, None, None, after, 7))
        seen += page.items
        if page.next is None:
            break
        partition, number = page.next.split(":")
        after = (int(partition), int(number))
        if seen[-1].state == State.READY and len(seen) < 30:
            pond.complete(pond.lease(1))  # items that go do not make it skip others
    assert len({item.id for item in seen}) == len(seen)
    assert {item.id for item in pond.list()} <= {item.id for item in seen}


def test_list_filters_by_kind_and_partition(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    pond.produce(Record(b"a", kind="x"), Record(b"b", kind="y"))
    pond.produce(Record(b"c", kind="x"))
    assert payloads(pond.ask(ListItems(None, None, "x", (0, 0), 10)).items) == [b"a", b"c"]
    assert payloads(pond.ask(ListItems(None, 1, None, (0, 0), 10)).items) == [b"c"]
    with pytest.raises(NotFound):
        pond.ask(ListItems(None, 7, None, (0, 0), 10))


# ---- stats ------------------------------------------------------------------------------------------------


def test_stats_count_what_is_there_and_what_happened(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2, completed_retention_ms=1_000_000))
    one_of_each(pond)
    stats = pond.stats()
    assert {state: stats.counts[state] for state in STATES} == dict.fromkeys(STATES, 2)
    assert stats.totals == {
        "produced": 14, "leased": 8, "completed": 2, "retried": 2, "dead": 2, "cancelled": 2,
    }  # fmt: skip
    pond.reopen()
    assert pond.stats().counts == stats.counts
    assert pond.stats().totals == stats.totals


def test_stats_tell_waiters_and_the_age_of_the_oldest_ready_item(pond: SteppedPond) -> None:
    assert pond.stats().oldest_ready_age is None
    pond.park(), pond.park()
    assert pond.stats().waiters == 2
    pond.produce(*numbered(3))
    pond.advance(2_500)
    assert pond.stats().waiters == 0
    assert pond.stats().oldest_ready_age == 2.5


def test_rates_are_of_the_last_minute(pond: SteppedPond) -> None:
    pond.produce(*numbered(60))
    pond.complete(pond.lease(30))
    rates = pond.stats().rates
    assert (rates.produced, rates.leased, rates.completed) == (1.0, 0.5, 0.5)
    pond.advance(61_000)
    assert pond.stats().rates.produced == 0.0


# ---- closing ----------------------------------------------------------------------------------------------


def test_closing_answers_everybody(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(on=faulty)
    pond.produce(*numbered(5))
    for item in pond.lease(5):
        pond.kill(item)
    waiting = pond.park()
    paced = pond.submit(Redrive(None, RedriveFilter(), rate=1.0))
    pond.run()
    assert not paced.answered
    faulty.of().away = True
    in_doubt = pond.submit(Produce([b"a"], 0))
    pond.run()
    held = [pond.submit(Produce([b"b"], 0)), pond.submit(Complete([]))]
    looking = pond.submit(GetItem("incq-0-1"))
    fresh = pond.submit(Lease(1, wait=1_000))
    pond.close()
    for request in (paced, in_doubt, looking, waiting, fresh, *held):
        assert request.answered, type(request).__name__
    assert isinstance(in_doubt.error, OutcomeUnknown)
    late = pond.submit(Produce([b"c"], 0))
    assert isinstance(late.error, Closed)


def test_a_clean_close_leaves_everything_as_it_was(make_pond: MakePond) -> None:
    pond = make_pond(definition(completed_retention_ms=1_000_000))
    one_of_each(pond)
    before = pond.list()
    pond.close()
    pond.open()
    assert pond.list() == before


def test_a_close_during_a_commit_waits_for_it(pond: SteppedPond) -> None:
    produce = pond.submit(Produce([b"a"], 0))
    jobs = pond.tick()
    pond.queues["q"].close(pond.clock.now())
    assert not produce.answered
    pond.do(jobs)
    assert len(produce.value) == 1
    pond.close()
    pond.open()
    assert payloads(pond.lease()) == [b"a"]
