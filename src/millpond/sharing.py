"""One data directory, any number of processes: the first to open it owns it, the others talk to the owner.

    with millpond.open("./data") as pond:                    # blocking
    async with millpond.open_async("./data") as pond:        # on the running event loop

Both have the methods of `millpond.api.Api`. The owner runs the engine and answers on a Unix socket in the directory;
a guest is a client of that socket, and holds a connection whose end tells it that the owner has gone. Then the guests
try to own the directory, which one of them does, and their calls, which are made again until they are answered, find
the new owner at the old place. ":memory:" is nobody's but this process's.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket
from typing import TYPE_CHECKING, Any, Self, cast

from millpond.api import Api
from millpond.blocking import Pond
from millpond.clock import Clock
from millpond.consuming.async_calls import AsyncConsumes
from millpond.consuming.async_keeper import AsyncKeeper
from millpond.consuming.async_subscribe import AsyncSubscription
from millpond.consuming.subscribe import PREFETCH
from millpond.directory import SOCKET
from millpond.embedded import AsyncPond
from millpond.errors import Closed, Conflict, DirectoryInUse
from millpond.model import Duration, Reloaded, StoreSettings

if TYPE_CHECKING:
    from millpond.client import AsyncClient
    from millpond.http.listener import Listener

Identity = tuple[int, int]  # device and inode of a file
Reload = Callable[[], Awaitable[Reloaded]]

log = logging.getLogger(__name__)
OPERATIONS = [name for name in vars(Api) if not name.startswith("_")]
SETTLE_S = 30.0  # an owner that begins with many queues, or ends with many commits, has done so by then
PERSON_S = 10.0  # the same for a person who waits
ANSWER_S = 3.0  # an owner that is there answers within it, however busy; a socket may outlive its owner in a fork
ASK_S = 60.0  # for an answer to a call that a person makes
LOOK_S = 0.02  # between tries to own the directory or to meet its owner, while neither can be had
SOCKET_LOOK_S = 3.0  # between an owner's looks at whether its socket is still there
CLOSE_GRACE_S = 5.0  # for the replies that are under way when an owner closes, and for what loops left
TRY_AGAIN_S = 1.0  # after a failed attempt to take over
SOCKET_PATH_MAX = 100  # bytes; the system takes 107


def open_async(
    path: str | Path,
    *,
    clock: Clock | None = None,
    listen: bool = True,
    stores: Sequence[StoreSettings] = (),
    patient: bool = True,
) -> AsyncPond:
    """A pond on `path`, for `async with`. Without `listen` it is there for a moment: as an owner it answers nobody.

    `stores` are for partitions, beside the directory; they count where this process owns it. Without `patient` it is
    for a person who waits: an owner that does not answer, and a full disk, are told soon.
    """
    if str(path) == ":memory:":
        return AsyncPond(path, clock=clock, stores=stores)
    return cast(AsyncPond, SharedPond(path, clock=clock, listen=listen, stores=stores, patient=patient))


def open(
    path: str | Path,
    *,
    clock: Clock | None = None,
    listen: bool = True,
    stores: Sequence[StoreSettings] = (),
    patient: bool = True,
) -> Pond:
    """A pond on `path`, for any number of threads. It is open on return; `close` it, or use `with`."""
    return Pond(open_async(path, clock=clock, listen=listen, stores=stores, patient=patient))


class Watch(asyncio.Protocol):
    """A connection that carries one answer, which shows that somebody is there. It ends with the owner."""

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answered: asyncio.Future[bool] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        self._answer(True)

    def connection_lost(self, error: Exception | None) -> None:
        self._answer(False)
        if not self.gone.done():
            self.gone.set_result(None)

    def _answer(self, there: bool) -> None:
        if not self.answered.done():
            self.answered.set_result(there)


class SharedPond(AsyncConsumes):
    """Once it is open it has the methods of `Api`: those of the engine if that is here, else those of a client.

    `consume` goes through these, and on when the pond inherits the directory.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock | None = None,
        listen: bool = True,
        stores: Sequence[StoreSettings] = (),
        reload: Reload | None = None,
        patient: bool = True,
    ) -> None:
        """`reload` is what an owner does that is told to read its configuration again."""
        self.clock = clock or Clock()
        self._engine = AsyncPond(path, clock=self.clock, stores=stores)
        self._reload = reload
        self._directory = Path(path).absolute()
        self._listen = listen
        self._patient = patient
        self._owner = False
        self._keeper: AsyncKeeper | None = None
        self._client: AsyncClient | None = None
        self._listener: Listener | None = None
        self._watch: Watch | None = None
        self._heir: asyncio.Task[None] | None = None  # waits for the owner to go
        self._minder: asyncio.Task[None] | None = None  # looks after the owner's socket
        self._folder: int | None = None  # of a directory whose name is too long for a socket's path

    def __getattr__(self, name: str) -> Any:
        """While it is closed the engine's own methods are there: they say so."""
        if name in OPERATIONS:
            return getattr(self._engine, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def engine(self) -> AsyncPond | None:
        """None while another process owns the directory."""
        return self._engine if self._owner else None

    async def open(self) -> None:
        if self._owner or self._heir is not None:
            raise Conflict("the pond is open already; open another one, or use this")
        try:
            await self._settle()
        except BaseException:
            self._close_folder()
            raise
        self._keeper = AsyncKeeper(self)

    def drain(self) -> None:
        """As an owner, before it closes: guests lease nothing more either, and find the next owner for that."""
        if self._listener is not None:
            self._listener.app.drain()

    async def close(self) -> None:
        """As an owner: what is under way is answered, then the directory is the next one's. Twice is once."""
        if self._keeper is not None:
            await self._keeper.close(CLOSE_GRACE_S)
        heir, self._heir = self._heir, None
        await _end(heir)
        minder, self._minder = self._minder, None
        await _end(minder)
        if self._watch is not None:
            self._watch.transport.close()
            self._watch = None
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.stop(CLOSE_GRACE_S)
            if self._engine.has_directory():  # and before the lock is let go: another's is not ours to remove
                with suppress(FileNotFoundError):
                    os.unlink(self._socket)
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        await self._engine.close()
        self._owner = False
        for name in OPERATIONS:
            self.__dict__.pop(name, None)
        self._close_folder()

    def subscribe(
        self, queue: str, *, prefetch: int = PREFETCH, lease_timeout: Duration | None = None, client_id: str = ""
    ) -> AsyncSubscription:
        """A guest's is a stream: if the guest dies, the owner knows at once, and takes back what was unfinished."""
        if self._client is None or self._owner:
            return super().subscribe(queue, prefetch=prefetch, lease_timeout=lease_timeout, client_id=client_id)
        return self._client.subscribe(queue, prefetch=prefetch, lease_timeout=lease_timeout, client_id=client_id)

    async def owner_answers(self) -> bool:
        """As a guest: whether the owner is well enough to say something."""
        watch = await self._knock()
        if watch is not None:
            watch.transport.close()
        return watch is not None

    def _keeper_of_leases(self) -> AsyncKeeper:
        if self._keeper is None:
            raise Closed("the pond is not open; open it and retry")
        return self._keeper

    # ---- owning, or meeting the owner -----------------------------------------------------------------------

    async def _settle(self) -> None:
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + (SETTLE_S if self._patient else PERSON_S)
        while True:
            try:
                await self._engine.open()
            except DirectoryInUse:
                if await self._meet_owner():
                    return
                if clock() > give_up_at:
                    raise
                await asyncio.sleep(LOOK_S)
            else:
                await self._own()
                return

    async def _own(self) -> None:
        self._owner = True
        self._use(self._engine)
        if self._listen:
            try:
                self._listener = await _listening(self._engine, self._socket, self._reload)
            except OSError as error:  # not every file system has sockets
                log.warning("no other process can use %s meanwhile (%s)", self._directory, error)
            else:
                self._minder = asyncio.ensure_future(self._mind_socket(self._listener, _identity(self._socket)))

    async def _meet_owner(self) -> bool:
        watch = await self._knock()
        if watch is None:
            return False
        if self._client is None:
            from millpond.client import AsyncClient
            from millpond.client.base import TIMEOUT_S

            timeout = TIMEOUT_S if self._patient else PERSON_S
            self._client = AsyncClient(f"unix://{self._socket}", timeout=timeout, patient=self._patient)
            self._use(self._client)
        self._watch = watch
        self._heir = asyncio.ensure_future(self._inherit(watch))
        return True

    async def _knock(self) -> Watch | None:
        """A connection on which the owner has answered."""
        loop = asyncio.get_running_loop()
        try:
            _, watch = await loop.create_unix_connection(lambda: Watch(loop), self._socket)
        except OSError:
            return None
        there = False
        try:
            async with asyncio.timeout(ANSWER_S):
                there = await watch.answered
        except TimeoutError:
            pass
        finally:
            if not there:
                watch.transport.close()
        return watch if there else None

    async def _inherit(self, watch: Watch) -> None:
        await watch.gone
        self._listen = True  # our own calls that are under way look for the new owner at the socket
        while True:
            try:
                await self._settle()
                return
            except DirectoryInUse:
                pass  # somebody owns it and is silent: callers hear of it, and we go on trying
            except Exception:
                log.exception("the owner of %s has gone, and taking over failed; trying again", self._directory)
                await asyncio.sleep(TRY_AGAIN_S)

    def _use(self, backend: Any) -> None:
        for name in OPERATIONS:
            setattr(self, name, getattr(backend, name))

    # ---- the socket -----------------------------------------------------------------------------------------

    @property
    def _socket(self) -> str:
        path = self._directory / SOCKET
        if len(os.fsencode(path)) <= SOCKET_PATH_MAX:
            return str(path)
        if self._folder is None:
            self._folder = os.open(self._directory, os.O_PATH | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder}/{SOCKET}"

    async def _mind_socket(self, listener: Listener, ours: Identity | None) -> None:
        """Without it nobody new could come. In a directory that is not ours any more we bind none."""
        while True:
            await asyncio.sleep(SOCKET_LOOK_S)
            found = _identity(self._socket)
            if (found is not None and found == ours) or not self._engine.has_directory():
                continue
            try:
                await listener.listen_unix(self._socket)
            except OSError as error:
                log.warning("the socket in %s has gone, and a new one failed (%s)", self._directory, error)
            else:
                ours = _identity(self._socket)
                log.warning("the socket in %s had gone; there is a new one", self._directory)

    def _close_folder(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def ask_owner(directory: Path, call: str) -> tuple[int, bytes] | None:
    """A call of the process that owns the directory, by its socket there: status and reply. None: nobody is there."""
    connection = HTTPConnection("localhost")
    with suppress(OSError), ExitStack() as stack:
        folder = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        connection.sock = stack.enter_context(Socket(AF_UNIX))
        connection.sock.settimeout(ASK_S)
        connection.sock.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # short, whatever the directory's name
        connection.request("POST", f"/v1/{call}", b"{}", {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read()
    return None


def _identity(path: str) -> Identity | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


async def _listening(engine: AsyncPond, socket: str, reload: Reload | None) -> Listener:
    """For the processes of whoever can read the directory: they own what is in it, and are asked for no token."""
    from millpond.http.app import App
    from millpond.http.listener import Listener
    from millpond.http.protocol import ConnectionLimits

    app = App(engine, queue_of=engine.queue_of, reload=reload)
    listener = Listener(app, engine.lean, ConnectionLimits())
    try:
        await listener.listen_unix(socket)
    except BaseException:
        await listener.stop(0)
        raise
    return listener
