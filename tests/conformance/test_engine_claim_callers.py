"""Who claims: callers who wait or leave, consumers that fence off those before them, several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from millpond.errors import ClaimFinished, Conflict, Fenced, InvalidRequest, MillpondError, NotFound, Unavailable
from millpond.history.format import Record
from millpond.model import CLAIM_MEMORY_MS
from millpond.queue.requests import ClaimItems, EndClaim, OpenConsumer
from tests.conformance.conftest import MakePond
from tests.conformance.engine import SteppedPond, numbered, payloads, verdict_dead, verdict_retry
from tests.drive import definition

SECOND = 1_000


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
        pond.judge(verdict_retry(pond.read("other")[0].id, 0), claim_id="other")
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
        lambda: pond.judge(verdict_dead(items[0].id), claim_id="s:1", epoch=old),
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
