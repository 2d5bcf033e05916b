"""A server for a command's own children: they speak HTTP, and a data directory has none to give them.

It listens on this machine, on a port and with a secret of its own, for as long as the command needs it.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

from millpond.access.tokens_file import new_secret
from millpond.errors import Unauthorized
from millpond.http.gate import Anybody, Identity

if TYPE_CHECKING:
    from millpond.client import AsyncClient
    from millpond.embedded import AsyncPond

HOST = "127.0.0.1"
GRACE_S = 5.0  # for the replies that are under way when the command ends


class OneSecret:
    """Whoever has it may do anything: it never leaves the command and its children."""

    def __init__(self, secret: str) -> None:
        self._header = f"Bearer {secret}".encode()

    def authenticate(self, authorization: bytes | None) -> Identity:
        if not hmac.compare_digest(authorization or b"", self._header):
            raise Unauthorized("this port is a command's own; use `millpond serve` for a server")
        return Anybody()

    def authorize(self, identity: Identity, call: str, queue: str | None, kinds: Collection[str] = ()) -> None:
        return None


@contextmanager
def served(pond: AsyncPond | AsyncClient) -> Iterator[tuple[str, str]]:
    """The address and the secret of a server for `pond`, which is opened for it and closed after it."""
    _, secret = new_secret(set())
    listening: Future[int] = Future()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()
    thread = threading.Thread(target=_run, args=(loop, pond, secret, listening, over), name="millpond-loopback")
    thread.start()
    try:
        yield f"http://{HOST}:{listening.result()}", secret
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def _run(
    loop: asyncio.AbstractEventLoop,
    pond: AsyncPond | AsyncClient,
    secret: str,
    listening: Future[int],
    over: asyncio.Event,
) -> None:
    try:
        loop.run_until_complete(_serve(pond, secret, listening, over))
    except BaseException as error:
        if listening.done():
            raise
        listening.set_exception(error)


async def _serve(pond: AsyncPond | AsyncClient, secret: str, listening: Future[int], over: asyncio.Event) -> None:
    from millpond.http.app import App
    from millpond.http.listener import Listener
    from millpond.http.protocol import ConnectionLimits

    async with pond:
        listener = Listener(App(pond, gate=OneSecret(secret)), None, ConnectionLimits())
        try:
            [(_, port)] = await listener.listen(HOST, 0)
            listening.set_result(port)
            await over.wait()
        finally:
            await listener.stop(GRACE_S)
