"""Calls of the user's own when a worker starts and stops, and when jobs begin, end and fail.

They run in a thread of their own, one after the other: the runner's loop never waits for them, and what they raise is
logged and changes nothing. A coroutine function is run to its end there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from queue import SimpleQueue
from typing import Any, Literal

from millpond.worker.executors import Outcome, Running

log = logging.getLogger("millpond.worker")
WAITING_MAX = 10_000  # calls; a hook that is slower than the jobs loses some, and the log says so
PATIENCE_S = 30.0  # for the start and stop hooks: the worker waits for those
Name = Literal["on_start", "on_stop", "on_error", "on_job_start", "on_job_end"]
Hook = Callable[..., Any]
Given = Hook | Iterable[Hook] | None
_Call = tuple[Hook, tuple[Any, ...]] | Callable[[], None]


class Hooks:
    """Each is a function or several.

    `on_start(worker)`, before the first job is leased. `on_stop(worker, reason)`, after the last one.
    `on_job_start(job)` and `on_job_end(job, outcome)` with every job, and `on_error(job, outcome)` with every one that
    failed.
    """

    def __init__(
        self,
        *,
        on_start: Given = None,
        on_stop: Given = None,
        on_error: Given = None,
        on_job_start: Given = None,
        on_job_end: Given = None,
    ) -> None:
        self._hooks: dict[Name, list[Hook]] = {
            "on_start": _listed(on_start),
            "on_stop": _listed(on_stop),
            "on_error": _listed(on_error),
            "on_job_start": _listed(on_job_start),
            "on_job_end": _listed(on_job_end),
        }
        self.of_jobs = bool(on_error or on_job_start or on_job_end)
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lost = 0

    def began(self, job: Running) -> None:
        self._fire("on_job_start", job)

    def ended(self, job: Running, outcome: Outcome) -> None:
        self._fire("on_job_end", job, outcome)
        if not outcome.ok and not outcome.defer and job.ending is None:
            self._fire("on_error", job, outcome)

    async def started(self, worker: Any) -> None:
        await self._call("on_start", worker)

    async def stopped(self, worker: Any, reason: str) -> None:
        """The last one: the thread ends with it."""
        await self._call("on_stop", worker, reason)
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None

    async def _call(self, name: Name, *args: Any) -> None:
        """After all that were fired before it."""
        self._fire(name, *args)
        if self._thread is None:
            return
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        self._calls.put(lambda: _tell(loop, over))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await over.wait()
        except TimeoutError:
            log.warning("an %s hook takes over %g s; the worker goes on without it", name, PATIENCE_S)

    def _fire(self, name: Name, *args: Any) -> None:
        for hook in self._hooks[name]:
            if self._calls.qsize() >= WAITING_MAX:
                self._lose(name)
                return
            self._calls.put((hook, args))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="millpond-hooks", daemon=True)
                self._thread.start()

    def _lose(self, name: Name) -> None:
        self._lost += 1
        if self._lost & (self._lost - 1) == 0:  # the 1st, 2nd, 4th, 8th: as often as is news
            log.warning("%d calls of hooks were left out, %s the last: they are slower than the jobs", self._lost, name)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if callable(call):
                call()
                continue
            hook, args = call
            try:
                made = hook(*args)
                if isinstance(made, Coroutine):
                    asyncio.run(made)
            except BaseException as error:  # one that exits must not end the others
                log.error("the hook %s failed: %s", getattr(hook, "__qualname__", hook), error, exc_info=error)


def _tell(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(over.set)
    except RuntimeError:  # the loop has ended: nobody waits
        pass


def _listed(given: Given) -> list[Hook]:
    if given is None:
        return []
    return [given] if callable(given) else list(given)
