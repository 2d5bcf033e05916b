"""One decision over several partitions: whatever crashes or fails in between, all of it comes to count, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millpond.errors import MillpondError, OutcomeUnknown, Unavailable
from millpond.history.format import Record
from millpond.model import REQUEST_TIMEOUT_MS, Claim, State
from millpond.queue.requests import (
    AbortStage,
    ClaimItems,
    EndClaim,
    JudgeClaim,
    JudgeItem,
    OpenConsumer,
    PublishStage,
    Request,
    StageItems,
)
from millpond.store.base import META_PARTITION
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, keyed, numbered, payloads
from tests.drive import definition

SECOND = 1_000
ITEMS = 6  # two in each of three partitions
PLACES = (0, 1, 2, META_PARTITION)


def spread(pond: SteppedPond) -> None:
    for payload in numbered(ITEMS):
        pond.produce(payload)


def claimed(pond: SteppedPond) -> None:
    """A claim of all items, one of which is to be retried and one to die."""
    spread(pond)
    pond.claim(parts=2)
    items = {item.payload: item.id for item in pond.read()}
    pond.judge(JudgeItem(items[b"0"], False, 0, "again"), JudgeItem(items[b"4"], True, None, "bad"))


def staged(pond: SteppedPond) -> None:
    """A chunk in each partition, and one that will not be named."""
    for number in range(3):
        pond.stage(f"c{number}", *numbered(2, 2 * number), keyed(f"k{number % 2}"))
    pond.stage("left out", b"x")


CHUNKS = ("c0", "c1", "c2")
OPEN = {"claimed": ITEMS}
NAMED = {"ready": ITEMS + 2}  # of the items with one of two keys, two are new

# What is asked for, what must be there first, and what there may be after a crash in the middle: nothing done, or all.
STORIES: dict[str, tuple[Callable[[SteppedPond], None], Callable[[SteppedPond], Request], list[dict[str, int]]]] = {
    "claim": (spread, lambda pond: ClaimItems("c", 100), [{"ready": ITEMS}, OPEN]),
    "claim of some": (spread, lambda pond: ClaimItems("c", 4, 3), [{"ready": ITEMS}, {"claimed": 3, "ready": 3}]),
    "complete": (claimed, lambda pond: EndClaim("c", True), [OPEN, {"ready": 1, "dead": 1}]),
    "release": (claimed, lambda pond: EndClaim("c", False), [OPEN, {"ready": ITEMS}]),
    "publish": (staged, lambda pond: PublishStage("t", CHUNKS), [{}, NAMED]),
    "abort": (staged, lambda pond: AbortStage("t"), [{}]),
    "stage": (staged, lambda pond: StageItems("t", "more", [b"more"], 0), [{}]),
    "open": (claimed, lambda pond: OpenConsumer("s"), [OPEN]),
}


def after(name: str, pond: SteppedPond) -> None:
    """Whatever happened, the same request again does all there is to do, and it counts once."""
    _, ask, outcomes = STORIES[name]
    if name in ("complete", "release") and pond.counts() != OPEN:
        assert pond.claims() == []
    elif name == "publish":
        pond.ask(ask(pond))
    elif name == "abort":
        pond.abort()
        assert not any(lane.partition.staged for lane in pond.queues["q"].state.lanes.values())
    elif name == "stage":
        pond.ask(ask(pond))
        assert pond.publish("more", *CHUNKS).items == ITEMS + 3
        assert payloads(pond.list()).count(b"more") == 1
        return
    elif name == "open":
        assert pond.open_consumer().epoch in (1, 2, 3)
    else:
        pond.ask(ask(pond))
    assert pond.counts() == outcomes[-1]
    if name.startswith("claim"):
        items = pond.read()
        assert payloads(items) == payloads(pond.read())
        pond.release_claim()
        assert pond.counts() == {"ready": ITEMS}


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("name", STORIES)
def test_a_crash_at_any_point_leaves_all_or_nothing(make_pond: MakePond, name: str, backwards: bool) -> None:
    """It is settled by the load alone, before anybody asks for anything."""
    prepare, ask, outcomes = STORIES[name]
    seen: list[dict[str, int]] = []
    crash_at = 0
    while True:
        pond = make_pond(definition(f"q{crash_at}", partitions=3))
        pond.queues = {"q": pond.queues.pop(f"q{crash_at}")}
        pond.definitions = {"q": pond.definitions.pop(f"q{crash_at}")}
        prepare(pond)
        request = pond.submit(ask(pond))
        over = True
        for step, _ in enumerate(pond.steps(backwards=backwards)):
            if step == crash_at:
                over = False
                break
        answered = request.answered and request.error is None
        pond.reopen()
        counts = pond.counts()
        assert counts in outcomes, f"crash at step {crash_at}"
        if answered:
            assert counts == outcomes[-1], f"crash at step {crash_at}, after the answer"
        seen.append(counts)
        after(name, pond)
        if over:
            break
        pond.drop()
        crash_at += 1
    assert [outcome for outcome in outcomes if outcome not in seen] == []
    assert crash_at > 5


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", ["lose", pytest.param("hide", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STORIES)
def test_a_failed_commit_anywhere_does_not_show(
    make_pond: MakePond, faulty: FaultyStores, name: str, fault: str, place: int
) -> None:
    """The store comes back at once: the request is carried out, once."""
    prepare, ask, outcomes = STORIES[name]
    pond = make_pond(definition(partitions=3), on=faulty)
    prepare(pond)
    setattr(faulty.of(place), fault, 1)
    pond.ask(ask(pond))
    setattr(faulty.of(place), fault, 0)
    assert pond.counts() == outcomes[-1]
    pond.reopen()
    assert pond.counts() == outcomes[-1]
    after(name, pond)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", ["lose", pytest.param("hide", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STORIES)
def test_a_store_that_stays_away_is_told_and_settled_when_it_is_back(
    make_pond: MakePond, faulty: FaultyStores, name: str, fault: str, place: int
) -> None:
    prepare, ask, outcomes = STORIES[name]
    pond = make_pond(definition(partitions=3), on=faulty)
    prepare(pond)
    setattr(faulty.of(place), fault, 1)
    request = pond.submit(ask(pond))
    while not request.answered:
        jobs = pond.tick()
        pond.do(jobs)
        if not getattr(faulty.of(place), fault):
            faulty.of(place).away = True  # the commit in doubt cannot be looked up
        if not jobs:
            pond.clock.advance(REQUEST_TIMEOUT_MS)
    if request.error is not None:
        assert isinstance(request.error, OutcomeUnknown | Unavailable)
    setattr(faulty.of(place), fault, 0)
    faulty.of(place).away = False
    for _ in range(40):
        pond.advance(SECOND)
    assert pond.counts() in outcomes
    if request.error is None:
        assert pond.counts() == outcomes[-1]
    after(name, pond)


def test_a_partition_that_is_away_is_not_claimed_from(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(definition(partitions=3), on=faulty)
    spread(pond)
    pond.close()
    faulty.of(1).away = True
    pond.open()
    assert pond.claim().items == 4
    faulty.of(1).away = False
    pond.advance(60 * SECOND)
    assert pond.claim().items == 4
    assert pond.claim("other").items == 2


def test_what_a_partition_took_before_it_failed_is_given_back(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(definition(partitions=3), on=faulty)
    spread(pond)
    faulty.of(2).away = True
    claim = pond.submit(ClaimItems("c", 100))
    pond.run()
    pond.advance(REQUEST_TIMEOUT_MS)
    assert isinstance(claim.error, MillpondError)
    assert pond.claims() == []
    faulty.of(2).away = False
    pond.advance(60 * SECOND)
    assert pond.counts() == {"ready": ITEMS}
    assert pond.claim().items == ITEMS


def test_a_claim_is_not_completed_in_half(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(definition(partitions=3), on=faulty)
    spread(pond)
    pond.claim()
    faulty.of(1).away = True
    end = pond.submit(EndClaim("c", True))
    pond.run()
    assert [claim.status for claim in pond.claims()] == ["completing"]
    pond.advance(REQUEST_TIMEOUT_MS)
    assert isinstance(end.error, OutcomeUnknown)
    faulty.of(1).away = False
    pond.advance(60 * SECOND)
    assert pond.counts() == {}
    assert pond.claims() == []
    assert pond.complete_claim().items == 0


def test_a_publish_waits_for_a_partition_that_may_have_a_chunk(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(definition(partitions=3), on=faulty)
    staged(pond)
    pond.close()
    faulty.of(1).away = True
    pond.open()
    with pytest.raises(Unavailable, match="may hold chunk"):
        pond.publish(*CHUNKS)
    assert pond.counts() == {}
    faulty.of(1).away = False
    pond.advance(60 * SECOND)
    assert pond.publish(*CHUNKS).items == ITEMS + 2


def test_nothing_is_decided_while_the_decisions_are_away(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(definition(partitions=3), on=faulty)
    spread(pond)
    faulty.of(META_PARTITION).away = True
    for request in (ClaimItems("c", 10), OpenConsumer("s"), StageItems("t", "x", [b"a"], 0), PublishStage("t", ["x"])):
        pond.submit(request)
        pond.run()
        pond.advance(REQUEST_TIMEOUT_MS)
        assert isinstance(request.error, Unavailable | OutcomeUnknown)
    assert payloads(pond.lease(1)) == [b"0"]
    assert pond.counts() == {"ready": ITEMS - 1, "leased": 1}
    faulty.of(META_PARTITION).away = False
    pond.advance(60 * SECOND)
    assert pond.claim().items == ITEMS


def test_a_full_disk_does_not_stop_claims(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(definition(partitions=3), on=faulty)
    spread(pond)
    for place in PLACES:
        faulty.of(place).full = True
    assert pond.claim(max_items=4).items == 4
    pond.judge(JudgeItem(pond.read()[0].id, True, None, "bad"))
    ended = pond.complete_claim()
    assert (ended.items, ended.dead) == (3, 1)
    pond.claim("other")
    assert pond.release_claim("other").items == 2
    assert pond.counts() == {"ready": 2, "dead": 1}


def test_a_verdict_survives_the_loss_of_its_commit(make_pond: MakePond, faulty: FaultyStores) -> None:
    for fault in ("lose", "hide"):
        pond = make_pond(definition(f"q{fault}"), on=faulty)
        pond.queues = {"q": pond.queues.pop(f"q{fault}")}
        pond.definitions = {"q": pond.definitions.pop(f"q{fault}")}
        [made] = pond.produce(b"a")
        pond.claim()
        setattr(faulty.of(0, f"q{fault}"), fault, 1)
        assert pond.ask(JudgeClaim("c", [JudgeItem(made.id, True, None, "bad")]))[0].ok
        pond.reopen()
        assert pond.complete_claim().dead == 1
        assert pond.list(State.DEAD)[0].last_error == "bad"


def test_a_claim_that_was_never_sealed_is_given_back_in_order(make_pond: MakePond) -> None:
    """The items of each partition stand at the head again, before what came since."""
    pond = make_pond()
    pond.produce(*numbered(4), Record(b"urgent", priority=-1))
    pond.submit(ClaimItems("c", 3))
    while "claimed" not in pond.counts_now():
        pond.do(pond.tick())
    pond.reopen()
    pond.produce(b"new")
    assert payloads(pond.lease(10)) == [b"urgent", *numbered(4), b"new"]


def test_late_parts_of_a_request_that_has_failed_do_nothing(make_pond: MakePond, faulty: FaultyStores) -> None:
    """One partition is slow, another away: the claim fails, and then the slow one's turn comes."""
    pond = make_pond(definition(partitions=2), on=faulty)
    pond.produce(b"0")
    pond.produce(b"1")
    slow = pond.submit(StageItems("t", "x", [b"x"], 0))
    pond.do(pond.tick())
    while not (jobs := pond.tick()):
        pass
    [busy] = jobs
    other = 1 - busy.lane.index
    faulty.of(other).away = True
    claim = pond.submit(ClaimItems("c", 10))
    for _ in range(10):
        pond.do([job for job in pond.tick() if job.lane is not busy.lane])
    pond.clock.advance(REQUEST_TIMEOUT_MS)
    pond.do(pond.tick())
    assert claim.error is not None
    pond.do([busy])
    faulty.of(other).away = False
    pond.advance(60 * SECOND)
    assert slow.answered
    assert pond.counts() == {"ready": 2}


def test_a_request_is_answered_once_whatever_fails(make_pond: MakePond, faulty: FaultyStores) -> None:
    pond = make_pond(definition(partitions=3), on=faulty)
    spread(pond)
    answers: list[Any] = []
    for place in PLACES:
        faulty.of(place).lose = 2
    claim = ClaimItems("c", 100)
    claim.done = answers.append
    pond.submit(claim)
    pond.run()
    for _ in range(20):
        pond.advance(SECOND)
    assert len(answers) == 1
    assert claim.error is not None or isinstance(claim.value, Claim)
