"""The hot calls without ASGI: no scope, no task, one write.

It takes what it can answer well: a whole POST of produce, lease, complete, retry or extend, for a queue that is awake.
Everything else, and every request that is wrong in any way, goes on to the application with what was read of it, as
uvicorn would have handed it over: there is one place that refuses. Its answers are those of the application, which is
the oracle in the tests. It leans on uvicorn's internals, so uvicorn's minor version is pinned.

Replies on a connection go out in the order of the requests: a request that comes before its predecessor is answered
waits in uvicorn's `pipeline`, whichever way it will be answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.server import ServerState

from millpond import model, wire
from millpond.api import Begin, Begun, Reply
from millpond.errors import InternalError, MillpondError
from millpond.http.app import PREFIX, App
from millpond.http.exchange import ONCE, preferred_codec, printable, refusal_headers
from millpond.http.metrics import CallMeter
from millpond.http.parked import is_zero
from millpond.http.protocol import ConnectionLimits, GuardedProtocol
from millpond.http.refusals import TooSlow
from millpond.model import CompletedItems, LeasedItem, Produced, ProducedItems, Result
from millpond.wire import Codec, codec_of, forms, payloads, requests
from millpond.wire.replies import ProduceReply, Results

log = logging.getLogger(__name__)

_LONG_WAY = frozenset({b"expect", b"content-encoding", b"upgrade"})  # headers that change what a request is
HEADS_KEPT = 1_000  # heads remembered: they differ by call and length
HEAD_BYTES_KEPT = 2_048  # of one of them; a longer one is nobody's usual
LOOK_AGAIN_S = 0.1  # a token that was good so long ago is looked at again
_AHEAD_BYTES_MAX = 1 << 20  # read of a request before its turn: the rest waits in the socket
_NO_KINDS: frozenset[str] = frozenset()
_CODECS_MAX = 100  # pairs of Content-Type and Accept remembered: clients send one or two
_REPLY_HEAD = b"%bcontent-type: %b\r\ncache-control: no-store\r\nx-content-type-options: nosniff\r\ncontent-length: "
_REPLY = b"%b%d\r\n%b\r\n%b"  # the head, the body's length, other headers, the body
_NAMED_REPLY = b"%b%d\r\nx-correlation-id: %b\r\n\r\n%b"


class _NoEvent:
    """For uvicorn, which sets a cycle's event when the connection is lost."""

    def set(self) -> None:
        pass


_NO_EVENT = _NoEvent()


class Head(msgspec.Struct, kw_only=True):
    """What the head of a request says. `length` is that of the body, -1 where the head does not tell.

    A client sends the same few heads again and again, so one has what follows from it at hand: how its call begins
    and ends, what a good reply begins with, and who sent it at this instant of the loop, with a queue they may use.
    """

    application: App
    engine: Begin
    call: str
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    length: int
    codec: Codec
    decode: Callable[[bytes | bytearray], Any]
    reply_codec: Codec
    authorization: bytes | None
    correlation_id: str | None
    start: Start
    finish: Finish
    reply_head: bytes
    meter: CallMeter
    seen_at: float = -1.0
    identity: Any = None
    allowed: str | None = None


class LeanCycle(msgspec.Struct, eq=False):
    """A request of a hot call and its reply, in the place of uvicorn's RequestResponseCycle."""

    protocol: LeanProtocol
    head: Head
    identity: Any
    began: float
    keep_alive: bool
    correlation_id: str | None
    body: bytes | bytearray = b""
    more_body: bool = True  # not all of it was read
    disconnected: bool = False
    response_complete: bool = False
    message_event: _NoEvent = _NO_EVENT
    begun: Begun | None = None
    parked: bool = False
    leases: Sequence[str] = ()  # that it ends, if all goes well

    def leave(self) -> None:
        if self.parked:
            self.parked = False
            self.head.application.parked.leave(self)

    def done(self, reply: Reply) -> None:
        """The engine has answered. Nothing may be raised into its loop."""
        protocol = self.protocol
        if self.parked:
            self.parked = False
            self.head.application.parked.leave(self)
            if protocol.loop.time() - self.began > LOOK_AGAIN_S and reply.value:
                protocol.loop.call_soon(protocol.hand_over, self, reply)
                return
        if self.begun is None:  # it answered at once, while we are still in its call
            protocol.loop.call_soon(protocol.write_reply, self, reply)
        else:
            protocol.write_reply(self, reply)

    def cancel(self) -> None:
        """As a task's, for a drain: the reply is empty and comes at once, what was leased goes back."""
        if self.begun is not None:
            self.begun.withdraw()


