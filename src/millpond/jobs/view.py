"""A job as people and programs see it: the item, in the words of jobs."""

from __future__ import annotations

import enum
import re
from datetime import datetime
from typing import Any

import msgspec

from millpond.jobs.names import COMMAND, HELD, TASK
from millpond.jobs.spec import try_decode
from millpond.model import Item, State


class JobState(enum.StrEnum):
    PENDING = "pending"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"  # waiting out its backoff
    DEAD = "dead"
    CANCELLED = "cancelled"


ITEM_STATES: dict[JobState, tuple[State, ...]] = {
    JobState.PENDING: (State.READY, State.SCHEDULED, State.CLAIMED),
    JobState.PROCESSING: (State.LEASED,),
    JobState.COMPLETED: (State.COMPLETED,),
    JobState.FAILED: (State.RETRYING,),
    JobState.DEAD: (State.DEAD,),
    JobState.CANCELLED: (State.CANCELLED,),
}
JOB_STATE: dict[State, JobState] = {state: job for job, states in ITEM_STATES.items() for state in states}
EXIT_CODE = re.compile(r"exit code (\d{1,3})\b")
NOT_FOUND = 127  # of a shell that knows no such command
ENDED = (JobState.COMPLETED, JobState.DEAD, JobState.CANCELLED)


class Job(msgspec.Struct, kw_only=True):
    """What `--json` shows. `run_at`: when it is due, if it waits for that. `held`: it waits for other jobs."""

    id: str
    queue: str
    state: JobState
    command: str | None = None
    task: str | None = None
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    attempts: int = 0
    max_retries: int = 0
    priority: int = 0
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None = None
    run_at: datetime | None = None
    last_error: str | None = None
    dead_reason: str | None = None
    result: Any = None
    exit_code: int | None = None
    timeout: float | None = None
    worker: str | None = None
    lease_deadline: datetime | None = None
    cancel_asked: bool = False
    progress: Any = None
    correlation_id: str | None = None
    key: str | None = None
    schedule: str | None = None
    due: str | None = None
    after: list[str] = []
    if_dead: str | None = None
    held: bool = False
    item_state: State

    @property
    def cause(self) -> str | None:
        """The error that put it into its state. Of a job that went on since, `last_error` says nothing of now."""
        of_error = self.state == JobState.FAILED or (self.state == JobState.DEAD and self.dead_reason != "expired")
        return self.last_error if of_error else None


def job_of(item: Item, queue: str) -> Job:
    """An item that is no job, or whose payload is not readable, has neither command nor task."""
    spec = try_decode(item.payload, item.encoding) if item.kind in (COMMAND, TASK) else None
    job = Job(
        id=item.id,
        queue=queue,
        state=JOB_STATE[item.state],
        attempts=item.attempts,
        max_retries=item.max_attempts,
        priority=item.priority,
        created_at=item.created_at,
        updated_at=item.updated_at,
        ended_at=item.ended_at,
        run_at=None if is_held(item) else item.enqueue_at,
        last_error=item.last_error,
        dead_reason=item.dead_reason if item.state == State.DEAD else None,
        result=item.result,
        worker=item.client_id,
        lease_deadline=item.lease_deadline,
        cancel_asked=item.cancel_asked,
        progress=item.state_doc.get("progress") if isinstance(item.state_doc, dict) else None,
        correlation_id=item.correlation_id,
        key=item.key,
        held=is_held(item),
        item_state=item.state,
    )
    job.exit_code = _exit_code(job) if item.kind == COMMAND else None
    if spec is not None:
        job.command, job.task, job.timeout = spec.command, spec.task, spec.timeout
        if spec.task is not None:
            job.args, job.kwargs = spec.args, spec.kwargs
        job.schedule, job.due, job.after = spec.schedule, spec.due, spec.after
        job.if_dead = spec.if_dead if spec.after else None
        job.max_retries = item.max_attempts if spec.max_retries is None else spec.max_retries
    return job


def _exit_code(job: Job) -> int | None:
    """Of its result, or of the error that put it into its state, as `worker.endings` writes it."""
    if isinstance(job.result, dict):
        told = job.result.get("exit_code")
        return told if isinstance(told, int) else None
    if job.cause is not None and job.cause.startswith("command not found"):
        return NOT_FOUND
    failed = EXIT_CODE.match(job.cause or "")
    return int(failed[1]) if failed else None


def is_held(item: Item) -> bool:
    """It waits for other jobs, not for an instant."""
    return item.state == State.SCHEDULED and item.enqueue_at is not None and item.enqueue_at >= HELD
