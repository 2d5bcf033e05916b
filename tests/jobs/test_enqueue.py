"""From a job to its item."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from millpond.errors import Forbidden, InvalidRequest, KeyConflict, NotFound
from millpond.jobs.control import find_job, list_jobs
from millpond.jobs.enqueue import NewJob, enqueue, enqueue_many
from millpond.jobs.names import COMMAND, JOBS_QUEUE, TASK
from millpond.jobs.queues import change_settings, is_job_queue, job_settings
from millpond.jobs.spec import MSGPACK, JobSpec, checked, decode, encode
from millpond.jobs.view import JobState
from tests.jobs.conftest import Mill, Run, command


def test_a_job_is_an_item_with_the_settings_of_its_queue_stamped_on_it(run: Run) -> None:
    async def act(mill: Mill) -> None:
        first = await enqueue(mill.pond, JOBS_QUEUE, command("sleep 2"), id="job1", priority=-3)
        await change_settings(mill.pond, max_retries=7, backoff_base=3)
        await enqueue(mill.pond, JOBS_QUEUE, command("sleep 2"), id="job2")
        old, new = await mill.pond.get_item("jobs", "job1"), await mill.pond.get_item("jobs", "job2")
        assert (first.id, old.kind, old.max_attempts, old.priority) == ("job1", COMMAND, 3, -3)
        assert decode(old.payload).backoff_base == 2
        assert (new.max_attempts, decode(new.payload).backoff_base) == (7, 3)
        assert (old.expire_deadline - old.created_at) > timedelta(days=3_000)

    run(act)


def test_what_a_job_says_of_itself_overrules_its_queue(run: Run) -> None:
    async def act(mill: Mill) -> None:
        spec = JobSpec(task="add", args=[1, 2], backoff_base=1.5)
        await enqueue(mill.pond, "math", spec, id="a", max_retries=0, delay="1m", encoding=MSGPACK)
        item = await mill.pond.get_item("math", "a")
        job = await find_job(mill.pond, "a")
        assert (item.kind, item.reference, item.encoding, item.max_attempts) == (TASK, "add", MSGPACK, 1)
        assert decode(item.payload, MSGPACK).backoff_base == 1.5
        assert (job.queue, job.task, job.args, job.max_retries) == ("math", "add", [1, 2], 0)
        assert job.state == JobState.PENDING
        assert job.run_at == mill.now + timedelta(minutes=1)

    run(act)


def test_who_may_not_create_a_queue_of_jobs_is_told_how_an_admin_does(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any, **__: Any) -> None:
        raise Forbidden("not for this token; use another")

    async def act(mill: Mill) -> None:
        monkeypatch.setattr(mill.pond, "create_queue", refused)
        with pytest.raises(NotFound, match="millpond queue create reports --jobs"):
            await enqueue(mill.pond, "reports", command("true"))

    run(act)


def test_settings_survive_and_zero_retries_are_shown_as_they_were_given(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await change_settings(mill.pond, max_retries=0, poll_interval=5)
        settings = await job_settings(mill.pond)
        assert settings is not None
        assert (settings.max_retries, settings.poll_interval, settings.backoff_base) == (0, 5, 2)
        info = await mill.pond.queue_info("jobs")
        assert info.max_attempts == 1
        assert is_job_queue(info)
        for wrong in (-1, 1.5, True):
            with pytest.raises(InvalidRequest):
                await change_settings(mill.pond, max_retries=wrong)  # type: ignore[arg-type]

    run(act)


def test_an_id_that_is_taken_is_refused_or_comes_back(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        assert (await enqueue(mill.pond, "jobs", command(), id="a")).duplicate
        with pytest.raises(KeyConflict):
            await enqueue(mill.pond, "jobs", command(), id="a", on_conflict="reject")

    run(act)


def test_many_jobs_come_back_in_their_order(run: Run) -> None:
    async def act(mill: Mill) -> None:
        jobs = [NewJob(spec=command(f"echo {n}"), id=f"j{n}") for n in range(1_500)]
        produced = await enqueue_many(mill.pond, "jobs", jobs)
        assert [one.id for one in produced] == [f"j{n}" for n in range(1_500)]
        listed = [job.id async for job in list_jobs(mill.pond, state="pending")]
        assert len(listed) == 1_500

    run(act)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (JobSpec(), "a command or a task"),
        (JobSpec(command="x", task="y"), "a command or a task"),
        (JobSpec(command="  "), "blank"),
        (JobSpec(command=""), "empty"),
        (JobSpec(command="a\0b"), "NUL"),
        (JobSpec(command="x", args=[1]), "args"),
        (JobSpec(command="x" * 200_000), "at most"),
        (JobSpec(command="x", timeout=-1), "timeout is -1"),
        (JobSpec(command="x", timeout=float("nan")), "timeout is nan"),
        (JobSpec(command="x", backoff_base=-2), "backoff_base is -2"),
        (JobSpec(command="x", env={"A=B": "1"}), "A=B"),
        (JobSpec(command="x", after=["a"] * 101), "at most 100"),
        (JobSpec(command="\ud800"), "Unicode"),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_what_to_mend(spec: JobSpec, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        checked(spec)


@pytest.mark.parametrize("value", [object(), "\ud800", 1 << 80])
@pytest.mark.parametrize("encoding", ["", MSGPACK])
def test_what_cannot_be_written_down_is_refused(value: Any, encoding: str) -> None:
    if value == 1 << 80 and not encoding:
        return  # JSON knows any number
    with pytest.raises(InvalidRequest, match="cannot be written down"):
        encode(JobSpec(task="t", args=[value]), encoding)


@pytest.mark.parametrize("payload", [b"", b"null", b"[]", b"{", b'{"comand":"x"}', b"\xff", b'{"env":{"A":1}}'])
def test_a_payload_that_is_no_job_says_so(payload: bytes) -> None:
    for encoding in ("", MSGPACK):
        with pytest.raises(InvalidRequest, match="not a job"):
            decode(payload, encoding)
