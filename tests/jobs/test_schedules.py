"""Schedules: each tick is one job, whoever fires it and whatever dies."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from millpond import NewItem
from millpond.errors import InvalidRequest, KeyConflict, NotFound, Unavailable
from millpond.jobs import schedules
from millpond.jobs.control import list_jobs
from millpond.jobs.firing import CATCH_UP_MAX, SCHEDULE_LEASE
from millpond.jobs.names import SCHEDULES_QUEUE
from millpond.model import LeasedItem
from tests.jobs.conftest import Mill, Run, command
from tests.jobs.trouble import Killed, Late, Trouble


async def leased(mill: Mill) -> LeasedItem | None:
    items = await mill.pond.lease(SCHEDULES_QUEUE, lease_timeout=SCHEDULE_LEASE)
    return items[0] if items else None


async def fire(mill: Mill) -> int:
    """What a worker does; returns how many ticks were fired."""
    fired = 0
    while (item := await leased(mill)) is not None:
        fired += len(await schedules.fire(mill.pond, item, mill.now))
    return fired


async def dues(mill: Mill) -> list[str]:
    return sorted([job.due or "" async for job in list_jobs(mill.pond)])


def test_a_cron_schedule_fires_once_at_each_tick(run: Run) -> None:
    async def act(mill: Mill) -> None:
        added = await schedules.add(mill.pond, "backup", command("pg_dump"), mill.now, cron="*/5 * * * *", priority=2)
        assert added.next_at == mill.now + timedelta(minutes=5)
        assert await fire(mill) == 0
        for _ in range(3):
            mill.pass_(300)
            assert await fire(mill) == 1
            assert await fire(mill) == 0
        jobs = [job async for job in list_jobs(mill.pond)]
        assert [job.due for job in jobs] == [f"2026-03-02T08:{m:02}:00.000Z" for m in (5, 10, 15)]
        assert {(job.schedule, job.command, job.priority, job.max_retries) for job in jobs} == {
            ("backup", "pg_dump", 2, 3)
        }

    run(act)


def test_an_interval_keeps_its_beat_when_it_is_fired_late(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "poll", command(), mill.now, every="90s")
        mill.pass_(100)
        assert await fire(mill) == 1
        assert (await schedules.get(mill.pond, "poll")).next_at == mill.now + timedelta(seconds=80)

    run(act)


def test_start_holds_the_first_tick_back(run: Run) -> None:
    async def act(mill: Mill) -> None:
        start = mill.now + timedelta(hours=1)
        first = await schedules.add(mill.pond, "a", command(), mill.now, every=60, start=start)
        cron = await schedules.add(mill.pond, "b", command(), mill.now, cron="* * * * *", start=start)
        assert (first.next_at, cron.next_at) == (start, start)
        with pytest.raises(InvalidRequest, match="names no time zone"):
            await schedules.add(mill.pond, "c", command(), mill.now, every=60, start=start.replace(tzinfo=None))

    run(act)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("latest", ["09:03"]), ("skip", ["09:03"]), ("all", [f"{8 + m // 60:02}:{m % 60:02}" for m in range(1, 64)])],
)
def test_missed_ticks_go_by_the_policy(run: Run, policy: Any, expected: list[str]) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, cron="* * * * *", missed=policy)
        mill.pass_(63 * 60 + 30)
        assert await fire(mill) == len(expected)
        assert [due[11:16] for due in await dues(mill)] == expected
        assert (await schedules.get(mill.pond, "a")).next_at == mill.now + timedelta(seconds=30)

    run(act)


def test_only_the_newest_tick_is_fired_of_those_that_were_missed_within_a_minute(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, every="5s", missed="skip")
        mill.pass_(33)
        assert await fire(mill) == 1
        assert await dues(mill) == ["2026-03-02T08:00:30.000Z"]

    run(act)


def test_a_tick_that_is_an_hour_late_is_skipped_by_that_policy(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, cron="0 * * * *", missed="skip")
        mill.pass_(90 * 60)
        assert await fire(mill) == 0
        mill.pass_(30 * 60)
        assert await fire(mill) == 1
        assert await dues(mill) == ["2026-03-02T10:00:00.000Z"]

    run(act)


def test_far_too_many_missed_ticks_are_cut_and_told(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, every=1, missed="all")
        mill.pass_(5_000)
        assert await fire(mill) == CATCH_UP_MAX
        assert "missed more than 100 ticks" in caplog.text

    run(act)


@pytest.mark.parametrize("call", ["write_state", "produce", "retry"])
@pytest.mark.parametrize("done", [False, True])
def test_a_worker_that_dies_anywhere_leaves_each_tick_fired_once(run: Run, call: str, done: bool) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, cron="*/5 * * * *")
        mill.pass_(300)
        item = await leased(mill)
        assert item is not None
        with pytest.raises(Killed):
            await schedules.fire(Trouble(mill.pond, call, done=done), item, mill.now)
        mill.pass_(SCHEDULE_LEASE + 1)
        await fire(mill)
        assert await dues(mill) == ["2026-03-02T08:05:00.000Z"]
        await mill.work()
        mill.pass_(300)
        await fire(mill)
        assert await dues(mill) == ["2026-03-02T08:05:00.000Z", "2026-03-02T08:10:00.000Z"]

    run(act)


def test_a_tick_of_which_nobody_knows_is_not_fired_again_once_its_key_may_be_forgotten(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, cron="0 0 * * *")
        mill.pass_(16 * 3600)
        item = await leased(mill)
        assert item is not None
        with pytest.raises(Killed):
            await schedules.fire(Trouble(mill.pond, "retry", done=False), item, mill.now)
        await mill.work()
        mill.pass_(23.9 * 3600)  # half the queue's dedup window and more
        assert await fire(mill) == 0
        mill.pass_(0.2 * 3600)
        assert await fire(mill) == 1

    run(act)


def test_a_worker_that_is_stopped_while_it_fires_leaves_the_tick_to_the_next(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, cron="*/5 * * * *")
        mill.pass_(300)
        item = await leased(mill)
        assert item is not None
        reached = asyncio.Event()

        class Stuck(Trouble):
            def __getattr__(self, name: str) -> Any:
                async def waits(*given: Any, **more: Any) -> None:
                    reached.set()
                    await asyncio.Event().wait()

                return waits if name == "produce" else getattr(self._pond, name)

        task = asyncio.create_task(schedules.fire(Stuck(mill.pond, "", done=False), item, mill.now))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await fire(mill) == 1
        assert await dues(mill) == ["2026-03-02T08:05:00.000Z"]

    run(act)


def test_a_firing_that_fails_is_told_and_tried_again(run: Run) -> None:
    class Full(Trouble):
        def __getattr__(self, name: str) -> Any:
            async def full(*given: Any, **more: Any) -> None:
                raise Unavailable("the queue is away; try again later")

            return full if name == "produce" else getattr(self._pond, name)

    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, cron="*/5 * * * *", missed="skip")
        mill.pass_(300)
        item = await leased(mill)
        assert item is not None
        assert await schedules.fire(Full(mill.pond, "", done=False), item, mill.now) == []
        assert (await schedules.get(mill.pond, "a")).error == "the queue is away; try again later"
        mill.pass_(100)
        assert await fire(mill) == 1
        assert (await schedules.get(mill.pond, "a")).error is None
        assert await dues(mill) == ["2026-03-02T08:05:00.000Z"]

    run(act)


def test_a_worker_whose_clock_is_wrong_fires_by_the_servers(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, cron="*/5 * * * *")
        for skew in (-7200, 7200):
            mill.pass_(300)
            item = await leased(mill)
            assert item is not None
            assert len(await schedules.fire(mill.pond, item, mill.now + timedelta(seconds=skew))) == 1
        assert len(await dues(mill)) == 2
        assert await leased(mill) is None

    run(act)


def test_a_paused_schedule_rests_and_goes_on_without_what_it_missed(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, cron="* * * * *", missed="all")
        mill.pass_(60)
        await fire(mill)
        paused = await schedules.pause(mill.pond, "a")
        assert (paused.schedule.paused, paused.next_at, paused.fired_at) == (True, None, mill.now)
        mill.pass_(600)
        await mill.pond.make_ready(SCHEDULES_QUEUE, ["a"])
        assert await fire(mill) == 0
        resumed = await schedules.resume(mill.pond, "a", mill.now)
        assert resumed.next_at == mill.now + timedelta(seconds=60)
        assert resumed.fired_at == mill.now - timedelta(seconds=600)
        mill.pass_(60)
        assert await fire(mill) == 1
        assert [one.schedule.name for one in await schedules.list_schedules(mill.pond)] == ["a"]

    run(act)


def test_a_name_is_taken_until_it_is_removed(run: Run) -> None:
    async def act(mill: Mill) -> None:
        pond = mill.pond
        assert await schedules.list_schedules(pond) == []
        for ask in (schedules.get(pond, "a"), schedules.remove(pond, "a"), schedules.pause(pond, "a")):
            with pytest.raises(NotFound, match="no schedule 'a'"):
                await ask
        await schedules.add(pond, "a", command("one"), mill.now, every=60)
        with pytest.raises(KeyConflict, match="there is a schedule 'a'"):
            await schedules.add(pond, "a", command("two"), mill.now, every=60)
        await schedules.add(pond, "a", command("two"), mill.now, every=60, on_conflict="replace")
        await schedules.remove(pond, "a")
        assert await schedules.list_schedules(pond) == []
        await schedules.add(pond, "a", command("three"), mill.now, every=60)
        mill.pass_(60)
        assert await fire(mill) == 1
        assert await mill.commands() == ["three"]

    run(act)


def test_one_that_is_removed_while_it_is_leased_fires_no_more(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, every=60)
        mill.pass_(60)
        item = await leased(mill)
        assert item is not None
        await schedules.remove(mill.pond, "a")
        assert await schedules.fire(mill.pond, item, mill.now) == []
        assert await schedules.list_schedules(mill.pond) == []
        mill.pass_(60)
        assert await fire(mill) == 0

    run(act)


@pytest.mark.parametrize("paused", [False, True])
def test_one_that_is_removed_while_it_is_to_be_paused_or_resumed_stays_removed(
    run: Run, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    monkeypatch.setattr(schedules, "REPLACE_PAUSE", 0)

    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command(), mill.now, every="1m")
        if paused:
            await schedules.pause(mill.pond, "a")
            await mill.pond.make_ready(SCHEDULES_QUEUE, ["a"])
        mill.pass_(60)
        item = await leased(mill)
        assert item is not None
        steps = iter([schedules.remove(mill.pond, "a"), schedules.fire(mill.pond, item, mill.now)])
        late: Any = Late(mill.pond, "produce", lambda: next(steps), queue=SCHEDULES_QUEUE)
        with pytest.raises(NotFound):
            await (schedules.resume(late, "a", mill.now) if paused else schedules.pause(late, "a"))
        await next(steps)
        assert await schedules.list_schedules(mill.pond) == []

    run(act)


def test_who_may_not_enqueue_a_command_cannot_schedule_one(run: Run) -> None:
    """A token without the permission cannot produce the kinds of jobs, so what claims to be another kind is refused."""

    async def act(mill: Mill) -> None:
        await schedules.add(mill.pond, "a", command("rm -rf /"), mill.now, every=60)
        stolen = (await mill.pond.get_item(SCHEDULES_QUEUE, "a")).payload
        await schedules.remove(mill.pond, "a")
        for kind in ("", "task"):
            await mill.pond.produce(SCHEDULES_QUEUE, [NewItem(payload=stolen, id=f"x{kind}", kind=kind)])
        mill.pass_(60)
        assert await fire(mill) == 0
        assert (await mill.pond.list_items(SCHEDULES_QUEUE)).items == []

    run(act)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "a cron line or an interval"),
        ({"cron": "* * * * *", "every": 5}, "a cron line or an interval"),
        ({"every": "-5s"}, "every is"),
        ({"every": 5, "name": "a b"}, "no name for a schedule"),
        ({"every": 5, "missed": "never"}, "missed is"),
        ({"cron": "* * * * *", "timezone": "Mars/Phobos"}, "no time zone"),
        ({"cron": "0 0 30 2 *"}, "never comes"),
        ({"every": 5, "spec": command(after=["x"])}, "waits for no other"),
    ],
)
def test_a_wrong_schedule_is_refused(run: Run, given: dict[str, Any], says: str) -> None:
    async def act(mill: Mill) -> None:
        more: dict[str, Any] = {"name": "a", "spec": command(), "now": mill.now} | given
        with pytest.raises(InvalidRequest, match=says):
            await schedules.add(mill.pond, **more)

    run(act)