class _LongWay(Exception):
    """Not for here."""


class LeanProtocol(GuardedProtocol):
    """`use` binds it to an application and an engine."""

    # What every request reads or writes lies side by side, so that a connection takes few lines of cache.
    __slots__ = (
        "_between", "_idle_at", "active_at", "answering", "begun_at", "cycle", "flow", "loop", "pipeline",
        "server_state", "transport",
    )  # fmt: skip

    application: ClassVar[App]
    engine: ClassVar[Begin]
    codecs: ClassVar[dict[tuple[bytes, bytes | None], tuple[Codec, Codec]]] = {}
    heads: ClassVar[dict[bytes, Head]] = {}  # by their bytes: a client sends the same few again and again

    @classmethod
    def use(cls, application: App, engine: Begin, limits: ConnectionLimits) -> type[LeanProtocol]:
        bound = {"application": application, "engine": engine, "connection_limits": limits, "codecs": {}, "heads": {}}
        return type("BoundLeanProtocol", (cls,), bound)

    @classmethod
    def limit(cls, limits: ConnectionLimits) -> None:
        super().limit(limits)
        cls.heads.clear()  # they were measured by the application's limits of then

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._reading: LeanCycle | None = None  # the request that is being read, if it is one of ours
        self._between = True  # requests: the next byte begins one
        self._head_bytes_seen: bytes | None = None  # of the request that begins

    # ---- the request --------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """A whole request whose head was seen before is not parsed again."""
        cycle = self.cycle
        if self._between and (cycle is None or cycle.response_complete):
            end = data.find(b"\r\n\r\n") + 4
            head = self.heads.get(data[:end])
            if head is not None and head.length == len(data) - end:
                self.active_at = self.begun_at = now = self.loop.time()
                if head.seen_at == now or self._know(head):
                    cycle = LeanCycle(
                        self, head, head.identity, now, head.keep_alive, head.correlation_id, data[end:], False
                    )
                    self.cycle = self.answering = cycle
                    self._begin(cycle)
                    return
            whole = 4 < end <= HEAD_BYTES_KEPT and data.startswith(b"POST ")  # or anybody's piece would stand for it
            self._head_bytes_seen = data[:end] if whole else None
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Without the scope: it is made when it turns out to be needed."""
        self.begin_head()
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._reading = None
        self._between = False

    def on_headers_complete(self) -> None:
        self.end_head()
        seen, self._head_bytes_seen = self._head_bytes_seen, None
        head = self._read_head()
        if head is None or not self._know(head):
            self._make_scope()
            super().on_headers_complete()
            return
        if seen is not None and head.length >= 0:
            if len(self.heads) >= HEADS_KEPT:
                self.heads.clear()
            self.heads[seen] = head
        cycle = LeanCycle(self, head, head.identity, self.begun_at, head.keep_alive, head.correlation_id)
        before, self.cycle, self._reading = self.cycle, cycle, cycle
        if before is None or before.response_complete:
            self.answering = cycle
        else:
            self.pipeline.appendleft((cycle, self.app))  # type: ignore[arg-type]
            self.read_on()

    def _read_head(self) -> Head | None:
        """None: not for here."""
        call = PATHS.get(self.url)
        if call is None or self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return None
        found = dict(self.headers)
        if not _LONG_WAY.isdisjoint(found) or (len(found) < len(self.headers) and _is_ambiguous(self.headers)):
            return None
        try:
            length = -1 if b"transfer-encoding" in found else int(found.get(b"content-length", -1))
            if length > self.application.limits.body_bytes_max:
                return None
            self.application.check_host(found.get(b"host"))
            codec, reply_codec = self._codecs(found[b"content-type"], found.get(b"accept"))
        except Exception:  # whatever is wrong with it, the application says so
            return None
        return Head(
            application=self.application,
            engine=self.engine,
            call=call,
            headers=self.headers,
            keep_alive=self.parser.should_keep_alive(),
            length=length,
            codec=codec,
            decode=codec.decode_produce if call == "queue.produce" else codec.decoder(wire.CALLS[call].request),
            reply_codec=reply_codec,
            authorization=found.get(b"authorization"),
            correlation_id=printable(found.get(b"x-correlation-id")),
            start=STARTS[call],
            finish=FINISHES[call],
            reply_head=_reply_head(200, reply_codec),
            meter=self.application.meter.calls[call],
        )

    def _know(self, head: Head) -> bool:
        """False for a stranger, whom the application refuses. Who asks is known before the body is read."""
        try:
            identity = self.application.gate.authenticate(head.authorization)
        except Exception:
            return False
        if identity is not head.identity:
            head.identity, head.allowed = identity, None
        head.seen_at = self.begun_at
        return True

    def _make_scope(self) -> None:
        headers, expect, url = self.headers, self.expect_100_continue, self.url
        super().on_message_begin()
        self.headers += headers  # the list is the scope's too
        self.expect_100_continue, self.url = expect, url

    def on_body(self, body: bytes) -> None:
        cycle = self._reading
        if cycle is None:
            super().on_body(body)
            return
        self._rest_bytes = 0
        if not cycle.body:
            cycle.body = body
        elif isinstance(cycle.body, bytes):
            cycle.body = bytearray(cycle.body) + body
        else:
            cycle.body += body
        if len(cycle.body) > self.application.limits.body_bytes_max:
            self._reading = None
            self._take_long_way(cycle)
        elif len(cycle.body) > _AHEAD_BYTES_MAX and cycle is not self.answering:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        cycle = self._reading
        self._between = True
        if cycle is None:
            super().on_message_complete()
            return
        self._rest_bytes = 0
        self._reading = None
        cycle.more_body = False
        if self.answering is cycle:
            self._begin(cycle)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Its turn has come."""
        if not isinstance(cycle, LeanCycle):
            super()._start_asgi_task(cycle, app)
            return
        self.answering = cycle
        if not cycle.more_body:
            self._begin(cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if isinstance(self.answering, LeanCycle) and not self.answering.response_complete:
            self.answering.cancel()

    def sweep(self, now: float) -> None:
        super().sweep(now)
        timeout = self.application.limits.body_timeout_s
        if self._reading is not None and now - self.begun_at > timeout:
            self.refuse(TooSlow(f"the body did not arrive within {timeout:g} s; send it faster, or less of it"))

    # ---- the long way -------------------------------------------------------------------------------------

    def _take_long_way(self, cycle: LeanCycle) -> None:
        """Hand it to the application, with what was read of it."""
        scope: Any = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "headers": cycle.head.headers,
            "state": {},
            "method": "POST",
            "path": f"{PREFIX}{cycle.head.call}",
            "raw_path": f"{PREFIX}{cycle.head.call}".encode(),
            "query_string": b"",
        }
        long = RequestResponseCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=cycle.keep_alive,
            on_response=self.on_response_complete,
        )
        long.body, long.more_body = bytearray(cycle.body), cycle.more_body
        long.message_event.set()
        if self.cycle is cycle:
            self.cycle = long
        if self.answering is cycle:
            self._start_asgi_task(long, self.app)
        else:
            waiting: list[Any] = [one for one, _ in self.pipeline]
            self.pipeline[waiting.index(cycle)] = (long, self.app)

    # ---- the answer ---------------------------------------------------------------------------------------

    def _begin(self, cycle: LeanCycle) -> None:
        try:
            begun = cycle.head.start(cycle)
        except Exception:  # wrong, not allowed, too many: the application says so
            begun = None
        if begun is None:
            cycle.leave()
            self._take_long_way(cycle)
        else:
            cycle.begun = begun

    def _codecs(self, content_type: bytes, accept: bytes | None) -> tuple[Codec, Codec]:
        known = self.codecs.get((content_type, accept))
        if known is None:
            codec = codec_of(content_type.decode("latin-1"))
            if codec is None or b"charset" in content_type.lower():
                raise _LongWay
            reply_codec = codec if accept is None else preferred_codec(accept.decode("latin-1"), codec)
            known = (codec, reply_codec)
            if len(self.codecs) < _CODECS_MAX:
                self.codecs[content_type, accept] = known
        return known

    def hand_over(self, cycle: LeanCycle, reply: Reply) -> None:
        """Items, to one who waited for them: their token may have been revoked meanwhile."""
        try:
            self.application.gate.authenticate(cycle.head.authorization)
        except MillpondError as error:
            if not cycle.disconnected:
                cycle.cancel()
                self._write_error(cycle, error)
        else:
            self.write_reply(cycle, reply)

    def write_reply(self, cycle: LeanCycle, reply: Reply) -> None:
        if cycle.disconnected:
            self.application.meter.count(cycle.head.call, 0, self.loop.time() - cycle.began)
            return
        try:
            if reply.error is not None:
                self._write_error(cycle, reply.error)
                return
            head = cycle.head
            body = head.finish(cycle, reply.value)
            if not cycle.keep_alive:
                self._write(cycle, 200, body)
                return
            named = cycle.correlation_id  # of a single item
            if named is None:
                self.transport.write(_REPLY % (head.reply_head, len(body), b"", body))
            else:
                self.transport.write(_NAMED_REPLY % (head.reply_head, len(body), named.encode(), body))
            now = self.loop.time()
            head.meter.note(now - cycle.began, len(cycle.body), len(body))
            cycle.response_complete = True
            cycle.begun = None  # else the two hold each other until the collector comes
            self.answered_at(now)
        except Exception as bug:
            log.error("%s failed", cycle.head.call, exc_info=bug, extra={"correlation_id": cycle.correlation_id})
            self._write_error(cycle, InternalError("millpond has a bug; its log has more"))

    def _write_error(self, cycle: LeanCycle, error: MillpondError) -> None:
        cycle.correlation_id = error.details.get("correlation_id", cycle.correlation_id)
        headers = b"".join(b"%s: %s\r\n" % header for header in refusal_headers(error))
        self._write(cycle, error.status, cycle.head.reply_codec.encode_error(error), headers)

    def _write(self, cycle: LeanCycle, status: int, body: bytes, headers: bytes = b"") -> None:
        if cycle.correlation_id is not None:
            headers += b"x-correlation-id: %b\r\n" % cycle.correlation_id.encode()
        if not cycle.keep_alive:
            headers += b"connection: close\r\n"
        self.transport.write(_REPLY % (_reply_head(status, cycle.head.reply_codec), len(body), headers, body))
        now = self.loop.time()
        cycle.head.meter.count(status, now - cycle.began, len(cycle.body), len(body))
        cycle.response_complete = True
        cycle.begun = None
        if not cycle.keep_alive:
            self.transport.close()
        self.answered_at(now)


