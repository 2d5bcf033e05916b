"""Claims: a named set of items that stays the same, in the same order, until it is completed or released."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from millpond.errors import (
    ClaimFinished,
    Conflict,
    Fenced,
    InvalidRequest,
    KeyConflict,
    MillpondError,
    NotFound,
    Unavailable,
)
from millpond.history.format import Record, encode_state
from millpond.model import CLAIM_MEMORY_MS, CLAIM_PAGE_BYTES, ClaimPart, ClaimRows, RedriveFilter, State, to_datetime
from millpond.queue.requests import (
    ClaimItems,
    EndClaim,
    JudgeItem,
    ListItems,
    OpenConsumer,
    ReadClaim,
    Redrive,
    WriteState,
)
from tests.conformance.conftest import MakePond
from tests.conformance.engine import SteppedPond, keyed, numbered, payloads
from tests.drive import definition

SECOND = 1_000
DAY = 86_400_000


@pytest.fixture
def three(make_pond: MakePond) -> SteppedPond:
    """Three partitions with two items each, `0` to `5` in the order of production."""
    pond = make_pond(definition(partitions=3))
    spread(pond, 6)
    return pond


def spread(pond: SteppedPond, count: int, start: int = 0) -> None:
    """One request an item, so that they go round the partitions."""
    for payload in numbered(count, start):
        pond.produce(payload)


def dead(item_id: str, error: str | None = None) -> JudgeItem:
    return JudgeItem(item_id, True, None, error)


def retry(item_id: str, delay: int | None = None, error: str | None = None) -> JudgeItem:
    return JudgeItem(item_id, False, delay, error)


# ---- the set ----------------------------------------------------------------------------------------------


def test_a_claim_takes_the_oldest_items_in_order(pond: SteppedPond) -> None:
    pond.produce(*numbered(5))
    claim = pond.claim(max_items=3, owner="spark")
    assert (claim.claim_id, claim.items, claim.owner, claim.status) == ("c", 3, "spark", "open")
    assert claim.created_at == to_datetime(pond.clock.now())
    assert claim.parts == [ClaimPart(0, 3)]
    assert payloads(pond.read()) == numbered(3)
    assert payloads(pond.lease(10)) == [b"3", b"4"]


def test_the_same_claim_again_is_the_same_set_in_the_same_order(three: SteppedPond) -> None:
    first, items = three.claim(max_items=4), three.read()
    spread(three, 3, start=6)
    assert three.claim(max_items=100, parts=9, owner="another") == first
    assert three.read() == items
    assert len(items) == 4


@pytest.mark.parametrize("how", ["reopen", "close"])
def test_a_claim_is_the_same_after_a_restart(three: SteppedPond, how: str) -> None:
    """From the journal, and from the snapshot that a close leaves."""
    first, items = three.claim(max_items=5, parts=4), three.read()
    three.judge(retry(items[0].id))
    for _ in range(2):
        if how == "close":
            three.close()
            three.open()
        else:
            three.reopen()
        assert three.counts() == {"claimed": 5, "ready": 1}
        assert three.claims() == [first]
        assert three.read() == items
    ended = three.complete_claim()
    assert (ended.items, ended.retried) == (4, 1)


def test_a_claim_goes_over_all_partitions_and_its_parts_over_one_each(three: SteppedPond) -> None:
    claim = three.claim()
    assert claim.parts == [ClaimPart(part, 2) for part in range(3)]
    by_part = [three.read(part=part) for part in range(3)]
    assert [len({item.partition for item in items}) for items in by_part] == [1, 1, 1]
    assert sorted(payloads([item for items in by_part for item in items])) == numbered(6)


def test_parts_are_of_about_the_same_size(pond: SteppedPond) -> None:
    pond.produce(*numbered(10))
    claim = pond.claim(parts=4)
    assert [part.items for part in claim.parts] == [3, 3, 3, 1]
    assert payloads(pond.read(part=1)) == numbered(3, 3)
    assert payloads(pond.read()) == numbered(10)
    with pytest.raises(InvalidRequest, match="4 parts"):
        pond.read(part=4)


def test_a_part_is_read_page_by_page(pond: SteppedPond) -> None:
    pond.produce(*numbered(5))
    pond.produce(*numbered(2, 5))
    pond.claim()
    for limit in range(1, 8):
        assert payloads(pond.read(limit=limit)) == numbered(7)


def test_a_page_ends_where_it_is_large_enough(pond: SteppedPond) -> None:
    big = [bytes([number]) * (CLAIM_PAGE_BYTES // 4) for number in range(10)]
    for payload in big:
        pond.produce(payload)
    pond.claim()
    assert payloads(pond.read()) == big


def test_reading_past_the_end_of_a_part_is_an_empty_page(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pond.claim()
    assert payloads(pond.read(limit=1)) == [b"a"]


def test_a_claim_shows_all_of_an_item_as_listing_does(make_pond: MakePond) -> None:
    pond = make_pond(definition(max_attempts=7))
    now = pond.clock.now()
    pond.produce(
        b"plain",
        Record(b"full", id="own", key="k", kind="mail", encoding="text", reference="ref", priority=0, max_attempts=3,
               expire_deadline=now + DAY, correlation_id="corr"),
        b"tried",
    )  # fmt: skip
    plain, full, tried = pond.lease(3)
    pond.write_state(tried, 0, {"step": 1})
    pond.retry(tried, error="boom", due=now)
    pond.extend(plain, 0)
    pond.extend(full, 0)
    pond.claim()
    assert sorted(pond.read(), key=lambda item: item.id) == sorted(pond.list(State.CLAIMED), key=lambda item: item.id)
    shown = {item.payload: item for item in pond.read()}
    assert (shown[b"tried"].last_error, shown[b"tried"].state_doc, shown[b"tried"].attempts) == ("boom", {"step": 1}, 1)
    assert {item.state for item in shown.values()} == {State.CLAIMED}


def test_what_was_redriven_shows_its_new_deadline(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=SECOND))
    pond.produce(b"a")
    pond.advance(SECOND)
    pond.redrive()
    pond.claim()
    assert pond.read()[0].expire_deadline == to_datetime(pond.clock.now() + SECOND)


def test_reading_writes_nothing(pond: SteppedPond) -> None:
    pond.produce(*numbered(3))
    pond.claim()
    turn = pond.partition().turn
    pond.read()
    pond.claims()
    pond.claim()
    assert pond.partition().turn == turn


# ---- how much ---------------------------------------------------------------------------------------------


def test_max_items_goes_over_partitions(three: SteppedPond) -> None:
    assert three.claim(max_items=3).items == 3
    assert three.claim("d", max_items=2).items == 2
    assert three.claim("e").items == 1
    read = [*three.read("c"), *three.read("d"), *three.read("e")]
    assert sorted(payloads(read)) == numbered(6)


def test_max_bytes_gives_back_what_goes_beyond(pond: SteppedPond) -> None:
    pond.produce(b"aaaa", b"bbbb", b"cccc", b"dd")
    assert pond.claim(max_bytes=9).items == 2
    assert payloads(pond.read()) == [b"aaaa", b"bbbb"]
    assert payloads(pond.lease(5)) == [b"cccc", b"dd"]


@pytest.mark.parametrize("room", [1, 4, 8])
def test_the_first_item_fits_whatever_its_size(three: SteppedPond, room: int) -> None:
    three.clear(State.READY)
    three.produce(b"x" * 10)
    three.produce(b"y" * 11)
    assert three.claim(max_bytes=room).items == 1
    assert three.counts() == {"claimed": 1, "ready": 1}


def test_max_bytes_over_partitions_and_chunks(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    for payload in (b"%03d" % number for number in range(60)):
        pond.produce(payload)
    assert pond.claim(max_bytes=150).items == 50
    assert pond.counts() == {"claimed": 50, "ready": 10}
    pond.release_claim()
    for partition in range(2):
        page = pond.ask(ListItems(State.READY, partition, None, (0, 0), 100))
        assert payloads(page.items) == sorted(payloads(page.items))
    first = [item.payload for item in pond.lease(60)]
    assert sorted(first) == [b"%03d" % number for number in range(60)]


def test_empty_payloads_fit_any_room(pond: SteppedPond) -> None:
    pond.produce(b"", b"", b"")
    assert pond.claim(max_bytes=1).items == 3


# ---- order ------------------------------------------------------------------------------------------------


def test_a_better_priority_goes_first(pond: SteppedPond) -> None:
    pond.produce(b"plain", Record(b"late", priority=5), Record(b"first", priority=-1), b"plain 2")
    pond.claim(max_items=3)
    assert payloads(pond.read()) == [b"first", b"plain", b"plain 2"]
    pond.release_claim()
    assert payloads(pond.lease(4)) == [b"first", b"plain", b"plain 2", b"late"]


def test_a_better_priority_in_another_partition_goes_first(make_pond: MakePond) -> None:
    pond = make_pond(definition(partitions=2))
    pond.produce(Record(b"best", priority=-1), *[Record(b"worst", priority=9)] * 3)
    pond.produce(b"plain 0", b"plain 1")
    pond.claim(max_items=3)
    assert sorted(payloads(pond.read())) == [b"best", b"plain 0", b"plain 1"]


# ---- nothing there ----------------------------------------------------------------------------------------


def test_a_claim_of_nothing_leaves_nothing(pond: SteppedPond) -> None:
    claim = pond.claim()
    assert (claim.items, claim.parts) == (0, [])
    assert pond.claims() == []
    with pytest.raises(NotFound):
        pond.read()
    pond.produce(b"a")
    assert pond.claim().items == 1


def test_scheduled_and_leased_items_are_not_claimed(pond: SteppedPond) -> None:
    pond.produce(Record(b"later", enqueue_at=pond.clock.now() + SECOND), b"leased")
    pond.lease()
    assert pond.claim().items == 0


def parked(pond: SteppedPond, claim_id: str = "c", wait: int = 60 * SECOND, **options: Any) -> ClaimItems:
    claim = ClaimItems(claim_id, 100, wait=wait, **options)
    pond.submit(claim)
    pond.run()
    return claim


WAKERS: dict[str, Callable[[SteppedPond], Any]] = {
    "produce": lambda pond: pond.produce(b"new"),
    "due": lambda pond: pond.advance(5 * SECOND),
    "lease expiry": lambda pond: pond.advance(10 * SECOND),
    "release": lambda pond: pond.release_claim("other"),
    "publish": lambda pond: (pond.stage("x", b"new"), pond.publish("x")),
    "redrive": lambda pond: pond.redrive(),
    "retry": lambda pond: pond.complete_claim("other"),
}


@pytest.mark.parametrize("waker", WAKERS)
def test_a_waiting_claim_wakes_when_an_item_becomes_ready(pond: SteppedPond, waker: str) -> None:
    if waker == "due":
        pond.produce(Record(b"due", enqueue_at=pond.clock.now() + 5 * SECOND))
    if waker == "lease expiry":
        pond.produce(b"leased")
        pond.lease(lease_timeout=10 * SECOND)
    if waker in ("release", "retry"):
        pond.produce(b"other")
        pond.claim("other")
    if waker == "retry":
        pond.judge(retry(pond.read("other")[0].id, 0), claim_id="other")
    if waker == "redrive":
        pond.produce(b"dead")
        pond.kill(pond.lease()[0])
    claim = parked(pond)
    assert not claim.answered
    WAKERS[waker](pond)
    assert claim.value.items == 1


def test_a_waiting_claim_of_a_dead_queue_wakes_on_a_letter(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead_queue="d"), definition("d"))
    claim = ClaimItems("c", 10, wait=SECOND)
    pond.submit(claim, "d")
    pond.run()
    pond.produce(b"bad")
    pond.kill(pond.lease()[0])
    assert claim.value.items == 1


def test_a_paused_queue_is_not_claimed_from_until_it_is_resumed(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pause(pond, True)
    claim = parked(pond)
    assert pond.claim("other").items == 0
    assert not claim.answered
    pause(pond, False)
    assert claim.value.items == 1


def pause(pond: SteppedPond, paused: bool) -> None:
    queue = pond.queues["q"]
    queue.configure(replace(queue.state.definition, paused=paused))
    pond.run()


def test_a_waiting_claim_ends_with_its_time(pond: SteppedPond) -> None:
    claim = parked(pond, wait=SECOND)
    pond.advance(SECOND - 1)
    assert not claim.answered
    pond.advance(1)
    assert claim.value.items == 0
    assert pond.claims() == []


def test_leases_are_served_before_claims(pond: SteppedPond) -> None:
    claim, lease = parked(pond), pond.park(2)
    pond.produce(*numbered(3))
    assert payloads(lease.value) == [b"0", b"1"]
    assert payloads(pond.read()) == [b"2"]
    assert claim.value.items == 1


def test_waiting_claims_do_not_share_an_item(pond: SteppedPond) -> None:
    one, other = parked(pond, "one"), parked(pond, "other")
    pond.produce(b"a")
    assert sum(claim.answered for claim in (one, other)) == 1
    pond.produce(b"b")
    assert payloads([*pond.read("one"), *pond.read("other")]) == [b"a", b"b"]


# ---- while it is claimed ----------------------------------------------------------------------------------


def test_claimed_items_are_listed_and_counted_and_not_leased(three: SteppedPond) -> None:
    three.claim(max_items=4)
    assert three.counts() == {"claimed": 4, "ready": 2}
    assert sorted(payloads(three.list(State.CLAIMED))) == sorted(payloads(three.read()))
    assert [three.get(item.id).state for item in three.read()] == [State.CLAIMED] * 4
    assert len(three.lease(10)) == 2
    assert three.stats().totals["claimed"] == 4


def test_a_claimed_item_does_not_expire(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=10 * SECOND))
    pond.produce(b"a", Record(b"own", expire_deadline=pond.clock.now() + SECOND))
    pond.claim()
    pond.advance(20 * SECOND)
    assert pond.counts() == {"claimed": 2}
    pond.reopen()
    assert payloads(pond.read()) == [b"a", b"own"]
    assert pond.complete_claim().items == 2
    assert pond.counts() == {}


def test_a_released_item_whose_time_is_over_dies(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=10 * SECOND))
    pond.produce(b"a", Record(b"own", expire_deadline=pond.clock.now() + SECOND), b"b")
    pond.advance(SECOND - 1)
    pond.produce(b"younger", Record(b"long", expire_deadline=pond.clock.now() + 100 * SECOND))
    pond.claim()
    pond.advance(9 * SECOND + 1)
    pond.release_claim()
    assert {item.payload: item.dead_reason for item in pond.list(State.DEAD)} == {
        b"a": "expired",
        b"own": "expired",
        b"b": "expired",
    }
    assert payloads(pond.lease(5)) == [b"younger", b"long"]


def test_a_released_item_expires_when_its_time_comes(make_pond: MakePond) -> None:
    pond = make_pond(definition(expire_timeout_ms=10 * SECOND))
    pond.produce(b"a")
    pond.claim()
    pond.advance(5 * SECOND)
    pond.release_claim()
    assert pond.counts() == {"ready": 1}
    pond.advance(5 * SECOND)
    assert pond.counts() == {"dead": 1}


def test_a_claimed_item_cannot_be_cancelled(pond: SteppedPond) -> None:
    [made] = pond.produce(b"a")
    pond.claim()
    [result] = pond.cancel(made.id)
    assert result.error.code == "conflict"
    assert payloads(pond.read()) == [b"a"]


def test_clear_leaves_claimed_items(pond: SteppedPond) -> None:
    pond.produce(*numbered(3))
    pond.claim(max_items=2)
    assert pond.clear(State.READY) == {"ready": 1}
    assert payloads(pond.read()) == [b"0", b"1"]


def test_a_claimed_item_is_not_replaced_and_guards_its_key(pond: SteppedPond) -> None:
    [made] = pond.produce(keyed("k", b"old"))
    pond.claim()
    with pytest.raises(KeyConflict):
        pond.produce(keyed("k", b"new"), on_conflict="replace")
    [again] = pond.produce(keyed("k", b"new"))
    assert (again.id, again.duplicate) == (made.id, True)


def test_a_claimed_letter_is_not_redriven(make_pond: MakePond) -> None:
    pond = make_pond(definition(dead_queue="d"), definition("d"))
    pond.produce(b"bad")
    pond.kill(pond.lease()[0])
    pond.ask(ClaimItems("c", 10), "d")
    assert pond.ask(Redrive(None, RedriveFilter()), "d").moved == 0
    assert pond.counts("d") == {"claimed": 1}


def test_a_claim_does_not_age_away(pond: SteppedPond) -> None:
    pond.produce(b"a")
    first = pond.claim()
    pond.advance(365 * DAY)
    pond.reopen()
    assert pond.claims() == [first]
    assert payloads(pond.read()) == [b"a"]


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
        pond.judge(dead("x"))


# ---- verdicts ---------------------------------------------------------------------------------------------


def test_a_verdict_takes_effect_when_the_claim_is_completed(pond: SteppedPond) -> None:
    pond.produce(*numbered(4))
    pond.claim()
    before = pond.read()
    assert [result.ok for result in pond.judge(dead(before[1].id, "bad"), retry(before[2].id, error="again"))] == [
        True,
        True,
    ]
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
    pond.judge(retry(pond.read()[0].id, delay))
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
        pond.judge(*[retry(item.id, 0, "no") for item in pond.read(claim)], claim_id=claim)
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
    pond.judge(retry(pond.read()[0].id))
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
    pond.judge(dead(made.id, "poison"))
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
    pond.judge(dead(one.id, "first"), retry(other.id))
    pond.judge(retry(one.id, 0, "second"), dead(other.id, "third"), dead(one.id, "fourth"), retry(one.id, 0, "fifth"))
    pond.complete_claim()
    assert [(item.payload, item.last_error) for item in pond.list(State.READY)] == [(b"a", "fifth")]
    assert [(item.payload, item.last_error) for item in pond.list(State.DEAD)] == [(b"b", "third")]


def test_a_verdict_on_what_is_not_in_the_claim_is_refused(three: SteppedPond) -> None:
    three.claim(max_items=2)
    three.claim("other", max_items=2)
    mine, theirs, free = three.read()[0], three.read("other")[0], three.list(State.READY)[0]
    results = three.judge(dead(mine.id), dead(theirs.id), dead(free.id), dead("nothing"), dead("incq-0-999"))
    assert [result.ok for result in results] == [True, False, False, False, False]
    assert {result.error.code for result in results[1:] if result.error is not None} == {"not_found"}
    assert three.complete_claim("other").dead == 0
    assert three.complete_claim().dead == 1


def test_verdicts_are_forgotten_when_the_claim_is_released(pond: SteppedPond) -> None:
    pond.produce(b"a")
    pond.claim()
    pond.judge(dead(pond.read()[0].id))
    pond.release_claim()
    pond.claim()
    assert pond.complete_claim().items == 1


def test_a_verdict_goes_by_own_ids_too(pond: SteppedPond) -> None:
    pond.produce(Record(b"a", id="mine"))
    pond.claim()
    assert pond.judge(dead("mine"))[0].ok
    assert pond.complete_claim().dead == 1


def test_a_retried_item_keeps_its_key_and_priority(pond: SteppedPond) -> None:
    pond.produce(Record(b"a", key="k", priority=-1), b"b")
    pond.claim(max_items=1)
    pond.judge(retry(pond.read()[0].id, 0))
    pond.complete_claim()
    assert pond.produce(keyed("k"))[0].duplicate
    assert payloads(pond.lease(2)) == [b"a", b"b"]


# ---- consumers --------------------------------------------------------------------------------------------


def test_a_consumer_begins_an_epoch_with_each_open(pond: SteppedPond) -> None:
    assert [pond.open_consumer().epoch for _ in range(3)] == [1, 2, 3]
    assert pond.open_consumer("other").epoch == 1
    pond.reopen()
    opened = pond.open_consumer()
    assert (opened.consumer, opened.epoch, opened.last_completed) == ("s", 4, 0)


def test_who_comes_with_another_past_than_the_consumers_fences_nobody_off(pond: SteppedPond) -> None:
    """A checkpoint of another queue, or an old one: its last claim is neither the last completed nor the next."""
    pond.produce(*numbered(3))
    epoch = pond.open_consumer().epoch
    pond.claim("s:1", 1, epoch=epoch)
    pond.complete_claim("s:1", epoch)
    for after in (0, 3):
        with pytest.raises(Conflict, match="has completed claim 1"):
            pond.ask(OpenConsumer("s", after))
    assert pond.claim("s:2", 1, epoch=epoch).items == 1
    assert [pond.ask(OpenConsumer("s", after)).epoch for after in (1, 2, None)] == [2, 3, 4]


def test_a_consumers_claims_go_in_order(pond: SteppedPond) -> None:
    pond.produce(*numbered(5))
    epoch = pond.open_consumer().epoch
    with pytest.raises(Conflict, match="the next is 1"):
        pond.claim("s:2", epoch=epoch)
    assert pond.claim("s:1", 2, epoch=epoch).epoch == epoch
    with pytest.raises(Conflict, match="the next is 1"):
        pond.claim("s:2", epoch=epoch)
    pond.complete_claim("s:1", epoch)
    assert pond.claim("s:2", 2, epoch=epoch).items == 2
    assert pond.open_consumer().last_completed == 1


def test_a_consumers_completed_claim_is_finished_for_ever(pond: SteppedPond) -> None:
    pond.produce(*numbered(3))
    epoch = pond.open_consumer().epoch
    for number in (1, 2):
        pond.claim(f"s:{number}", 1, epoch=epoch)
        pond.complete_claim(f"s:{number}", epoch)
    pond.advance(100 * CLAIM_MEMORY_MS)
    pond.close()
    pond.open()
    for name in ("s:1", "s:2"):
        with pytest.raises(ClaimFinished):
            pond.claim(name, epoch=epoch)
        with pytest.raises(ClaimFinished):
            pond.read(name, epoch=epoch)
        assert pond.complete_claim(name, epoch).items == 0


def test_a_stale_epoch_is_fenced_off(pond: SteppedPond) -> None:
    pond.produce(*numbered(3))
    old = pond.open_consumer().epoch
    pond.claim("s:1", 2, epoch=old)
    items = pond.read("s:1", epoch=old)
    new = pond.open_consumer().epoch
    stale: Sequence[Callable[[], Any]] = (
        lambda: pond.claim("s:1", epoch=old),
        lambda: pond.read("s:1", epoch=old),
        lambda: pond.judge(dead(items[0].id), claim_id="s:1", epoch=old),
        lambda: pond.complete_claim("s:1", old),
        lambda: pond.release_claim("s:1", old),
        lambda: pond.claim("s:2", epoch=old),
        lambda: pond.claim("s:1", epoch=new + 1),
    )
    for call in stale:
        with pytest.raises(Fenced):
            call()
    assert pond.claim("s:1", epoch=new).items == 2
    assert pond.read("s:1", epoch=new) == items
    assert pond.complete_claim("s:1", new).items == 2
    with pytest.raises(Fenced):
        pond.complete_claim("s:1", old)


def test_an_operator_needs_no_epoch_to_look_and_to_end(pond: SteppedPond) -> None:
    pond.produce(*numbered(2))
    epoch = pond.open_consumer().epoch
    pond.claim("s:1", 1, epoch=epoch, owner="job 7")
    [shown] = pond.claims()
    assert (shown.claim_id, shown.owner, shown.epoch) == ("s:1", "job 7", epoch)
    assert payloads(pond.read("s:1")) == [b"0"]
    assert pond.release_claim("s:1").items == 1
    assert pond.claim("s:1", 2, epoch=epoch).items == 2


@pytest.mark.parametrize(("name", "epoch"), [("s:1", None), ("unopened:1", None), ("unopened:1", 1), ("plain", 1)])
def test_names_and_epochs_must_fit(pond: SteppedPond, name: str, epoch: int | None) -> None:
    pond.produce(b"a")
    pond.open_consumer()
    with pytest.raises(InvalidRequest):
        pond.claim(name, epoch=epoch)
    assert pond.counts() == {"ready": 1}


def test_a_consumer_that_was_opened_again_takes_nothing_more(pond: SteppedPond) -> None:
    """The one before was in the middle of making a claim: what it took is back."""
    pond.produce(*numbered(3))
    old = pond.open_consumer().epoch
    claim = pond.submit(ClaimItems("s:1", 10, epoch=old))
    jobs = pond.tick()
    while "claimed" not in pond.counts_now():
        pond.do(jobs)
        jobs = pond.tick()
    opened = pond.submit(OpenConsumer("s"))
    pond.do([*jobs, *pond.tick()])
    pond.run()
    new = opened.value.epoch
    assert isinstance(claim.error, Fenced)
    assert pond.counts() == {"ready": 3}
    assert pond.claim("s:1", epoch=new).items == 3
    assert payloads(pond.read("s:1")) == numbered(3)


# ---- several at once, and callers who leave ---------------------------------------------------------------


def test_two_requests_that_make_the_same_claim_make_one(three: SteppedPond) -> None:
    claims = [ClaimItems("c", 4) for _ in range(2)]
    for claim in claims:
        three.submit(claim)
    three.run()
    assert [claim.error is None for claim in claims] == [True, False]
    assert isinstance(claims[1].error, Unavailable)
    assert three.counts() == {"claimed": 4, "ready": 2}
    assert three.claim() == claims[0].value


def test_claims_of_two_names_share_nothing(three: SteppedPond) -> None:
    claims = [ClaimItems(name, 4) for name in "ab"]
    for claim in claims:
        three.submit(claim)
    three.run()
    assert sorted(payloads([*three.read("a"), *three.read("b")])) == numbered(6)


def test_a_claim_that_waits_for_nobody_is_given_up_at_once(pond: SteppedPond) -> None:
    claim = parked(pond)
    pond.queues["q"].withdraw(claim)
    pond.run()
    assert claim.answered
    pond.produce(b"a")
    assert pond.counts() == {"ready": 1}
    assert pond.claim().items == 1


def test_what_a_caller_who_left_was_about_to_claim_is_back(three: SteppedPond) -> None:
    for steps in range(20):
        claim = ClaimItems(f"c{steps}", 4)
        three.submit(claim)
        for _ in range(steps):
            if not claim.answered:
                three.do(three.tick())
        three.queues["q"].withdraw(claim)
        three.run()
        sealed = [one.claim_id for one in three.claims()]
        assert three.counts() == ({"claimed": 4, "ready": 2} if sealed else {"ready": 6})
        if sealed:
            three.release_claim(sealed[0])


def test_a_request_that_leaves_after_the_end_was_decided_changes_nothing(three: SteppedPond) -> None:
    three.claim()
    end = EndClaim("c", True)
    three.submit(end)
    three.do(three.tick())
    three.queues["q"].withdraw(end)
    three.run()
    three.advance(SECOND)
    assert three.counts() in ({}, {"claimed": 6})
    assert three.complete_claim().items in (0, 6)
    assert three.counts() == {}


def test_an_error_of_a_claim_leaves_its_name_free(three: SteppedPond) -> None:
    three.open_consumer()
    with pytest.raises(MillpondError):
        three.claim("s:5", epoch=1)
    assert three.claim("s:1", epoch=1).items == 6


# ---- what it costs ----------------------------------------------------------------------------------------


def test_a_large_claim_is_a_few_numbers_in_memory_and_in_the_journal(pond: SteppedPond) -> None:
    for _ in range(50):
        pond.produce(*[b"x"] * 1_000)
    lane = pond.queues["q"].state.lanes[0]
    before = lane.partition.turn
    pond.claim(max_items=100_000)
    [hold] = lane.partition.claims.values()
    assert (len(hold.runs), hold.items) == (1, 50_000)
    middle = pond.ask(ListItems(State.CLAIMED, 0, None, (0, 25_000), 1)).items[0]
    pond.judge(retry(middle.id, 0))
    pond.complete_claim()
    assert pond.counts() == {"ready": 1}
    written = sum(len(row.events) for row in lane.store.journal(before, 100))
    assert written < 500


def test_a_claim_is_read_without_an_item_being_made(pond: SteppedPond) -> None:
    pond.produce(*numbered(5))
    pond.claim()
    page = pond.ask(ReadClaim("c", 0, 0, 1_000))
    assert isinstance(page.items, ClaimRows)
    [run] = page.items.runs
    assert (run.numbers, run.payloads, run.known) == (range(1, 6), numbered(5), {})
