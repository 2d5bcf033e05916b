"""The connections of a client on the event loop: few, kept, and each for one call at a time."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from millpond.client.async_connection import AsyncConnection
from millpond.client.base import Settings
from millpond.client.http1 import Reply
from millpond.client.retrying import closed
from millpond.errors import BadReply, MillpondError, OutcomeUnknown, Unavailable

LATE_S = 5.0  # for a reply that nobody waits for any more: a lease is granted at once, or the wait was hung up

Left = Callable[[Coroutine[Any, Any, Reply | None]], None]  # takes the reply to a call that was cancelled


class AsyncPool:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._idle: list[AsyncConnection] = []  # the last used is the next: the others grow old and are dropped
        self._busy: set[AsyncConnection] = set()
        self._opening = 0
        self._turns: deque[asyncio.Future[None]] = deque()
        self.closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    async def exchange(
        self, request: bytes, deadline: float, left: Left | None = None, *, waits: bool = False
    ) -> Reply:
        """`left`: for a request whose reply matters even if the caller is cancelled; one that `waits` is hung up."""
        connection = pending = None
        reusable = False
        try:
            async with asyncio.timeout_at(deadline):
                connection = await self.take()
                pending = connection.send(request, self._loop)
                reply = await (pending if left is None else asyncio.shield(pending))
                reusable = reply.reusable
        except asyncio.CancelledError:
            if left is not None and connection is not None and pending is not None:
                left(self._late(connection, pending, waits))
                connection = None
            raise
        except TimeoutError:
            url = self._settings.address.url
            if pending is None:
                raise Unavailable(
                    f"no connection to {url} in time; is the server up, or connections= too low?"
                ) from None
            raise OutcomeUnknown(f"{url} did not answer in time; raise timeout=, or look there") from None
        finally:
            if connection is not None:
                self.put(connection, reusable)
        return reply

    async def _late(self, connection: AsyncConnection, pending: asyncio.Future[Reply], waits: bool) -> Reply | None:
        try:
            if waits and not pending.done():
                connection.hang_up()
            async with asyncio.timeout(LATE_S):
                return await pending
        except (TimeoutError, MillpondError):  # what was leased comes back when the lease runs out
            return None
        finally:
            self.put(connection, reusable=False)

    async def take(self) -> AsyncConnection:
        while not self.closed:
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_stale(self._loop.time()):
                    self._busy.add(connection)
                    return connection
                connection.abort()
            if len(self._busy) + self._opening < self._settings.connections:
                return await self._opened()
            await self._turn()
        raise closed()

    async def _turn(self) -> None:
        turn = self._loop.create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free()
            raise

    async def _opened(self) -> AsyncConnection:
        self._opening += 1
        connection = None
        try:
            connection = await self._connected()
            self._busy.add(connection)
        finally:
            self._opening -= 1
            if connection is None:
                self._free()
        if self.closed:
            self.put(connection, reusable=False)
            raise closed()
        return connection

    async def _connected(self) -> AsyncConnection:
        url = self._settings.address.url
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                return await self._connect()
        except ssl.SSLCertVerificationError as error:
            raise BadReply(f"{url} has no certificate to trust ({error}); check ca=") from error
        except OSError as error:  # TimeoutError is one
            words = str(error) or type(error).__name__
            raise Unavailable(f"cannot connect to {url} ({words}); is the server up?") from error

    async def _connect(self) -> AsyncConnection:
        address, tls = self._settings.address, self._settings.tls
        make = partial(AsyncConnection, self._settings)
        if address.path:
            _, connection = await self._loop.create_unix_connection(make, address.path)
        else:
            _, connection = await self._loop.create_connection(make, address.host, address.port, ssl=tls)
        return connection

    def put(self, connection: AsyncConnection, reusable: bool) -> None:
        self._busy.discard(connection)
        if reusable and not self.closed:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        else:
            connection.drop()
        self._free()

    def _free(self) -> None:
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def close(self) -> None:
        """Calls under way end with an error."""
        self.closed = True
        for connection in [*self._idle, *self._busy]:
            connection.abort()
        self._idle.clear()
        while self._turns:
            self._free()
        for _ in range(2):  # the transports close in the loop's next pass, those of TLS in the one after
            await asyncio.sleep(0)
