"""Where an app's tasks run in a worker: async ones on a loop of their own, plain ones in threads or in processes."""

from __future__ import annotations

from typing import Literal, get_args

from millpond.api import Api
from millpond.errors import InvalidRequest
from millpond.tasks.calling import Found
from millpond.tasks.connection import Where
from millpond.tasks.looping import LoopPool
from millpond.tasks.processes import ProcessPool
from millpond.tasks.threads import ThreadPool
from millpond.worker.executors import Executor

Pool = Literal["threads", "processes"]


def executors(
    app: Found,
    api: Api,
    *,
    slots: int,
    pool: Pool = "threads",
    place: str | None = None,
    where: Where | None = None,
    process_jobs_max: int | None = None,
    process_rss_max: int | None = None,
) -> list[Executor]:
    """For a `Worker` on `api`. Processes load the app by its `place` ("MODULE:APP"), and enqueue by `where`.

    `where` is what the worker itself works on: its data directory, or its server and token. None is the app's own.
    `process_jobs_max`: a process is replaced after so many jobs; `process_rss_max`: after the job that left it with
    more than so many bytes of memory.
    """
    if pool not in get_args(Pool):
        raise InvalidRequest(f"pool is {pool!r:.60}; use threads or processes")
    found: list[Executor] = [LoopPool(app, api, slots)]
    if pool == "threads":
        return [*found, ThreadPool(app, api, slots)]
    if place is None:
        raise InvalidRequest("a pool of processes must be told where the app is; give MODULE:APP")
    limits = process_jobs_max, process_rss_max
    return [*found, ProcessPool(app, api, slots, place, where or app.connection.where, *limits)]
