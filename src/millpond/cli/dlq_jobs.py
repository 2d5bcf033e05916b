"""`millpond dlq` for jobs, as QueueCTL has it: list, show and retry without a word about queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments
from millpond.cli.output import DONE, agreed_code, code_of, print_json, say
from millpond.cli.pond import on_pond
from millpond.cli.progress import Progress
from millpond.cli.text import counted

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.jobs.view import Job

NAMED = 5  # other queues with dead items


def list_dead(asked: Arguments, limit: int | None) -> int:
    from millpond.cli.list import print_jobs

    jobs, more, others = on_pond(asked, lambda pond: _look(pond, asked, limit), empty=True)
    if asked.json:
        print_json(jobs)
        return DONE
    if jobs:
        print_jobs(jobs)
    else:
        say("no job is dead")
    if more:
        say("there are more; see them with --limit")
    for name, count in list(others.items())[:NAMED]:
        say(f"{counted(count, 'dead item')} in {name}: `millpond dlq list {name}`")
    if len(others) > NAMED:
        say(f"{len(others) - NAMED:,} more queues have dead items: `millpond dlq list --queues`")
    return DONE


async def _look(pond: Api, asked: Arguments, limit: int | None) -> tuple[list[Job], bool, dict[str, int]]:
    """The dead jobs, whether there are more, and how many are dead in queues that are not of jobs."""
    from millpond.cli.list import find
    from millpond.jobs.queues import is_job_queue, job_queues

    jobs, more = await find(pond, asked.jobs_queue, "dead", limit)
    others: dict[str, int] = {}
    if asked.jobs_queue is None and not asked.json:
        for info in await job_queues(pond):
            stats = await pond.stats(info.name)
            letters = stats.totals.get("letters", 0) > 0
            count = sum(stats.counts.values()) if letters else stats.counts.get("dead", 0)
            if count and not is_job_queue(info):
                others[info.name] = count
    return jobs, more, others


def show(asked: Arguments) -> int:
    from millpond.cli.job import show as show_job

    asked.queue = asked.jobs_queue
    on_pond(asked, lambda pond: _find_dead(pond, asked.id, asked.jobs_queue))
    return show_job(asked)


async def _find_dead(pond: Api, id: str, queue: str | None) -> Job:
    from millpond.errors import Conflict
    from millpond.jobs.control import find_job

    job = await find_job(pond, id, queue)
    if job.state != "dead":
        raise Conflict(f"job {job.id!r} is {job.state}, not dead; see `millpond job show {job.id}`")
    return job


# ---- retry --------------------------------------------------------------------------------------------------------


def retry(asked: Arguments) -> int:
    from millpond.errors import InvalidRequest

    if bool(asked.ids) == asked.all:
        raise InvalidRequest("name the jobs, or give --all for all that are dead; one of the two")
    return on_pond(asked, lambda pond: _retry(pond, asked), listen=asked.all)


async def _retry(pond: Api, asked: Arguments) -> int:
    """Each by itself: one that cannot go back does not hold up the others."""
    from millpond.cli.list import find
    from millpond.errors import MillpondError
    from millpond.jobs.held import look_again

    ids: list[tuple[str, str | None]] = [(id, asked.jobs_queue) for id in dict.fromkeys(asked.ids)]
    if asked.all:
        jobs, _ = await find(pond, asked.jobs_queue, "dead", None)
        ids = [(job.id, job.queue) for job in jobs]
    done: list[dict[str, Any]] = []
    codes: set[int] = set()
    with Progress(len(ids), "retried") as progress:
        for number, (id, queue) in enumerate(ids, 1):
            try:
                done.append(await _retry_one(pond, id, queue))
            except MillpondError as error:
                say(f"millpond: {error.message}")
                codes.add(code_of(error))
            progress(number)
    if done:
        await look_again(pond, {(one["queue"], one["id"]) for one in done})
    if asked.json:
        print_json(done)
    elif asked.all:
        say(f"{counted(len(done), 'dead job')} pending again")
    else:
        for one in done:
            say(f"job {one['id']} is pending again")
    return agreed_code(codes)


async def _retry_one(pond: Api, id: str, queue: str | None) -> dict[str, Any]:
    from millpond.jobs.control import retry_dead

    job = await _find_dead(pond, id, queue)
    await retry_dead(pond, job.queue, job.id)
    return {"id": job.id, "queue": job.queue, "state": "pending", "attempts": 0}
