"""`millpond list`: the jobs, by state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.cli.flags import Arguments, Subparsers, add_command, whole
from millpond.cli.output import DONE, print_json, print_table, say
from millpond.cli.pond import on_pond, runs_on_pond
from millpond.cli.text import first_line, instant

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.jobs.view import Job

STATES = ("pending", "processing", "completed", "failed", "dead", "cancelled")
LIMIT = 1_000  # rows of a table; --json has them all

EXAMPLES = """\
  millpond list
  millpond list --state dead
  millpond list --state pending --queue reports --limit 20
  millpond list --json | jq '.[] | select(.attempts > 1)'

pending: waits for its time or a worker; processing: runs; failed: waits out its backoff and is tried again; completed,
dead and cancelled: over. Completed ones are kept for a day. The oldest come first.
"""


def add(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "list", "list the jobs", EXAMPLES)
    verb.add_argument("--state", choices=STATES, help="all without")
    verb.add_argument("--queue", help="only those in this queue")
    verb.add_argument("--limit", type=whole(1), metavar="N", help=f"so many at most ({LIMIT:,}; with --json all)")
    runs_on_pond(verb, list_all)


def list_all(asked: Arguments) -> int:
    limit = asked.limit if asked.limit or asked.json else LIMIT
    jobs, more = on_pond(asked, lambda pond: find(pond, asked.queue, asked.state, limit), empty=True)
    if asked.json:
        print_json(jobs)
    elif jobs:
        print_jobs(jobs)
    else:
        say("there are no jobs" if asked.state is None else f"no job is {asked.state}")
    if more and not asked.json:
        say(f"there are more than these {limit:,}; see them with --limit")
    return DONE


async def find(pond: Api, queue: str | None, state: str | None, limit: int | None) -> tuple[list[Job], bool]:
    """At most `limit`, and whether there are more. Without a queue, of all that were made for jobs."""
    from millpond.jobs.control import list_jobs
    from millpond.jobs.queues import is_job_queue, job_queues

    names = [one.name for one in await job_queues(pond) if is_job_queue(one)] if queue is None else [queue]
    jobs: list[Job] = []
    for name in names:
        async for job in list_jobs(pond, name, state):
            if limit is not None and len(jobs) == limit:
                return jobs, True
            jobs.append(job)
    return jobs, False


def print_jobs(jobs: list[Job]) -> None:
    print_table(
        ["ID", "QUEUE", "STATE", "ATTEMPTS", "PRIORITY", "CREATED", "COMMAND", "ERROR"],
        [
            [
                one.id,
                one.queue,
                one.state.value,
                f"{one.attempts}/{one.max_retries or 1}",
                str(one.priority),
                instant(one.created_at),
                first_line(what(one)),
                first_line(one.cause),
            ]
            for one in jobs
        ],
    )


def what(job: Job) -> str:
    return job.command or job.task or "-"
