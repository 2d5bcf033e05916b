"""Schedules: jobs that are enqueued again and again, by a cron line or an interval.

A schedule is one item of `SCHEDULES_QUEUE`, by its name, that is due at its next tick; `firing.py` is what comes then.
A paused one is never due. What changes a schedule replaces its item.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Literal

import msgspec
from msgspec.structs import replace

from millpond.api import Api
from millpond.durations import checked_seconds
from millpond.errors import Conflict, InvalidRequest, KeyConflict, NotFound
from millpond.jobs.firing import fire as fire  # for workers
from millpond.jobs.names import FOR_EVER, HELD, JOBS_QUEUE, SCHEDULES_QUEUE
from millpond.jobs.queues import ensure_queue, refuse_own
from millpond.jobs.schedule import Missed, Schedule, Scheduled, next_due, read, read_fired
from millpond.jobs.spec import JobSpec, checked
from millpond.jobs.ticks import zone
from millpond.model import ENDED, LIST_LIMIT_MAX, Duration, Item, NewItem, State

REPLACE_TRIES = 150  # while a worker fires it: a lease of one that died ends in 10 s
REPLACE_PAUSE = 0.1  # seconds

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


# ---- add, change and remove -------------------------------------------------------------------------------


async def add(
    api: Api,
    name: str,
    spec: JobSpec,
    now: datetime,
    *,
    cron: str | None = None,
    every: Duration | None = None,
    timezone: str = "UTC",
    queue: str = JOBS_QUEUE,
    priority: int = 0,
    max_retries: int | None = None,
    missed: Missed = "latest",
    start: datetime | None = None,
    on_conflict: Literal["reject", "replace"] = "reject",
) -> Scheduled:
    """Ticks count from now on; those of an interval from `start`, or one interval from now."""
    seconds = None if every is None else checked_seconds(every, "every")
    schedule = Schedule(
        name=name, cron=cron, every=seconds, timezone=timezone, queue=queue, spec=checked(spec), priority=priority,
        max_retries=max_retries, missed=missed, start=start, created_at=now, last=now,
    )  # fmt: skip
    check(schedule)
    if start is not None:
        schedule.last = max(now, start - timedelta(microseconds=1))
    due = next_due(schedule, schedule.last)
    await ensure_queue(api, SCHEDULES_QUEUE)
    await ensure_queue(api, queue)
    if on_conflict == "replace":
        await _replace(api, schedule, due)
    else:
        await _add_new(api, schedule, due)
    return Scheduled(schedule=schedule, next_at=due)


def check(schedule: Schedule) -> None:
    """InvalidRequest, if it could never be fired."""
    name = schedule.name
    for field in ("name", "cron", "timezone"):
        given: object = getattr(schedule, field)
        if not (isinstance(given, str) or (field == "cron" and given is None)):
            raise InvalidRequest(f"{field} of a schedule is a {type(given).__name__}; give a text")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{name!r:.60} is no name for a schedule; use up to 100 letters, digits and '._-'")
    if (schedule.cron is None) == (schedule.every is None):
        raise InvalidRequest("a schedule has a cron line or an interval; give one of them")
    refuse_own(schedule.queue)
    zone(schedule.timezone)
    if schedule.missed not in ("skip", "latest", "all"):
        raise InvalidRequest(f"missed is {schedule.missed!r:.60}; use 'skip', 'latest' or 'all'")
    if schedule.spec.after:
        raise InvalidRequest("a job on a schedule waits for no other; leave `after` out")
    if schedule.start is not None and schedule.start.tzinfo is None:
        raise InvalidRequest(f"start is {schedule.start}, which names no time zone; add one, such as 'Z'")
    schedule.ticks()


async def pause(api: Api, name: str) -> Scheduled:
    """It is not fired until it is resumed; the ticks in between are not missed ones."""

    def paused(seen: Scheduled) -> Scheduled:
        schedule = replace(seen.schedule, paused=True, fired=seen.fired_at)
        return Scheduled(schedule=schedule, next_at=None, fired_at=seen.fired_at)

    return await _change(api, name, paused)


async def resume(api: Api, name: str, now: datetime) -> Scheduled:
    """Ticks count from now on. Of one that is not paused nothing changes."""

    def resumed(seen: Scheduled) -> Scheduled:
        if not seen.schedule.paused:
            return seen
        schedule = replace(seen.schedule, paused=False, last=max(now, seen.schedule.last))
        return Scheduled(schedule=schedule, next_at=next_due(schedule, schedule.last), fired_at=seen.fired_at)

    return await _change(api, name, resumed)


async def remove(api: Api, name: str) -> None:
    """Jobs that it has enqueued stay."""
    try:
        [result] = await api.cancel(SCHEDULES_QUEUE, [name])
    except NotFound:
        raise _no_schedule(name) from None
    if result.error is not None:
        raise _no_schedule(name)


# ---- look -------------------------------------------------------------------------------------------------


async def get(api: Api, name: str) -> Scheduled:
    try:
        found = _scheduled(await api.get_item(SCHEDULES_QUEUE, name))
    except NotFound:
        raise _no_schedule(name) from None
    if found is None:
        raise _no_schedule(name)
    return found


async def list_schedules(api: Api) -> list[Scheduled]:
    """By name."""
    found: list[Scheduled] = []
    after: str | None = None
    while True:
        try:
            page = await api.list_items(SCHEDULES_QUEUE, after=after, limit=LIST_LIMIT_MAX)
        except NotFound:  # there never was one
            return []
        found += [one for item in page.items if (one := _scheduled(item)) is not None]
        after = page.next
        if after is None:
            return sorted(found, key=lambda one: one.schedule.name)


def _scheduled(item: Item) -> Scheduled | None:
    schedule = read(item.payload, item.kind)
    if schedule is None or item.state in ENDED or item.cancel_asked:
        return None
    fired = read_fired(item.state_doc)
    newest = fired.ticks[-1] if fired is not None and fired.ticks else schedule.fired
    due = item.enqueue_at
    if due is None:  # a worker is at it, or nobody is
        due = next_due(schedule, newest or schedule.last)
    error = item.last_error if item.state == State.RETRYING else None
    return Scheduled(schedule=schedule, next_at=None if schedule.paused else due, fired_at=newest, error=error)


def _no_schedule(name: str) -> NotFound:
    return NotFound(f"there is no schedule {name!r:.60}; `millpond schedule list` shows those there are")


# ---- items ------------------------------------------------------------------------------------------------


def _item(schedule: Schedule, due: datetime) -> NewItem:
    return NewItem(
        payload=msgspec.json.encode(schedule),
        id=schedule.name,
        kind=schedule.spec.kind,
        reference=schedule.queue,
        enqueue_at=due,
        max_attempts=0,
        expire_timeout=FOR_EVER,
    )


async def _add_new(api: Api, schedule: Schedule, due: datetime) -> None:
    try:
        await api.produce(SCHEDULES_QUEUE, [_item(schedule, due)], on_conflict="reject")
    except KeyConflict:
        try:
            await get(api, schedule.name)
        except NotFound:  # it was removed lately, and its name is remembered for some minutes
            await _replace(api, schedule, due)
            return
        raise KeyConflict(f"there is a schedule {schedule.name!r}; remove it first, or replace it") from None


async def _change(api: Api, name: str, change: Callable[[Scheduled], Scheduled]) -> Scheduled:
    """Looks at it before each try: it may have been fired meanwhile, or removed."""
    for _ in range(REPLACE_TRIES):
        seen = await get(api, name)
        changed = change(seen)
        if changed is seen or await _put(api, changed.schedule, changed.next_at or HELD):
            return changed
        await asyncio.sleep(REPLACE_PAUSE)
    raise _always_fired(name)


async def _replace(api: Api, schedule: Schedule, due: datetime) -> None:
    """Waits while a worker fires it: that takes no time, unless the worker has died."""
    for _ in range(REPLACE_TRIES):
        if await _put(api, schedule, due):
            return
        await asyncio.sleep(REPLACE_PAUSE)
    raise _always_fired(schedule.name)


async def _put(api: Api, schedule: Schedule, due: datetime) -> bool:
    """In the place of the one that is there. False: a worker is firing that."""
    try:
        await api.produce(SCHEDULES_QUEUE, [_item(schedule, due)], on_conflict="replace")
    except KeyConflict:
        return False
    return True


def _always_fired(name: str) -> Conflict:
    return Conflict(f"schedule {name!r} is being fired all the time; try again later")
