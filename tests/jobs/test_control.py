"""What people do with jobs."""

from __future__ import annotations

import asyncio

import pytest

from millpond import NewItem
from millpond.errors import Conflict, NotFound
from millpond.jobs.control import (
    WAIT_SLICE,
    cancel,
    find_job,
    job_counts,
    list_jobs,
    release,
    retry_dead,
    wait_for_end,
)
from millpond.jobs.enqueue import enqueue
from millpond.jobs.spec import JobSpec
from millpond.jobs.view import JobState
from tests.jobs.conftest import Mill, Run, command


def test_a_job_is_found_in_whatever_queue_it_is(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await mill.pond.create_queue("plain")
        given = await enqueue(mill.pond, "team/reports", command(), id="r1")
        assigned = await enqueue(mill.pond, "plain", command())
        assert (await find_job(mill.pond, given.id)).queue == "team/reports"
        assert (await find_job(mill.pond, "team/reports/r1")).id == "r1"
        assert (await find_job(mill.pond, assigned.id)).queue == "plain"
        for id, queue in (("nobody", None), ("r1", "plain"), ("r1", "nowhere"), ("no/where", None)):
            with pytest.raises(NotFound, match="no job"):
                await find_job(mill.pond, id, queue)

    run(act)


def test_jobs_are_listed_by_their_states_and_other_items_are_not_jobs(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="done")
        await mill.work(result={"exit_code": 0})
        await enqueue(mill.pond, "jobs", command(), id="dead", max_retries=1)
        await mill.work(error="exit code 3: no")
        await enqueue(mill.pond, "jobs", command(), id="failed")
        await mill.work(error="exit code 4")
        await enqueue(mill.pond, "jobs", command(), id="running")
        [held] = await mill.pond.lease("jobs", client_id="w1")
        for id, delay in (("ready", None), ("later", 60), ("gone", None)):
            await enqueue(mill.pond, "jobs", command(), id=id, delay=delay)
        await cancel(mill.pond, "jobs", "gone")
        await mill.pond.produce("jobs", [NewItem(payload=b"x", kind="order")])
        seen = {state: [job.id async for job in list_jobs(mill.pond, state=state)] for state in JobState}
        assert seen == {
            "pending": ["ready", "later"],
            "processing": ["running"],
            "completed": ["done"],
            "failed": ["failed"],
            "dead": ["dead"],
            "cancelled": ["gone"],
        }
        assert len([job async for job in list_jobs(mill.pond)]) == 7
        assert (await job_counts(mill.pond))[JobState.PENDING] == 3
        done, dead = await find_job(mill.pond, "done"), await find_job(mill.pond, "dead")
        assert (done.exit_code, done.attempts, done.last_error) == (0, 1, None)
        assert (dead.last_error, dead.dead_reason, dead.attempts) == ("exit code 3: no", "max_attempts", 1)
        assert (dead.exit_code, (await find_job(mill.pond, "failed")).exit_code) == (3, 4)
        assert (await find_job(mill.pond, held.id)).worker == "w1"

    run(act)


def test_a_dead_job_runs_again_with_all_its_attempts(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", max_retries=1)
        with pytest.raises(Conflict, match="only a dead one"):
            await retry_dead(mill.pond, "jobs", "a")
        await mill.work(error="no")
        await retry_dead(mill.pond, "jobs", "a")
        job = await find_job(mill.pond, "a")
        assert (job.state, job.attempts) == (JobState.PENDING, 0)
        with pytest.raises(NotFound):
            await retry_dead(mill.pond, "jobs", "nobody")

    run(act)


def test_what_has_ended_is_neither_cancelled_nor_released(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        await mill.work()
        for act_on in (cancel, release):
            with pytest.raises(Conflict):
                await act_on(mill.pond, "jobs", "a")
            with pytest.raises(NotFound):
                await act_on(mill.pond, "jobs", "nobody")

    run(act)


def test_who_waits_has_the_job_as_it_ended(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "sums", JobSpec(task="add"), id="a")
        assert (await wait_for_end(mill.pond, "sums", "a", 0)).state == "ready"
        waiting = asyncio.create_task(wait_for_end(mill.pond, "sums", "a"))
        while not waiting.done() and mill.now.hour == 8:  # longer than one call is parked
            mill.pass_(WAIT_SLICE)
            await mill.pond.stats("sums")
        await mill.work("sums", result={"sum": 3})
        assert (await waiting).result == {"sum": 3}
        with pytest.raises(NotFound):
            await wait_for_end(mill.pond, "sums", "nobody", 5)

    run(act)