def _reply_head(status: int, codec: Codec) -> bytes:
    return _REPLY_HEAD % (STATUS_LINE[status], codec.media_type_bytes)


def _is_ambiguous(headers: list[tuple[bytes, bytes]]) -> bool:
    names = [name for name, _ in headers]
    return any(names.count(name) > 1 for name in ONCE)


# ---- the calls: how each begins, and what becomes of its reply --------------------------------------------

Start = Callable[["LeanCycle"], Begun | None]
Finish = Callable[["LeanCycle", Any], bytes]


def _check_queue(cycle: LeanCycle, queue: str, kinds: frozenset[str] = _NO_KINDS) -> None:
    """Whether whoever asks may use the queue so. The usual answer, for one that makes no jobs, is at hand."""
    head = cycle.head
    if queue == head.allowed and not kinds and cycle.identity is head.identity:
        return
    head.application.gate.authorize(cycle.identity, head.call, queue, kinds)
    if not kinds and cycle.identity is head.identity:
        head.allowed = queue


def _begin_produce(cycle: LeanCycle) -> Begun | None:
    head = cycle.head
    request = head.decode(cycle.body)
    kinds = _NO_KINDS if type(request) is requests.ProducePlain else payloads.kinds_of(request)
    _check_queue(cycle, request.queue, kinds)
    items = payloads.new_items(request, head.codec, cycle.correlation_id)
    return head.engine.begin_produce(request.queue, items, request.on_conflict, request.request_id, cycle.done)


