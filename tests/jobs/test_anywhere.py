"""The same on a server, as a guest, and after a restart: all of jobs goes by the operations alone."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import AsyncClient, AsyncPond, Retry
from millpond.clock import ManualClock
from millpond.jobs import links, schedules, workers
from millpond.jobs.control import find_item, find_job, list_jobs
from millpond.jobs.enqueue import enqueue
from millpond.jobs.explain import explain
from millpond.jobs.names import LINKS_QUEUE, SCHEDULES_QUEUE
from millpond.jobs.timeline import timeline
from millpond.jobs.view import JobState
from millpond.model import to_datetime
from tests.client.served import serve
from tests.jobs.conftest import command
from tests.jobs.test_workers import info_of

pytestmark = pytest.mark.slow


async def story(api: Any) -> None:
    """A day in the life of some jobs."""
    now = datetime.now(UTC)
    await workers.heartbeat(api, info_of("inc1", now))
    hearing = asyncio.create_task(workers.stop_asked(api, "inc1"))
    await enqueue(api, "jobs", command("one"), id="a", priority=-1)
    await enqueue(api, "jobs", command("two"), id="b", after=["a"])
    [link] = await api.lease(LINKS_QUEUE, lease_timeout=links.LINK_LEASE)
    following = asyncio.create_task(links.follow(api, link, now))
    assert (await explain(api, "jobs", "b", now)).reason == "waiting_for_jobs"
    assert (await explain(api, "jobs", "a", now)).reason == "queued"
    for error in ("exit code 1", None):
        [item] = await api.lease("jobs", client_id="inc1", wait=10)
        if error:
            await api.retry([Retry(lease=item.lease, error=error, delay=0)])
        else:
            await api.complete([item], result={"exit_code": 0})
    await following
    queue, item = await find_item(api, "a")
    told = await timeline(api, queue, item)
    assert [(one.by, one.how, one.error) for one in told.attempts] == [
        ("inc1", "failed", "exit code 1"),
        ("inc1", "completed", None),
    ]
    [job] = [job async for job in list_jobs(api, state="pending")]
    assert (job.id, job.held, job.state) == ("b", False, JobState.PENDING)
    await schedules.add(api, "s", command("tick"), now, every=1, start=now - timedelta(hours=1))
    [due] = await api.lease(SCHEDULES_QUEUE, lease_timeout=10, wait=10)
    [tick] = await schedules.fire(api, due, datetime.now(UTC))
    fired = [job async for job in list_jobs(api) if job.schedule == "s"]
    assert [one.key for one in fired] == [f"schedule:s:{tick.isoformat(timespec='milliseconds')[:-6]}Z"]
    assert await workers.ask_to_stop(api, ["inc1"]) == ["inc1"]
    assert await hearing


def test_jobs_on_a_server() -> None:
    with serve() as server:

        async def main() -> None:
            async with AsyncClient(server.url) as client:
                await story(client)

        asyncio.run(main())


@pytest.mark.parametrize("guest", [False, True])
def test_jobs_in_a_directory(tmp_path: Path, guest: bool) -> None:
    async def main() -> None:
        async with millpond.open_async(tmp_path) as pond:
            if not guest:
                await story(pond)
                return
            async with millpond.open_async(tmp_path) as other:
                await story(other)

    asyncio.run(main())


def test_what_waits_is_still_there_after_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()

    async def before() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            now = to_datetime(clock.now())
            await enqueue(pond, "jobs", command(), id="a")
            await enqueue(pond, "jobs", command(), id="b", after=["a"], max_retries=1)
            await schedules.add(pond, "s", command(), now, every=60, missed="all")

    async def after() -> None:
        async with AsyncPond(tmp_path, clock=clock) as pond:
            now = to_datetime(clock.now())
            assert (await find_job(pond, "b")).held
            [item] = await pond.lease("jobs")
            await pond.complete([item])
            [link] = await pond.lease(LINKS_QUEUE, lease_timeout=links.LINK_LEASE)
            await links.follow(pond, link, now)
            [item] = await pond.lease("jobs")
            assert item.id == "b"
            [due] = await pond.lease(SCHEDULES_QUEUE, lease_timeout=10)
            assert len(await schedules.fire(pond, due, now)) == 3

    asyncio.run(before())
    clock.advance(3 * 60_000)
    asyncio.run(after())
