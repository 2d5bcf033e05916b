"""Sockets in front of an application: listening, and ending without losing anybody.

uvicorn gives the protocol and its state; the loop, the signals and the sockets are ours, for uvicorn's own server takes
all three for itself.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from millpond.api import Begin
from millpond.http.app import App, Limits
from millpond.http.lean import LeanProtocol
from millpond.http.protocol import ConnectionLimits, GuardedProtocol, Sweeper

BACKLOG = 2_048  # connections that wait to be accepted: a herd of clients comes back at once after a restart
DRAIN_LOOK_S = 0.01  # between looks at whether all have gone
SOCKET_MODE = 0o600  # a Unix socket is for its owner

log = logging.getLogger(__name__)


class Listener:
    """All the connections of one application. `engine` is for the lean calls; without it all go through ASGI."""

    def __init__(self, app: App, engine: Begin | None, limits: ConnectionLimits) -> None:
        self.app = app
        self._loop = asyncio.get_running_loop()
        self._state = ServerState()
        self._config = Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        self._config.load()
        self._limits = limits
        self._protocol: type[GuardedProtocol]
        if engine is None:
            self._protocol = type("Protocol", (GuardedProtocol,), {"connection_limits": limits})
        else:
            self._protocol = LeanProtocol.use(app, engine, limits)
        self._servers: list[asyncio.Server] = []
        self._sweeper = Sweeper(self._loop, self._state.connections)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> list[tuple[str, int]]:
        """Returns where it listens: a port of 0 is any that is free."""
        within_s = None if tls is None else self._limits.header_timeout_s
        server = await self._loop.create_server(
            self._connected,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=within_s,
            ssl_shutdown_timeout=within_s,
            backlog=BACKLOG,
        )
        self._servers.append(server)
        return [sock.getsockname()[:2] for sock in server.sockets]

    async def listen_unix(self, path: str) -> None:
        """In the place of a socket that somebody left behind. Whoever may write to its directory may talk to it."""
        with suppress(FileNotFoundError):
            os.unlink(path)
        mask = os.umask(0o777 & ~SOCKET_MODE)
        try:
            server = await self._loop.create_unix_server(self._connected, path, backlog=BACKLOG)
        finally:
            os.umask(mask)
        self._servers.append(server)

    def limit(self, limits: ConnectionLimits, app_limits: Limits, allowed_hosts: Iterable[str] | None) -> None:
        """To these from now on; a TLS handshake may take as long as it might before."""
        self.app.limit(app_limits, allowed_hosts)
        self._protocol.limit(limits)

    @property
    def connections(self) -> int:
        return len(self._state.connections)

    @property
    def in_flight(self) -> int:
        """Requests without a reply."""
        connections: Collection[Any] = self._state.connections
        cycles = [connection.cycle for connection in connections]
        return sum(cycle is not None and not cycle.response_complete for cycle in cycles)

    async def stop(self, grace_s: float, outstanding: Callable[[], int] = lambda: 0) -> None:
        """Nobody leases any more, and while items are `outstanding` they may be completed; then all is closed.

        Replies under way are waited for. Cancelled, it closes at once.
        """
        self.app.drain()
        try:
            async with asyncio.timeout(grace_s):
                await _until(lambda: not outstanding())
                self._close_servers()
                for connection in list(self._state.connections):
                    connection.shutdown()
                await _until(lambda: not self._state.connections and not self._state.tasks)
        except TimeoutError:
            log.warning("after %g s %d connections were still there and are cut", grace_s, self.connections)
        finally:
            self._cut()

    def _close_servers(self) -> None:
        for server in self._servers:
            server.close()

    def _cut(self) -> None:
        self._sweeper.stop()
        self._close_servers()
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()

    def _connected(self) -> GuardedProtocol:
        return self._protocol(self._config, self._state, {}, self._loop)


def make_way(path: str) -> None:
    """For `listen_unix`: a socket that nobody listens on any more is removed; anything else there is an OSError."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "a file that is no socket is there")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:  # so many wait to be accepted
            pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


async def _until(over: Callable[[], bool]) -> None:
    """By looking: the counts are uvicorn's and the engine's, and they tell nobody."""
    while not over():  # noqa: ASYNC110
        await asyncio.sleep(DRAIN_LOOK_S)
