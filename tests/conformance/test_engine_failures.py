"""Stores that fail: nothing is lost, nothing is done twice, and the answer is honest."""

from __future__ import annotations

import pytest

from millpond.errors import DiskFull, OutcomeUnknown, Unavailable
from millpond.history.format import Record
from millpond.model import REQUEST_TIMEOUT_MS, State
from millpond.queue.requests import Cancel, Complete, Extend, GetItem, Lease, Produce, Request, WriteState
from millpond.store.memory import MemoryStores
from tests.conformance.conftest import MakePond
from tests.conformance.engine import FaultyStores, SteppedPond, keyed, numbered, payloads, request
from tests.drive import definition

TIMEOUT = 10_000


@pytest.fixture
def shaky(make_pond: MakePond, faulty: FaultyStores) -> SteppedPond:
    """One partition, whose store can be made to fail."""
    return make_pond(on=faulty)


@pytest.fixture
def two(make_pond: MakePond, faulty: FaultyStores) -> SteppedPond:
    """Two partitions, whose stores can be made to fail."""
    return make_pond(definition(partitions=2), on=faulty)


# ---- a failed commit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lose", "hide"])
def test_a_failed_commit_is_carried_out_exactly_once(shaky: SteppedPond, faulty: FaultyStores, fault: str) -> None:
    """Whether it was written or not: after the reload the engine knows, and goes on."""
    shaky.produce(b"held", b"other")
    held, other = shaky.lease(2)
    setattr(faulty.of(), fault, 1)
    produce = shaky.submit(request(b"new", keyed("k"), name=b"r"))
    complete = shaky.submit(Complete([held.lease]))
    write = shaky.submit(WriteState(other.lease, 0, b"\x01"))
    extend = shaky.submit(Extend([other.lease], 60_000))
    lease = shaky.submit(Lease(1))
    shaky.run()
    assert [reply.duplicate for reply in produce.value] == [False, False]
    assert complete.value[0].ok
    assert write.value.version == 1
    assert extend.value[0].ok
    assert payloads(lease.value) == [b"new"]
    assert lease.value[0].attempts == 1
    assert sorted(payloads(shaky.list())) == [b"", b"new", b"other"]
    assert shaky.ask(request(b"new", keyed("k"), name=b"r")) == produce.value
    assert all(result.ok for result in shaky.complete([*lease.value, other]))
    shaky.reopen()
    assert payloads(shaky.list()) == [b""]


@pytest.mark.parametrize("fault", ["lose", "hide"])
@pytest.mark.parametrize("skip", range(4))
def test_a_failure_at_any_commit_of_an_items_life_does_not_show(
    shaky: SteppedPond, faulty: FaultyStores, fault: str, skip: int
) -> None:
    faulty.of().commits = 0

    def fail_when_due() -> None:
        setattr(faulty.of(), fault, 1 if faulty.of().commits == skip else 0)

    fail_when_due()
    [produced] = shaky.produce(b"a")
    fail_when_due()
    [item] = shaky.lease()
    assert (item.id, item.attempts) == (produced.id, 1)
    fail_when_due()
    assert shaky.retry(item, deferred=True, error="x").ok
    fail_when_due()
    [item] = shaky.lease()
    assert (item.attempts, item.deliveries, item.last_error) == (1, 2, "x")
    assert shaky.complete([item])[0].ok
    assert shaky.list() == []
    assert shaky.stats().totals == {"produced": 1, "leased": 2, "retried": 1, "completed": 1}


def test_a_lost_commit_sends_its_produces_elsewhere(two: SteppedPond, faulty: FaultyStores) -> None:
    faulty.of(0).lose = 1
    two.produce(b"a")
    assert [part.counts[State.READY] for part in two.stats().partitions] == [0, 1]


def test_leases_of_a_lost_commit_keep_their_order(shaky: SteppedPond, faulty: FaultyStores) -> None:
    shaky.produce(*numbered(3))
    faulty.of().lose = 1
    leases = [shaky.submit(Lease(1, wait=1_000, client=f"c{number}")) for number in range(3)]
    shaky.run()
    assert [payloads(lease.value) for lease in leases] == [[b"0"], [b"1"], [b"2"]]


