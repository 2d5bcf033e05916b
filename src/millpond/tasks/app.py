"""The App: tasks by name, handlers by queue, and the connection that they are enqueued through.

    app = millpond.App(data="./data")                # or server="http://127.0.0.1:7410", token="…"

    @app.task(max_attempts=5, timeout="30s")
    def send(to: str, count: int = 1) -> str:
        return f"sent {count} to {to}"

    handle = send.enqueue("a@b.c")
    handle.result(timeout=10)

A worker runs them: `millpond worker start --app MODULE:app`, where the app says, unless `--data` or `--server` name
another place. It finds a task by its name among those registered here; nothing is imported or unpickled because an item
says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, overload

from millpond.durations import checked_seconds
from millpond.errors import InvalidRequest
from millpond.jobs.names import JOBS_QUEUE
from millpond.model import STRING_MAX, Duration, Produced
from millpond.tasks.connection import Connection, where
from millpond.tasks.consumer import AnyConsumer, Consumer
from millpond.tasks.context import Context
from millpond.tasks.functions import check_function, check_queue
from millpond.tasks.handle import Handle
from millpond.tasks.policy import BackoffLike, Encoding, policy
from millpond.tasks.task import Task
from millpond.worker.hooks import Hook, Hooks, Name

if TYPE_CHECKING:
    from millpond.jobs.schedule import Missed
    from millpond.tasks.declared import Declared
    from millpond.tasks.testing import Testing

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")
H = TypeVar("H", bound=Hook)


AnyTask = Task[Any, Any, Any, Any]
Eventually = Coroutine[Any, Any, R]


class MakesTask(Protocol):
    """A context that is the first parameter is not among the arguments of `enqueue`."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], Eventually[R]]
    ) -> Task[Concatenate[Context, P], Eventually[R], R, P]: ...

    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R]) -> Task[Concatenate[Context, P], R, R, P]: ...

    @overload
    def __call__(self, function: Callable[P, Eventually[R]]) -> Task[P, Eventually[R], R, P]: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> Task[P, R, R, P]: ...


