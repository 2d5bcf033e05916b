"""A schedule that is due: its ticks become jobs, each exactly once, however many workers there are and whatever dies.

A tick is a produce with the key `schedule:NAME:INSTANT`, which the job's queue takes once for as long as its
`dedup_window`. Before it the tick is noted in the schedule's state document. Who leases the schedule after a worker
that died in between produces what was noted again while the key is surely remembered; later on it counts as fired.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from millpond.api import Api
from millpond.errors import Forbidden, LeaseLost, MillpondError, NotFound
from millpond.jobs.enqueue import NewJob, enqueue_many
from millpond.jobs.names import HELD, SCHEDULES_QUEUE
from millpond.jobs.now import by_lease
from millpond.jobs.schedule import Fired, Schedule, next_due, read, read_fired
from millpond.jobs.ticks import missed
from millpond.model import LeasedItem, Retry

SCHEDULE_LEASE = 10.0  # seconds: to fire takes milliseconds
CATCH_UP_MAX = 100  # missed ticks that are fired at once: the newest
GRACE = timedelta(seconds=60)  # a tick that is fired later than this was missed, or when the next one is due too
ERROR_PAUSE = 10.0  # seconds, after a firing that failed

logger = logging.getLogger(__name__)


async def fire(api: Api, item: LeasedItem, now: datetime) -> list[datetime]:
    """Fire what is due of a schedule that was leased for `SCHEDULE_LEASE`, and hand it back until its next tick.

    Returns the ticks. Nobody else may hand it back but as a failure: a schedule that was deferred has been fired.
    """
    now = by_lease(item, now, SCHEDULE_LEASE)
    schedule = read(item.payload, item.kind)
    if schedule is None:
        logger.error("schedule %s cannot be read, and is removed", item.id)
        await api.retry([Retry(lease=item, dead=True, error="not a schedule")], queue=SCHEDULES_QUEUE)
        return []
    try:
        if schedule.paused:  # somebody made it ready by hand
            await _hand_back(api, item, HELD, now, early=False)
            return []
        return await _fire(api, item, schedule, now)
    except asyncio.CancelledError:
        await api.retry([Retry(lease=item, delay=0)], queue=SCHEDULES_QUEUE)
        raise
    except LeaseLost:
        return []  # another worker has it
    except MillpondError as error:
        logger.warning("schedule %s could not be fired: %s", schedule.name, error.message)
        failed = Retry(lease=item, delay=ERROR_PAUSE, error=error.message)
        await api.retry([failed], queue=SCHEDULES_QUEUE)
        return []


async def _fire(api: Api, item: LeasedItem, schedule: Schedule, now: datetime) -> list[datetime]:
    noted = read_fired(item.state_doc) or Fired(ticks=[], at=now, attempts=item.attempts)
    again: list[datetime] = []
    unsure = item.attempts > noted.attempts
    if unsure and await _is_remembered(api, schedule, noted, now):
        again = noted.ticks
        await _produce(api, schedule, again)
    last = max([schedule.last, *noted.ticks])
    fresh = due_ticks(schedule, last, now)
    if fresh:
        noted = Fired(ticks=fresh, at=now, attempts=item.attempts)
    if fresh or unsure:
        noted.attempts = item.attempts
        if not await _note(api, item, noted):
            return again
    await _produce(api, schedule, fresh)
    await _hand_back(api, item, next_due(schedule, max(last, now)), now, early=not fresh and not again)
    return again + fresh


async def _hand_back(api: Api, item: LeasedItem, due: datetime, now: datetime, *, early: bool) -> None:
    """One that came too early goes by the time that is left: the clock here is behind the server's."""
    back = Retry(lease=item, intent="defer")
    if early:
        back.delay = due - now
    else:
        back.retry_at = due
    await api.retry([back], queue=SCHEDULES_QUEUE)


async def _is_remembered(api: Api, schedule: Schedule, noted: Fired, now: datetime) -> bool:
    """Whether the keys of these ticks, if they were fired, are surely still taken: half the time, as clocks differ."""
    try:
        window = (await api.queue_info(schedule.queue)).dedup_window
    except (Forbidden, NotFound):
        return False
    return now - noted.at < timedelta(seconds=window / 2)


def due_ticks(schedule: Schedule, last: datetime, now: datetime) -> list[datetime]:
    """What is to be fired of the ticks after `last`, by the schedule's way with missed ones."""
    if schedule.missed == "skip":
        last = max(last, now - GRACE)
    limit = CATCH_UP_MAX if schedule.missed == "all" else 1
    found, more = missed(schedule.ticks(), last, now, limit)
    if more and schedule.missed == "all":
        logger.warning("schedule %s missed more than %d ticks; the newest %d are fired", schedule.name, limit, limit)
    return found


async def _note(api: Api, item: LeasedItem, fired: Fired) -> bool:
    """False: the schedule was removed, and ends with this."""
    document = msgspec.to_builtins(fired)
    written = await api.write_state(item, document, version=item.state_version, queue=SCHEDULES_QUEUE)
    if written.cancelled:
        await api.retry([Retry(lease=item, intent="defer")], queue=SCHEDULES_QUEUE)
    return not written.cancelled


async def _produce(api: Api, schedule: Schedule, ticks: list[datetime]) -> None:
    """All or none."""
    if not ticks:
        return
    jobs = [
        NewJob(
            spec=replace(schedule.spec, schedule=schedule.name, due=instant(tick)),
            key=tick_key(schedule.name, tick),
            priority=schedule.priority,
            max_retries=schedule.max_retries,
        )
        for tick in ticks
    ]
    await enqueue_many(api, schedule.queue, jobs)


def tick_key(name: str, tick: datetime) -> str:
    return f"schedule:{name}:{instant(tick)}"


def instant(tick: datetime) -> str:
    return tick.isoformat(timespec="milliseconds").replace("+00:00", "Z")
