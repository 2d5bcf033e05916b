"""The real server in a thread of its own: the engine in memory behind the listener that `millpond serve` has."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from millpond import AsyncPond
from millpond.http.app import App
from millpond.http.listener import Listener
from millpond.http.protocol import ConnectionLimits

T = TypeVar("T")
TIMEOUT_S = 10.0


class Served:
    def __init__(self, port: int, app: App, pond: AsyncPond, listener: Listener) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.app = app
        self.pond = pond
        self.listener = listener
        self.loop = asyncio.get_running_loop()

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(TIMEOUT_S)

    def until(self, holds: Callable[[], bool]) -> None:
        """Lets the server's loop turn until it holds there."""

        async def turn() -> None:
            while not holds():  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(0)

        self.on_loop(turn())

    def count(self, queue: str, state: str) -> int:
        return self.on_loop(self.pond.stats(queue)).counts.get(state, 0)

    def until_count(self, queue: str, state: str, count: int) -> None:
        async def turn() -> None:
            while (await self.pond.stats(queue)).counts.get(state, 0) != count:  # noqa: ASYNC110
                await asyncio.sleep(0)

        self.on_loop(turn())


@contextmanager
def serve(unix: Path | None = None, tls: ssl.SSLContext | None = None, **options: Any) -> Iterator[Served]:
    up = threading.Event()
    made: list[Served] = []
    ends: list[asyncio.Event] = []

    async def main() -> None:
        async with AsyncPond(":memory:") as pond:
            app = App(pond, queue_of=pond.queue_of, **options)
            listener = Listener(app, pond.lean, ConnectionLimits())
            [(_, port)] = await listener.listen("127.0.0.1", 0, tls)
            if unix is not None:
                await listener.listen_unix(str(unix))
            ends.append(asyncio.Event())
            made.append(Served(port, app, pond, listener))
            up.set()
            await ends[0].wait()
            await listener.stop(TIMEOUT_S)

    thread = threading.Thread(target=lambda: uvloop.run(main()), name="server")
    thread.start()
    assert up.wait(TIMEOUT_S)
    try:
        yield made[0]
    finally:
        made[0].loop.call_soon_threadsafe(ends[0].set)
        thread.join()
