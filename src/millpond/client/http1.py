"""HTTP/1.1 as a client speaks it, without I/O: request bytes out, reply bytes in."""

from __future__ import annotations

import math
from collections.abc import Iterator

from httptools import HttpParserError, HttpResponseParser
from msgspec import Struct

from millpond.errors import BadReply

HEAD_BYTES_MAX = 256 << 10  # nobody's headers are that long, and one read may bring part of the body with them
RETRY_AFTER_MAX_S = 3_600.0  # a server that says more has gone away


class Reply(Struct, frozen=True, gc=False):
    """`retry_after` is in seconds; `reusable`: the connection may carry another request."""

    status: int
    media_type: str
    body: bytes
    retry_after: float
    reusable: bool


class ReplyParser:
    """The replies on one connection, one after the other."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._parser = HttpResponseParser(self)
        self._reply: Reply | None = None
        self._clear()

    def _clear(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._size = 0
        self._head_size = 0
        self.status = 0  # known once the headers are
        self.begun = False
        self._excess = False

    def feed(self, data: bytes) -> Reply | None:
        """The reply, once it is whole. What is no HTTP, or too much of it, is a BadReply."""
        self.begun = True
        if not self.status:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            cause = error.__context__
            raise (
                cause if isinstance(cause, BadReply) else BadReply(f"the reply is no HTTP ({error}); {WRONG}")
            ) from None
        if not self.status and self._head_size > HEAD_BYTES_MAX:
            raise BadReply(f"the reply's headers have more than {HEAD_BYTES_MAX} bytes; {WRONG}")
        reply, self._reply = self._reply, None
        if reply is not None:
            if self._excess:
                reply = Reply(reply.status, reply.media_type, reply.body, reply.retry_after, False)
            self._clear()
        return reply

    def drain(self) -> bytes:
        """What there is of the body so far: for a stream, whose reply is never whole."""
        parts, self._parts = self._parts, []
        self._size = 0
        return b"".join(parts)

    # ---- what httptools calls -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._excess = self._reply is not None

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if not self._excess:
            self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._bytes_max:
            raise BadReply(f"the reply has more than {self._bytes_max} bytes; ask for less, or raise reply_bytes_max")
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue and the like: the reply is still to come
            self._headers, self.status = {}, 0
        elif self._reply is None:
            media_type = self._headers.get(b"content-type", b"").decode("latin-1")
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            after = _retry_after(self._headers.get(b"retry-after"))
            self._reply = Reply(self.status, media_type, body, after, self._parser.should_keep_alive())


WRONG = "is there a millpond server at that address?"


def _retry_after(value: bytes | None) -> float:
    """Seconds only: millpond sends no dates."""
    try:
        found = float(value or 0)
    except ValueError:
        return 0.0
    return min(found, RETRY_AFTER_MAX_S) if math.isfinite(found) and found > 0 else 0.0


def head(prefix: str, call: str, host: str, media_type: str, headers: dict[str, str]) -> bytes:
    """All of a request but its length and body."""
    lines = [f"POST {prefix}/v1/{call} HTTP/1.1", f"Host: {host}", f"Content-Type: {media_type}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\nContent-Length: ").encode("ascii")


def request(head: bytes, body: bytes) -> bytes:
    return b"%b%d\r\n\r\n%b" % (head, len(body), body)


class Lines:
    """The lines of a stream, as its bytes come."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._bytes_max:
            raise BadReply(f"a line of the stream has more than {self._bytes_max} bytes; {WRONG}")
        return filter(None, whole)
