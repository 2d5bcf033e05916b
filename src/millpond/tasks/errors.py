"""What tasks raise, and what the callers of tasks can meet.

Raised by a task, to say how its attempt ends:
    RetryLater   a failure that names the time of the next attempt
    GiveUp       no further attempt: the job is dead
Raised to who asks for a result:
    TaskFailed, TaskCancelled, ResultGone, and the built-in TimeoutError
Raised to who enqueues:
    WrongArguments
Raised inside a task, in a thread, when its time is over:
    Interrupted
"""

from __future__ import annotations

from millpond.durations import checked_seconds
from millpond.errors import InvalidRequest, MillpondError, NotFound
from millpond.model import DURATION_MAX_MS, Duration


class RetryLater(Exception):
    """The attempt failed, and counts; the next one is after `delay`, in place of the backoff."""

    delay: float | None = None  # also of a subclass that does not call us

    def __init__(self, why: str = "the task asked for another attempt", *, delay: Duration | None = None) -> None:
        super().__init__(why)
        self.delay = None if delay is None else checked_seconds(delay, "delay")
        if self.delay is not None and self.delay > DURATION_MAX_MS / 1000:
            raise InvalidRequest(f"delay is {delay!r:.60}; use up to {DURATION_MAX_MS // 86_400_000} days")


class GiveUp(Exception):
    """Trying again would not help: the job is dead at once."""

    def __init__(self, why: str = "the task gave up") -> None:
        super().__init__(why)


class Interrupted(KeyboardInterrupt):
    """The task's time is over, or nobody wants it done any more. Not an Exception: tasks catch those to go on.

    A KeyboardInterrupt, since an event loop that a plain task runs lets those out, and swallows all others.
    """


class WrongArguments(InvalidRequest, TypeError):
    """The arguments do not fit the task's annotations."""

    code = "wrong_arguments"


class TaskFailed(MillpondError):
    """The job is dead. `error` is what its last attempt failed with, `reason` why there is no other."""

    code = "task_failed"

    def __init__(self, id: str, error: str | None, reason: str | None) -> None:
        super().__init__(f"job {id} is dead ({reason or 'no reason given'}): {error or 'no error given'}")
        self.id = id
        self.error = error
        self.reason = reason


class TaskCancelled(MillpondError):
    code = "task_cancelled"

    def __init__(self, id: str) -> None:
        super().__init__(f"job {id} was cancelled; it has no result")
        self.id = id


class ResultGone(NotFound):
    code = "result_gone"

    def __init__(self, id: str, queue: str) -> None:
        super().__init__(
            f"there is no job {id} in {queue} any more; it was removed, or its result was kept for as long as the"
            " queue's completed_retention and no longer"
        )
        self.id = id
