"""`millpond job cancel`: jobs by their ids, or all in a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millpond.cli.flags import Arguments
from millpond.cli.output import WRONG_USAGE, agreed, code_of_results, fail, print_json, say
from millpond.cli.pond import on_pond
from millpond.cli.progress import Progress
from millpond.cli.text import counted

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.jobs.view import Job
    from millpond.model import Result

BATCH = 1_000  # ids of one request: the model's TOKEN_BATCH_MAX
NAMED = 20  # jobs that a dry run names


def cancel(asked: Arguments) -> int:
    from millpond.errors import InvalidRequest

    if bool(asked.ids) == (asked.state is not None):
        raise InvalidRequest("name the jobs, or give --state for all in that state; one of the two")
    return on_pond(asked, lambda pond: _cancel(pond, asked))


async def _cancel(pond: Api, asked: Arguments) -> int:
    jobs = await _choose(pond, asked)
    if asked.dry_run:
        return _would(asked, jobs)
    ask = asked.state is not None and jobs and not asked.yes
    if ask and not agreed(f"cancel {counted(len(jobs), f'{asked.state} job')}?"):
        return fail("nothing was cancelled; say --yes", WRONG_USAGE)
    results: list[Result] = []
    with Progress(len(jobs), "cancelled") as progress:
        for queue, some in _batches(jobs):
            results += await pond.cancel(queue, [one.id for one in some])
            progress(len(results))
    return _tell(asked, [one for _, some in _batches(jobs) for one in some], results)


async def _choose(pond: Api, asked: Arguments) -> list[Job]:
    from millpond.cli.list import find
    from millpond.jobs.control import find_job

    if asked.state is None:
        return [await find_job(pond, id, asked.queue) for id in dict.fromkeys(asked.ids)]
    jobs, _ = await find(pond, asked.queue, asked.state, None)
    return jobs


def _batches(jobs: Sequence[Job]) -> list[tuple[str, list[Job]]]:
    by_queue: dict[str, list[Job]] = {}
    for job in jobs:
        by_queue.setdefault(job.queue, []).append(job)
    return [(queue, some[at : at + BATCH]) for queue, some in by_queue.items() for at in range(0, len(some), BATCH)]


def _would(asked: Arguments, jobs: list[Job]) -> int:
    if asked.json:
        print_json({"dry_run": True, "cancelled": [], "would_cancel": [one.id for one in jobs]})
    else:
        print(f"{counted(len(jobs), 'job')} would be cancelled")
        for one in jobs[:NAMED]:
            print(f"{one.id} ({one.state})")
    return 0


def _tell(asked: Arguments, jobs: list[Job], results: list[Result]) -> int:
    both = list(zip(jobs, results, strict=True))
    done = [job for job, result in both if result.error is None]
    errors = {job.id: result.error for job, result in both if result.error is not None}
    if asked.json:
        print_json({"dry_run": False, "cancelled": [one.id for one in done], "errors": errors})
    else:
        for one in done[:NAMED]:
            told = "is told to stop" if one.state == "processing" else "is cancelled"
            say(f"job {one.id} {told}")
        if len(done) > NAMED or not jobs:
            say(f"cancelled {counted(len(done), 'job')}")
    for error in list(errors.values())[:NAMED]:
        say(f"millpond: {error.message}")
    return code_of_results(results)
