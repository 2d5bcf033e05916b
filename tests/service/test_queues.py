"""Queues: made, changed, listed, paused and cleared."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import AsyncPond, MillpondError, NewItem, Pond, Retry
from millpond.clock import ManualClock
from millpond.errors import Conflict, InvalidRequest, NotFound, QueueExists, QueueInUse
from millpond.model import LIST_LIMIT_MAX
from millpond.queue.requests import Arrive, Forget
from millpond.queue.runner import Runner
from tests.service.looks import DEFAULTS, picture, settings_of, until_parked


@pytest.fixture
def pond(clock: ManualClock) -> Iterator[Pond]:
    with millpond.open(":memory:", clock=clock) as made:
        yield made


SETTINGS: dict[str, Any] = {
    "lease_timeout": "1m",
    "expire_timeout": "1h",
    "max_attempts": 2,
    "dead_queue": "letters",
    "dead": "delete",
    "backoff": {"base": 3.0, "cap": 60, "jitter": 0.5},
    "dedup_window": "1s",
    "completed_retention": "2s",
    "reference": "mine",
}
SEEN: dict[str, Any] = {
    **SETTINGS,
    "lease_timeout": 60.0,
    "expire_timeout": 3600.0,
    "backoff": {"base": 3.0, "cap": 60.0, "jitter": 0.5},
    "dedup_window": 1.0,
    "completed_retention": 2.0,
}


# ---- create, update, info ---------------------------------------------------------------------------------


def test_a_new_queue_has_the_defaults(pond: Pond) -> None:
    queue = pond.create_queue("q")
    assert settings_of(queue) == DEFAULTS
    assert (queue.durability, queue.paused, len(queue.partitions), queue.loaded) == ("full", False, 1, False)
    assert queue.created_at == queue.updated_at
    info = pond.queue_info("q")
    assert settings_of(info) == DEFAULTS
    assert (info.incarnation, info.created_at, info.loaded) == (queue.incarnation, queue.created_at, True)
    assert [one.status for one in info.partitions] == ["open"]


def test_a_queue_is_as_it_was_asked_for(pond: Pond) -> None:
    pond.create_queue("letters")
    queue = pond.create_queue("a/q", partitions=3, durability="relaxed", **SETTINGS)
    assert settings_of(queue) == SEEN
    assert (queue.durability, [one.partition for one in queue.partitions]) == ("relaxed", [0, 1, 2])


@pytest.mark.parametrize("field", SETTINGS)
def test_update_changes_what_is_given_and_the_rest_stays(field: str, pond: Pond, clock: ManualClock) -> None:
    pond.create_queue("letters")
    created = pond.create_queue("q")
    clock.advance(1_000)
    updated = pond.update_queue("q", **{field: SETTINGS[field]})
    assert settings_of(updated) == {**DEFAULTS, field: SEEN[field]}
    assert settings_of(pond.queue_info("q")) == settings_of(updated)
    assert (updated.incarnation, updated.created_at) == (created.incarnation, created.created_at)
    assert updated.updated_at > created.updated_at
    back = pond.update_queue("q", **{name: value for name, value in DEFAULTS.items() if name == field})
    assert settings_of(back) == DEFAULTS


def test_what_is_left_out_of_a_backoff_stays_too(pond: Pond) -> None:
    pond.create_queue("q", backoff={"cap": "10s"})
    updated = pond.update_queue("q", backoff={"base": 3})
    assert updated.backoff == {"base": 3.0, "cap": 10.0, "jitter": 0.0}


def test_an_update_of_nothing_changes_nothing(pond: Pond) -> None:
    created = pond.create_queue("q", max_attempts=2)
    assert settings_of(pond.update_queue("q")) == settings_of(created)


def test_settings_and_pause_survive_a_restart(reopen: Callable[[], Pond]) -> None:
    pond = reopen()
    pond.create_queue("letters")
    pond.create_queue("q", partitions=2, durability="relaxed", **SETTINGS)
    pond.create_queue("paused")
    pond.pause("paused")
    pond.update_queue("paused", max_attempts=9)
    before = {queue.name: queue for queue in pond.list_queues().queues}
    after = {queue.name: queue for queue in reopen().list_queues().queues}
    assert before == after
    assert settings_of(after["q"]) == SEEN
    assert (after["paused"].paused, after["paused"].max_attempts) == (True, 9)


def test_a_new_lease_timeout_is_for_new_leases(pond: Pond, clock: ManualClock) -> None:
    pond.create_queue("q", lease_timeout="10s")
    pond.produce("q", ["a", "b"])
    [old] = pond.lease("q")
    pond.update_queue("q", lease_timeout="20s")
    [new] = pond.lease("q")
    assert (new.lease_deadline - old.lease_deadline).total_seconds() == 10
    clock.advance(10_000)
    results = pond.complete([old, new])
    assert [result.ok for result in results] == [False, True]


def test_a_new_max_attempts_is_for_items_that_exist_too(pond: Pond) -> None:
    pond.create_queue("q", max_attempts=5, backoff={"base": 0})
    [mine, _] = pond.produce("q", ["a", NewItem(payload="own limit", max_attempts=3)])
    pond.update_queue("q", max_attempts=1)
    pond.retry(pond.lease("q", batch=2))
    assert pond.stats("q").counts["dead"] == 1
    assert pond.get_item("q", mine.id).dead_reason == "max_attempts"


def test_creating_what_exists_is_refused(pond: Pond) -> None:
    pond.create_queue("q", max_attempts=2)
    with pytest.raises(QueueExists) as caught:
        pond.create_queue("q")
    assert caught.value.status == 409
    assert pond.queue_info("q").max_attempts == 2


def test_of_many_who_create_one_name_exactly_one_wins(tmp_path: Path) -> None:
    with millpond.open(tmp_path) as pond, ThreadPoolExecutor(16) as threads:
        start = threading.Barrier(16)

        def create(number: int) -> bool:
            start.wait()
            try:
                return pond.create_queue("q", reference=str(number)).reference == str(number)
            except QueueExists:
                return False

        won = list(threads.map(create, range(16)))
        assert sum(won) == 1
        assert pond.queue_info("q").reference == str(won.index(True))
        assert len(pond.list_queues().queues) == 1


def test_a_change_whose_caller_has_gone_is_carried_through(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with millpond.open_async(tmp_path) as pond:
            await pond.create_queue("doomed")
            await pond.produce("doomed", ["a"])
            for change in (
                pond.create_queue("new"),
                pond.update_queue("doomed", max_attempts=9),
                pond.delete_queue("doomed", force=True),
            ):
                task = asyncio.create_task(change)
                await asyncio.sleep(0)  # it has begun
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await pond.create_queue("last")  # changes are made one after the other
            assert [queue.name for queue in (await pond.list_queues()).queues] == ["last", "new"]
            with pytest.raises(NotFound):
                await pond.stats("doomed")

    asyncio.run(scenario())


# ---- dead queues ------------------------------------------------------------------------------------------


def refused(kind: type[MillpondError], pond: Pond, call: Callable[[], Any]) -> None:
    before = picture(pond)
    with pytest.raises(kind):
        call()
    assert picture(pond) == before


def test_a_dead_queue_must_exist(pond: Pond) -> None:
    pond.create_queue("q")
    refused(InvalidRequest, pond, lambda: pond.create_queue("new", dead_queue="nowhere"))
    refused(InvalidRequest, pond, lambda: pond.update_queue("q", dead_queue="nowhere"))


def test_a_queue_is_not_its_own_dead_queue(pond: Pond) -> None:
    pond.create_queue("q")
    refused(InvalidRequest, pond, lambda: pond.create_queue("new", dead_queue="new"))
    refused(InvalidRequest, pond, lambda: pond.update_queue("q", dead_queue="q"))


def test_a_dead_queue_has_no_dead_queue(pond: Pond) -> None:
    for name in ("letters", "other"):
        pond.create_queue(name)
    pond.create_queue("q", dead_queue="letters")
    refused(Conflict, pond, lambda: pond.create_queue("new", dead_queue="q"))
    refused(Conflict, pond, lambda: pond.update_queue("other", dead_queue="q"))
    refused(Conflict, pond, lambda: pond.update_queue("letters", dead_queue="other"))
    refused(Conflict, pond, lambda: pond.update_queue("letters", dead_queue="q"))


@pytest.mark.parametrize("force", [True, False])
def test_a_queue_in_use_as_a_dead_queue_is_not_deleted(force: bool, pond: Pond) -> None:
    pond.create_queue("letters")
    pond.create_queue("q", dead_queue="letters")
    pond.create_queue("also", dead_queue="letters")
    refused(QueueInUse, pond, lambda: pond.delete_queue("letters", force=force))
    pond.update_queue("q", dead_queue=None)
    refused(QueueInUse, pond, lambda: pond.delete_queue("letters", force=force))
    pond.delete_queue("also")
    pond.delete_queue("letters", force=force)
    assert [queue.name for queue in pond.list_queues().queues] == ["q"]


def test_a_queue_that_no_longer_is_a_dead_queue_may_have_one(pond: Pond) -> None:
    pond.create_queue("letters")
    pond.create_queue("q", dead_queue="letters")
    pond.update_queue("q", dead_queue=None)
    assert pond.update_queue("letters", dead_queue="q").dead_queue == "q"


def test_dead_letters_go_where_the_queue_says_when_they_die(pond: Pond) -> None:
    for name in ("first", "second"):
        pond.create_queue(name)
    pond.create_queue("q", dead_queue="first", max_attempts=1)
    pond.produce("q", ["a", "b"])
    pond.retry(pond.lease("q"))
    [letter] = pond.lease("first", wait="10s")
    pond.update_queue("q", dead_queue="second")
    pond.retry(pond.lease("q"))
    [other] = pond.lease("second", wait="10s")
    assert (letter.text, other.text) == ("a", "b")
    assert not pond.lease("first")


def test_letters_from_one_queue_to_another_stay_in_order_whatever_wakes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> list[str]:
        async with AsyncPond(tmp_path) as pond:
            await pond.create_queue("dead")
            await pond.create_queue("q", dead_queue="dead")
            manager, order, gate, both = pond._manager, list[str](), asyncio.Event(), asyncio.Event()
            sender, target = await manager.runner("q"), await manager.runner("dead")
            calls = 0

            async def slow_at_first(name: str) -> Runner:
                nonlocal calls
                calls += 1
                if calls == 1:
                    await gate.wait()
                return target

            def accept(request: Arrive | Forget, settle: Callable[[Any], None]) -> None:
                order.append(type(request).__name__)
                if len(order) == 2:
                    both.set()

            monkeypatch.setattr(manager, "runner", slow_at_first)
            monkeypatch.setattr(target, "accept", accept)
            manager._send(sender, Arrive("dead", 0, [], []))
            manager._send(sender, Forget("dead", 0, []))
            for _ in range(10):
                await asyncio.sleep(0)
            assert order == []
            gate.set()
            await both.wait()
            return order

    assert asyncio.run(main()) == ["Arrive", "Forget"]


# ---- list -------------------------------------------------------------------------------------------------


def test_list_goes_page_by_page_in_order(pond: Pond) -> None:
    names = sorted([f"a/{number}" for number in range(5)] + ["a", "a.b", "b/1", "b/2", "c"])
    for name in reversed(names):
        pond.create_queue(name)
    for limit in (1, 2, 3, 10, 100):
        seen: list[str] = []
        after: str | None = ""
        while after is not None:
            page = pond.list_queues(after=after, limit=limit)
            assert len(page.queues) <= limit
            seen += [queue.name for queue in page.queues]
            after = page.next
        assert seen == names
    found = pond.list_queues(prefix="a/", limit=3)
    assert [queue.name for queue in found.queues] == ["a/0", "a/1", "a/2"]
    rest = pond.list_queues(prefix="a/", after=found.next or "")
    assert [queue.name for queue in rest.queues] == ["a/3", "a/4"]
    assert rest.next is None
    assert pond.list_queues(prefix="x").queues == []
    assert [queue.name for queue in pond.list_queues(prefix="b/", after="a").queues] == ["b/1", "b/2"]


def test_a_cursor_stays_good_when_its_queue_is_deleted(pond: Pond) -> None:
    for name in "abcd":
        pond.create_queue(name)
    page = pond.list_queues(limit=2)
    pond.delete_queue("b")
    assert [queue.name for queue in pond.list_queues(after=page.next or "").queues] == ["c", "d"]


def test_a_page_is_capped(pond: Pond) -> None:
    for number in range(LIST_LIMIT_MAX + 1):
        pond.create_queue(f"q{number}")
    page = pond.list_queues(limit=1 << 40)
    assert (len(page.queues), page.next) == (LIST_LIMIT_MAX, page.queues[-1].name)


def test_listing_wakes_no_queue_and_shows_what_is_awake(reopen: Callable[[], Pond]) -> None:
    pond = reopen()
    for name in ("asleep", "awake"):
        pond.create_queue(name)
        pond.produce(name, ["x"])
    pond = reopen()
    pond.stats("awake")
    asleep, awake = pond.list_queues().queues
    assert (asleep.loaded, awake.loaded) == (False, True)
    assert [one.status for one in asleep.partitions] == ["closed"]
    assert [(one.status, one.counts["ready"]) for one in awake.partitions] == [("open", 1)]


# ---- stats, pause, clear ----------------------------------------------------------------------------------


def test_stats_count_every_state(pond: Pond, clock: ManualClock) -> None:
    pond.create_queue("q", partitions=3, completed_retention="1h")
    pond.produce("q", [NewItem(payload=str(number)) for number in range(6)])
    pond.produce("q", [NewItem(payload="later", delay="1h")])
    failed, dead, done, asked, _ = pond.lease("q", batch=5)
    pond.retry([Retry(lease=failed, delay="1h"), Retry(lease=dead, dead=True)])
    pond.complete([done])
    [cancelled] = pond.produce("q", ["cancelled"])
    pond.cancel("q", [cancelled.id, asked.id])
    clock.advance(2_000)
    stats = pond.stats("q")
    expected = {"scheduled": 1, "ready": 1, "leased": 2, "retrying": 1, "completed": 1, "dead": 1, "cancelled": 1}
    assert {state: count for state, count in stats.counts.items() if count} == expected
    assert sum(sum(one.counts.values()) for one in stats.partitions) == sum(expected.values())
    assert (stats.queue, stats.waiters, stats.oldest_ready_age, stats.paused) == ("q", 0, 2.0, False)


@pytest.mark.parametrize("look", ["stats", "queue_info"])
def test_the_first_look_after_a_restart_sees_every_partition(look: str, reopen: Callable[[], Pond]) -> None:
    pond = reopen()
    pond.create_queue("q", partitions=8)
    for _ in range(8):
        pond.produce("q", ["x"])
    seen = getattr(reopen(), look)("q")
    assert [one.status for one in seen.partitions] == ["open"] * 8
    assert sum(one.counts["ready"] for one in seen.partitions) == 8


def test_a_paused_queue_takes_items_and_hands_out_none(pond: Pond) -> None:
    pond.create_queue("q")
    assert pond.pause("q").paused
    assert pond.pause("q").paused
    pond.produce("q", ["x"])
    assert pond.lease("q") == []
    assert pond.stats("q").paused
    assert not pond.resume("q").paused
    assert [item.text for item in pond.lease("q")] == ["x"]


def test_resume_wakes_those_who_wait(pond: Pond) -> None:
    pond.create_queue("q")
    pond.pause("q")
    pond.produce("q", ["x"])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pond.lease, "q", wait="10m")
        until_parked(pond, "q")
        pond.resume("q")
        assert [item.text for item in waiting.result()] == ["x"]


def test_a_pause_holds_after_a_restart_and_leaves_holders_alone(reopen: Callable[[], Pond]) -> None:
    pond = reopen()
    pond.create_queue("q")
    pond.produce("q", ["a", "b"])
    [held] = pond.lease("q")
    pond.pause("q")
    pond = reopen()
    assert pond.lease("q") == []
    assert [result.ok for result in pond.complete([held.lease])] == [True]
    pond.resume("q")
    assert [item.text for item in pond.lease("q", batch=9)] == ["b"]


def test_clear_removes_what_it_says(pond: Pond) -> None:
    pond.create_queue("q", partitions=2)
    pond.produce("q", ["leased", "dead", "retried"])
    _, dead, retried = pond.lease("q", batch=3)
    pond.retry([Retry(lease=dead, dead=True), Retry(lease=retried, delay="1h")])
    pond.produce("q", ["a", NewItem(payload="later", delay="1h")])
    pond.produce("q", ["b"])
    assert pond.clear("q", ["scheduled"]) == {"scheduled": 1}
    assert pond.clear("q") == {"ready": 2, "scheduled": 0, "retrying": 1}
    assert {state: n for state, n in pond.stats("q").counts.items() if n} == {"leased": 1, "dead": 1}
    assert pond.clear("q", ["dead", "leased"]) == {"dead": 1, "leased": 1}
    assert not any(pond.stats("q").counts.values())
