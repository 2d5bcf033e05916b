"""Dead letters: kept, deleted or moved to a dead queue, never lost and never twice; and the way back."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from millpond.history.format import Record
from millpond.model import Item, QueueSettings, RedriveFilter, State, to_ms
from millpond.queue.requests import Produce, Redrive, RetryItem, RetryItems
from millpond.store.base import JournalRow
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, keyed, numbered, payloads
from tests.drive import definition

QUEUES = (definition(dead_queue="dq"), definition("dq"))
CUTS_MAX = 400  # more steps than any move takes


@pytest.fixture
def pair(make_pond: MakePond) -> SteppedPond:
    """A queue and its dead queue."""
    return make_pond(*QUEUES)


def letters(pond: SteppedPond) -> list[Item]:
    return pond.list(queue="dq")


def kill_one(pond: SteppedPond, record: bytes | Record = b"a", error: str | None = None) -> Item:
    """Produce, lease and reject; returns the dead letter."""
    pond.produce(record)
    pond.kill(pond.lease()[0], error=error)
    return letters(pond)[-1]


def redrive_letters(pond: SteppedPond, ids: list[str] | None = None, **options: object) -> Redrive:
    request = Redrive(ids, RedriveFilter(), **options)  # type: ignore[arg-type]
    pond.submit(request, "dq")
    pond.run()
    return request


# ---- without a dead queue ---------------------------------------------------------------------------------


def test_the_dead_are_kept_in_place_without_a_dead_queue(pond: SteppedPond) -> None:
    [produced] = pond.produce(b"a")
    pond.kill(pond.lease()[0], error="boom")
    pond.reopen()
    dead = pond.get(produced.id)
    assert (dead.state, dead.dead_reason, dead.last_error, dead.payload) == (State.DEAD, "rejected", "boom", b"a")
    assert dead.ended_at is not None
    assert to_ms(dead.ended_at) == pond.clock.now()
    assert pond.lease() == []


# ---- to the dead queue ------------------------------------------------------------------------------------


def test_a_dead_letter_keeps_what_it_was_and_says_whence_it_came(pair: SteppedPond) -> None:
    [produced] = pair.produce(Record(b"p", kind="mail", encoding="e", reference="r", priority=3, correlation_id="c"))
    for attempt in range(2):
        [item] = pair.lease()
        pair.write_state(item, attempt, {"step": attempt})
        pair.retry(item, due=0, error="early")
    pair.kill(pair.lease()[0], error="boom")
    [letter] = letters(pair)
    assert letter.id != produced.id
    assert (letter.source_id, letter.source_queue, letter.source_attempts) == (produced.id, "q", 3)
    assert (letter.dead_reason, letter.last_error, letter.correlation_id) == ("rejected", "boom", "c")
    assert (letter.state_doc, letter.state_version) == ({"step": 1}, 2)
    assert (letter.attempts, letter.deliveries, letter.state) == (0, 0, State.READY)
    assert (letter.payload, letter.kind, letter.encoding, letter.reference) == (b"p", "mail", "e", "r")
    assert not pair.exists(produced.id)


def test_a_leased_dead_letter_says_the_same(pair: SteppedPond) -> None:
    letter = kill_one(pair, Record(b"p", id="own"), error="boom")
    [item] = pair.lease(queue="dq")
    assert (item.id, item.source_id, item.source_queue, item.source_attempts) == (letter.id, "own", "q", 1)
    assert (item.dead_reason, item.last_error, item.attempts) == ("rejected", "boom", 1)


@pytest.mark.parametrize("reason", ["max_attempts", "expired", "rejected"])
def test_every_way_to_die_leads_to_the_dead_queue(make_pond: MakePond, reason: str) -> None:
    pond = make_pond(definition(dead_queue="dq", max_attempts=1, expire_timeout_ms=100_000), definition("dq"))
    pond.produce(b"a")
    if reason == "max_attempts":
        pond.lease()
        pond.advance(30_000)
    elif reason == "expired":
        pond.advance(100_000)
    else:
        pond.kill(pond.lease()[0])
    assert [letter.dead_reason for letter in letters(pond)] == [reason]
    assert pond.list() == []


def test_a_generated_correlation_id_is_kept_by_the_dead_letter_and_on_the_way_back(pair: SteppedPond) -> None:
    [produced] = pair.produce(b"a")
    pair.advance(1_000)
    pair.kill(pair.lease()[0])
    assert letters(pair)[0].correlation_id == produced.correlation_id
    redrive_letters(pair)
    assert pair.get(produced.id).correlation_id == produced.correlation_id


def test_a_flood_of_dead_letters_arrives_whole(pair: SteppedPond) -> None:
    pair.produce(*numbered(1_000))
    pair.produce(*numbered(500, 1_000))
    pair.advance(14 * 86_400_000)
    assert sorted(payloads([*pair.lease(1_000, queue="dq"), *pair.lease(1_000, queue="dq")])) == sorted(numbered(1_500))
    assert pair.list() == []


def test_a_dead_letter_that_dies_again_is_kept_in_the_dead_queue(pair: SteppedPond) -> None:
    kill_one(pair)
    pair.kill(pair.lease(queue="dq")[0], queue="dq")
    [letter] = letters(pair)
    assert (letter.state, letter.source_queue) == (State.DEAD, "q")


def test_a_dead_queue_that_is_gone_leaves_the_dead_in_place(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead_queue="dq"))
    [produced] = pond.produce(b"a")
    pond.kill(pond.lease()[0])
    pond.run()
    dead = pond.get(produced.id)
    assert (dead.state, dead.dead_reason) == (State.DEAD, "rejected")


def test_a_dead_queue_that_is_away_gets_its_letters_when_it_is_back(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(*QUEUES, on=faulty)
    faulty.of(queue="dq").away = True
    pond.produce(b"a")
    pond.kill(pond.lease()[0])
    pond.advance(15_000)
    assert pond.stats().counts[State.DEAD] == 1
    faulty.of(queue="dq").away = False
    for _ in range(60):
        pond.advance(1_000)
    assert payloads(letters(pond)) == [b"a"]
    assert pond.list() == []
    assert_all_forgotten(pond)


# ---- never lost, never twice ------------------------------------------------------------------------------


def assert_all_forgotten(pond: SteppedPond) -> None:
    """When a move is over nobody remembers it: else memory grows with every letter."""
    for queue in pond.queues.values():
        for lane in queue.state.lanes.values():
            assert not lane.partition.dedup.arrivals
            assert not lane.partition.confirming
            assert not lane.partition.moving
            assert not lane.sent
            assert not lane.confirming


def cut(pond: SteppedPond, steps: int) -> bool:
    """Run so many steps, then crash; False if it was over before."""
    run = pond.steps()
    for _ in range(steps):
        if next(run, StopIteration) is StopIteration:
            return False
    run.close()
    pond.reopen()
    pond.run()
    return True


def test_a_crash_at_any_step_of_a_move_neither_loses_nor_doubles(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead_queue="dq", partitions=2), definition("dq", partitions=2))
    for steps in range(CUTS_MAX):
        pond.produce(Record(b"%d" % steps, correlation_id=f"c{steps}"))
        [item] = pond.lease()
        pond.submit(rejecting(item.lease))
        over = not cut(pond, steps)
        if pond.list():  # the crash came before the death was durable
            pond.advance(30_000)
            pond.kill(pond.lease()[0])
        [letter] = pond.lease(10, queue="dq")
        assert (letter.payload, letter.correlation_id) == (b"%d" % steps, f"c{steps}")
        assert pond.complete([letter], queue="dq")[0].ok
        assert pond.list() == []
        assert_all_forgotten(pond)
        if over:
            return
    raise AssertionError("the move never ends")


def rejecting(token: str) -> RetryItems:
    return RetryItems([RetryItem(token, dead=True)])


def test_a_crash_at_any_step_of_a_redrive_neither_loses_nor_doubles(make_pond: MakePond) -> None:
    pond = make_pond(*QUEUES)
    for steps in range(CUTS_MAX):
        kill_one(pond, Record(b"%d" % steps, id=f"own{steps}"))
        pond.submit(Redrive(None, RedriveFilter()), "dq")
        over = not cut(pond, steps)
        if letters(pond):
            redrive_letters(pond)
        [item] = pond.lease(10)
        assert (item.id, item.payload, item.attempts) == (f"own{steps}", b"%d" % steps, 1)
        assert pond.complete([item])[0].ok
        assert pond.lease(10) == []
        assert letters(pond) == []
        assert_all_forgotten(pond)
        if over:
            return
    raise AssertionError("the redrive never ends")


@pytest.mark.parametrize("fault", ["lose", "hide"])
@pytest.mark.parametrize("queue", ["q", "dq"])
def test_a_failed_commit_in_a_move_neither_loses_nor_doubles(
    make_pond: MakePond, faulty: FaultyStores, fault: str, queue: str
) -> None:
    pond = make_pond(*QUEUES, on=faulty)
    for skip in range(6):
        pond.produce(b"%d" % skip)
        [item] = pond.lease()
        pond.submit(rejecting(item.lease))
        run = pond.steps()
        until = faulty.of(queue=queue).commits + skip
        while faulty.of(queue=queue).commits < until and next(run, StopIteration) is not StopIteration:
            pass
        setattr(faulty.of(queue=queue), fault, 1)
        for _ in run:
            pass
        pond.advance(5_000)
        setattr(faulty.of(queue=queue), fault, 0)
        pond.run()
        assert payloads(letters(pond)) == [b"%d" % skip]
        assert pond.list() == []
        assert_all_forgotten(pond)
        pond.complete(pond.lease(10, queue="dq"), queue="dq")


def test_a_second_copy_that_is_held_up_until_after_the_confirmation_is_not_taken_in(
    make_pond: MakePond, faulty: FaultyStores
) -> None:
    pond = make_pond(*QUEUES, on=faulty)
    source, target = pond.queues["q"], pond.queues["dq"]
    pond.produce(b"a")
    [item] = pond.lease()
    pond.submit(rejecting(item.lease))
    for _ in range(2):  # the death, then the reading of what is to be sent
        pond.do(pond.tick())
    [first] = source.state.outbox
    source.state.outbox = []
    faulty.of().lose = 1  # the source fails over something else, is loaded again, and sends a second copy
    pond.submit(Produce([b"other"], 0))
    while not source.state.outbox:
        pond.do(pond.tick())
    [second] = source.state.outbox
    source.state.outbox = []
    for copy in (first, second):
        copy.done = source.settle
    target.submit(first, pond.clock.now())
    pond.do(pond.tick("dq"), "dq")
    target.submit(Produce([b"slow"], 0), pond.clock.now())
    slow = pond.tick("dq")
    target.submit(second, pond.clock.now())
    assert pond.tick("dq") == []
    while not source.state.outbox:  # the first is answered: the source lets go and says so
        pond.do(pond.tick())
    pond._deliver(source)
    pond.do(slow, "dq")
    pond.run()
    assert sorted(payloads(letters(pond))) == [b"a", b"slow"]
    assert_all_forgotten(pond)


# ---- redrive ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [None, "mine"])
@pytest.mark.parametrize("later", [0, 400_000])
def test_a_redriven_letter_is_back_under_its_original_id(pair: SteppedPond, own: str | None, later: int) -> None:
    [produced] = pair.produce(Record(b"a", id=own, key="k", kind="x", max_attempts=7))
    [item] = pair.lease()
    pair.write_state(item, 0, {"step": 1})
    pair.kill(item, error="boom")
    pair.advance(later)
    done = redrive_letters(pair).value
    assert (done.matched, done.moved, done.errors) == (1, 1, {})
    [back] = pair.list()
    assert (back.id, back.key, back.kind, back.max_attempts) == (produced.id, "k", "x", 7)
    assert (back.attempts, back.state, back.state_doc) == (0, State.READY, {"step": 1})
    assert (back.source_id, back.source_queue) == (None, None)
    assert letters(pair) == []
    assert pair.get(produced.id).payload == b"a"
    assert pair.produce(keyed("k"))[0].id == produced.id
    pair.reopen()
    [item] = pair.lease()
    assert (item.id, item.attempts) == (produced.id, 1)
    assert pair.complete([item])[0].ok


def test_a_redriven_letter_whose_id_is_taken_gets_a_new_one_and_its_source_id(pair: SteppedPond) -> None:
    kill_one(pair, Record(b"old", id="x"))
    pair.advance(400_000)
    pair.produce(Record(b"new", id="x"))
    redrive_letters(pair)
    old = next(item for item in pair.list() if item.payload == b"old")
    assert (old.id != "x", old.source_id) == (True, "x")
    assert pair.get("x").payload == b"new"


def test_two_letters_of_one_id_do_not_both_get_it_back(pair: SteppedPond) -> None:
    for _ in range(2):
        kill_one(pair, Record(b"a", id="x", key="k"))
        pair.advance(400_000)
    assert len(letters(pair)) == 2
    redrive_letters(pair)
    back = pair.list()
    assert [item.id for item in back].count("x") == 1
    assert [item.key for item in back].count("k") == 1
    assert [item.source_id for item in back if item.id != "x"] == ["x"]


def test_a_letter_whose_queue_is_gone_is_an_error_and_stays(make_pond: MakePond) -> None:
    pond = make_pond(*QUEUES, definition("r", dead_queue="dq"))
    gone = kill_one(pond, b"gone")
    pond.produce(b"fine", queue="r")
    pond.kill(pond.lease(queue="r")[0], queue="r")
    del pond.definitions["q"], pond.queues["q"]
    done = redrive_letters(pond).value
    assert (done.matched, done.moved) == (2, 1)
    assert {item_id: error.code for item_id, error in done.errors.items()} == {gone.id: "not_found"}
    assert payloads(letters(pond)) == [b"gone"]
    assert payloads(pond.list(queue="r")) == [b"fine"]


def test_the_dead_in_place_are_redriven_with_attempts_reset(make_pond: MakePond) -> None:
    pond = make_pond(definition(max_attempts=2, expire_timeout_ms=100_000))
    [produced] = pond.produce(b"a")
    for _ in range(2):
        pond.retry(pond.lease()[0], due=0)
    assert pond.get(produced.id).state == State.DEAD
    pond.advance(200_000)
    assert pond.redrive().moved == 1
    [item] = pond.lease()
    assert (item.id, item.attempts, item.deliveries) == (produced.id, 1, 3)
    pond.reopen()
    pond.retry(item, due=0)
    assert pond.get(produced.id).state == State.READY
    pond.advance(100_000)
    assert pond.get(produced.id).dead_reason == "expired"


def test_two_redrives_at_once_bring_each_item_back_once(pair: SteppedPond) -> None:
    for number in range(3):
        kill_one(pair, b"%d" % number)
    one = pair.submit(Redrive(None, RedriveFilter()), "dq")
    two = pair.submit(Redrive(None, RedriveFilter()), "dq")
    pair.run()
    assert one.value.moved + two.value.moved == 3
    assert sorted(payloads(pair.list())) == numbered(3)


def test_two_redrives_in_place_at_once_bring_each_item_back_once(pond: SteppedPond) -> None:
    pond.produce(b"a", b"b")
    for item in pond.lease(2):
        pond.kill(item)
    one, two = pond.submit(Redrive(None, RedriveFilter())), pond.submit(Redrive(None, RedriveFilter()))
    pond.run()
    assert one.value.moved + two.value.moved == 2
    assert len(pond.lease(10)) == 2


def test_a_dry_run_counts_and_moves_nothing(pair: SteppedPond) -> None:
    for number in range(3):
        kill_one(pair, b"%d" % number)
    done = redrive_letters(pair, dry_run=True).value
    assert (done.matched, done.moved) == (3, 0)
    assert len(letters(pair)) == 3
    assert pair.list() == []


CHOICES: list[tuple[str, RedriveFilter, list[bytes]]] = [
    ("source_queue", RedriveFilter(source_queue="r"), [b"2"]),
    ("dead_reason", RedriveFilter(dead_reason="expired"), [b"3"]),
    ("kind", RedriveFilter(kind="mail"), [b"0"]),
    ("error_contains", RedriveFilter(error_contains="oo"), [b"0", b"1"]),
    ("both", RedriveFilter(error_contains="oo", kind="sms"), [b"1"]),
    ("none", RedriveFilter(kind="fax"), []),
]


@pytest.mark.parametrize(("chosen", "expected"), [choice[1:] for choice in CHOICES], ids=[c[0] for c in CHOICES])
def test_a_filter_chooses_what_is_redriven(make_pond: MakePond, chosen: RedriveFilter, expected: list[bytes]) -> None:
    pond = make_pond(*QUEUES, definition("r", dead_queue="dq"))
    kill_one(pond, Record(b"0", kind="mail"), error="boom")
    kill_one(pond, Record(b"1", kind="sms"), error="zoom")
    pond.produce(b"2", queue="r")
    pond.kill(pond.lease(queue="r")[0], queue="r", error="other")
    pond.produce(Record(b"3", expire_deadline=pond.clock.now() + 10))
    pond.advance(10)
    assert len(letters(pond)) == 4
    done = pond.redrive(chosen=chosen, queue="dq")
    pond.run()
    assert (done.matched, done.moved) == (len(expected), len(expected))
    assert sorted(payloads([*pond.list(), *pond.list(queue="r")])) == expected


def test_letters_are_redriven_by_id_and_an_unknown_id_is_an_error(pair: SteppedPond) -> None:
    ids = [kill_one(pair, b"%d" % number).id for number in range(3)]
    done = redrive_letters(pair, [ids[1], "unknown"]).value
    assert (done.moved, list(done.errors)) == (1, ["unknown"])
    assert payloads(pair.list()) == [b"1"]
    again = redrive_letters(pair, [ids[1]]).value  # its letter is gone: as unknown as any
    assert (again.matched, [error.code for error in again.errors.values()]) == (0, ["not_found"])


def test_a_leased_letter_is_not_redriven(pair: SteppedPond) -> None:
    kill_one(pair)
    [item] = pair.lease(queue="dq")
    assert redrive_letters(pair).value.moved == 0
    assert pair.complete([item], queue="dq")[0].ok


def test_a_redrive_keeps_to_its_rate(pair: SteppedPond) -> None:
    for number in range(10):
        kill_one(pair, b"%d" % number)
    redrive = redrive_letters(pair, rate=2.0)
    moved = []
    for _ in range(5):
        moved.append(len(pair.list()))
        pair.advance(1_000)
    assert moved == [2, 4, 6, 8, 10]
    assert redrive.value.moved == 10


def test_a_redriven_letter_that_dies_again_makes_a_new_letter(pair: SteppedPond) -> None:
    kill_one(pair, Record(b"a", id="x"), error="first")
    redrive_letters(pair)
    pair.kill(pair.lease()[0], error="second")
    [letter] = letters(pair)
    assert (letter.source_id, letter.last_error, letter.source_attempts) == ("x", "second", 1)


def test_a_key_of_an_item_in_the_dead_queue_is_guarded_for_the_window(pair: SteppedPond) -> None:
    kill_one(pair, keyed("k"))
    assert pair.produce(keyed("k"))[0].duplicate
    pair.advance(300_000)
    assert not pair.produce(keyed("k"))[0].duplicate


def test_a_key_taken_meanwhile_stays_with_the_new_item(pair: SteppedPond) -> None:
    kill_one(pair, keyed("k", b"old"))
    pair.advance(300_000)
    pair.produce(keyed("k", b"new"))
    redrive_letters(pair)
    assert {item.payload: item.key for item in pair.list()} == {b"old": None, b"new": "k"}


def test_letters_of_many_partitions_go_to_many_partitions(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead_queue="dq", partitions=4, max_attempts=1), definition("dq", partitions=3))
    for number in range(40):
        pond.produce(b"%d" % number)
    pond.lease(100)
    pond.advance(30_000)
    assert sorted(payloads(letters(pond))) == sorted(numbered(40))
    done = redrive_letters(pond).value
    assert done.moved == 40
    assert sorted(payloads(pond.list())) == sorted(numbered(40))
    assert_all_forgotten(pond)


# ---- found by attack --------------------------------------------------------------------------------------


def test_a_fencing_token_grows_through_the_dead_queue_and_back_to_another_partition(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2, dead_queue="dq", max_attempts=0), definition("dq"))
    for number in range(40):
        pond.produce(b"%d" % number)
    for item in pond.lease(40):
        if item.payload != b"0":
            pond.complete([item])
    pond.advance(30_000)
    tokens = []
    for _ in range(4):
        [item] = pond.lease()
        tokens.append(item.fencing_token)
        assert pond.get(item.id).fencing_token == item.fencing_token
        pond.kill(item)
        [letter] = pond.lease(queue="dq")
        tokens.append(letter.fencing_token)
        pond.advance(30_000)
        redrive_letters(pond)
        pond.reopen()
    assert tokens == sorted(set(tokens))


def test_letters_go_back_though_their_source_no_longer_names_the_dead_queue(pair: SteppedPond) -> None:
    letter = kill_one(pair)
    queue = pair.queues["q"]
    queue.configure(msgspec.structs.replace(pair.definitions["q"], settings=QueueSettings()))
    redriven = redrive_letters(pair)
    assert (redriven.value.matched, redriven.value.moved) == (1, 1)
    [item] = pair.lease()
    assert item.id == letter.source_id


def test_a_letter_whose_source_is_gone_is_not_sent_and_stays_a_letter(pair: SteppedPond) -> None:
    letter = kill_one(pair)
    del pair.definitions["q"]
    redriven = redrive_letters(pair)
    assert set(redriven.value.errors) == {letter.id}
    [kept] = letters(pair)
    assert (kept.id, kept.state, kept.dead_reason) == (letter.id, State.READY, "rejected")


def test_a_repeated_complete_of_many_reads_each_journal_row_once(pond: SteppedPond) -> None:
    pond.produce(*[b"a"] * 60)
    items = pond.lease(60)
    for item in sorted(items, key=lambda one: one.number * 37 % 61):
        pond.complete([item])
    lane = pond.queues["q"].state.lanes[0]
    asked: list[tuple[int, int, int]] = []
    ended = lane.store.ended

    def counted(low: int, high: int, since: int) -> Iterator[JournalRow]:
        asked.append((low, high, since))
        return ended(low, high, since)

    lane.store.ended = counted  # type: ignore[method-assign]
    assert all(result.ok for result in pond.complete(items))
    assert [(low, high) for low, high, _ in asked] == [(1, 60)]
