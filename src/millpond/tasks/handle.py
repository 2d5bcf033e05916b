"""A job that was enqueued, for who waits for it.

    handle = send.enqueue("a@b.c")                   # blocking
    handle.result(timeout=10)

    handle = await send.enqueue_async("a@b.c")       # on an event loop
    await handle.result(timeout=10)

A blocking handle can be awaited too: `await handle` is its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Final, Generic, TypeVar

from millpond.api import Api
from millpond.durations import checked_seconds
from millpond.errors import InvalidRequest, NotFound, made
from millpond.jobs.view import JOB_STATE, Job, JobState, job_of
from millpond.model import Duration, Item, Produced, State
from millpond.tasks.connection import Connection
from millpond.tasks.context import current_or_none
from millpond.tasks.errors import ResultGone, TaskCancelled, TaskFailed
from millpond.tasks.portal import Portal

R = TypeVar("R")
ENDED: Final = (State.COMPLETED, State.DEAD, State.CANCELLED)
WAIT_S: Final = 600.0  # of one call: below what a server allows; then it is asked again
Read = Callable[[Any, str], Any]  # a stored result and its encoding, as the task's annotation has it


class _Handled(Generic[R]):
    def __init__(self, connection: Connection, queue: str, produced: Produced, read: Read | None = None) -> None:
        self._connection = connection
        self._read = read
        self.queue = queue
        self.id = produced.id
        self.correlation_id = produced.correlation_id
        self.duplicate = produced.duplicate  # it was there already, by its id or key

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.queue}/{self.id})"

    async def _item(self, api: Api) -> Item:
        return await api.get_item(self.queue, self.id)

    async def _cancel(self, api: Api) -> None:
        [result] = await api.cancel(self.queue, [self.id])
        if result.error is not None:
            raise made(result.error.code, result.error.message)

    async def _ended(self, api: Api, patience: float | None) -> Item:
        """Parked where the item is; nothing is asked again and again."""
        clock = asyncio.get_running_loop().time
        deadline = None if patience is None else clock() + patience
        while True:
            wait = WAIT_S if deadline is None else max(0.0, min(WAIT_S, deadline - clock()))
            try:
                item = await api.get_item(self.queue, self.id, wait=wait)
            except NotFound:
                raise ResultGone(self.id, self.queue) from None
            if item.state in ENDED:
                return item
            if deadline is not None and clock() >= deadline:
                raise TimeoutError(f"job {self.id} has not ended yet; it is {JOB_STATE[item.state]}")

    def _result(self, item: Item) -> R:
        if item.state == State.DEAD:
            raise TaskFailed(self.id, item.last_error, item.dead_reason)
        if item.state == State.CANCELLED:
            raise TaskCancelled(self.id)
        result: R = item.result if self._read is None else self._read(item.result, item.encoding)
        return result


class Handle(_Handled[R]):
    """For plain code: its methods block."""

    def state(self) -> JobState:
        return JOB_STATE[self._connection.portal.call(self._item).state]

    def job(self) -> Job:
        """All there is to know of it, its progress too."""
        return job_of(self._connection.portal.call(self._item), self.queue)

    def cancel(self) -> None:
        """One that runs learns of it within half its lease."""
        self._connection.portal.call(self._cancel)

    def result(self, timeout: Duration | None = None) -> R:
        """Waits for the job's end. Raises TaskFailed, TaskCancelled, ResultGone, or TimeoutError."""
        portal = self._connection.portal
        _refuse_in_async_task()
        wait = _patience(timeout, portal)
        portal.settle()
        return self._result(portal.call(lambda api: self._ended(api, wait)))

    @property
    def on_loop(self) -> AsyncHandle[R]:
        """The same job for code on an event loop."""
        return AsyncHandle(self._connection, self.queue, self._produced(), self._read)

    def __await__(self) -> Generator[Any, None, R]:
        return self.on_loop.result().__await__()

    def _produced(self) -> Produced:
        return Produced(self.id, self.correlation_id, self.duplicate)


def _patience(timeout: Duration | None, portal: Portal) -> float | None:
    """Where tasks run inline they run before the wait: then there is nothing to wait for."""
    seconds = None if timeout is None else checked_seconds(timeout, "timeout")
    return 0.0 if portal.inline else seconds


def _refuse_in_async_task() -> None:
    """All async tasks share a loop: one that blocks it would keep the others, and may wait for one of them."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if current_or_none() is not None:
        raise InvalidRequest("result() would block the event loop of all async tasks; write `await handle` instead")


class AsyncHandle(_Handled[R]):
    """For code on an event loop."""

    async def state(self) -> JobState:
        return JOB_STATE[(await self._connection.portal.call_async(self._item)).state]

    async def job(self) -> Job:
        """All there is to know of it, its progress too."""
        return job_of(await self._connection.portal.call_async(self._item), self.queue)

    async def cancel(self) -> None:
        """One that runs learns of it within half its lease."""
        await self._connection.portal.call_async(self._cancel)

    async def result(self, timeout: Duration | None = None) -> R:  # noqa: ASYNC109 - as the blocking one
        """Waits for the job's end. Raises TaskFailed, TaskCancelled, ResultGone, or TimeoutError."""
        portal = self._connection.portal
        wait = _patience(timeout, portal)
        await portal.settle_async()
        return self._result(await portal.call_async(lambda api: self._ended(api, wait)))

    def __await__(self) -> Generator[Any, None, R]:
        return self.result().__await__()