def _begin_lease(cycle: LeanCycle) -> Begun | None:
    head = cycle.head
    request: requests.Lease = head.decode(cycle.body)
    _check_queue(cycle, request.queue)
    parked = head.application.parked
    if is_zero(request.wait):
        parked.check_open()
    else:
        parked.enter(cycle)
        cycle.parked = True
    return head.engine.begin_lease(
        request.queue, request.batch, request.wait, request.lease_timeout, request.client_id, cycle.done
    )


def _begin_complete(cycle: LeanCycle) -> Begun | None:
    head = cycle.head
    request: requests.Complete = head.decode(cycle.body)
    if request.queue is None or request.result is not None:
        raise _LongWay
    _check_queue(cycle, request.queue)
    cycle.leases = request.leases
    return head.engine.begin_complete(request.queue, request.leases, cycle.done)


def _begin_retry(cycle: LeanCycle) -> Begun | None:
    request: requests.Retry = cycle.head.decode(cycle.body)
    if request.queue is None:
        raise _LongWay
    _check_queue(cycle, request.queue)
    cycle.leases = [item.lease for item in request.items]
    items = [model.Retry(**msgspec.structs.asdict(item)) for item in request.items]
    return cycle.head.engine.begin_retry(request.queue, items, cycle.done)


def _begin_extend(cycle: LeanCycle) -> Begun | None:
    request: requests.Extend = cycle.head.decode(cycle.body)
    if request.queue is None:
        raise _LongWay
    _check_queue(cycle, request.queue)
    if is_zero(request.lease_timeout):
        cycle.leases = request.leases
    return cycle.head.engine.begin_extend(request.queue, request.leases, request.lease_timeout, cycle.done)