def test_a_key_given_up_by_a_lost_commit_is_still_taken(two: SteppedPond, faulty: FaultyStores) -> None:
    [first] = two.produce(keyed("k"))
    [item] = two.lease()
    faulty.of(0).lose = 1
    complete = two.submit(Complete([item.lease]))
    jobs = two.tick()
    again = two.submit(request(keyed("k")))
    two.tick()
    assert not again.answered
    two.do(jobs)
    two.run()
    assert complete.value[0].ok
    assert (again.value[0].id, again.value[0].duplicate) == (first.id, True)


# ---- a store that stays away ------------------------------------------------------------------------------


def test_a_commit_whose_store_stays_away_is_outcome_unknown_at_the_deadline(
    shaky: SteppedPond, faulty: FaultyStores
) -> None:
    shaky.produce(b"a")
    [item] = shaky.lease()
    produce, complete = request(b"b", name=b"r"), Complete([item.lease])
    write = WriteState(item.lease, 0, b"\x01")
    for one in (produce, complete, write):
        shaky.submit(one)
    faulty.of().hide = 1
    jobs = shaky.tick()
    shaky.do(jobs)
    faulty.of().away = True
    shaky.run()
    shaky.advance(TIMEOUT - 1)
    assert not produce.answered
    shaky.advance(1)
    assert isinstance(produce.error, OutcomeUnknown)
    assert complete.value[0].error.code == "outcome_unknown"
    assert isinstance(write.error, OutcomeUnknown)
    faulty.of().away = False
    shaky.advance(60_000)
    assert len(shaky.ask(request(b"b", name=b"r"))) == 1
    assert payloads(shaky.list()) == [b"b"]


def test_a_request_that_never_got_to_a_commit_is_unavailable_at_the_deadline(
    shaky: SteppedPond, faulty: FaultyStores
) -> None:
    [produced] = shaky.produce(b"a")
    [item] = shaky.lease()
    faulty.of().away = True
    shaky.submit(request(b"first"))
    shaky.run()
    requests = [
        shaky.submit(one)
        for one in (request(b"b"), Complete([item.lease]), GetItem(produced.id), Cancel([produced.id]))
    ]
    write = shaky.submit(WriteState(item.lease, 0, b"\x01"))
    shaky.advance(TIMEOUT)
    for one in (requests[0], requests[2], requests[3], write):
        assert one.answered
        assert type(one.error) is Unavailable
    assert requests[1].value[0].error.code == "unavailable"
    faulty.of().away = False
    shaky.advance(60_000)
    assert b"b" not in payloads(shaky.list())
    assert shaky.complete([item])[0].error is not None  # its lease ran out meanwhile


def test_a_lease_in_doubt_that_was_given_up_returns_its_items(shaky: SteppedPond, faulty: FaultyStores) -> None:
    shaky.produce(b"a")
    lease = shaky.submit(Lease(1, lease_timeout=3_600_000))
    jobs = shaky.tick()
    faulty.of().hide = 1
    shaky.do(jobs)
    faulty.of().away = True
    shaky.advance(TIMEOUT)
    assert isinstance(lease.error, OutcomeUnknown)
    faulty.of().away = False
    shaky.advance(60_000)
    [item] = shaky.lease()
    assert (item.attempts, item.deliveries) == (1, 2)


def test_produces_go_to_the_other_partition_while_one_is_away(two: SteppedPond, faulty: FaultyStores) -> None:
    two.produce(b"0")
    two.produce(b"1")
    faulty.of(0).away = True
    two.submit(Cancel(["incq-0-1"]))
    two.run()
    for number in range(5):
        assert len(two.ask(request(b"x", name=b"r%d" % number))) == 1
    assert two.stats().partitions[0].status == "failed"
    assert two.stats().partitions[1].counts[State.READY] == 6
    assert len(two.lease(10)) == 6
    faulty.of(0).away = False
    two.advance(60_000)
    assert two.stats().partitions[0].status == "open"


def test_a_failed_store_is_probed_with_backoff(shaky: SteppedPond, faulty: FaultyStores) -> None:
    faulty.of().away = True
    shaky.submit(request(b"a"))
    for _ in range(200):
        shaky.advance(1_000)
    failures = shaky.stats().partitions[0].failures
    assert 8 <= failures <= 25
    faulty.of().away = False
    shaky.advance(30_000)
    assert shaky.stats().partitions[0].status == "open"


