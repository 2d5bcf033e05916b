"""Queues that hold jobs: made with their defaults when they are first needed, and what they say of new jobs."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.api import Api
from millpond.errors import Forbidden, InvalidRequest, NotFound, QueueExists
from millpond.jobs.names import (
    BACKOFF_BASE,
    BACKOFF_CAP,
    JOB_QUEUE,
    JOBS_QUEUE,
    MAX_RETRIES,
    POLL_INTERVAL,
    SYSTEM_PREFIX,
    SYSTEM_QUEUES,
)
from millpond.model import ATTEMPTS_LIMIT, QueueInfo

QUEUES_MAX = 1_000  # that are looked at for a job by its id alone
BASE_MAX = 1_000.0  # the engine's limit


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue gives to a job that does not say otherwise. `max_retries` None: the queue has no limit."""

    max_retries: int | None = MAX_RETRIES
    backoff_base: float = BACKOFF_BASE
    backoff_cap: float = BACKOFF_CAP
    backoff_jitter: float = 0.0
    poll_interval: float = POLL_INTERVAL


class _Note(msgspec.Struct, omit_defaults=True):
    """What a queue of jobs has in its `reference`: that it is one, and what the engine has no setting for."""

    jobs: bool = False
    poll_interval: float = POLL_INTERVAL
    max_retries: int | None = None  # where it was given as 0, which the engine would take for no limit


def _note(info: QueueInfo) -> _Note:
    """A reference that somebody else wrote says nothing."""
    try:
        return msgspec.json.decode(info.reference, type=_Note)
    except msgspec.DecodeError:
        return _Note()


def _written(note: _Note) -> str:
    return msgspec.json.encode(note).decode()


def refuse_own(queue: str) -> None:
    """Queues of our own hold no jobs: who worked on them as such would break schedules and links."""
    if str(queue).startswith(SYSTEM_PREFIX):
        raise InvalidRequest(f"queue {queue!r:.60} is one of millpond's own, which holds no jobs; name another")


# ---- made when needed -------------------------------------------------------------------------------------


async def ensure_queue(api: Api, name: str = JOBS_QUEUE) -> QueueInfo | None:
    """The queue, made with the defaults of its use if there is none. None: it may not be looked at, so it is there."""
    try:
        return await api.queue_info(name)
    except Forbidden:
        return None
    except NotFound:
        pass
    try:
        return await api.create_queue(name, **(SYSTEM_QUEUES.get(name) or for_jobs()))
    except QueueExists:
        return await api.queue_info(name)
    except Forbidden:
        how = f"an admin makes it with `millpond queue create {name} --jobs`"
        raise NotFound(f"there is no queue {name!r}, and this token may not create it; {how}") from None


def for_jobs() -> dict[str, Any]:
    """What a queue is created with that holds jobs."""
    return {**JOB_QUEUE, "reference": _written(_Note(jobs=True))}


async def job_queues(api: Api) -> list[QueueInfo]:
    """All queues but our own, those first that were made for jobs."""
    found: list[QueueInfo] = []
    after = ""
    while len(found) < QUEUES_MAX:
        page = await api.list_queues(after=after, limit=100)
        found += [info for info in page.queues if not info.name.startswith(SYSTEM_PREFIX)]
        if page.next is None:
            break
        after = page.next
    return sorted(found, key=lambda info: (info.name != JOBS_QUEUE, not is_job_queue(info), info.name))


def is_job_queue(info: QueueInfo) -> bool:
    return info.name == JOBS_QUEUE or _note(info).jobs


# ---- settings ---------------------------------------------------------------------------------------------


def settings_of(info: QueueInfo) -> JobSettings:
    note = _note(info)
    limit: int | None = info.max_attempts or None
    return JobSettings(
        max_retries=0 if note.max_retries == 0 and limit == 1 else limit,
        backoff_base=info.backoff["base"],
        backoff_cap=info.backoff["cap"],
        backoff_jitter=info.backoff["jitter"],
        poll_interval=note.poll_interval,
    )


async def job_settings(api: Api, queue: str = JOBS_QUEUE) -> JobSettings | None:
    """None: this token may not look, so nothing is stamped onto jobs and the queue's policy holds."""
    try:
        return settings_of(await api.queue_info(queue))
    except Forbidden:
        return None


async def change_settings(
    api: Api,
    queue: str = JOBS_QUEUE,
    *,
    max_retries: int | None = None,
    backoff_base: float | None = None,
    poll_interval: float | None = None,
) -> JobSettings:
    """For jobs that are enqueued from now on. What is None stays."""
    info = await ensure_queue(api, queue)
    if info is None:
        raise Forbidden(f"this token may not look at queue {queue!r}; use one with the role admin")
    note, changes = _note(info), dict[str, Any]()
    note.jobs = note.jobs or queue == JOBS_QUEUE
    if max_retries is not None:
        note.max_retries = 0 if whole(max_retries, "max_retries") == 0 else None
        changes["max_attempts"] = max(1, max_retries)
    if backoff_base is not None:
        changes["backoff"] = {"base": _number(backoff_base, "backoff_base", BASE_MAX)}
    if poll_interval is not None:
        note.poll_interval = _number(poll_interval, "poll_interval", 86_400.0)
    if max_retries is not None or poll_interval is not None:
        changes["reference"] = _written(note)
    return settings_of(await api.update_queue(queue, **changes) if changes else info)


def whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= ATTEMPTS_LIMIT:
        raise InvalidRequest(f"{name} is {value!r:.60}; use a whole number from 0 to {ATTEMPTS_LIMIT}")
    return value


def _number(value: Any, name: str, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise InvalidRequest(f"{name} is {value!r:.60}; use a number from 0 to {high:.15g}")
    return float(value)