def _produced(cycle: LeanCycle, produced: Sequence[Produced]) -> bytes:
    codec = cycle.head.reply_codec
    if type(produced) is ProducedItems and len(produced) > 1:
        return forms.produced(produced, codec)
    made = produced if type(produced) is list else list(produced)
    if len(made) == 1:
        cycle.correlation_id = made[0].correlation_id
    return codec.encode(ProduceReply(made))


def _leased(cycle: LeanCycle, items: Sequence[LeasedItem]) -> bytes:
    codec = cycle.head.reply_codec
    if (told := forms.leased(items, codec)) is not None:
        cycle.correlation_id, body = told[0] or cycle.correlation_id, told[1]
        return body
    reply = payloads.lease_reply(items, codec)
    if len(reply.items) == 1:
        cycle.correlation_id = reply.items[0].correlation_id
    return codec.encode(reply)


def _settled(cycle: LeanCycle, results: Sequence[Result]) -> bytes:
    """Streams that hold these leases have room for more."""
    if cycle.leases:
        cycle.head.application.streams.settle(cycle.leases, results)
    if type(results) is CompletedItems and len(results) > 1:
        return forms.completed(results, cycle.head.reply_codec)
    made = results if type(results) is list else list(results)
    if len(made) == 1:
        cycle.correlation_id = made[0].correlation_id or cycle.correlation_id  # what is no token is of no item
    return cycle.head.reply_codec.encode(Results(made))


STARTS: dict[str, Start] = {
    "queue.produce": _begin_produce,
    "queue.lease": _begin_lease,
    "queue.complete": _begin_complete,
    "queue.retry": _begin_retry,
    "queue.extend": _begin_extend,
}
FINISHES: dict[str, Finish] = {
    "queue.produce": _produced,
    "queue.lease": _leased,
    "queue.complete": _settled,
    "queue.retry": _settled,
    "queue.extend": _settled,
}
PATHS: dict[bytes, str] = {f"{PREFIX}{name}".encode(): name for name in STARTS}
