"""Transactions: items staged chunk by chunk, seen by nobody, and published all at once and once only."""

from __future__ import annotations

import pytest

from millpond.errors import Conflict, DiskFull, InvalidRequest, NotFound, Unavailable
from millpond.history.format import Record
from millpond.model import CLAIM_MEMORY_MS, STAGE_TIMEOUT_MS, State, to_datetime
from millpond.queue import produce as produce_module
from millpond.queue import settling as settling_module
from millpond.queue import stages as stages_module
from millpond.queue.requests import ListItems, PublishStage, ReadJournal, StageItems
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, keyed, numbered, payloads, request
from tests.drive import definition, plain_items

SECOND = 1_000


@pytest.fixture
def three(make_pond: MakePond) -> SteppedPond:
    """Three partitions, empty."""
    return make_pond(definition(partitions=3))


def stored(pond: SteppedPond, index: int = 0) -> set[int]:
    """The chunks that a partition's store has."""
    return set(pond.queues["q"].state.lanes[index].store.read(range(1, 200), [])[0])


# ---- staged -----------------------------------------------------------------------------------------------


def test_staged_items_are_invisible(three: SteppedPond) -> None:
    assert three.stage("x", b"a", b"b") == 2
    assert three.stage("y", b"c") == 1
    assert three.counts() == {}
    assert three.list() == []
    assert three.lease(5) == []
    assert three.claim().items == 0
    assert three.stats().totals == {}
    assert three.clear(*(state for state in State if state != State.CLAIMED))["ready"] == 0


def test_publishing_shows_all_of_them_in_all_partitions(three: SteppedPond) -> None:
    for number in range(6):
        three.stage(f"chunk {number}", *numbered(2, 2 * number))
    assert len([lane for lane in three.queues["q"].state.lanes.values() if lane.partition.staged]) == 3
    published = three.publish(*(f"chunk {number}" for number in range(6)))
    assert (published.txn, published.items, published.duplicates, published.again) == ("t", 12, 0, False)
    assert sorted(payloads(three.list(State.READY))) == sorted(numbered(12))
    assert three.stats().totals == {"produced": 12}
    three.reopen()
    assert sorted(payloads(three.lease(20))) == sorted(numbered(12))


@pytest.mark.parametrize("how", ["reopen", "close"])
def test_what_was_staged_is_there_after_a_restart(three: SteppedPond, how: str) -> None:
    three.stage("x", *numbered(3))
    three.produce(b"between")
    three.stage("y", *numbered(3, 3), keyed("k", b"keyed"))
    if how == "close":
        three.close()
        three.open()
    else:
        three.reopen()
    assert three.counts() == {"ready": 1}
    assert three.publish("x", "y").items == 7
    assert sorted(payloads(three.lease(10))) == sorted([b"between", b"keyed", *numbered(6)])


def test_a_chunk_sent_again_adds_nothing(three: SteppedPond) -> None:
    assert three.stage("x", b"a", b"b") == 2
    assert three.stage("x", b"a", b"b") == 2
    three.reopen()
    assert three.stage("x", b"a", b"b") == 2
    assert three.publish("x").items == 2


def test_a_chunk_sent_again_while_its_partition_is_away_counts_once(make_pond: MakePond, faulty: FaultyStores) -> None:
    three = make_pond(definition(partitions=3), on=faulty)
    three.stage("x", b"a", b"b")
    [home] = [index for index, lane in three.queues["q"].state.lanes.items() if lane.partition.staged]
    three.close()
    faulty.of(home).away = True
    three.open()
    assert three.stage("x", b"a", b"b") == 2
    assert three.publish("x").items == 2
    faulty.of(home).away = False
    three.advance(60 * SECOND)
    assert payloads(three.lease(10)) == [b"a", b"b"]
    assert not any(lane.partition.staged for lane in three.queues["q"].state.lanes.values())
    assert stored(three, home) == set()


def test_a_large_chunk_is_stored_in_pieces(pond: SteppedPond) -> None:
    assert pond.stage("x", *numbered(2_500)) == 2_500
    assert [piece.count for piece in pond.partition().staged["t"]["x"]] == [1_000, 1_000, 500]
    assert pond.publish("x").items == 2_500
    assert [item.payload for _ in range(5) for item in pond.lease(500)] == numbered(2_500)


