"""The server that is measured: `python -m benchmarks.pond DIRECTORY`, or `:memory:`.

A directory is served by the same `Server` as `millpond serve` runs. That takes no queue in memory, so there its parts
are put together here, as `Server` does it: with its guard, its check of hosts and its limits.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from benchmarks.children import until_told
from millpond.clock import Clock
from millpond.config.addresses import host_names
from millpond.config.settings import Address, Config
from millpond.embedded import AsyncPond
from millpond.http.app import App
from millpond.http.auth import Guard
from millpond.http.listener import Listener
from millpond.http.protocol import ConnectionLimits
from millpond.server import Server, settle_memory

LOOPBACK = Address("127.0.0.1", 0)
GRACE_S = 1.0  # for the replies under way when it is told to end


async def serve_directory(path: str) -> None:
    server = Server(Config(data=Path(path), bind=(LOOPBACK,)))
    await server.start()
    settle_memory()
    await until_told(server.addresses[0].port)
    stopping = asyncio.ensure_future(server.stop())
    await asyncio.wait({stopping}, timeout=GRACE_S)
    stopping.cancel()  # the load leaves items leased, for which a server waits
    await asyncio.wait({stopping})


async def serve_memory() -> None:
    clock = Clock()
    async with AsyncPond(":memory:", clock=clock) as pond:
        app = App(
            pond,
            gate=Guard(None, clock.now, open_to_local=True),
            queue_of=pond.queue_of,
            allowed_hosts=host_names(Config(bind=(LOOPBACK,))),
            now=clock.now,
        )
        listener = Listener(app, pond.lean, ConnectionLimits())
        [(_, port)] = await listener.listen(LOOPBACK.host, LOOPBACK.port)
        settle_memory()
        await until_told(port)
        await listener.stop(GRACE_S)


if __name__ == "__main__":
    uvloop.run(serve_memory() if sys.argv[1] == ":memory:" else serve_directory(sys.argv[1]))
