"""Claims: a named set of items that stays the same, in the same order, until it is completed or released."""

from __future__ import annotations

import pytest

from millpond.errors import InvalidRequest, KeyConflict
from millpond.history.format import Record
from millpond.model import CLAIM_PAGE_BYTES, ClaimPart, ClaimRows, RedriveFilter, State, to_datetime
from millpond.queue.requests import ClaimItems, ListItems, ReadClaim, Redrive
from tests.conformance.conftest import MakePond
from tests.conformance.engine import SteppedPond, keyed, numbered, payloads, spread, verdict_retry
from tests.drive import definition

SECOND = 1_000
DAY = 86_400_000


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
    three.judge(verdict_retry(items[0].id))
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
    pond.judge(verdict_retry(middle.id, 0))
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
