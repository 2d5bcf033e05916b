"""The HTTP API as one ASGI application: from a path to an answer. The complete path, and the readable one.

A call is `POST /v1/<name>`, by the table in `wire/calls.py`. In order: the host, who asks (before the body is read),
the body, what it says, whether they may, the answer. Whatever goes wrong on the way is an error with a status; what
is no error of `millpond.errors` is a bug of ours, and is logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import msgspec

from millpond.api import Api, caller
from millpond.errors import InternalError, MillpondError, NotBuilt, NotFound
from millpond.http.answers import ANSWERS, Answers, QueueOf, queues_named
from millpond.http.aside import ON_LOOP_BYTES, Aside
from millpond.http.batches import Encoded
from millpond.http.exchange import Exchange, Receive, Scope, Send
from millpond.http.gate import Anybody, Gate, OpenGate
from millpond.http.hosts import AllowedHosts
from millpond.http.metrics import HttpMeter
from millpond.http.pages import Look, Metrics, Pages
from millpond.http.parked import Parked
from millpond.http.refusals import ClientGone, MethodNotAllowed
from millpond.http.streaming import GiveBack, Streams
from millpond.log import correlation_id
from millpond.model import Check, Health, Reloaded, Retry
from millpond.wire import CALLS, Call, Codec
from millpond.wire.payloads import Producing, kinds_of
from millpond.wire.requests import Produce, Stage
from millpond.wire.staged import StagedRows, read_stage

PREFIX = "/v1/"
RELOAD = "config.reload"  # no call of the API: only on the socket of a data directory, for who can read that
log = logging.getLogger(__name__)


Ready = Callable[[bool], Health]
Reload = Callable[[], Awaitable[Reloaded]]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    body_bytes_max: int = 16 << 20  # a thousand items of 16 KiB
    body_timeout_s: float = 30.0  # a body of that size over a slow line; slower ones hold a place for nothing
    parked_max: int = 20_000  # waiting leases: some 10 KiB each
    streams_max: int = 1_000  # each has its leases extended
    keep_alive_s: float = 15.0  # below the minute after which proxies drop a silent connection
    stall_s: float = 60.0  # how long a stream's client may leave what was sent unread


class App:
    """`queue_of` tells the queue of a lease token, `give_back` returns items of clients that left, `now` is in ms.

    `live` and `ready` (which is told of a drain) look at the engine's health, `metrics` gives Prometheus' page,
    `reload` reads the configuration again.
    """

    def __init__(
        self,
        api: Api,
        *,
        gate: Gate | None = None,
        queue_of: QueueOf = lambda lease: None,
        give_back: GiveBack | None = None,
        allowed_hosts: Iterable[str] | None = None,
        live: Look = lambda: Health(status="ok", checks={}),
        ready: Ready | None = None,
        metrics: Metrics | None = None,
        now: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        limits: Limits | None = None,
        reload: Reload | None = None,
    ) -> None:
        self._reload = reload
        self.limits = limits = limits or Limits()
        self.gate: Gate = gate or OpenGate()
        self.queue_of = queue_of
        self._hosts = None if allowed_hosts is None else AllowedHosts(allowed_hosts)
        give_back = give_back or defer_all(api)
        self.parked = Parked(limits.parked_max)
        self.streams = Streams(
            api,
            self.parked,
            give_back,
            now,
            limit=limits.streams_max,
            keep_alive_s=limits.keep_alive_s,
            stall_s=limits.stall_s,
        )
        self._aside = Aside()
        self.answers = Answers(api, self.parked, self._aside, self.streams, give_back)
        self._pages = Pages(live, lambda: (ready or readiness)(self.draining), metrics)
        self.meter = HttpMeter([*CALLS, *self._pages.paths])

    @property
    def draining(self) -> bool:
        return self.parked.draining

    def limit(self, limits: Limits, allowed_hosts: Iterable[str] | None) -> None:
        """To these from now on; streams stay as they are."""
        self.limits = limits
        self.parked.limit = limits.parked_max
        self._hosts = None if allowed_hosts is None else AllowedHosts(allowed_hosts)

    def drain(self) -> None:
        """Before a shutdown: not ready, leases do not wait, streams end; everything else is answered as ever."""
        self.parked.drain()
        self.streams.drain()

    def check_host(self, host: bytes | None) -> None:
        if self._hosts is not None:
            self._hosts.check(host)

    # ---- one exchange -------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _decline(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        correlation_id.set(exchange.asked_correlation_id)
        began = time.perf_counter()
        try:
            await self._answer(exchange)
        except MillpondError as error:
            await exchange.refuse(error)
        except (ClientGone, asyncio.CancelledError):  # only who cuts the connection cancels
            pass
        except Exception as bug:
            await _confess(exchange, bug)
        finally:
            exchange.close()
            call, seconds = exchange.path.removeprefix(PREFIX), time.perf_counter() - began
            self.meter.count_bytes(call, exchange.status, seconds, exchange.bytes_received, exchange.bytes_sent)

    async def _answer(self, exchange: Exchange) -> None:
        exchange.check_once()
        self.check_host(exchange.headers.get(b"host"))
        path = exchange.path
        call = CALLS.get(path[len(PREFIX) :]) if path.startswith(PREFIX) else None
        if call is not None:
            _check_method(exchange, "POST")
            await self._call(exchange, call)
        elif path in self._pages.paths:
            _check_method(exchange, "GET", "HEAD")
            await self._page(exchange)
        elif path == PREFIX + RELOAD and self._reload is not None:
            _check_method(exchange, "POST")
            exchange.negotiate()
            caller.set(Anybody.who)
            codec = exchange.reply_codec
            await exchange.reply(200, codec.encode(await self._reload()), codec.media_type)
        else:
            raise _not_found(path, self._pages.paths)

    async def _page(self, exchange: Exchange) -> None:
        permission = self._pages.permission(exchange.path)
        if permission is not None:
            identity = self.gate.authenticate(exchange.headers.get(b"authorization"))
            self.gate.authorize(identity, permission, None)
        page = self._pages.page(exchange.path, exchange.headers.get(b"accept", b"").decode("latin-1"))
        await exchange.reply(page.status, page.body, page.media_type, page.headers)

    # ---- calls --------------------------------------------------------------------------------------------

    async def _call(self, exchange: Exchange, call: Call) -> None:
        exchange.negotiate(call.arrow)
        exchange.authenticate = partial(self.gate.authenticate, exchange.headers.get(b"authorization"))
        exchange.identity = exchange.authenticate()
        caller.set(exchange.identity.who)
        body = await exchange.body(self.limits.body_bytes_max, self.limits.body_timeout_s)
        request = await self._decoded(exchange, call, body)
        self._authorize(exchange.identity, call, request)
        if not call.built:
            raise NotBuilt(f"{call.name} is not built yet; a later release has it", call=call.name)
        if call.name == "queue.subscribe":
            await self.streams.serve(exchange, request)
            return
        reply = await ANSWERS[call.name](self.answers, request, exchange)
        if not isinstance(reply, Encoded):
            reply = Encoded(exchange.reply_codec.encode(reply), exchange.reply_codec.media_type)
        await exchange.reply(200, reply.body, reply.media_type, reply.headers)

    async def _decoded(self, exchange: Exchange, call: Call, body: bytes) -> Any:
        if exchange.sends_arrow:
            return await self._aside.run(read_stage, exchange.query, body)
        if call.request is Stage and len(body) > ON_LOOP_BYTES:
            return await self._aside.run(exchange.request_codec.decode_stage, body)
        return decoded(call, exchange.request_codec, body)

    def _authorize(self, identity: Any, call: Call, request: Any) -> None:
        kinds = kinds_of(request) if isinstance(request, Producing | StagedRows) else ()
        named = False
        for queue in queues_named(request, self.queue_of):
            named = True
            self.gate.authorize(identity, call.name, queue, kinds)
        if not named:
            self.gate.authorize(identity, call.name, None, kinds)


def readiness(draining: bool) -> Health:
    """Of the server alone."""
    if not draining:
        return Health(status="ready", checks={})
    return Health(status="not_ready", checks={"draining": Check(status="failed", detail="the server is shutting down")})


def decoded(call: Call, codec: Codec, body: bytes) -> Any:
    if call.request is Produce:
        return codec.decode_produce(body)
    return codec.decode_stage(body) if call.request is Stage else codec.decode(body, call.request)


def defer_all(api: Api) -> GiveBack:
    """Items back with their attempt, to the tail: all that the API can do. The engine itself can do better."""

    async def give_back(queue: str, leases: Sequence[str]) -> None:
        try:
            await api.retry([Retry(lease=lease, intent="defer") for lease in leases], queue=queue)
        except MillpondError as error:  # they come back when their leases run out
            log.warning("items of a client that left %s were not given back: %s", queue, error.message)

    return give_back


def _check_method(exchange: Exchange, *allowed: str) -> None:
    if exchange.method not in allowed:
        allow = ", ".join(allowed)
        raise MethodNotAllowed(f"{exchange.method[:20]} is not for {exchange.path}; use {allow}", allow=allow)


def _not_found(path: str, pages: Iterable[str]) -> NotFound:
    shown = path[:100]
    near = get_close_matches(shown, [*(PREFIX + name for name in CALLS), *pages], 1)
    hint = f"did you mean {near[0]}?" if near else "see /docs for what there is"
    return NotFound(f"there is nothing at {shown!r}; {hint}", **({"nearest": near[0]} if near else {}))


async def _confess(exchange: Exchange, bug: Exception) -> None:
    """To the log all, to the client the name to find it by."""
    named = exchange.correlation_id or exchange.asked_correlation_id or uuid.uuid4().hex
    log.error("%s %s failed, correlation id %s", exchange.method, exchange.path, named, exc_info=bug)
    if not exchange.status:
        exchange.correlation_id = named
        await exchange.refuse(
            InternalError("millpond has a bug; its log has more under the correlation id", correlation_id=named)
        )


async def _decline(scope: Scope, receive: Receive, send: Send) -> None:
    """A server starts and stops the engine itself; WebSockets are not spoken."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1003})
    elif scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
