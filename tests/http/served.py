"""A real server in this process: on a free port, with an engine in memory, in a thread of its own."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import uvloop

from millpond import AsyncPond
from millpond.http.app import App
from millpond.http.listener import Listener
from millpond.http.protocol import ConnectionLimits

T = TypeVar("T")
WAY = ["lean"]  # or "asgi": set by conftest.py
TIMEOUT_S = 5.0  # for one answer: a test that hangs says where


class Reply(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> Any:
        return self.value["error"]


class Served:
    """What tests hold of a server: its address, and its app and engine on the server's event loop."""

    def __init__(
        self, port: int, loop: asyncio.AbstractEventLoop, app: App, pond: AsyncPond, listener: Listener
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.loop = loop
        self.app = app
        self.pond = pond
        self.listener = listener

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(TIMEOUT_S)

    def until(self, condition: Callable[[], Any]) -> None:
        """Lets the server's loop turn until it holds there."""

        async def turn() -> None:
            while not await _awaited(condition()):  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(0)

        self.on_loop(turn())

    def until_parked(self, count: int = 1) -> None:
        self.until(lambda: len(self.app.parked) >= count)

    def call(self, name: str, body: Any = None, /, **fields: Any) -> Reply:
        """`POST /v1/<name>` in JSON."""
        return self.ask("POST", f"/v1/{name}", msgspec.json.encode(body or fields))

    def must(self, name: str, /, **fields: Any) -> Any:
        reply = self.call(name, **fields)
        assert reply.status == 200, reply
        return reply.value

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, {**named})
            answer = connection.getresponse()
            return Reply(answer.status, {n.lower(): v for n, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)

    def raw(self, data: bytes) -> bytes:
        """The reply of a connection to these bytes; empty if it is closed instead."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_reply(sock)


async def _awaited(value: Any) -> Any:
    return await value if isinstance(value, Awaitable) else value


def read_reply(sock: socket.socket) -> bytes:
    """One reply with a Content-Length; empty if the connection is closed instead."""
    data = b""
    while True:
        head, end, body = data.partition(b"\r\n\r\n")
        if end:
            [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            size = int(length.partition(b":")[2])
            if len(body) >= size:
                return head + end + body[:size]
        try:
            part = sock.recv(65536)
        except ConnectionResetError:
            return data
        if not part:
            return data
        data += part


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request as it goes over the wire."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@contextmanager
def serve(
    make: Callable[[AsyncPond], App] | None = None, *, bounds: ConnectionLimits | None = None, **options: Any
) -> Iterator[Served]:
    """Hot calls go the way that `WAY` says: through the lean protocol, or all through the application."""
    holder: list[Any] = []
    up = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        async with AsyncPond(":memory:") as pond:
            app = make(pond) if make is not None else App(pond, queue_of=pond.queue_of, **options)
            listener = Listener(app, pond.lean if WAY[0] == "lean" else None, bounds or ConnectionLimits())
            [(_, port)] = await listener.listen("127.0.0.1", 0)
            holder.extend([port, asyncio.get_running_loop(), app, pond, listener])
            up.set()
            await stop.wait()
            await listener.stop(TIMEOUT_S)
            await asyncio.sleep(0)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            holder.append([task for task in tasks if "http" in repr(task.get_coro())])

    thread = threading.Thread(target=uvloop.run, args=(main(),), name="served")
    thread.start()
    assert up.wait(TIMEOUT_S)
    port, loop, app, pond, listener = holder
    try:
        yield Served(port, loop, app, pond, listener)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(2 * TIMEOUT_S)
    assert not thread.is_alive(), "the server did not end"
    assert not holder[5], f"left behind: {holder[5]}"