def test_keyed_produces_wait_and_are_refused_while_a_partitions_keys_are_unknown(
    two: SteppedPond, faulty: FaultyStores
) -> None:
    two.produce(keyed("k"))
    faulty.of(0).away = True
    two.reopen()
    assert len(two.produce(b"plain")) == 1
    keyed_one = two.submit(request(keyed("other")))
    own = two.submit(request(Record(b"", id="own")))
    two.advance(TIMEOUT - 1)
    assert not keyed_one.answered
    two.advance(1)
    assert type(keyed_one.error) is Unavailable
    assert type(own.error) is Unavailable
    waiting = two.submit(request(keyed("k")))
    faulty.of(0).away = False
    two.advance(9_000)
    assert waiting.value[0].duplicate


def test_a_request_that_may_have_been_carried_out_in_a_partition_that_is_away_is_not_done_again(
    two: SteppedPond, faulty: FaultyStores
) -> None:
    first = two.ask(request(b"a", name=b"r"))
    faulty.of(0).away = True
    two.reopen()
    again = two.submit(request(b"a", name=b"r"))
    two.advance(1_000)
    assert not again.answered
    faulty.of(0).away = False
    two.advance(8_000)
    assert again.value == first


def test_a_lease_is_filled_from_the_partitions_that_are_there(two: SteppedPond, faulty: FaultyStores) -> None:
    two.produce(b"0")
    two.produce(b"1")
    faulty.of(0).away = True
    two.reopen()
    assert payloads(two.lease(10)) == [b"1"]


def test_a_partial_batch_does_not_wait_for_a_partition_that_fails(two: SteppedPond, faulty: FaultyStores) -> None:
    two.produce(b"0")
    two.produce(b"1")
    lease = two.submit(Lease(2, wait=60_000))
    jobs = two.tick()
    faulty.of(0).away = True
    two.do(jobs)
    two.run()
    assert lease.answered
    assert payloads(lease.value) == [b"1"]
    faulty.of(0).away = False
    two.advance(1_000)
    [item] = two.lease()
    assert (item.payload, item.attempts) == (b"0", 1)


def test_looking_for_an_id_that_may_be_in_an_unknown_partition_is_unavailable(
    two: SteppedPond, faulty: FaultyStores
) -> None:
    two.produce(Record(b"a", id="own"))
    faulty.of(0).away = True
    two.reopen()
    with pytest.raises(Unavailable):
        two.get("own")


# ---- reads ------------------------------------------------------------------------------------------------


def test_a_failed_read_sets_the_partition_aside_until_it_works_again(shaky: SteppedPond, faulty: FaultyStores) -> None:
    shaky.produce(b"a")
    shaky.reopen()  # the bodies are no longer in memory
    faulty.of().unreadable = True
    lease = shaky.park()
    assert not lease.answered
    assert shaky.stats().partitions[0].failures == 2
    faulty.of().unreadable = False
    shaky.advance(1_000)
    assert [(item.payload, item.attempts) for item in lease.value] == [(b"a", 1)]


@pytest.mark.parametrize("name", [None, b"r"])
def test_produces_of_a_turn_that_could_not_read_go_elsewhere(
    two: SteppedPond, faulty: FaultyStores, name: bytes | None
) -> None:
    two.produce(b"a")
    two.produce(*numbered(3))
    two.reopen()
    faulty.of(0).unreadable = True
    lease = two.submit(Lease(4))
    produce = two.submit(request(b"new", keyed("k"), name=name))
    jobs = two.tick()
    faulty.of(0).away = True
    two.do(jobs)
    two.run()
    assert len(produce.value) == 2
    assert two.get(produce.value[0].id).partition == 1
    assert lease.answered
    faulty.of(0).unreadable = faulty.of(0).away = False
    two.advance(60_000)
    assert sorted(item.payload for item in two.list()) == [b"", b"0", b"1", b"2", b"a", b"new"]


