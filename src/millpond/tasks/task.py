"""Tasks: functions that are called here, or enqueued to be called by a worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import update_wrapper
from typing import Any, Final, Generic, ParamSpec, TypeVar

from millpond.durations import checked_seconds
from millpond.errors import InvalidRequest
from millpond.jobs.enqueue import NewJob
from millpond.jobs.spec import IfDead
from millpond.model import Duration, OnConflict
from millpond.tasks.arguments import Arguments
from millpond.tasks.connection import Connection
from millpond.tasks.context import current_or_none
from millpond.tasks.handle import AsyncHandle, Handle
from millpond.tasks.policy import CallOptions, Policy, attempts

P = ParamSpec("P")  # of the function
Q = ParamSpec("Q")  # of who enqueues it: without a context that comes first
C = TypeVar("C")  # what calling it gives: the result, or a coroutine of it
R = TypeVar("R")  # the result
NO_OPTIONS = CallOptions()
ALONE: Final = (str, Handle, AsyncHandle)  # what is one job, not several


class Enqueues(Generic[Q, R]):
    """The ways to enqueue a task, with the options of `self`."""

    _task: Task[Any, Any, R, Q]
    _options: CallOptions

    def enqueue(self, *args: Q.args, **kwargs: Q.kwargs) -> Handle[R]:
        """Durable on return. WrongArguments if they do not fit the task's annotations."""
        return self._many([(args, kwargs)])[0]

    delay = enqueue

    async def enqueue_async(self, *args: Q.args, **kwargs: Q.kwargs) -> AsyncHandle[R]:
        [handle] = await self._many_async([(args, kwargs)])
        return handle

    delay_async = enqueue_async

    def map(self, values: Iterable[Any]) -> list[Handle[R]]:
        """A job for each value, which is its one argument: all in one request, up to 1,000 of them."""
        return self._many([((value,), {}) for value in values])

    async def map_async(self, values: Iterable[Any]) -> list[AsyncHandle[R]]:
        return await self._many_async([((value,), {}) for value in values])

    def enqueue_many(self, calls: Iterable[Sequence[Any] | Mapping[str, Any]]) -> list[Handle[R]]:
        """A job for each call: a tuple of its arguments, or a dict of them by name."""
        return self._many([_arguments(call) for call in calls])

    async def enqueue_many_async(self, calls: Iterable[Sequence[Any] | Mapping[str, Any]]) -> list[AsyncHandle[R]]:
        return await self._many_async([_arguments(call) for call in calls])

    def _many(self, calls: list[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Handle[R]]:
        task = self._task
        queue, jobs = task.jobs(calls, self._options)
        produced = task.connection.enqueue(queue, jobs, task.policy.whole, self._options.on_conflict)
        return [Handle(task.connection, queue, one, task.arguments.result) for one in produced]

    async def _many_async(self, calls: list[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[AsyncHandle[R]]:
        task = self._task
        queue, jobs = task.jobs(calls, self._options)
        produced = await task.connection.enqueue_async(queue, jobs, task.policy.whole, self._options.on_conflict)
        return [AsyncHandle(task.connection, queue, one, task.arguments.result) for one in produced]


class Task(Enqueues[Q, R], Generic[P, C, R, Q]):
    """A registered function. It is still called as it was."""

    def __init__(self, connection: Connection, function: Callable[P, C], policy: Policy) -> None:
        update_wrapper(self, function)
        self.connection = connection
        self.name = policy.name
        self.policy = policy
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        self.arguments = Arguments(policy.name, function)
        self._task = self
        self._options = NO_OPTIONS

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    def options(
        self,
        *,
        delay: Duration | None = None,
        run_at: datetime | None = None,
        priority: int | None = None,
        id: str | None = None,
        key: str | None = None,
        after: Iterable[str | Handle[Any] | AsyncHandle[Any]] = (),
        if_dead: IfDead | None = None,
        correlation_id: str | None = None,
        queue: str | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        expire_timeout: Duration | None = None,
        on_conflict: OnConflict = "ignore",
    ) -> Prepared[Q, R]:
        """The task with these options for some calls: `send.options(delay="5m").enqueue(...)`.

        `after` are the jobs to wait for, as handles or ids; `if_dead` what becomes of this one if one of them dies:
        "cancel" or "hold". `on_conflict` says what to do if there is a job with this `id` or `key` already: "ignore"
        gives a handle of that one (`handle.duplicate` is true), "reject" raises KeyConflict, "replace" puts this one in
        its place unless it has begun. A task that is enqueued by another inherits its correlation id.
        """
        where = queue or self.policy.queue
        options = CallOptions(
            delay=delay,
            run_at=run_at,
            priority=priority,
            id=id,
            key=key,
            after=tuple(_parent(one, where) for one in ([after] if isinstance(after, ALONE) else after)),
            if_dead=if_dead,
            correlation_id=correlation_id,
            queue=queue,
            max_attempts=attempts(max_attempts),
            timeout=None if timeout is None else checked_seconds(timeout, "timeout"),
            expire_timeout=expire_timeout,
            on_conflict=on_conflict,
        )
        return Prepared(self, options)

    def jobs(
        self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]], options: CallOptions
    ) -> tuple[str, list[NewJob]]:
        """Queue and jobs, checked as the worker will check them: by what comes out of the encoding."""
        if (options.id or options.key) and len(calls) > 1:
            raise InvalidRequest("an id or a key is one job's; enqueue them one by one")
        context = current_or_none()
        inherited = options.correlation_id or (None if context is None else context.correlation_id)
        return options.queue or self.policy.queue, [
            self._job(args, kwargs, options, inherited) for args, kwargs in calls
        ]

    def _job(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions, correlation_id: str | None
    ) -> NewJob:
        policy = self.policy
        self.arguments.check(args, kwargs, policy.encoding)
        spec = policy.spec(args, dict(kwargs))
        if options is not NO_OPTIONS:
            spec.after = list(options.after)
            spec.if_dead = options.if_dead or spec.if_dead
            spec.timeout = policy.timeout if options.timeout is None else options.timeout
        return NewJob(
            spec=spec,
            id=options.id,
            key=options.key,
            priority=policy.priority if options.priority is None else options.priority,
            delay=options.delay,
            run_at=options.run_at,
            max_retries=policy.max_attempts if options.max_attempts is None else options.max_attempts,
            expire_timeout=options.expire_timeout,
            correlation_id=correlation_id,
            encoding=policy.encoding,
        )


class Prepared(Enqueues[Q, R]):
    """A task with options for its next calls."""

    def __init__(self, task: Task[Any, Any, R, Q], options: CallOptions) -> None:
        self._task = task
        self._options = options


def _parent(one: object, queue: str) -> str:
    if isinstance(one, str):
        return one
    if not isinstance(one, Handle | AsyncHandle):
        raise InvalidRequest(f"`after` has a {type(one).__name__}; give handles or ids of jobs")
    return one.id if one.queue == queue else f"{one.queue}/{one.id}"


def _arguments(call: Sequence[Any] | Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    given: Any = call
    if isinstance(given, Mapping):
        return (), given
    if isinstance(given, tuple | list):
        return given, {}
    raise InvalidRequest(f"a call is a {type(given).__name__}; give a tuple of arguments or a dict (map takes values)")
