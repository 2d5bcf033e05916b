"""The end of a claim: all its items completed at once, but for those with a verdict, or all of them back."""

from __future__ import annotations

import pytest

from millpond.errors import ClaimFinished, NotFound
from millpond.history.format import Record, encode_state
from millpond.model import CLAIM_MEMORY_MS, State, to_datetime
from millpond.queue.requests import WriteState
from tests.conformance.conftest import MakePond
from tests.conformance.engine import SteppedPond, keyed, numbered, payloads, verdict_dead, verdict_retry
from tests.drive import definition

SECOND = 1_000


# ---- completing -------------------------------------------------------------------------------------------


def test_completing_ends_all_items_at_once(three: SteppedPond) -> None:
    three.claim(max_items=5)
    ended = three.complete_claim()
    assert (ended.claim_id, ended.items, ended.retried, ended.dead) == ("c", 5, 0, 0)
    assert three.counts() == {"ready": 1}
    assert three.claims() == []
    three.reopen()
    assert three.counts() == {"ready": 1}
    assert three.stats().totals["completed"] == 5


def test_completing_twice_is_success_twice(three: SteppedPond) -> None:
    three.claim()
    three.complete_claim()
    assert three.complete_claim().items == 0
    three.reopen()
    assert three.complete_claim().items == 0


def test_a_completed_claim_is_finished_for_seven_days(pond: SteppedPond) -> None:
    pond.produce(*numbered(3))
    pond.claim(max_items=1)
    pond.complete_claim()
    for restart in (False, True):
        if restart:
            pond.reopen()
        for call in (pond.claim, pond.read, pond.release_claim):
            with pytest.raises(ClaimFinished):
                call()
    pond.advance(CLAIM_MEMORY_MS)
    with pytest.raises(ClaimFinished):
        pond.claim()
    pond.advance(1)
    pond.claim("other", max_items=1)
    pond.complete_claim("other")
    assert pond.claim().items == 1


def test_completed_items_are_kept_where_the_queue_keeps_them(make_pond: MakePond) -> None:
    pond = make_pond(definition(completed_retention_ms=60 * SECOND, dedup_window_ms=10 * SECOND))
    pond.produce(b"a", keyed("k", b"b"))
    pond.claim()
    pond.complete_claim()
    assert [(item.payload, item.attempts, item.deliveries) for item in pond.list(State.COMPLETED)] == [
        (b"a", 1, 1),
        (b"b", 1, 1),
    ]
    assert pond.produce(keyed("k"))[0].duplicate
    pond.advance(10 * SECOND)
    assert not pond.produce(keyed("k"))[0].duplicate
    pond.advance(50 * SECOND)
    assert pond.counts() == {"ready": 1}


def test_a_completed_item_guards_its_key_for_the_window(pond: SteppedPond) -> None:
    pond.produce(keyed("k"))
    pond.claim()
    pond.complete_claim()
    assert pond.produce(keyed("k"))[0].duplicate
    pond.advance(300 * SECOND)
    assert not pond.produce(keyed("k"))[0].duplicate


def test_the_state_document_of_a_completed_item_is_gone(pond: SteppedPond) -> None:
    pond.produce(b"a")
    [item] = pond.lease()
    pond.write_state(item, 0, {"a": 1})
    pond.retry(item, due=pond.clock.now(), deferred=True)
    pond.claim()
    pond.complete_claim()
    lane = pond.queues["q"].state.lanes[0]
    assert lane.store.read([], range(40)) == ({}, {})


# ---- releasing --------------------------------------------------------------------------------------------


def test_a_release_puts_the_items_back_as_if_they_had_never_been_claimed(pond: SteppedPond) -> None:
    pond.produce(*numbered(4))
    pond.claim(max_items=3)
    pond.produce(b"new")
    assert pond.release_claim().items == 3
    assert pond.counts() == {"ready": 5}
    items = pond.lease(5)
    assert payloads(items) == [*numbered(4), b"new"]
    assert {(item.attempts, item.deliveries) for item in items} == {(1, 1)}


def test_a_released_name_may_be_used_again(three: SteppedPond) -> None:
    three.claim(max_items=2)
    three.release_claim()
    for call in (three.read, three.complete_claim, three.release_claim):
        with pytest.raises(NotFound):
            call()
    assert three.claim(max_items=5).items == 5
    assert three.complete_claim().items == 5


def test_what_was_never_claimed_cannot_be_ended(pond: SteppedPond) -> None:
    for call in (pond.read, pond.complete_claim, pond.release_claim):
        with pytest.raises(NotFound):
            call()
    with pytest.raises(NotFound):
        pond.judge(verdict_dead("x"))


# ---- verdicts ---------------------------------------------------------------------------------------------


def test_a_verdict_takes_effect_when_the_claim_is_completed(pond: SteppedPond) -> None:
    pond.produce(*numbered(4))
    pond.claim()
    before = pond.read()
    results = pond.judge(verdict_dead(before[1].id, "bad"), verdict_retry(before[2].id, error="again"))
    assert [result.ok for result in results] == [True, True]
    assert pond.read() == before
    ended = pond.complete_claim()
    assert (ended.items, ended.retried, ended.dead) == (2, 1, 1)
    [died], [again] = pond.list(State.DEAD), pond.list(State.RETRYING)
    assert (died.payload, died.dead_reason, died.last_error, died.attempts) == (b"1", "rejected", "bad", 1)
    assert (again.payload, again.last_error, again.attempts, again.deliveries) == (b"2", "again", 1, 1)
    assert again.enqueue_at == to_datetime(pond.clock.now() + 2 * SECOND)
    pond.reopen()
    assert pond.counts() == {"dead": 1, "retrying": 1}