class App:
    """Opens nothing until something is enqueued or asked for. It is the same in every thread and event loop."""

    def __init__(self, *, data: str | Path | None = None, server: str | None = None, token: str | None = None) -> None:
        self.connection = Connection(where(data, server, token))
        self.place = self.connection.where if data or server else None  # that it was given itself
        self.tasks: dict[str, AnyTask] = {}
        self.consumers: dict[str, AnyConsumer] = {}
        self.schedules: dict[str, Declared] = {}
        self._hooks: dict[Name, list[Hook]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Calls under way are answered. An app that is used again opens again."""
        self.connection.close()

    @property
    def queues(self) -> list[str]:
        """Those of its tasks and consumers: what a worker takes on unless it is told."""
        return sorted({task.policy.queue for task in self.tasks.values()} | set(self.consumers))

    # ---- registering ------------------------------------------------------------------------------------------

    @overload
    def task(
        self, function: Callable[Concatenate[Context, P], Eventually[R]], /
    ) -> Task[Concatenate[Context, P], Eventually[R], R, P]: ...

    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[Concatenate[Context, P], R, R, P]: ...

    @overload
    def task(self, function: Callable[P, Eventually[R]], /) -> Task[P, Eventually[R], R, P]: ...

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R, R, P]: ...

    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        queue: str = JOBS_QUEUE,
        max_attempts: int | None = None,
        backoff: BackoffLike | None = None,
        timeout: Duration | None = None,
        priority: int = 0,
        encoding: Encoding = "json",
    ) -> MakesTask: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str = JOBS_QUEUE,
        max_attempts: int | None = None,
        backoff: BackoffLike | None = None,
        timeout: Duration | None = None,
        priority: int = 0,
        encoding: Encoding = "json",
    ) -> Any:
        """Register a plain or async function. `@app.task` alone is enough.

        What is left out is the queue's: attempts and backoff. `backoff` is a base (2 waits 2, 4, 8 seconds) or
        {"base": 2, "cap": "10m", "jitter": 0.1}.
        """

        def register(function: Callable[..., Any]) -> AnyTask:
            check_function(function, named=name is not None)
            named = name or default_name(function)
            made = policy(named, queue, max_attempts, backoff, timeout, priority, encoding)
            return self._add(Task(self.connection, function, made))

        return register if function is None else register(function)

    def consumer(self, queue: str, *, timeout: Duration | None = None) -> Callable[[Callable[P, C]], Consumer[P, C]]:
        """Register the handler of a queue's plain items: a function of the LeasedItem."""

        check_queue(queue)

        def register(function: Callable[P, C]) -> Consumer[P, C]:
            known = self.consumers.get(queue)
            if known is not None and not _is_same(known.function, function):
                raise InvalidRequest(f"queue {queue!r} has a consumer already, {known.function.__qualname__}; keep one")
            check_function(function, named=True)
            limit = None if timeout is None else checked_seconds(timeout, "timeout")
            made = self.consumers[queue] = Consumer(queue, function, limit)
            return made

        return register

    def _add(self, task: AnyTask) -> AnyTask:
        known = self.tasks.get(task.name)
        if known is not None and not _is_same(known.function, task.function):
            raise InvalidRequest(f"there is a task {task.name!r} already; give this one another name=")
        self.tasks[task.name] = task
        return task

    def schedule(
        self,
        name: str,
        task: AnyTask,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        timezone: str = "UTC",
        missed: Missed = "latest",
    ) -> None:
        """Enqueue `task` with these arguments by a cron line or an interval: `app.schedule("tick", tick, every="1m")`.

        A worker of this app makes the schedule when it starts, or replaces the one of that name if it has changed.
        """
        from millpond.tasks.declared import declared

        self.schedules[name] = declared(name, task, args, kwargs or {}, cron, every, timezone, missed)

    # ---- hooks ------------------------------------------------------------------------------------------------

    def on_start(self, hook: H) -> H:
        """`@app.on_start` before `def ready(worker)`: called when a worker has started, before its first job.

        Hooks are plain or async functions, any number of each kind. They are called in the worker's own process, one
        after the other, in a thread of theirs; also where tasks run in processes. What they raise is logged, and
        changes nothing. A worker waits for those of its start and its stop, for 30 seconds at most, and for no others.
        """
        return self._hook("on_start", hook)

    def on_stop(self, hook: H) -> H:
        """`def gone(worker, reason)`: called after a worker's last job. `reason` is stopped, signal, asked, failed…"""
        return self._hook("on_stop", hook)

    def on_error(self, hook: H) -> H:
        """`def failed(job, outcome)`: called with every attempt that failed. See `on_job_end`."""
        return self._hook("on_error", hook)

    def on_job_start(self, hook: H) -> H:
        """`def begun(job)`: called with every job that begins, commands too. It has `item`, `queue` and `spec`."""
        return self._hook("on_job_start", hook)

    def on_job_end(self, hook: H) -> H:
        """`def ended(job, outcome)`: called when an attempt has ended. The outcome has `ok`, `result` and `error`."""
        return self._hook("on_job_end", hook)

    def hooks(self) -> Hooks:
        """For a `Worker`: all that were registered so far."""
        return Hooks(**self._hooks)

    def _hook(self, name: Name, hook: H) -> H:
        self._hooks.setdefault(name, []).append(hook)
        return hook

    # ---- jobs -------------------------------------------------------------------------------------------------

    def handle(self, id: str, queue: str = JOBS_QUEUE) -> Handle[Any]:
        """Of a job by its id, whoever enqueued it."""
        return Handle(self.connection, queue, Produced(id))

    def testing(self, *, eager: bool = False) -> AbstractContextManager[Testing]:
        """Tasks without a worker: see `millpond.tasks.testing`."""
        from millpond.tasks.testing import open_testing

        return open_testing(self, eager=eager)


def default_name(function: Callable[..., Any]) -> str:
    """`module.function`. A script has the name that a worker imports it by."""
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name.removesuffix(".__main__") if spec is not None else Path(file).stem if file else module
    return f"{module}.{function.__qualname__.replace('<locals>.', '')}"[:STRING_MAX]


def _is_same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Defined again, as by a reload or in a notebook."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