# ---- a full disk ------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_produces_while_completes_go_on(shaky: SteppedPond, faulty: FaultyStores) -> None:
    shaky.produce(*numbered(5))
    items = shaky.lease(3)
    faulty.of().full = True
    produce, complete = shaky.submit(request(b"x")), shaky.submit(Complete([items[0].lease]))
    shaky.run()
    assert isinstance(produce.error, DiskFull)
    assert (produce.error.status, produce.error.code) == (507, "disk_full")
    assert complete.value[0].ok
    assert shaky.stats().partitions[0].status == "full"
    with pytest.raises(DiskFull):
        shaky.produce(b"y")
    assert shaky.complete(items[1:2])[0].ok
    assert shaky.retry(items[2], deferred=True).ok
    assert payloads(shaky.lease(10)) == [b"3", b"4", b"2"]
    shaky.advance(5_000)
    with pytest.raises(DiskFull):
        shaky.produce(b"z")
    faulty.of().full = False
    shaky.advance(1_000)
    assert len(shaky.produce(b"again")) == 1
    assert shaky.stats().partitions[0].status == "open"
    assert sorted(payloads(shaky.list())) == [b"2", b"3", b"4", b"again"]


def test_a_replace_on_a_full_disk_is_refused_and_harms_nobody(shaky: SteppedPond, faulty: FaultyStores) -> None:
    shaky.produce(keyed("k", b"old"), b"b")
    [item] = shaky.lease()
    shaky.retry(item, deferred=True)
    [held] = shaky.lease()
    faulty.of().full = True
    with pytest.raises(DiskFull):
        shaky.produce(b"x")
    replace = shaky.submit(request(keyed("k", b"new"), on_conflict="replace"))
    complete = shaky.submit(Complete([held.lease]))
    shaky.run()
    assert isinstance(replace.error, DiskFull)
    assert complete.value[0].ok
    assert payloads(shaky.list()) == [b"old"]


def test_produces_go_to_a_partition_that_has_room(two: SteppedPond, faulty: FaultyStores) -> None:
    faulty.of(0).full = True
    for number in range(3):
        two.produce(b"%d" % number)
    assert two.stats().partitions[1].counts[State.READY] == 3


def test_not_even_completes_work_when_the_reserve_is_used_up(shaky: SteppedPond, faulty: FaultyStores) -> None:
    shaky.produce(b"a")
    [item] = shaky.lease()
    faulty.of().full = True
    with pytest.raises(DiskFull):
        shaky.produce(b"x")
    faulty.of().relieved = False
    complete = shaky.submit(Complete([item.lease]))
    shaky.run()
    assert complete.value[0].error.code == "disk_full"
    faulty.of().full = False
    shaky.advance(5_000)
    assert shaky.complete([item])[0].ok


def test_a_quota_that_is_used_up_is_met_by_completing() -> None:
    pond = SteppedPond(MemoryStores(quota=60_000, reserve_bytes=10_000), definition())
    ids: list[str] = []
    full = None
    while full is None:
        produce = pond.submit(request(b"x" * 1_000))
        pond.run()
        full = produce.error
        ids += [reply.id for reply in produce.value or []]
    assert isinstance(full, DiskFull)
    assert 30 < len(ids) < 60
    assert [item.id for item in pond.list()] == ids
    while items := pond.lease(10):
        assert all(result.ok for result in pond.complete(items))
    pond.advance(2_000)
    assert len(pond.produce(b"x" * 1_000)) == 1


def test_a_store_that_never_answers_holds_nobody_beyond_the_deadline(pond: SteppedPond) -> None:
    pond.produce(b"a", b"b")
    [item] = pond.lease()
    queue = pond.queues["q"]
    stuck = Produce([b"c"], 1)
    late: list[Request] = [Produce([b"d"], 1), Complete([item.lease]), Lease(1)]
    queue.submit(stuck, pond.clock.now())
    queue.tick(pond.clock.now())  # its job is under way, and stays so
    for one in late:
        queue.submit(one, pond.clock.now())
    queue.tick(pond.clock.now())
    assert not any(one.answered for one in late)
    pond.clock.advance(REQUEST_TIMEOUT_MS)
    queue.tick(pond.clock.now())
    produce, complete, lease = late
    assert isinstance(produce.error, Unavailable)
    assert complete.value[0].error.code == "unavailable"
    assert isinstance(lease.error, Unavailable)
    assert not stuck.answered
    pond.run()
    assert stuck.value