@pytest.mark.parametrize(("delay", "due"), [(5 * SECOND, 5 * SECOND), (0, 0)])
def test_a_retry_waits_as_long_as_it_is_told(pond: SteppedPond, delay: int, due: int) -> None:
    pond.produce(b"a", b"b")
    pond.claim(max_items=1)
    pond.judge(verdict_retry(pond.read()[0].id, delay))
    pond.complete_claim()
    if due:
        assert payloads(pond.lease(5)) == [b"b"]
        pond.advance(due - 1)
        assert pond.lease() == []
        pond.advance(1)
        assert payloads(pond.lease()) == [b"a"]
    else:
        assert payloads(pond.lease(5)) == [b"b", b"a"]


def test_a_retry_at_max_attempts_dies(make_pond: MakePond) -> None:
    pond = make_pond(definition(max_attempts=2))
    pond.produce(b"a", Record(b"once", max_attempts=1), Record(b"always", max_attempts=0))
    for round_ in range(2):
        claim = f"c{round_}"
        pond.claim(claim)
        pond.judge(*[verdict_retry(item.id, 0, "no") for item in pond.read(claim)], claim_id=claim)
        pond.complete_claim(claim)
    assert {item.payload: (item.dead_reason, item.attempts) for item in pond.list(State.DEAD)} == {
        b"once": ("max_attempts", 1),
        b"a": ("max_attempts", 2),
    }
    assert payloads(pond.list(State.READY)) == [b"always"]


def test_a_retry_of_what_is_past_its_deadline_dies(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=SECOND))
    pond.produce(b"a")
    pond.claim()
    pond.judge(verdict_retry(pond.read()[0].id))
    pond.advance(SECOND)
    assert pond.complete_claim().dead == 1
    assert pond.list()[0].dead_reason == "expired"


def test_a_dead_verdict_moves_the_item_with_all_it_has(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead_queue="d"), definition("d"))
    [made] = pond.produce(Record(b"bad", key="k", correlation_id="corr"))
    [item] = pond.lease()
    pond.ask(WriteState(item.lease, 0, encode_state({"step": 1})))
    pond.retry(item, due=pond.clock.now(), deferred=True)
    pond.claim()
    pond.judge(verdict_dead(made.id, "poison"))
    pond.complete_claim()
    assert pond.counts() == {}
    [letter] = pond.list(queue="d")
    assert (letter.payload, letter.last_error, letter.dead_reason) == (b"bad", "poison", "rejected")
    assert (letter.source_id, letter.source_queue, letter.source_attempts) == (made.id, "q", 1)
    assert (letter.correlation_id, letter.state_doc, letter.state_version) == ("corr", {"step": 1}, 1)
    assert (letter.attempts, letter.state) == (0, State.READY)


def test_the_newest_verdict_counts(pond: SteppedPond) -> None:
    pond.produce(b"a", b"b")
    pond.claim()
    one, other = pond.read()
    pond.judge(verdict_dead(one.id, "first"), verdict_retry(other.id))
    pond.judge(
        verdict_retry(one.id, 0, "second"),
        verdict_dead(other.id, "third"),
        verdict_dead(one.id, "fourth"),
        verdict_retry(one.id, 0, "fifth"),
    )
    pond.complete_claim()
    assert [(item.payload, item.last_error) for item in pond.list(State.READY)] == [(b"a", "fifth")]
    assert [(item.payload, item.last_error) for item in pond.list(State.DEAD)] == [(b"b", "third")]


def test_a_verdict_on_what_is_not_in_the_claim_is_refused(three: SteppedPond) -> None:
    three.claim(max_items=2)
    three.claim("other", max_items=2)
    mine, theirs, free = three.read()[0], three.read("other")[0], three.list(State.READY)[0]
    results = three.judge(
        verdict_dead(mine.id),
        verdict_dead(theirs.id),
        verdict_dead(free.id),
        verdict_dead("nothing"),
        verdict_dead("incq-0-999"),
    )
    assert [result.ok for result in results] == [True, False, False, False, False]
    assert {result.error.code for result in results[1:] if result.error is not None} == {"not_found"}
    assert three.complete_claim("other").dead == 0
    assert three.complete_claim().dead == 1


def test_verdicts_are_forgotten_when_the_claim_is_released(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pond.claim()
    pond.judge(verdict_dead(pond.read()[0].id))
    pond.release_claim()
    pond.claim()
    assert pond.complete_claim().items == 1


def test_a_verdict_goes_by_own_ids_too(pond: SteppedPond) -> None:
    pond.produce(Record(b"a", id="mine"))
    pond.claim()
    assert pond.judge(verdict_dead("mine"))[0].ok
    assert pond.complete_claim().dead == 1


def test_a_retried_item_keeps_its_key_and_priority(pond: SteppedPond) -> None:
    pond.produce(Record(b"a", key="k", priority=-1), b"b")
    pond.claim(max_items=1)
    pond.judge(verdict_retry(pond.read()[0].id, 0))
    pond.complete_claim()
    assert pond.produce(keyed("k"))[0].duplicate
    assert payloads(pond.lease(2)) == [b"a", b"b"]
