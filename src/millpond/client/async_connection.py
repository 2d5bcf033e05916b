"""A connection on the event loop.

What went wrong is told by what it means: Unavailable, nothing was done; OutcomeUnknown, the server may have done it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from millpond.client.base import IDLE_MAX_S, Settings
from millpond.client.http1 import Reply, ReplyParser
from millpond.errors import BadReply, MillpondError, OutcomeUnknown, Unavailable


class AsyncConnection(asyncio.Protocol):
    def __init__(self, settings: Settings) -> None:
        self._url = settings.address.url
        self._parser = ReplyParser(settings.reply_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._more: asyncio.Future[None] | None = None  # of a stream
        self._error: MillpondError | None = None
        self.idle_since = 0.0

    # ---- for the pool -------------------------------------------------------------------------------------

    def send(self, request: bytes, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Reply]:
        if self._transport is None or self._transport.is_closing():
            raise Unavailable(f"{self._url} closed the connection before the request was sent; try again")
        reply: asyncio.Future[Reply] = loop.create_future()
        self._reply = reply
        self._transport.write(request)
        return reply

    def is_stale(self, now: float) -> bool:
        gone = self._transport is None or self._transport.is_closing() or self._error is not None
        return gone or now - self.idle_since > IDLE_MAX_S

    def hang_up(self) -> None:
        """The server ends a wait when it sees that; what it had sent by then still comes. TLS has no half of a line."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.abort()

    def abort(self) -> None:
        """Whoever waits for a reply is told."""
        if self._transport is not None:
            self._transport.abort()

    def drop(self) -> None:
        """Nobody waits any more."""
        if self._reply is not None and not self._reply.cancel() and not self._reply.cancelled():
            self._reply.exception()  # seen, and of no interest
        self.abort()

    # ---- streams ------------------------------------------------------------------------------------------

    async def start(self, request: bytes, loop: asyncio.AbstractEventLoop) -> Reply | None:
        """Returns when the headers are there; with the reply, if that is whole already."""
        if self._transport is None or self._transport.is_closing():
            raise Unavailable(f"{self._url} closed the connection before the request was sent; try again")
        reply: asyncio.Future[Reply] = loop.create_future()
        self._reply = reply
        self._transport.write(request)
        while not reply.done() and self._parser.status != 200:
            await self._changed(loop)
        return None if self._parser.status == 200 else reply.result()

    async def more(self, loop: asyncio.AbstractEventLoop) -> tuple[bytes, bool]:
        """What has come of a stream's body, and whether that was the end."""
        assert self._reply is not None, "a stream was started"
        while True:
            data = self._parser.drain()
            if data:
                return data, False
            if self._reply.done():
                return self._reply.result().body, True
            await self._changed(loop)

    async def _changed(self, loop: asyncio.AbstractEventLoop) -> None:
        self._more = loop.create_future()
        await self._more

    # ---- what the event loop calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        sock: socket.socket = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # long polls outlive a router's patience

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():  # nobody asked
            self.abort()
            return
        try:
            reply = self._parser.feed(data)
        except BadReply as error:
            self._fail(error)
            self.abort()
            return
        if reply is not None:
            self._reply.set_result(reply)
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        words = "" if error is None else f" ({str(error) or type(error).__name__})"
        what = "in the middle of a reply" if self._parser.begun else "without a reply"
        self._fail(OutcomeUnknown(f"{self._url} closed the connection {what}{words}; try again"))

    def _fail(self, error: MillpondError) -> None:
        self._error = error
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
