"""Schedules that an app declares in its code: a worker of the app sees to it that they are there.

What was declared and has changed replaces the schedule of that name; what is as it was keeps its beat, its missed ticks
and its pause. One that is declared no longer stays until it is removed (`millpond schedule remove`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from millpond.api import Api
from millpond.durations import checked_seconds
from millpond.errors import Forbidden, InvalidRequest, MillpondError, NotFound
from millpond.jobs import schedules
from millpond.jobs.schedule import Missed, Schedule
from millpond.jobs.spec import JobSpec, decode, encode
from millpond.model import Duration
from millpond.tasks.policy import Policy

if TYPE_CHECKING:
    from millpond.tasks.task import Task

log = logging.getLogger("millpond.tasks")
SOME_DAY: Final = datetime(2024, 1, 1, tzinfo=UTC)  # to look at a schedule's ticks


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """As checked."""

    name: str
    spec: JobSpec
    cron: str | None
    every: float | None
    timezone: str
    missed: Missed
    queue: str
    priority: int
    max_retries: int | None

    def made(self, now: datetime) -> Schedule:
        fields = {field: getattr(self, field) for field in self.__struct_fields__}
        return Schedule(**fields, created_at=now, last=now)

    def is_in(self, there: Schedule) -> bool:
        return all(getattr(there, field) == getattr(self, field) for field in self.__struct_fields__)


def declared(
    name: str,
    task: Task[Any, Any, Any, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cron: str | None,
    every: Duration | None,
    timezone: str,
    missed: Missed,
) -> Declared:
    """Checked at once, where it is declared."""
    policy = getattr(task, "policy", None)
    if not isinstance(policy, Policy):
        raise InvalidRequest(f"schedule {name!r:.60} is to enqueue a {type(task).__name__}; register it with @app.task")
    if policy.encoding:
        raise InvalidRequest(f"task {task.name} has another encoding than JSON, but a schedule is JSON; leave it out")
    task.arguments.check(args, kwargs, policy.encoding)
    found = Declared(
        name=name, spec=decode(encode(policy.spec(args, dict(kwargs)))), cron=cron,
        every=None if every is None else checked_seconds(every, "every"), timezone=timezone, missed=missed,
        queue=policy.queue, priority=policy.priority, max_retries=policy.max_attempts,
    )  # fmt: skip
    schedules.check(found.made(SOME_DAY))
    return found


async def declare(api: Api, wanted: Iterable[Declared], now: datetime) -> None:
    """Those that are not there, or otherwise. Where the token does not allow it, others have to."""
    for one in wanted:
        try:
            await _declare(api, one, now)
        except Forbidden as error:
            log.info("schedule %s is left as it is, for this token may not: %s", one.name, error.message)
        except MillpondError as error:
            log.warning("schedule %s could not be declared: %s", one.name, error.message)


async def _declare(api: Api, wanted: Declared, now: datetime) -> None:
    try:
        if wanted.is_in((await schedules.get(api, wanted.name)).schedule):
            return
    except NotFound:
        pass
    await schedules.add(
        api, wanted.name, wanted.spec, now, cron=wanted.cron, every=wanted.every, timezone=wanted.timezone,
        queue=wanted.queue, priority=wanted.priority, max_retries=wanted.max_retries, missed=wanted.missed,
        on_conflict="replace",
    )  # fmt: skip
