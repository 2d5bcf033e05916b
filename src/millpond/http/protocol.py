"""A connection that cannot be held for nothing: uvicorn's protocol on httptools, with bounds.

uvicorn sets a timer for every reply and none for a request that never ends. Here one sweep a second looks at all
connections: those that are idle for too long are closed, those that dawdle over their headers are told so. Headers
are bounded in bytes and number, connections in number, and what cannot be parsed is refused in the shape of all errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, ClassVar

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from millpond.errors import InvalidRequest, MillpondError, TooManyRequests, Unavailable
from millpond.http.refusals import HeadersTooLarge, TooSlow
from millpond.wire import JSON

PIPELINE_MAX = 16  # requests that are read ahead of their turn; the rest waits in the socket
SWEEP_EVERY_S = 1.0  # how late an idle connection may be closed
REFUSED_GRACE_S = 1.0  # for what is under way ahead of a refused request: a commit's time, not a long poll's
CONNECTIONS_RETRY_S = 1
HEADERS_MAX = 200  # lines: a dozen of a client, as many of each proxy on the way
LINE_BYTES = 4  # of a header, besides its name and value


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    header_bytes_max: int = 32 << 10  # a token, a cookie jar and a proxy's remarks
    header_timeout_s: float = 10.0  # a request's headers come in one packet, or a handful
    stall_timeout_s: float = 10.0  # with so much behind a long poll that its client could not be seen to leave
    idle_timeout_s: float = 75.0  # longer than a load balancer's minute, so that it closes first
    connections_max: int = 20_000  # each costs a file descriptor and some 9 KiB


class _Refused(Exception):
    """Raised in a callback of the parser to end the parsing."""


class _Refusal(msgspec.Struct, frozen=True):
    """In the place of a request, behind those that are to be answered before it."""

    error: MillpondError
    at: float


class GuardedProtocol(HttpToolsProtocol):
    connection_limits: ClassVar[ConnectionLimits] = ConnectionLimits()

    @classmethod
    def limit(cls, limits: ConnectionLimits) -> None:
        """All connections, from now on."""
        cls.connection_limits = limits

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.cycle: Any = None  # the request that came last
        self.answering: Any = None  # the one whose turn it is
        self._head_bytes = 0  # of the headers that are complete
        self._rest_bytes = 0  # what came behind them, or behind the body, and is neither yet
        self._in_head = False
        self._refusal: MillpondError | None = None
        self._held = False  # the next answer waits until this one is read
        self.active_at = self.begun_at = self._idle_at = self.loop.time()

    # ---- bounds on a request's head -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.connection_limits.connections_max:
            self.refuse(Unavailable("too many connections are open here; close some, or come back later"))

    def data_received(self, data: bytes) -> None:
        self.active_at = self.loop.time()
        if self._refused() is not None:
            return
        self._rest_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.refuse(self._refusal or InvalidRequest("this is not HTTP/1.1; speak it, or check the address"))
        else:
            if self._head_bytes + self._rest_bytes > self.connection_limits.header_bytes_max:
                self.refuse(self._too_large())

    def _parse(self, data: bytes) -> None:
        """No other protocol is spoken here: a request to change to one is answered as if it did not ask."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.begin_head()

    def begin_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self.begun_at = self.active_at

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + LINE_BYTES
        self._rest_bytes = 0
        if not self._in_head:  # a trailer: bounded as headers are, and no header
            self._check_head()
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._rest_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._rest_bytes = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self.end_head()
        super().on_headers_complete()
        self.read_on()

    def read_on(self) -> None:
        """uvicorn reads nothing behind a request; but then a client that waits cannot be seen to leave."""
        if len(self.pipeline) < PIPELINE_MAX:
            self.flow.resume_reading()
        else:
            self.flow.pause_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, _Refusal):
            self._tell(cycle.error)
            return
        self.answering = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells only the request that came last."""
        super().connection_lost(exc)
        if self.answering is not None and not self.answering.response_complete:
            self.answering.disconnected = True
            self.answering.message_event.set()

    def end_head(self) -> None:
        self._in_head = False
        self._check_head()
        self._head_bytes = 0

    def _check_head(self) -> None:
        bytes_max = self.connection_limits.header_bytes_max
        if self._head_bytes + len(self.url) > bytes_max or len(self.headers) > HEADERS_MAX:
            self._refusal = self._too_large()
            raise _Refused

    def _too_large(self) -> HeadersTooLarge:
        limit = self.connection_limits.header_bytes_max
        return HeadersTooLarge(f"there are over {limit} bytes or {HEADERS_MAX} lines of headers; send fewer")

    def refuse(self, error: MillpondError) -> None:
        """The request that is being read. It is told so in its turn, if that comes soon; the connection is over."""
        if not self._owes_reply():
            self._tell(error)
        elif self._refused() is None:
            self.pipeline.appendleft((_Refusal(error, self.loop.time()), self.app))  # type: ignore[arg-type]

    def _owes_reply(self) -> bool:
        """To a request before the one that is being read."""
        answering = self.answering
        if answering is None or answering.response_complete:
            return False
        return answering is not self.cycle or self._in_head or not answering.more_body

    def _refused(self) -> _Refusal | None:
        last: Any = self.pipeline[0][0] if self.pipeline else None
        return last if isinstance(last, _Refusal) else None

    def _tell(self, error: MillpondError) -> None:
        """Written at once, without a thought for what else is under way."""
        if self.transport.is_closing():
            return
        body = JSON.encode_error(error)
        retry = b"retry-after: %d\r\n" % CONNECTIONS_RETRY_S if error.retryable else b""
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        self.transport.write(b"".join((STATUS_LINE[error.status], head, retry, b"\r\n", body)))
        self.transport.close()

    # ---- time ---------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """As uvicorn's, without a timer."""
        self.answered_at(self.loop.time())

    def answered_at(self, now: float) -> None:
        self.active_at = self._idle_at = now
        flow = self.flow
        if not self.pipeline and not flow.write_paused and not flow.read_paused:
            return  # nothing waits: nearly always
        if self.transport.is_closing():
            return
        if self.flow.write_paused:  # a client that does not read gets no more answers
            self._held = True
            self.flow.pause_reading()
        else:
            self._proceed()

    def _proceed(self) -> None:
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._held:
            self._held = False
            self._proceed()

    def sweep(self, now: float) -> None:
        if self.transport.is_closing():
            return
        limits = self.connection_limits
        if (refused := self._refused()) is not None:
            if now - refused.at > REFUSED_GRACE_S:
                self.transport.close()
        elif self._in_head:
            if now - self.begun_at > limits.header_timeout_s:
                self.refuse(TooSlow(f"the headers did not arrive within {limits.header_timeout_s:g} s; send them"))
        elif self.pipeline and self.flow.read_paused and now - self.active_at > limits.stall_timeout_s:
            self._tell(  # in the place of what keeps it waiting
                TooManyRequests(
                    "too much waits behind one request on this connection; use another for long polls",
                    retry_after=CONNECTIONS_RETRY_S,
                )
            )
        elif (self.cycle is None or self.cycle.response_complete) and now - self._idle_at > limits.idle_timeout_s:
            self.transport.close()  # also one that drips: blank lines, or a body that nobody waits for any more


class Sweeper:
    """Once a second, all connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: Collection[Any]) -> None:
        self._loop = loop
        self._connections = connections
        self._timer = loop.call_later(SWEEP_EVERY_S, self._sweep)

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in list(self._connections):
            connection.sweep(now)
        self._timer = self._loop.call_later(SWEEP_EVERY_S, self._sweep)

    def stop(self) -> None:
        self._timer.cancel()
