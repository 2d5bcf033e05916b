"""One request and its one reply, over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from millpond.errors import BatchTooLarge, InvalidRequest, MillpondError, TooManyRequests, Unauthorized
from millpond.http.refusals import ClientGone, MethodNotAllowed, TooSlow, UnsupportedMediaType
from millpond.wire import JSON, Codec, arrow, codec_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

CORRELATION_MAX = 128  # as an item's
RETRY_AFTER_S = 1  # for what is over in a moment: a store that comes back, a restart
ONCE = frozenset({b"host", b"authorization", b"content-type", b"content-length"})  # two of these and nobody knows


class Exchange:
    """`correlation_id` goes into the reply's header: the item's on single-item calls, else what the client sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.headers: dict[bytes, bytes] = dict(self._headers)
        self._receive = receive
        self._send = send
        self._gone: asyncio.Task[None] | None = None
        self.status = 0  # of the reply, once it is begun
        self.bytes_received = self.bytes_sent = 0
        self.request_codec = self.reply_codec = JSON
        self.sends_arrow = self.wants_arrow = False  # in place of these codecs; errors are never told so
        self.identity: Any = None
        self.authenticate: Callable[[], Any] = lambda: None  # again, for whoever waited: a token may be revoked by then
        self.asked_correlation_id = printable(self.headers.get(b"x-correlation-id"))
        self.correlation_id: str | None = None

    # ---- the request --------------------------------------------------------------------------------------

    def negotiate(self, arrow_in: str = "") -> None:
        """The request's codec. The reply's is the one of Accept, else the same. `arrow_in` is `Call.arrow`."""
        self._accept(JSON)
        self.request_codec = self._content_codec(arrow_in == "request")
        self._accept(self.request_codec)
        self.wants_arrow = arrow_in == "reply" and prefers_arrow(self.headers.get(b"accept", b"").decode("latin-1"))

    def check_once(self) -> None:
        """Before any of them is believed."""
        if len(self.headers) == len(self._headers):
            return
        names = [name for name, _ in self._headers]
        for name in ONCE:
            if names.count(name) > 1:
                raise InvalidRequest(f"the header {name.decode()} is there twice; send it once")

    def _content_codec(self, may_be_arrow: bool) -> Codec:
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise UnsupportedMediaType("the body has a Content-Encoding; send it as it is")
        given = self.headers.get(b"content-type", b"").decode("latin-1")
        if may_be_arrow and is_arrow(given):
            self.sends_arrow = True
            return JSON
        codec = codec_of(given)
        charset = given.lower().partition("charset=")[2].strip(' ";')
        if codec is None or charset not in ("", "utf-8", "utf8"):
            what = f"Content-Type {given[:60]!r} is not spoken here" if given else "there is no Content-Type"
            or_arrow = f", or {arrow.MEDIA_TYPE}" if may_be_arrow else ""
            raise UnsupportedMediaType(f"{what}; send application/json (UTF-8) or application/msgpack{or_arrow}")
        return codec

    def _accept(self, otherwise: Codec) -> None:
        accept = self.headers.get(b"accept")
        self.reply_codec = otherwise if accept is None else preferred_codec(accept.decode("latin-1"), otherwise)

    async def body(self, bytes_max: int, within_s: float) -> bytes:
        """All of it. Counted as it comes, whatever Content-Length says; in time, or the client is told to hurry."""
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > bytes_max):
            raise _body_too_large(bytes_max)
        try:
            async with asyncio.timeout(within_s):
                return await self._all(bytes_max)
        except TimeoutError:
            raise TooSlow(f"the body did not arrive within {within_s:g} s; send it faster, or less of it") from None

    async def _all(self, bytes_max: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            part = await self._receive()
            if part["type"] == "http.disconnect":
                raise ClientGone
            parts.append(part.get("body", b""))
            self.bytes_received = size = size + len(parts[-1])
            if size > bytes_max:
                raise _body_too_large(bytes_max)
            if not part.get("more_body"):
                return b"".join(parts)

    # ---- the client's presence ----------------------------------------------------------------------------

    def gone(self) -> asyncio.Task[None]:
        """Done once the client has left. To be asked for after the body was read."""
        if self._gone is None:
            self._gone = asyncio.ensure_future(self._until_gone())
        return self._gone

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        if self._gone is not None:
            self._gone.cancel()

    def mirror(self, replies: Sequence[Any]) -> None:
        """The correlation id of a single item."""
        if len(replies) == 1:
            self.correlation_id = replies[0].correlation_id

    # ---- the reply ----------------------------------------------------------------------------------------

    async def reply(self, status: int, body: bytes, media_type: str, headers: Headers = ()) -> None:
        await self.start(status, media_type, [(b"content-length", b"%d" % len(body)), *headers])
        await self.write(b"" if self.method == "HEAD" else body, last=True)

    async def start(self, status: int, media_type: str, headers: Headers = ()) -> None:
        named = self.correlation_id or self.asked_correlation_id
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", media_type.encode()),
                    (b"cache-control", b"no-store"),
                    (b"x-content-type-options", b"nosniff"),
                    *headers,
                    *([] if named is None else [(b"x-correlation-id", named.encode())]),
                ],
            }
        )

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Returns when the client has room for more."""
        self.bytes_sent += len(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def refuse(self, error: MillpondError) -> None:
        named = error.details.get("correlation_id")
        if isinstance(named, str):
            self.correlation_id = named
        codec = self.reply_codec
        await self.reply(error.status, codec.encode_error(error), codec.media_type, refusal_headers(error))


def refusal_headers(error: MillpondError) -> list[tuple[bytes, bytes]]:
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", error.allow.encode())]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", error.challenge.encode())]
    if isinstance(error, TooManyRequests):
        return [(b"retry-after", b"%d" % max(1, round(error.retry_after)))]
    if isinstance(error, TooSlow):
        return [(b"connection", b"close")]  # the rest of the body may never come
    return [(b"retry-after", b"%d" % RETRY_AFTER_S)] if error.retryable else []


def preferred_codec(accept: str, otherwise: Codec) -> Codec:
    """The codec of the best-liked media type that is spoken here; a tie goes to the first."""
    best, best_quality = otherwise, 0.0
    for entry in accept.split(","):
        codec = codec_of(entry)
        quality = _quality(entry)
        if codec is not None and quality > best_quality:
            best, best_quality = codec, quality
    return best


def is_arrow(media_type: str) -> bool:
    return media_type.partition(";")[0].strip().lower() == arrow.MEDIA_TYPE


def prefers_arrow(accept: str) -> bool:
    """Whether Arrow is liked best of what is spoken here."""
    entries = [entry for entry in accept.split(",") if is_arrow(entry) or codec_of(entry) is not None]
    best = max(entries, key=_quality, default="")  # a tie goes to the first
    return is_arrow(best) and _quality(best) > 0


def _quality(entry: str) -> float:
    for parameter in entry.split(";")[1:]:
        name, _, value = parameter.strip().partition("=")
        if name == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def printable(value: bytes | None) -> str | None:
    """A correlation id as it may be written into logs and headers; one that may not is as good as none."""
    if value is None or not 0 < len(value) <= CORRELATION_MAX or not all(0x20 <= byte < 0x7F for byte in value):
        return None
    return value.decode("ascii")


def _body_too_large(bytes_max: int) -> BatchTooLarge:
    return BatchTooLarge(f"the body has more than {bytes_max} bytes; split it", bytes_max=bytes_max)
