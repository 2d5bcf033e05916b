"""A job as QueueCTL writes it: one JSON object, or a bare command. What is wrong with it is told."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from millpond.durations import seconds
from millpond.errors import InvalidRequest
from millpond.jobs.enqueue import NewJob
from millpond.jobs.names import JOBS_QUEUE
from millpond.jobs.spec import IfDead, JobSpec, checked, unknown_field

TOLD = ("state", "attempts", "created_at", "updated_at")
"""Of a job that QueueCTL has shown: these follow from what happens, and are left out."""


class JobFields(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What may be said of a new job. Durations are seconds, or text such as "1m30s"."""

    command: str | None = None
    task: str | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    id: str | None = None
    key: str | None = None
    queue: str = JOBS_QUEUE
    priority: int = 0
    max_retries: int | None = None
    timeout: float | str | None = None
    delay: float | str | None = None
    run_at: datetime | None = None
    backoff_base: float | None = None
    backoff_cap: float | str | None = None
    backoff_jitter: float | None = None
    expire_timeout: float | str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    after: list[str] | str = []
    if_dead: IfDead = "cancel"
    correlation_id: str | None = None


FIELDS = list(JobFields.__struct_fields__)


class Given(NamedTuple):
    queue: str
    job: NewJob


def words_of(words: list[str]) -> str:
    """A job that the shell has taken apart, or that is one argument, as it should be."""
    if len(words) > 1 and words[0].startswith("{"):
        raise InvalidRequest('the JSON came in pieces; put it in single quotes: \'{"command": "sleep 2"}\'')
    return words[0] if len(words) == 1 else shlex.join(words)


def read_job(text: str, flags: Mapping[str, Any]) -> Given:
    """`flags` fill in what the text leaves out."""
    text = text.strip()
    return made_job({**flags, **(_object(text) if text.startswith("{") else {"command": _command(text)})})


def _command(text: str) -> str:
    """Any text but other JSON: a list, null or a number was meant as a job. `true` and `"a b"` are commands."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    if isinstance(found, bool | str):
        return text
    raise InvalidRequest('the job is JSON, but no object; give one such as {"command": "sleep 2"}')


def _object(text: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(
            f'the job is no JSON ({error}); mend it, or if it is a command, give it as {{"command": "…"}}'
        ) from None
    return {name: value for name, value in found.items() if name not in TOLD}


def made_job(fields: Mapping[str, Any]) -> Given:
    for name in fields:
        if name not in FIELDS:
            raise unknown_field(name, FIELDS)
    if not fields.get("command") and not fields.get("task"):
        raise InvalidRequest("the job has no command; say what to run")
    try:
        found = msgspec.convert(dict(fields), JobFields)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the job is wrong: {error}; mend it") from None
    spec = JobSpec(
        command=found.command,
        task=found.task,
        args=found.args,
        kwargs=found.kwargs,
        timeout=_seconds(found.timeout, "timeout"),
        backoff_base=found.backoff_base,
        backoff_cap=_seconds(found.backoff_cap, "backoff_cap"),
        backoff_jitter=found.backoff_jitter,
        env=found.env,
        cwd=found.cwd,
        after=[found.after] if isinstance(found.after, str) else found.after,
        if_dead=found.if_dead,
    )
    return Given(found.queue, _new_job(found, checked(spec)))


def _new_job(found: JobFields, spec: JobSpec) -> NewJob:
    delay = _seconds(found.delay, "delay")
    if delay is not None and found.run_at is not None:
        raise InvalidRequest("delay and run_at do not go together; give one of them")
    if found.max_retries is not None and found.max_retries < 0:
        raise InvalidRequest(f"max_retries is {found.max_retries}; give 0 or more")
    return NewJob(
        spec=spec,
        id=found.id,
        key=found.key,
        priority=found.priority,
        delay=delay,
        run_at=found.run_at if found.run_at is None or found.run_at.tzinfo else found.run_at.replace(tzinfo=UTC),
        max_retries=found.max_retries,
        expire_timeout=_seconds(found.expire_timeout, "expire_timeout"),
        correlation_id=found.correlation_id,
    )


def _seconds(value: float | str | None, name: str) -> float | None:
    if value is None:
        return None
    found = seconds(value)
    if found is None or not 0 <= found < float("inf"):
        raise InvalidRequest(f"{name} is {value!r:.60}; give seconds, or a duration such as '1m30s'")
    return found
