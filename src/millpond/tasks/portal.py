"""Calls on an event loop that has the connection, from any thread and any other loop.

An App has one connection, whoever asks: a loop in a thread of its own with a pond or a client on it, made when it is
first needed. In a worker it is the worker's own connection, on the worker's loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import uvloop

from millpond.api import Api
from millpond.errors import Closed, InvalidRequest

T = TypeVar("T")
Call = Callable[[Api], Coroutine[Any, Any, T]]


class Portal:
    """`api` on `loop`. Who binds it to a running loop has nothing to close."""

    inline = False  # nobody else runs tasks: who waits for one must run it

    def __init__(self, loop: asyncio.AbstractEventLoop, api: Api) -> None:
        self.loop = loop
        self.api = api

    def call(self, call: Call[T]) -> T:
        """Blocks until it is answered."""
        if _running_loop() is self.loop:
            raise InvalidRequest("this would block the event loop that has to answer; use the async call, and await it")
        thread = threading.get_ident()
        _waiting[thread] = future = self._submit(call)
        try:
            return future.result()
        except BaseException:  # an interrupt: the call must not go on behind the caller's back
            future.cancel()
            raise
        finally:
            del _waiting[thread]

    async def call_async(self, call: Call[T]) -> T:
        if asyncio.get_running_loop() is self.loop:
            return await call(self.api)
        return await asyncio.wrap_future(self._submit(call))

    def soon(self, call: Callable[[Api], None]) -> None:
        """On the loop, in a moment; nobody waits."""
        self.loop.call_soon_threadsafe(call, self.api)

    def settle(self) -> None:
        """Before a wait for a result: where tasks run inline, run them."""

    async def settle_async(self) -> None:
        """The same, on the caller's loop."""

    def enqueued(self) -> None:
        """After something was: where tasks run inline and at once, run them."""

    async def enqueued_async(self) -> None:
        """The same, on the caller's loop."""

    def _submit(self, call: Call[T]) -> Future[T]:
        made = call(self.api)
        try:
            return asyncio.run_coroutine_threadsafe(made, self.loop)
        except RuntimeError:  # the loop is closed
            made.close()
            raise Closed("the connection is closed; open the app again and retry") from None


class OwnPortal(Portal):
    """A loop in a thread of its own, with what `make` makes on it. Open on return; `close` it."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._make = make
        self._process = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="millpond-app", daemon=True)
        self._thread.start()
        try:
            self._opened, api = asyncio.run_coroutine_threadsafe(self._open(), loop).result()
        except BaseException:
            self._end(loop)
            raise
        super().__init__(loop, api)

    @property
    def forked(self) -> bool:
        """The loop has stayed with the parent: of no use here."""
        return os.getpid() != self._process

    def close(self) -> None:
        """What is under way is answered. Twice is once."""
        if self.forked:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._shut(), self.loop).result()
            self._end(self.loop)

    async def _open(self) -> tuple[AbstractAsyncContextManager[Any], Api]:
        opened = self._make()
        return opened, await opened.__aenter__()

    async def _shut(self) -> None:
        """Ends when the calls of other threads have their answers too."""
        await self._opened.__aexit__(None, None, None)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.close()


def end_wait(thread: int) -> None:
    """Whatever the thread waits for here is over: so it can hear that it is interrupted."""
    future = _waiting.get(thread)
    if future is not None:
        future.cancel()


_waiting: dict[int, Future[Any]] = {}  # by thread


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
