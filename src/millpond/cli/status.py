"""`millpond status`: how many jobs there are in each state, who works on them, and what else is in the queues."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments, Subparsers, add_command
from millpond.cli.output import DONE, print_json, print_table
from millpond.cli.pond import on_pond, runs_on_pond
from millpond.cli.text import counted, span

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.jobs.workers import WorkerInfo

EXAMPLES = """\
  millpond status
  millpond status --json | jq .counts.dead
  millpond status --queue reports
  watch millpond status

A worker is a process that runs as many jobs at a time as it has slots: `worker start --count 3` is one with 3 of them.
Active ones are alive, also while they drain; `lost` is one that was killed.
"""


def add(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "status", "how many jobs there are, and who works on them", EXAMPLES)
    verb.add_argument("--queue", help="only the jobs in this queue")
    runs_on_pond(verb, status)


def status(asked: Arguments) -> int:
    found = on_pond(asked, lambda pond: _look(pond, asked), empty=True)
    if asked.json:
        import msgspec

        workers = found["workers"]
        told = None if workers is None else [msgspec.structs.asdict(one) for one in workers]
        print_json(found | {"workers": told})
        return DONE
    print_table(["STATE", "JOBS"], [[state, f"{count:,}"] for state, count in found["counts"].items()])
    print()
    _print_workers(found["workers"])
    if found["queues"]:
        print()
        states = list(found["counts"])
        print_table(
            ["QUEUE", *map(str.upper, states), "STATUS"],
            [
                [one["name"], *(f"{one['counts'][state]:,}" for state in states), "paused" if one["paused"] else "-"]
                for one in found["queues"]
            ],
        )
    return DONE


async def _look(pond: Api, asked: Arguments) -> dict[str, Any]:
    """Queues that are not of jobs are shown, and not counted as such."""
    from millpond.jobs.control import job_counts
    from millpond.jobs.queues import is_job_queue, job_queues
    from millpond.jobs.view import JobState

    infos = await job_queues(pond) if asked.queue is None else [await pond.queue_info(asked.queue)]
    queues: list[dict[str, Any]] = []
    totals = {state.value: 0 for state in JobState}
    for info in infos:
        counts = {state.value: count for state, count in (await job_counts(pond, info.name)).items()}
        jobs = asked.queue is not None or is_job_queue(info)
        queues.append({"name": info.name, "jobs": jobs, "paused": info.paused, "counts": counts})
        if jobs:
            totals = {state: totals[state] + count for state, count in counts.items()}
    workers = await _workers(pond, asked.queue)
    active = None if workers is None else [one for one in workers if one.active]
    told = {
        "active_workers": None if active is None else len(active),
        "active_slots": None if active is None else sum(one.slots for one in active),
    }
    return {"counts": totals, **told, "workers": workers, "queues": queues}


async def _workers(pond: Api, queue: str | None) -> list[WorkerInfo] | None:
    """None: this token may not look at them."""
    from millpond.errors import Forbidden
    from millpond.jobs.workers import list_workers

    try:
        found = await list_workers(pond)
    except Forbidden:
        return None
    return found if queue is None else [one for one in found if queue in one.queues]


def _print_workers(workers: list[WorkerInfo] | None) -> None:
    if workers is None:
        print("workers are not shown: this token may not look at them")
        return
    active = [one for one in workers if one.active]
    if active:
        slots, running = sum(one.slots for one in active), sum(one.running_count for one in active)
        print(f"{counted(slots, 'slot')} in {counted(len(active), 'active worker')}, {running:,} running")
    else:
        print("no worker is running; start one with `millpond worker start --count 3`")
    if not workers:
        return
    now = datetime.now(UTC)
    print_table(
        ["WORKER", "HOST", "PID", "SLOTS", "RUNNING", "QUEUES", "STATUS", "UP"],
        [
            [
                one.incarnation,
                one.host,
                str(one.pid),
                str(one.slots),
                str(one.running_count),
                ", ".join(one.queues),
                one.status,
                span(max(0.0, (now - one.started_at).total_seconds())),
            ]
            for one in workers
        ],
    )