def test_givenalone_are_cut_by_their_number_and_their_bytes(pond: SteppedPond) -> None:
    given = [*numbered(1_200), *[bytes([65 + number]) * 600_000 for number in range(3)], b"", b"last"]
    asked = pond.ask(StageItems("t", "x", plain_items(given), 0))
    assert asked.items == len(given)
    assert [piece.count for piece in pond.partition().staged["t"]["x"]] == [1_000, 201, 1, 3]
    assert pond.publish("x").items == len(given)
    pond.reopen()
    assert [item.payload for _ in range(3) for item in pond.lease(500)] == given


def test_a_full_turn_stages_in_the_next(pond: SteppedPond, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "TURN_BYTES_MAX", 100)
    assert produce_module.TURN_BYTES_MAX > 100
    asked = [pond.submit(StageItems("t", f"c{number}", [b"x"], 60)) for number in range(4)]
    pond.run()
    assert [stage.value.items for stage in asked] == [1] * 4
    assert pond.publish(*(f"c{number}" for number in range(4))).items == 4


def test_many_names_are_published_over_several_turns(three: SteppedPond, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a turn would take seconds. It is one decision all the same: nobody has to ask for the rest."""
    monkeypatch.setattr(settling_module, "PUBLISH_NAMED_MAX", 2)
    for number in range(9):
        three.stage(f"c{number}", keyed(f"k{number}"), keyed(f"k{number + 1}"))
    publish = three.submit(PublishStage("t", [f"c{number}" for number in range(9)]))
    while not three.counts_now():
        three.do(three.tick())
    assert three.counts_now() != {"ready": 10}
    three.reopen()
    assert not publish.answered
    assert three.counts() == {"ready": 10}
    for number in range(9):
        three.stage(f"c{number}", keyed(f"k{number}"), keyed(f"l{number}"), txn="u")
    published = three.publish(*(f"c{number}" for number in range(9)), txn="u")
    assert (published.items, published.duplicates) == (9, 9)


def test_chunks_of_several_transactions_lie_side_by_side(three: SteppedPond) -> None:
    for txn in "ab":
        for chunk in "xy":
            three.stage(chunk, f"{txn}{chunk}".encode(), txn=txn)
    assert three.publish("x", "y", txn="b").items == 2
    assert sorted(payloads(three.list())) == [b"bx", b"by"]
    assert three.publish("x", "y", txn="a").items == 2
    assert sorted(payloads(three.list())) == [b"ax", b"ay", b"bx", b"by"]


def test_an_id_that_this_queue_assigns_is_refused(pond: SteppedPond) -> None:
    with pytest.raises(InvalidRequest, match="has the form"):
        pond.stage("x", Record(b"a", id="incq-0-5"))
    assert pond.partition().staged == {}


# ---- what comes out ---------------------------------------------------------------------------------------


def test_published_items_stand_behind_what_was_produced_before(pond: SteppedPond) -> None:
    pond.produce(b"0")
    pond.stage("x", b"2", b"3")
    pond.produce(b"1")
    pond.publish("x")
    pond.produce(b"4")
    pond.reopen()
    assert payloads(pond.lease(5)) == numbered(5)


def test_an_items_time_begins_when_it_is_published(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=10 * SECOND))
    pond.stage("x", b"plain", Record(b"own", expire_deadline=pond.clock.now() + 4 * SECOND))
    pond.advance(60 * SECOND)
    now = pond.clock.now()
    pond.publish("x")
    shown = {item.payload: item for item in pond.list()}
    assert {to_datetime(now)} == {item.created_at for item in shown.values()}
    assert shown[b"plain"].expire_deadline == to_datetime(now + 10 * SECOND)
    assert shown[b"own"].expire_deadline == to_datetime(now + 4 * SECOND)
    pond.claim(max_items=5)
    assert {item.payload: item.expire_deadline for item in pond.read()} == {
        payload: item.expire_deadline for payload, item in shown.items()
    }
    pond.release_claim()
    pond.advance(4 * SECOND)
    assert payloads(pond.list(State.DEAD)) == [b"own"]
    pond.reopen()
    pond.advance(6 * SECOND)
    assert sorted(payloads(pond.list(State.DEAD))) == [b"own", b"plain"]


def test_all_that_an_item_was_given_is_honoured(pond: SteppedPond) -> None:
    now = pond.clock.now()
    pond.stage(
        "x",
        Record(b"later", enqueue_at=now + 5 * SECOND),
        Record(b"low", priority=5),
        b"plain",
        Record(b"high", priority=-1, kind="mail", correlation_id="corr", max_attempts=1),
    )
    pond.publish("x")
    assert pond.counts() == {"ready": 3, "scheduled": 1}
    items = pond.lease(5)
    assert payloads(items) == [b"high", b"plain", b"low"]
    assert (items[0].kind, items[0].correlation_id) == ("mail", "corr")
    pond.advance(5 * SECOND)
    assert payloads(pond.lease(5)) == [b"later"]
    pond.retry(items[0])
    assert payloads(pond.list(State.DEAD)) == [b"high"]


def test_what_fell_due_while_it_was_staged_is_ready_at_once(pond: SteppedPond) -> None:
    pond.stage("x", Record(b"a", enqueue_at=pond.clock.now() + SECOND))
    pond.advance(2 * SECOND)
    pond.publish("x")
    assert payloads(pond.lease()) == [b"a"]


def test_published_items_are_found_by_id_and_listed_in_pages(pond: SteppedPond) -> None:
    pond.produce(b"before")
    pond.stage("x", *numbered(5), Record(b"own", id="own"))
    pond.produce(b"after")
    pond.publish("x")
    items = pond.list()
    assert payloads(items) == [b"before", *numbered(5), b"own", b"after"]
    assert [pond.get(item.id).payload for item in items] == payloads(items)
    assert pond.get("own").payload == b"own"
    pages, after = [], (0, 0)
    while True:
        page = pond.ask(ListItems(None, None, None, after, 2))
        pages += payloads(page.items)
        if page.next is None:
            break
        partition, _, number = page.next.partition(":")
        after = (int(partition), int(number))
    assert pages == payloads(items)


def test_chunks_that_are_not_named_are_dropped(three: SteppedPond) -> None:
    for chunk in "abcdef":
        three.stage(chunk, chunk.encode())
    assert three.publish("b", "e").items == 2
    assert sorted(payloads(three.list())) == [b"b", b"e"]
    assert not any(lane.partition.staged for lane in three.queues["q"].state.lanes.values())
    assert sum(len(stored(three, index)) for index in range(3)) == 2


def test_publishing_no_chunks_drops_them_all(three: SteppedPond) -> None:
    three.stage("x", b"a")
    assert three.publish().items == 0
    assert three.counts() == {}
    assert not any(stored(three, index) for index in range(3))
    assert three.publish("x").again


# ---- names ------------------------------------------------------------------------------------------------


def test_a_name_that_comes_twice_in_a_transaction_counts_once(three: SteppedPond) -> None:
    three.stage("x", keyed("k", b"0"), keyed("k", b"1"), Record(b"2", id="i"), b"plain")
    three.stage("y", keyed("k", b"3"), Record(b"4", id="i"), keyed("other", b"5"))
    published = three.publish("x", "y")
    assert (published.items, published.duplicates) == (4, 3)
    assert len({item.key for item in three.list() if item.key}) == 2
    three.reopen()
    assert three.counts() == {"ready": 4}


def test_a_name_that_is_taken_is_ignored_and_counted(three: SteppedPond) -> None:
    three.produce(keyed("live", b"live"), Record(b"own", id="own"))
    three.stage("x", keyed("live"), Record(b"", id="own"), keyed("new", b"new"))
    published = three.publish("x")
    assert (published.items, published.duplicates) == (1, 2)
    assert sorted(payloads(three.list())) == [b"live", b"new", b"own"]


def test_a_name_that_was_taken_after_staging_is_ignored_too(three: SteppedPond) -> None:
    three.stage("x", keyed("k", b"staged"))
    three.produce(keyed("k", b"produced"))
    assert three.publish("x").duplicates == 1
    assert payloads(three.list()) == [b"produced"]


def test_staging_takes_no_name(three: SteppedPond) -> None:
    three.stage("x", keyed("k", b"staged"))
    assert not three.produce(keyed("k"))[0].duplicate


def test_a_name_is_guarded_for_the_window_after_its_item_ended(three: SteppedPond) -> None:
    three.produce(keyed("k"))
    three.complete(three.lease())
    three.stage("x", keyed("k", b"x"))
    three.stage("y", keyed("k", b"y"), txn="u")
    assert three.publish("x").duplicates == 1
    three.advance(300 * SECOND)
    assert three.publish("y", txn="u").items == 1


def test_a_published_name_is_taken(three: SteppedPond) -> None:
    three.stage("x", keyed("k", b"x"), Record(b"own", id="own"))
    three.publish("x")
    again = three.produce(keyed("k"), Record(b"", id="own"))
    assert [one.duplicate for one in again] == [True, True]


def test_a_chunk_with_nothing_left_of_it_is_dropped_from_the_store(pond: SteppedPond) -> None:
    pond.produce(keyed("k"))
    before = stored(pond)
    pond.stage("x", keyed("k"))
    assert pond.publish("x").duplicates == 1
    assert stored(pond) == before


def test_publish_and_produce_of_one_name_at_once_make_one_item(three: SteppedPond) -> None:
    three.stage("x", keyed("k", b"staged"))
    publish = three.submit(PublishStage("t", ["x"]))
    produced = []
    for _ in range(6):
        jobs = three.tick()
        produced.append(three.submit(request(keyed("k", b"produced"))))
        three.do(jobs)
    three.run()
    new = [one for one in produced if not one.value[0].duplicate]
    assert len(new) + publish.value.items == 1
    assert three.counts() == {"ready": 1}


# ---- once -------------------------------------------------------------------------------------------------


def test_publishing_twice_is_once(three: SteppedPond) -> None:
    three.stage("x", b"a")
    three.publish("x")
    for _ in range(2):
        again = three.publish("x")
        assert (again.items, again.duplicates, again.again) == (0, 0, True)
        three.reopen()
    assert three.counts() == {"ready": 1}


def test_what_is_staged_after_the_publish_comes_to_nothing(three: SteppedPond) -> None:
    """A batch that is replayed: the client asks for the same again."""
    three.stage("x", b"a")
    three.publish("x")
    assert three.stage("x", b"a") == 0
    assert three.stage("y", b"b") == 0
    assert three.publish("x", "y").again
    assert three.counts() == {"ready": 1}
    assert not any(lane.partition.staged for lane in three.queues["q"].state.lanes.values())


def test_a_chunk_that_arrives_with_the_publish_is_not_shown_twice(three: SteppedPond) -> None:
    """A second copy of a task sends its chunk again while the first copy's is published, and the publisher leaves."""
    for delay in range(12):
        txn = f"t{delay}"
        three.stage("x", txn.encode(), txn=txn)
        three.stage("y", txn.encode() + b"y", txn=txn)
        publish = three.submit(PublishStage(txn, ["x", "y"]))
        for _ in range(delay):
            three.do(three.tick())
        again = three.submit(StageItems(txn, "x", [txn.encode()], 0))
        jobs = three.tick()
        three.queues["q"].withdraw(publish)
        three.do(list(reversed(jobs)))
        three.run()
        assert again.answered
        three.publish("x", "y", txn=txn)
        three.advance(SECOND)
        found = sorted(payloads(three.lease(10)))
        assert found == [txn.encode(), txn.encode() + b"y"]


def test_a_numbered_transaction_is_remembered_by_the_highest_number(three: SteppedPond) -> None:
    for number in (1, 2, 7):
        three.stage("x", b"%d" % number, txn=f"job:{number}")
        assert three.publish("x", txn=f"job:{number}").items == 1
    three.advance(100 * CLAIM_MEMORY_MS)
    three.close()
    three.open()
    for number in (1, 2, 6, 7):
        assert three.stage("x", b"again", txn=f"job:{number}") == 0
        assert three.publish("x", txn=f"job:{number}").again
    assert three.stage("x", b"8", txn="job:8") == 1
    assert three.stage("x", b"1", txn="other:1") == 1
    assert not three.publish("x", txn="job:8").again
    assert not three.publish("x", txn="other:1").again


def test_a_lower_number_that_is_published_at_the_same_time_does_not_bring_the_higher_back(three: SteppedPond) -> None:
    for number in (5, 7):
        three.stage("x", b"%d" % number, txn=f"job:{number}")
    seven = three.submit(PublishStage("job:7", ["x"]))
    five = three.submit(PublishStage("job:5", ["x"]))
    three.run()
    assert (seven.value.items, five.value.items) in ((1, 0), (1, 1))
    assert three.publish("x", txn="job:7").again
    assert three.stage("x", b"7", txn="job:7") == 0
    assert three.stage("x", b"6", txn="job:6") == 0
    assert payloads(three.list()).count(b"7") == 1


def test_a_plain_transaction_is_remembered_for_seven_days(pond: SteppedPond) -> None:
    pond.stage("x", b"a")
    pond.publish("x")
    pond.advance(CLAIM_MEMORY_MS)
    assert pond.stage("x", b"a") == 0
    pond.advance(1)
    pond.stage("x", b"b", txn="other")
    pond.publish("x", txn="other")
    assert pond.stage("x", b"c") == 1


# ---- refused ----------------------------------------------------------------------------------------------


def test_a_missing_chunk_refuses_the_publish_and_changes_nothing(three: SteppedPond) -> None:
    three.stage("x", b"a")
    with pytest.raises(NotFound, match="'y'"):
        three.publish("x", "y")
    assert three.counts() == {}
    three.stage("y", b"b")
    assert three.publish("x", "y").items == 2


def test_an_unknown_transaction_cannot_be_published(three: SteppedPond) -> None:
    with pytest.raises(NotFound):
        three.publish("x", txn="nothing")


def test_two_publishes_at_once_are_one(three: SteppedPond) -> None:
    three.stage("x", b"a")
    asked = [three.submit(PublishStage("t", ["x"])) for _ in range(2)]
    three.run()
    assert asked[0].value.items == 1
    assert isinstance(asked[1].error, Unavailable)
    assert three.counts() == {"ready": 1}


# ---- dropped ----------------------------------------------------------------------------------------------


def test_an_abort_drops_what_was_staged(three: SteppedPond) -> None:
    for chunk in "xyz":
        three.stage(chunk, b"a", b"b")
    three.stage("x", b"other", txn="other")
    assert three.abort() == 6
    assert three.abort() == 0
    with pytest.raises(NotFound):
        three.publish("x")
    assert three.stage("x", b"anew") == 1
    assert three.publish("x").items == 1
    assert three.publish("x", txn="other").items == 1
    assert sorted(payloads(three.list())) == [b"anew", b"other"]
    assert sum(len(stored(three, index)) for index in range(3)) == 2


def test_a_published_transaction_cannot_be_aborted(three: SteppedPond) -> None:
    three.stage("x", b"a")
    three.publish("x")
    with pytest.raises(Conflict):
        three.abort()
    assert three.counts() == {"ready": 1}


def test_what_nobody_publishes_is_swept(three: SteppedPond) -> None:
    three.stage("x", b"a")
    three.advance(STAGE_TIMEOUT_MS - 1)
    three.stage("y", b"b", txn="younger")
    assert sum(len(stored(three, index)) for index in range(3)) == 2
    three.advance(1)
    assert sum(len(stored(three, index)) for index in range(3)) == 1
    with pytest.raises(NotFound):
        three.publish("x")
    assert three.publish("y", txn="younger").items == 1


def test_a_transaction_that_grows_is_not_swept(pond: SteppedPond) -> None:
    pond.stage("x", b"a")
    pond.advance(STAGE_TIMEOUT_MS - 1)
    pond.stage("y", b"b")
    pond.advance(STAGE_TIMEOUT_MS - 1)
    assert pond.publish("x", "y").items == 2


def test_a_sleeping_queue_wakes_to_sweep(pond: SteppedPond) -> None:
    pond.stage("x", b"a")
    swept = pond.clock.now() + STAGE_TIMEOUT_MS
    queue = pond.queues["q"]
    assert queue.idle
    assert queue.sleeping_until() == swept
    pond.close()
    pond.clock.advance(STAGE_TIMEOUT_MS)
    pond.open()
    assert stored(pond) == set()
    assert pond.queues["q"].sleeping_until() is None


def test_an_old_transaction_can_be_published_until_it_is_swept(pond: SteppedPond) -> None:
    """At the very instant; and the queue does not spin while it is under way."""
    pond.stage("x", b"a")
    pond.clock.advance(STAGE_TIMEOUT_MS)
    publish = pond.submit(PublishStage("t", ["x"]))
    pond.run()
    assert publish.answered


def test_a_full_disk_refuses_to_stage_and_lets_publish(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(on=faulty)
    pond.stage("x", b"a")
    faulty.of().full = True
    with pytest.raises(DiskFull):
        pond.stage("y", b"b")
    assert pond.publish("x").items == 1
    faulty.of().full = False
    pond.advance(10 * SECOND)
    assert pond.stage("y", b"b", txn="next") == 1


# ---- the state behind it ------------------------------------------------------------------------------------


def test_a_queue_that_is_only_ever_published_to_does_not_grow(pond: SteppedPond) -> None:
    """What is done leaves nothing behind in memory."""
    chunks = pond.partition().chunks
    for number in range(200):
        pond.stage("x", b"a", txn=f"job:{number + 1}")
        pond.publish("x", txn=f"job:{number + 1}")
        pond.complete(pond.lease())
    assert len(chunks._blocks) <= 1
    assert len(chunks._expiry) < 150


def test_staged_chunks_go_round_the_partitions(three: SteppedPond) -> None:
    asked = [three.submit(StageItems("t", f"c{number}", [b"a", b"b"], 0)) for number in range(9)]
    three.run()
    assert all(stage.value.items == 2 for stage in asked)
    assert [lane.partition.staged_count for lane in three.queues["q"].state.lanes.values()] == [6, 6, 6]


# ---- the journal and the list, for who keeps the history -----------------------------------------------------


def test_the_journal_is_read_in_pages(pond: SteppedPond) -> None:
    for payload in numbered(5):
        pond.produce(payload)
    whole = pond.ask(ReadJournal(0, 0, 500))
    assert (whole.incarnation, whole.partition, whole.last_turn) == ("incq", 0, 5)
    assert [row.turn for row in whole.rows] == [1, 2, 3, 4, 5]
    assert {row.at for row in whole.rows} == {pond.clock.now()}
    after, rows = 0, []
    while page := pond.ask(ReadJournal(0, after, 2)).rows:
        rows += page
        after = page[-1].turn
    assert rows == whole.rows
    assert pond.ask(ReadJournal(0, 5, 500)).rows == []
    with pytest.raises(NotFound):
        pond.ask(ReadJournal(1, 0, 500))


def test_the_journal_tells_only_what_is_durable(pond: SteppedPond) -> None:
    pond.produce(b"a")
    produce = pond.submit(request(b"b"))
    page = pond.submit(ReadJournal(0, 0, 500))
    pond.run()
    assert produce.answered
    assert (page.value.last_turn, [row.turn for row in page.value.rows]) == (1, [1])


def test_a_list_stops_where_it_is_told(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    pond.produce(*numbered(600))
    pond.produce(*numbered(5, 600))
    until = pond.stats().partitions[0].last_number
    assert until == 600
    pond.produce(*numbered(700, 1_000))
    pond.produce(*numbered(700, 2_000))
    assert pond.stats().partitions[0].last_number == 1_300
    assert payloads(pond.ask(ListItems(None, 0, None, (0, 0), 1_000, 5)).items) == numbered(5)
    assert payloads(pond.ask(ListItems(None, 0, None, (0, 0), 1_000, until)).items) == numbered(600)
    assert payloads(pond.ask(ListItems(State.CLAIMED, 0, None, (0, 0), 1_000, until)).items) == []
    pond.claim(max_items=2)
    claimed = pond.read()
    assert payloads(pond.list(State.CLAIMED)) == payloads(claimed)
