"""What people do with jobs: find, list, cancel, retry and release them, and wait for their end."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from millpond.api import Api
from millpond.errors import Forbidden, NotFound, made
from millpond.jobs.held import look
from millpond.jobs.names import JOBS_QUEUE, KINDS
from millpond.jobs.queues import job_queues
from millpond.jobs.view import ITEM_STATES, Job, JobState, job_of
from millpond.model import ENDED, LIST_LIMIT_MAX, Item, Result, State

WAIT_SLICE = 300.0  # seconds of one parked call, of those that wait for longer

_DERIVED = re.compile(r"([a-z0-9]{1,32})-\d{1,5}-\d{1,14}")  # an id that a queue has assigned


# ---- find and list ----------------------------------------------------------------------------------------


async def find_job(api: Api, id: str, queue: str | None = None) -> Job:
    found, item = await find_item(api, id, queue)
    return job_of(item, found)


async def find_item(api: Api, id: str, queue: str | None = None) -> tuple[str, Item]:
    """A job by its id, in that queue or in all; the name of the queue comes with it."""
    if queue is not None:
        names = [queue]
    elif "/" in id:  # as `after` writes it
        there, _, id = id.rpartition("/")
        names = [there]
    else:
        names = await _queues_of(api, id)
    for name in names:
        item = await look(api, name, id)
        if item is not None:
            return name, item
    where = f"in queue {names[0]!r}" if len(names) == 1 else f"in any of {len(names)} queues"
    raise NotFound(f"there is no job {id!r:.140} {where}; it may have ended and been forgotten", id=id)


async def _queues_of(api: Api, id: str) -> list[str]:
    """Where to look for it, the likely ones first. An assigned id tells its queue."""
    try:
        queues = await job_queues(api)
    except Forbidden:
        return [JOBS_QUEUE]  # a look there says whether it may be looked at
    assigned = _DERIVED.fullmatch(id)
    if assigned:
        queues.sort(key=lambda info: info.incarnation != assigned[1])
    return [info.name for info in queues] or [JOBS_QUEUE]


async def list_jobs(api: Api, queue: str = JOBS_QUEUE, state: str | None = None) -> AsyncIterator[Job]:
    """The jobs of a queue as they were produced; of the states of items behind one of jobs, one after the other."""
    states: tuple[State | None, ...] = (None,) if state is None else ITEM_STATES[JobState(state)]
    for one in states:
        after: str | None = None
        while True:
            page = await api.list_items(queue, state=one, after=after, limit=LIST_LIMIT_MAX)
            for item in page.items:
                if item.kind in KINDS:
                    yield job_of(item, queue)
            after = page.next
            if after is None:
                break


async def job_counts(api: Api, queue: str = JOBS_QUEUE) -> dict[JobState, int]:
    """How many there are in each state; of all items of the queue."""
    counts = (await api.stats(queue)).counts
    return {state: sum(counts.get(one, 0) for one in states) for state, states in ITEM_STATES.items()}


# ---- change -----------------------------------------------------------------------------------------------


async def cancel(api: Api, queue: str, id: str) -> None:
    """For good. One that runs is told, and ends as cancelled; one that has ended is a Conflict."""
    [result] = await api.cancel(queue, [id])
    _check(result)


async def retry_dead(api: Api, queue: str, id: str) -> None:
    """A dead job runs again, with all its attempts before it. `held.look_again` tells those that are held for it."""
    redriven = await api.redrive(queue, ids=[id])
    if redriven.errors:
        [error] = redriven.errors.values()
        raise made(error.code, error.message)


async def release(api: Api, queue: str, id: str) -> None:
    """A job that waits, for an instant, a backoff or other jobs, runs as soon as a worker is free."""
    [result] = await api.make_ready(queue, [id])
    _check(result)


def _check(result: Result) -> None:
    if result.error is not None:
        raise made(result.error.code, result.error.message)


# ---- wait -------------------------------------------------------------------------------------------------


async def wait_for_end(api: Api, queue: str, id: str, wait: float | None = None) -> Item:
    """The item as it ended, or as it is after `wait` seconds (None: for ever). Nothing is polled."""
    left = wait
    while True:
        now = WAIT_SLICE if left is None else min(left, WAIT_SLICE)
        item = await api.get_item(queue, id, wait=now)
        if item.state in ENDED:
            return item
        if left is not None:
            left -= now
            if left <= 0:
                return item
