"""What no client should send, as bytes; and how a connection may end."""

from __future__ import annotations

import json
import socket
import struct
from typing import NamedTuple

from tests.http.served import Served, post
from tests.server.process import Server

JSON = "Content-Type: application/json"
HEAD = b"POST /v1/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LEAN, ASGI = HEAD % b"queue.produce", HEAD % b"queues.list"  # the two ways through the server
ITEM = b'{"queue": "q", "items": [{"text": "x"}]}'


class Abuse(NamedTuple):
    """`statuses` are those that may answer it; a closed connection always may, and silence if it is `unfinished`."""

    name: str
    sent: bytes
    statuses: tuple[int, ...]
    unfinished: bool = False


def _each_way(name: str, rest: bytes, *statuses: int, unfinished: bool = False) -> list[Abuse]:
    return [
        Abuse(f"{name}, {way}", head + rest, statuses, unfinished) for way, head in (("lean", LEAN), ("asgi", ASGI))
    ]


ABUSES = [
    # Not HTTP/1.1
    Abuse("nothing", b"", (), unfinished=True),
    Abuse("blank lines", b"\r\n" * 20, (), unfinished=True),
    Abuse("one NUL", b"\0", (400,)),
    Abuse("many NULs", b"\0" * 5000, (400,)),
    Abuse("noise", bytes(range(256)) * 20, (400,)),
    Abuse("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", (400,)),
    Abuse("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\7" * 506, (400,)),
    Abuse("SSH", b"SSH-2.0-OpenSSH_9.6\r\n", (400,)),
    Abuse("Redis", b"*1\r\n$4\r\nPING\r\n", (400,)),
    Abuse("a SOCKS proxy's", b"\x05\x01\x00", (400,)),
    Abuse("HTTP/0.9", b"GET /\r\n\r\n", (400, 403)),
    Abuse("HTTP/9.9", b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", (400,)),
    Abuse("HTTP/1.0 without a host", b"GET /health HTTP/1.0\r\n\r\n", (403,)),
    Abuse("no host", b"GET /health HTTP/1.1\r\n\r\n", (400, 403)),
    Abuse("CONNECT", b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 404, 405)),
    Abuse("an invented method", b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 405)),
    Abuse("a path of noise", b"GET /\xff\xfe\x01 HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 404)),
    Abuse("a NUL in the path", b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n", (400,)),
    Abuse("a NUL in the path, encoded", b"GET /%00%ff%c0%ae HTTP/1.1\r\nHost: localhost\r\n\r\n", (404,)),
    Abuse("a path upwards", b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", (404,)),
    Abuse("the path *", b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 404, 405)),
    # Headers
    Abuse("a NUL in a header", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n", (400,)),
    Abuse("a NUL in a name", b"GET / HTTP/1.1\r\nHost: localhost\r\nX\0Y: a\r\n\r\n", (400,)),
    Abuse("a bare line feed", b"GET / HTTP/1.1\nHost: localhost\nX: a\n\n", (200, 400)),
    Abuse("a folded header", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n", (200, 400)),
    Abuse("a header without a colon", b"GET / HTTP/1.1\r\nHost: localhost\r\nnonsense\r\n\r\n", (400,)),
    Abuse("space before the colon", b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", (400, 403)),
    Abuse("two hosts", LEAN + b"Host: evil.example\r\nContent-Length: 2\r\n\r\n{}", (400, 403)),
    Abuse("a long header", b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000, (431,)),
    Abuse("a long name", b"GET / HTTP/1.1\r\n" + b"a" * 100_000, (431,)),
    Abuse("a long path", b"GET /" + b"a" * 100_000, (431,)),
    Abuse("many headers", b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 500 + b"\r\n", (431,)),
    Abuse("very many headers", b"GET / HTTP/1.1\r\n" + b"X:\r\n" * 30_000 + b"\r\n", (431,)),
    # Bodies
    *_each_way("a negative length", b"Content-Length: -1\r\n\r\n", 400),
    *_each_way("a length that is none", b"Content-Length: 1e3\r\n\r\n", 400),
    *_each_way("a huge length", b"Content-Length: 9999999999999999\r\n\r\n{}", 413),
    *_each_way("a length over all numbers", b"Content-Length: 99999999999999999999999999\r\n\r\n{}", 400, 413),
    *_each_way("two lengths", b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    *_each_way("length and chunks", b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    *_each_way("chunks and length", b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n", 400),
    *_each_way("chunks of gzip", b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    *_each_way("chunks that are not last", b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    *_each_way("a chunk without a size", b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
    *_each_way("a chunk that is longer than it says", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n", 400),
    *_each_way("a chunk of negative size", b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n", 400),
    *_each_way("a chunk of huge size", b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff0\r\n", 400),
    *_each_way("many trailers", b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: yyyyyyyyyyyy\r\n" * 9000, 400, 431),
    *_each_way("a long trailer", b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 200_000, 400, 431),
    *_each_way("a long chunk extension", b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 200_000, 431),
    *_each_way("no length and a body", b"\r\n" + ITEM, 400, 415),
    *_each_way("more than the length", b"Content-Length: 2\r\n\r\n{}" + b"}" * 100, 200, 400),
    *_each_way("less than the length", b"Content-Length: 1000\r\n\r\n{}", 400, unfinished=True),
    *_each_way("an empty body", b"Content-Length: 0\r\n\r\n", 400),
    *_each_way("a NUL for a body", b"Content-Length: 1\r\n\r\n\0", 400),
    *_each_way("half of a head", b"Content-Le", unfinished=True),
    *_each_way("an unknown expectation", b"Expect: miracles\r\nContent-Length: 1\r\n\r\n{", 400, 417),
    *_each_way("an upgrade", b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 1\r\n\r\n{", 400),
    *_each_way("an upgrade to HTTP/2", b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 1\r\n\r\n{", 400),
    *_each_way("a body in gzip", b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\0", 415),
    # In the middle of something
    Abuse(
        "a poll, and then noise", post("/v1/queue.lease", b'{"queue": "q", "wait": "10m"}', JSON) + b"\0" * 99, (400,)
    ),
    Abuse("a poll", post("/v1/queue.lease", b'{"queue": "idle", "wait": "10m"}', JSON), (200,), unfinished=True),
    Abuse("a stream", post("/v1/queue.subscribe", b'{"queue": "idle"}', JSON), (200,), unfinished=True),
    Abuse("a produce", post("/v1/queue.produce", json.dumps(json.loads(ITEM)).encode(), JSON), (200,)),
    Abuse("many at once", post("/v1/queue.produce", ITEM, JSON) * 50, (200,)),
    Abuse("many after a poll", post("/v1/queue.lease", b'{"queue": "idle", "wait": "10m"}', JSON) * 10, (200,), True),
]


def prepare(server: Server | Served) -> None:
    """The queues that the abuses name, with their files open, and with little patience for what is not completed."""
    for name in ("q", "idle"):
        server.must("queues.create", name=name, lease_timeout="1ms", max_attempts=1, dead="delete")
        server.must("queue.produce", queue=name, items=[{"text": "x"}])
        server.must("queue.lease", queue=name)


def status_of(reply: bytes) -> int | None:
    """Of a reply in the shape of all errors; None where there is none."""
    if not reply:
        return None
    head, _, body = reply.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if status >= 400:
        error = json.loads(body)["error"]
        assert set(error) == {"code", "message", "details"}
        assert "; " in error["message"]
    return status


def reset(sock: socket.socket) -> None:
    """Closed with a RST in place of a FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
