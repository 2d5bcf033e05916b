"""Why a job is not running, in one sentence."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from millpond import NewItem, Retry
from millpond.errors import NotFound
from millpond.jobs import processes
from millpond.jobs.control import cancel
from millpond.jobs.enqueue import enqueue
from millpond.jobs.explain import Explanation, explain, span
from millpond.jobs.links import LINK_LEASE, follow
from millpond.jobs.names import LINKS_QUEUE
from millpond.jobs.position import ahead_of
from millpond.jobs.workers import heartbeat
from tests.jobs.conftest import Mill, Run, command
from tests.jobs.test_workers import worker


async def why(mill: Mill, id: str = "a", queue: str = "jobs") -> Explanation:
    return await explain(mill.pond, queue, id, mill.now)


def test_a_job_that_waits_for_a_time_says_until_when(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", delay="90m")
        said = await why(mill)
        assert said.sentence == "Job a is not due until 2026-03-02 09:30:00 UTC (in 1h30m)."
        assert said.reason == "not_due"
        await mill.pond.make_ready("jobs", ["a"])
        await mill.work(error="exit code 2: no such host\nand more")
        said = await why(mill)
        assert said.sentence == (
            "Job a is backing off until 2026-03-02 08:00:02 UTC (in 2s): attempt 1 of 3 failed because of: exit code 2:"
            " no such host."
        )
        assert said.reason == "backing_off"

    run(act)


def test_a_job_that_a_worker_could_not_run_says_why_it_was_put_off(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        [item] = await mill.pond.lease("jobs")
        await mill.pond.retry([Retry(lease=item, intent="defer", delay=2, error="no task 'x' here")], queue="jobs")
        assert (await why(mill)).sentence == (
            "Job a was put off by its worker and is not due until 2026-03-02 08:00:02 UTC (in 2s) because of: no task"
            " 'x' here."
        )

    run(act)


def test_a_ready_job_says_who_is_ahead_and_who_could_run_it(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="b")
        await enqueue(mill.pond, "jobs", command(), id="a")
        said = await why(mill)
        assert (said.reason, said.ahead) == ("no_worker", 1)
        assert said.sentence.startswith(
            "Job a waits because no worker runs on queue jobs (1 job is ahead of it); `mill"
        )
        await heartbeat(mill.pond, worker(mill, "w1", queues={"other": 1}))
        assert (await why(mill)).reason == "no_worker"
        await heartbeat(mill.pond, worker(mill, "w2", slots=4, running_count=4))
        assert (await why(mill)).sentence == (
            "Job a waits for a free worker: 1 job is ahead of it, and there is 1 worker on queue jobs with 4 of 4 slots"
            " busy."
        )
        await mill.pond.pause("jobs")
        said = await why(mill)
        assert (said.reason, "queue jobs is paused" in said.sentence) == ("paused", True)

    run(act)


def test_a_job_in_somebodys_hands_says_in_whose(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        await heartbeat(mill.pond, worker(mill, "inc1", name="mill-1", host="box", pid=42))
        await mill.pond.lease("jobs", client_id="inc1")
        said = await why(mill)
        assert said.sentence == (
            "Job a is running, attempt 1 of 3: its lease is held by worker mill-1 (process 42 on box) until"
            " 2026-03-02 08:00:20 UTC (in 20s)."
        )
        await cancel(mill.pond, "jobs", "a")
        said = await why(mill)
        assert (said.reason, said.worker) == ("cancelling", "inc1")
        await enqueue(mill.pond, "jobs", command(), id="c")
        await mill.pond.claim("jobs", "nightly", owner="spark")
        assert "is claimed by claim nightly of spark" in (await why(mill, "c")).sentence

    run(act)


def test_a_job_whose_worker_was_killed_is_not_running(run: Run) -> None:
    async def act(mill: Mill) -> None:
        here = processes.name_of(os.getpid())
        gone = f"{here.rpartition('/')[0]}/1"  # the number is another's by now
        await heartbeat(mill.pond, worker(mill, "w1", name="mill-1", pid=os.getpid(), host="box", process=gone))
        await enqueue(mill.pond, "jobs", command(), id="a")
        await mill.pond.lease("jobs", client_id="w1")
        said = await why(mill)
        assert said.sentence == (
            "Job a waits for its lease to end 2026-03-02 08:00:20 UTC (in 20s): "
            f"worker mill-1 (process {os.getpid()} on box), which had it, has died."
        )
        assert (said.reason, said.until, said.worker) == ("worker_lost", mill.now + timedelta(seconds=20), "w1")
        await cancel(mill.pond, "jobs", "a")
        assert (await why(mill)).reason == "cancelling"

    run(act)


def test_a_job_that_waits_for_others_names_them(run: Run) -> None:
    async def act(mill: Mill) -> None:
        for parent in "pqrst":
            await enqueue(mill.pond, "jobs", command(), id=parent, max_retries=1)
        await enqueue(mill.pond, "jobs", command(), id="a", after=list("pqrst"), if_dead="hold")
        await mill.work()
        said = await why(mill)
        assert said.sentence == (
            "Job a is waiting for jobs q (pending), r (pending), s (pending) and 1 other to complete."
        )
        assert said.jobs == list("qrst")
        await mill.work(error="boom")
        said = await why(mill)
        assert said.reason == "blocked"
        assert "is held because it waits for job q (dead because of: boom), which" in said.sentence
        await mill.pond.redrive("jobs")
        for _ in range(4):
            await mill.work()
        assert "no worker is running to release it" in (await why(mill)).sentence
        await heartbeat(mill.pond, worker(mill))
        assert (await why(mill)).reason == "releasing"

    run(act)


def test_a_job_that_was_held_is_released_at_the_next_look(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="p", max_retries=1)
        await mill.work(error="boom")
        await enqueue(mill.pond, "jobs", command(), id="a", after=["p"], if_dead="hold")
        [link] = await mill.pond.lease(LINKS_QUEUE, lease_timeout=LINK_LEASE)
        await follow(mill.pond, link, mill.now)
        await mill.pond.redrive("jobs")
        await mill.work()
        await heartbeat(mill.pond, worker(mill))
        said = await why(mill)
        assert (said.reason, said.until) == ("releasing", mill.now + timedelta(seconds=10))
        assert "is released 2026-03-02 08:00:10 UTC (in 10s), or by `millpond job release`" in said.sentence

    run(act)


def test_a_job_that_waits_for_no_other_any_more_may_still_not_be_due(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="p")
        await enqueue(mill.pond, "jobs", command(), id="a", after=["p"], delay="1h")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["p"], run_at=mill.now + timedelta(hours=2))
        await mill.work()
        await heartbeat(mill.pond, worker(mill))
        said = await why(mill)
        assert said.sentence == "Job a is not due until 2026-03-02 09:00:00 UTC (in 1h)."
        assert (said.reason, said.until) == ("not_due", mill.now + timedelta(hours=1))
        assert (await why(mill, "b")).until == mill.now + timedelta(hours=2)
        mill.pass_(3600)
        assert (await why(mill)).reason == "releasing"

    run(act)


def test_a_cancelled_job_names_another_only_if_that_is_why(run: Run) -> None:
    async def act(mill: Mill) -> None:
        for id in ("p", "q"):
            await enqueue(mill.pond, "jobs", command(), id=id, max_retries=1)
            await enqueue(mill.pond, "jobs", command(), id=f"after-{id}", after=[id])
        await cancel(mill.pond, "jobs", "after-q")
        mill.pass_(1)
        await mill.work(error="boom")
        await mill.work(error="boom")
        mill.pass_(1)
        await cancel(mill.pond, "jobs", "after-p")
        assert (await why(mill, "after-p")).sentence.endswith("since it waited for job p (dead because of: boom).")
        assert (await why(mill, "after-q")).sentence.endswith("was cancelled 2026-03-02 08:00:00 UTC (2s ago).")

    run(act)


def test_a_job_that_has_ended_says_when_and_why(run: Run) -> None:
    async def act(mill: Mill) -> None:
        for id in ("done", "dead", "gone", "old"):
            await enqueue(
                mill.pond, "jobs", command(), id=id, max_retries=1, expire_timeout="1h" if id == "old" else None
            )
        mill.pass_(5)
        await mill.work()
        await mill.work(error="exit code 1")
        await cancel(mill.pond, "jobs", "gone")
        await mill.pass_in("jobs", 3_600)
        assert (await why(mill, "done")).sentence == (
            "Job done completed 2026-03-02 08:00:05 UTC (1h ago), at attempt 1 of 1."
        )
        assert (await why(mill, "dead")).sentence.startswith(
            "Job dead died 2026-03-02 08:00:05 UTC (1h ago) after 1 attempt because of: exit code 1; `millpond dlq"
        )
        assert (await why(mill, "gone")).sentence == "Job gone was cancelled 2026-03-02 08:00:05 UTC (1h ago)."
        assert "expired" in (await why(mill, "old")).sentence
        with pytest.raises(NotFound):
            await why(mill, "nobody")

    run(act)


@pytest.mark.parametrize("scheduled", [False, True])
def test_who_is_ahead_is_who_the_engine_leases_first(run: Run, scheduled: bool) -> None:
    """Whatever brought the items into the line: priorities, backoffs, schedules, leases that ran out, redrives."""

    async def act(mill: Mill) -> None:
        pond = mill.pond
        await pond.create_queue("jobs", max_attempts=9, lease_timeout=2)
        for n in range(40):
            own = f"i{n}" if n % 2 else None
            delay = 1 + n % 11 if scheduled and n % 5 == 0 else None
            await pond.produce("jobs", [NewItem(payload=b"x", priority=(n * 3) % 4 - 1, delay=delay, id=own)])
            mill.pass_(0.5)
            if n % 4 == 3:
                [item] = await pond.lease("jobs")
                if n % 3 < 2:
                    await pond.retry([Retry(lease=item.lease, delay=n % 7, dead=n % 3 == 1)])
            if n % 13 == 12:
                await pond.redrive("jobs")
        for _ in range(300):  # a little at a time: none shares its instant with another
            mill.pass_(0.1)
            await pond.stats("jobs")
        await pond.redrive("jobs")
        waiting = {item.id: item for item in (await pond.list_items("jobs", state="ready", limit=1_000)).items}
        assert len(waiting) == 40
        said = {id: (await ahead_of(pond, "jobs", item)).count for id, item in waiting.items()}
        order = [item.id for item in await pond.lease("jobs", batch=100)]
        assert [said[id] for id in order] == list(range(40))

    run(act)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59, "59s"), (61, "1m1s"), (7_200, "2h"), (90_061, "1d1h")])
def test_spans_are_told_in_two_units(seconds: int, text: str) -> None:
    assert span(seconds) == text
