"""A thread for calls that wait for a disk or a network, one after the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class CallThread:
    """No executor: those take no work once the main thread has ended."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                value = call(*arguments)
            except Exception as error:
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_fulfil, future, value)

        self._calls.put(work)
        return await future

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


def _fulfil(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
