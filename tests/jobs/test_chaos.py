"""Workers that die at any call, many times over: ticks are fired once, and jobs run after those they wait for.

A failure names its seed; put it into SEEDS to replay it alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime
from random import Random
from typing import Any

import pytest

from millpond import Retry
from millpond.errors import NotFound
from millpond.jobs import links, schedules
from millpond.jobs.control import list_jobs
from millpond.jobs.enqueue import enqueue
from millpond.jobs.firing import SCHEDULE_LEASE
from millpond.jobs.names import LINKS_QUEUE, SCHEDULES_QUEUE
from millpond.jobs.view import Job, JobState
from tests.jobs.conftest import Mill, Run, command
from tests.jobs.trouble import Killed, Trouble

pytestmark = pytest.mark.slow

SEEDS = range(12)
CALLS = ["write_state", "produce", "retry", "complete", "make_ready", "cancel", "get_item", "extend", "queue_info"]


def dying(mill: Mill, rng: Random) -> Any:
    """The pond, or one on which the worker dies."""
    if rng.random() < 0.5:
        return mill.pond
    return Trouble(mill.pond, rng.choice(CALLS), done=rng.random() < 0.5)


async def jobs_of(mill: Mill) -> list[Job]:
    return [job async for job in list_jobs(mill.pond)]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_tick_is_fired_once(run: Run, seed: int) -> None:
    async def act(mill: Mill) -> None:
        rng, begin = Random(seed), mill.now
        await schedules.add(mill.pond, "s", command(), mill.now, every=60, missed="all")
        while (mill.now - begin).total_seconds() < 5_000:
            mill.pass_(rng.uniform(0, 40))
            held = list(await mill.pond.lease(SCHEDULES_QUEUE, lease_timeout=SCHEDULE_LEASE))
            if held and rng.random() < 0.2:
                mill.pass_(SCHEDULE_LEASE + 1)  # one that is late, and another has it
                held += await mill.pond.lease(SCHEDULES_QUEUE, lease_timeout=SCHEDULE_LEASE)
            fired = [schedules.fire(dying(mill, rng), item, mill.now) for item in held]
            for outcome in await asyncio.gather(*fired, return_exceptions=True):
                assert isinstance(outcome, list | Killed), (seed, outcome)
            for item in await mill.pond.lease("jobs", batch=rng.randint(1, 3)):
                await mill.pond.complete([item])
        for _ in range(3):
            mill.pass_(SCHEDULE_LEASE + 1)
            for item in await mill.pond.lease(SCHEDULES_QUEUE, lease_timeout=SCHEDULE_LEASE):
                await schedules.fire(mill.pond, item, mill.now)
        fired_at = Counter(job.due for job in await jobs_of(mill))
        last = max(due for due in fired_at if due)
        count = round((datetime.fromisoformat(last).timestamp() - begin.timestamp()) / 60)
        assert set(fired_at.values()) == {1}, seed
        assert len(fired_at) == count >= 80, seed

    run(act)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_job_runs_once_and_after_those_it_waits_for(run: Run, seed: int) -> None:
    async def act(mill: Mill) -> None:
        rng = Random(seed)
        ran: list[str] = []
        failing: set[str] = set()
        after: dict[str, list[str]] = {}
        for n in range(30):
            id = f"j{n}"
            after[id] = rng.sample(list(after), min(len(after), rng.choice([0, 0, 1, 2, 3])))
            if rng.random() < 0.1:
                failing.add(id)
            for api in (dying(mill, rng), mill.pond):
                try:
                    await enqueue(api, "jobs", command(), id=id, after=after[id], max_retries=1)
                except Killed:
                    continue
            await work(mill, rng, ran, failing)
        for _ in range(400):
            mill.pass_(rng.uniform(0, 20))
            await work(mill, rng, ran, failing)
        states = {job.id: job.state for job in await jobs_of(mill)}
        assert len(states) == 30, seed
        for id, parents in after.items():
            whole = all(states[parent] == JobState.COMPLETED for parent in parents)
            expected = (JobState.DEAD if id in failing else JobState.COMPLETED) if whole else JobState.CANCELLED
            assert states[id] == expected, (seed, id)
            if whole:
                assert ran.count(id) == 1, (seed, id)
                assert all(ran.index(parent) < ran.index(id) for parent in parents), (seed, id)
            else:
                assert id not in ran, (seed, id)

    run(act)


async def work(mill: Mill, rng: Random, ran: list[str], failing: set[str]) -> None:
    """A moment of some workers' lives."""
    try:
        held = await mill.pond.lease(LINKS_QUEUE, lease_timeout=links.LINK_LEASE, batch=rng.randint(1, 5))
    except NotFound:
        held = []
    tasks = [asyncio.create_task(links.follow(dying(mill, rng), link, mill.now)) for link in held]
    for item in await mill.pond.lease("jobs", batch=rng.randint(1, 3), lease_timeout=600):
        ran.append(item.id)
        if item.id in failing:
            await mill.pond.retry([Retry(lease=item.lease, error="no")])
        else:
            await mill.pond.complete([item])
    for _ in range(20):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()  # stopped, or done
    await asyncio.gather(*tasks, return_exceptions=True)
