"""The lines of `/v1/queue.subscribe`, opened again when they break: on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from millpond.client.async_connection import AsyncConnection
from millpond.client.async_pool import AsyncPool
from millpond.client.base import SUBSCRIBE_SILENCE_S
from millpond.client.faults import error_of
from millpond.client.http1 import Lines
from millpond.client.lines import LINE_BYTES_MAX, item_of
from millpond.client.retrying import closed
from millpond.consuming.held import AsyncHeldItem
from millpond.consuming.keeper import log
from millpond.consuming.pauses import Pauses
from millpond.errors import MillpondError, Unavailable
from millpond.wire.replies import LeaseItem

Hold = Callable[[LeaseItem], AsyncHeldItem]


class AsyncStream:
    """An object rather than a generator: a loop that leaves it closes its stream at once, not when garbage is."""

    def __init__(self, pool: AsyncPool, request: bytes, timeout: float, pauses: Pauses, hold: Hold) -> None:
        self._pool = pool
        self._hold = hold
        self._request = request
        self._timeout = timeout
        self._pauses = pauses
        self._deadline: float | None = pool.loop.time() + timeout  # None once it has worked
        self._connection: AsyncConnection | None = None
        self._lines = Lines(LINE_BYTES_MAX)
        self._found: list[bytes] = []
        self._ended = False
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncHeldItem:
        if self._closed:
            raise StopAsyncIteration
        while True:
            try:
                item = await self._next()
            except (MillpondError, TimeoutError) as error:
                self._disconnect()
                await self._again(error)
                continue
            if item is not None:
                self._pauses.reset()
                return self._hold(item)

    async def _next(self) -> LeaseItem | None:
        if self._connection is None:
            await self._open()
        assert self._connection is not None, "it was opened"
        while not self._found:
            if self._ended:
                raise Unavailable("the server ended the stream; it is opened again")
            async with asyncio.timeout(SUBSCRIBE_SILENCE_S):
                data, self._ended = await self._connection.more(self._pool.loop)
            self._find(data)
        return item_of(self._found.pop())

    def _find(self, data: bytes) -> None:
        self._found = [*self._lines.feed(data)][::-1]

    async def _open(self) -> None:
        self._lines, self._found, self._ended = Lines(LINE_BYTES_MAX), [], False
        async with asyncio.timeout(self._timeout):
            self._connection = await self._pool.take()
            whole = await self._connection.start(self._request, self._pool.loop)
        if whole is not None and whole.status != 200:
            raise error_of(whole)
        if whole is not None:
            self._find(whole.body)
            self._ended = True
        self._deadline = None

    async def _again(self, error: MillpondError | TimeoutError) -> None:
        if self._pool.closed:
            raise closed() from error
        late = self._deadline is not None and self._pool.loop.time() > self._deadline
        if isinstance(error, TimeoutError):
            error = Unavailable("the stream fell silent; it is opened again")
        if late or not error.retryable:
            raise error
        log.warning("the stream broke, and is opened again: %s", error)
        await asyncio.sleep(self._pauses.next())

    async def aclose(self) -> None:
        """What is unfinished goes back."""
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.put(connection, reusable=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        """Wherever that runs; if the loop has ended by then, so has the connection."""
        if self._connection is not None:
            try:
                self._pool.loop.call_soon_threadsafe(self._pool.put, self._connection, False)
            except RuntimeError:
                pass
