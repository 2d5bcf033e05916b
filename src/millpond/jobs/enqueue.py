"""From a job to an item in its queue.

The queue's settings of the moment are stamped onto a job that does not say otherwise, so that a later change does not
touch it. A job that waits for others (`after`) goes by `held.hold`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from millpond.api import Api
from millpond.errors import NotFound
from millpond.jobs import held
from millpond.jobs.names import BACKOFF_CAP
from millpond.jobs.queues import JobSettings, ensure_queue, refuse_own, settings_of, whole
from millpond.jobs.spec import IfDead, JobSpec, checked, encode
from millpond.model import PRODUCE_BATCH_MAX, Duration, NewItem, OnConflict, Produced


class NewJob(msgspec.Struct, kw_only=True):
    """A job to be enqueued: its spec, and what is said of its item. `delay` and `run_at` exclude each other.

    `max_retries` counts all executions; 0 means one; None is the queue's.
    """

    spec: JobSpec
    id: str | None = None
    key: str | None = None
    priority: int = 0
    delay: Duration | None = None
    run_at: datetime | None = None
    max_retries: int | None = None
    expire_timeout: Duration | None = None
    correlation_id: str | None = None
    encoding: str = ""


async def enqueue(
    api: Api,
    queue: str,
    spec: JobSpec,
    *,
    id: str | None = None,
    key: str | None = None,
    priority: int = 0,
    delay: Duration | None = None,
    run_at: datetime | None = None,
    max_retries: int | None = None,
    after: Sequence[str] = (),
    if_dead: IfDead | None = None,
    correlation_id: str | None = None,
    expire_timeout: Duration | None = None,
    encoding: str = "",
    on_conflict: OnConflict = "ignore",
    settings: JobSettings | None = None,
) -> Produced:
    """One job. `settings` spares a look at the queue, by who has looked before."""
    if after or if_dead:
        spec = replace(spec, after=[*spec.after, *after], if_dead=if_dead or spec.if_dead)
    job = NewJob(
        spec=spec, id=id, key=key, priority=priority, delay=delay, run_at=run_at, max_retries=max_retries,
        expire_timeout=expire_timeout, correlation_id=correlation_id, encoding=encoding,
    )  # fmt: skip
    [produced] = await enqueue_many(api, queue, [job], on_conflict=on_conflict, settings=settings)
    return produced


async def enqueue_many(
    api: Api,
    queue: str,
    jobs: Sequence[NewJob],
    *,
    on_conflict: OnConflict = "ignore",
    settings: JobSettings | None = None,
) -> list[Produced]:
    """In order. Up to 1,000 jobs that wait for no other are enqueued all or none; those that do, one by one after."""
    refuse_own(queue)
    for job in jobs:
        checked(job.spec)
    if settings is None:
        info = await ensure_queue(api, queue)
        settings = None if info is None else settings_of(info)
    items = [new_item(job, settings) for job in jobs]
    free = [place for place, job in enumerate(jobs) if not job.spec.after]
    produced: dict[int, Produced] = {}
    for start in range(0, len(free), PRODUCE_BATCH_MAX):
        places = free[start : start + PRODUCE_BATCH_MAX]
        replies = await _produce(api, queue, [items[place] for place in places], on_conflict)
        produced |= dict(zip(places, replies, strict=True))
    for place, job in enumerate(jobs):
        if job.spec.after:
            produced[place] = await held.hold(api, queue, items[place], job.spec, on_conflict)
    return [produced[place] for place in range(len(jobs))]


async def _produce(api: Api, queue: str, items: list[NewItem], on_conflict: OnConflict) -> Sequence[Produced]:
    try:
        return await api.produce(queue, items, on_conflict=on_conflict)
    except NotFound:  # `settings` were of a queue that has gone, or it may not be looked at
        if await ensure_queue(api, queue) is None:
            raise
        return await api.produce(queue, items, on_conflict=on_conflict)


def new_item(job: NewJob, settings: JobSettings | None) -> NewItem:
    """The item of a job whose spec was checked."""
    spec = job.spec
    limit = None if job.max_retries is None else whole(job.max_retries, "max_retries")
    if limit is None and settings is not None:
        limit = settings.max_retries
    return NewItem(
        payload=encode(_stamped(spec, limit, settings), job.encoding),
        id=job.id,
        key=job.key,
        kind=spec.kind,
        encoding=job.encoding,
        reference=spec.task or "",
        priority=job.priority,
        delay=job.delay,
        enqueue_at=job.run_at,
        max_attempts=None if limit is None else max(1, limit),
        expire_timeout=job.expire_timeout,
        correlation_id=job.correlation_id,
    )


def _stamped(spec: JobSpec, limit: int | None, settings: JobSettings | None) -> JobSpec:
    changes: dict[str, Any] = {}
    if limit == 0:
        changes["max_retries"] = 0
    if settings is not None and spec.backoff_base is None:
        changes["backoff_base"] = settings.backoff_base
        if spec.backoff_cap is None and settings.backoff_cap != BACKOFF_CAP:
            changes["backoff_cap"] = settings.backoff_cap
        if spec.backoff_jitter is None and settings.backoff_jitter:
            changes["backoff_jitter"] = settings.backoff_jitter
    return replace(spec, **changes) if changes else spec
