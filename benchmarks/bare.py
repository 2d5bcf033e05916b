"""The yardsticks: servers that do a queue's JSON work and nothing else. `python -m benchmarks.bare lean|floor`.

`lean` is a subclass of uvicorn's protocol on httptools that answers the three calls with no scope, no task and one
write; `floor` a protocol written by hand, which does not even look at headers. Both decode requests and encode replies
with the server's own Structs, so that the JSON is the same; between them is a deque and a dict, with no checks, no
engine, no commits, no timers and nobody to wait. Only answers of 200 are known.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httptools
import msgspec
import uvloop
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from benchmarks.children import until_told
from millpond.model import Produced, Result
from millpond.wire.replies import LeaseItem, LeaseReply, ProduceReply, Results
from millpond.wire.requests import Complete, Lease, PlainItem, ProducePlain

Entry = tuple[str, str, PlainItem, datetime]  # id, correlation id, payload, when it came


class BareQueue:
    """From a request's body to its reply's."""

    def __init__(self) -> None:
        self._ready: deque[Entry] = deque()
        self._leased: dict[str, Entry] = {}
        self._number = 0
        self._encode = msgspec.json.Encoder().encode
        self._decode_produce = msgspec.json.Decoder(ProducePlain).decode
        self._decode_lease = msgspec.json.Decoder(Lease).decode
        self._decode_complete = msgspec.json.Decoder(Complete).decode
        self.calls: dict[bytes, Callable[[bytes], bytes]] = {
            b"/v1/queue.produce": self.produce,
            b"/v1/queue.lease": self.lease,
            b"/v1/queue.complete": self.complete,
        }

    def produce(self, body: bytes) -> bytes:
        now = datetime.now(UTC)
        produced = []
        for item in self._decode_produce(body).items:
            self._number = number = self._number + 1
            entry = f"barebare-0-{number}", f"01a1e21c-291c-7735-8b52-{number:012x}", item, now
            self._ready.append(entry)
            produced.append(Produced(entry[0], entry[1]))
        return self._encode(ProduceReply(produced))

    def lease(self, body: bytes) -> bytes:
        now = datetime.now(UTC)
        leased = []
        for _ in range(min(self._decode_lease(body).batch, len(self._ready))):
            entry = self._ready.popleft()
            self._number = number = self._number + 1
            token = f"barebare.{number:056x}"
            self._leased[token] = entry
            name, correlation_id, item, created_at = entry
            leased.append(LeaseItem(name, token, correlation_id, 1, 1, number, now, created_at, item.text, item.data))
        return self._encode(LeaseReply(leased))

    def complete(self, body: bytes) -> bytes:
        results = [Result(True, self._leased.pop(lease)[1]) for lease in self._decode_complete(body).leases]
        return self._encode(Results(results))


def response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


# ---- lean -------------------------------------------------------------------------------------------------


class LeanProtocol(HttpToolsProtocol):
    """Calls that it does not know take uvicorn's way. Its timer for idle connections, one a reply, is left out."""

    calls: dict[bytes, Callable[[bytes], bytes]]

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._body = b""

    def on_headers_complete(self) -> None:
        self._call = self.calls.get(self.url)
        if self._call is None:
            headers, url = self.headers, self.url
            super().on_message_begin()
            self.headers += headers
            self.url = url
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._call is None:
            super().on_body(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        if self._call is None:
            super().on_message_complete()
        else:
            self.transport.write(response(self._call(self._body)))


async def no_such_call(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def lean() -> Callable[[], asyncio.Protocol]:
    flags: dict[str, Any] = {"access_log": False, "server_header": False, "date_header": False}
    config = Config(no_such_call, ws="none", lifespan="off", log_config=None, **flags)
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    protocol = type("BoundLeanProtocol", (LeanProtocol,), {"calls": BareQueue().calls})
    return lambda: protocol(config, state, {}, loop)


# ---- floor ------------------------------------------------------------------------------------------------


class FloorProtocol(asyncio.Protocol):
    def __init__(self, calls: dict[bytes, Callable[[bytes], bytes]]) -> None:
        self._calls = calls
        self._feed = httptools.HttpRequestParser(self).feed_data

    def connection_made(self, transport: Any) -> None:
        self._write = transport.write

    def data_received(self, data: bytes) -> None:
        self._feed(data)

    def on_url(self, url: bytes) -> None:
        self._url = url
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._write(response(self._calls[self._url](self._body)))


def floor() -> Callable[[], asyncio.Protocol]:
    calls = BareQueue().calls
    return lambda: FloorProtocol(calls)


async def serve(kind: str) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lean() if kind == "lean" else floor(), "127.0.0.1", 0)
    await until_told(server.sockets[0].getsockname()[1])


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
