"""`millpond serve`: a data directory behind HTTP. The composition root of the server."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import ssl
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import uvloop

from millpond.access.tokens_file import TokensFile
from millpond.config.addresses import check_bind, host_names, only_local
from millpond.config.certificates import read_certificate, tls_context
from millpond.config.keys import KEYS, with_values
from millpond.config.load import Loaded
from millpond.config.settings import Address, Config
from millpond.errors import Conflict, InvalidRequest, MillpondError, NotFound
from millpond.http.app import App, Limits
from millpond.http.auth import Guard
from millpond.http.listener import Listener, make_way
from millpond.http.metrics import MetricsPage
from millpond.http.protocol import ConnectionLimits
from millpond.log import configure
from millpond.model import Health, Reloaded
from millpond.service.health import guest_readiness
from millpond.service.lean import LeanService
from millpond.sharing import SharedPond

log = logging.getLogger("millpond.server")
ReadAgain = Callable[[], Loaded]
OWNER_LOOK_S = 1.0  # between a guest's looks at whether the owner answers
FIXED = ("data", "bind", "insecure_no_tls", "tls.client_ca")  # keys that a server which runs cannot change
GC_NEW_OBJECTS = 20_000  # some hundred requests; with the usual 700 a busy server collects all the time
KEPT_BLOCK_BYTES = 20 << 20  # larger ones are given back to the system at once: no request is as large by default
KEPT_BYTES = 64 << 20  # at the end of the heap, for the next requests: some that are as large as they may be
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in glibc's malloc.h


def serve(config: Config, read_again: ReadAgain | None = None) -> None:
    """Until SIGTERM or SIGINT: the first drains, the second does not wait for that. SIGHUP has it read again."""
    _allow_files(config.limits.connections)
    uvloop.run(_serve(config, read_again))


async def _serve(config: Config, read_again: ReadAgain | None) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    told_again = asyncio.Event()

    def tell() -> None:
        (told_again if told.is_set() else told).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell)
    server = Server(config, read_again)
    reloads: set[asyncio.Task[Reloaded]] = set()
    on_terminal = sys.stderr.isatty()

    def hang_up() -> None:
        if on_terminal and not sys.stderr.isatty():  # that has gone, and whoever sat there with it
            tell()
            return
        task = asyncio.ensure_future(server.reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    if await _unless(told, server.start()):
        settle_memory()
        await told.wait()
        log.info("ending: no more leases; completes are taken for %g s at most", config.timeouts.shutdown)
        await _unless(told_again, server.stop())
    log.info("ended")


async def _unless(told: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether it came to its end: it is cancelled when `told`."""
    doing, telling = asyncio.ensure_future(work), asyncio.ensure_future(told.wait())
    await asyncio.wait({doing, telling}, return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    if not doing.done():
        doing.cancel()
    try:
        await doing
    except asyncio.CancelledError:
        return False
    return True


def settle_memory() -> None:
    """What is there when a server starts stays: the collector need not look at it again, nor every few requests.

    And what large requests took is kept for the next ones. The C library would give it back to the system at once, and
    the kernel clear each page anew: that took a tenth of a batch writer's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_NEW_OBJECTS, *gc.get_threshold()[1:])
    with suppress(AttributeError, OSError):  # it is glibc's alone
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def _allow_files(connections: int) -> None:
    """As many as the system lets us have: the usual 1,024 are fewer than the connections that are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (OSError, ValueError):  # where "no limit" is said and not meant
        pass
    if soft != resource.RLIM_INFINITY and soft < connections:
        log.warning(
            "limits.connections is %d, but only %d files may be open; raise the limit (ulimit -n)", connections, soft
        )


class Server:
    """A data directory and its listeners. `addresses` says where it listens, once it does."""

    def __init__(self, config: Config, read_again: ReadAgain | None = None) -> None:
        self._config = config
        self._read_again = read_again
        self._reloading = asyncio.Lock()
        self._pond = SharedPond(config.data, stores=config.stores, reload=self.reload)
        self._listener: Listener | None = None
        self._tls: ssl.SSLContext | None = None
        self._page: MetricsPage | None = None
        self._sockets: list[str] = []
        self._owner_answers = True  # once the pond is open, or it would not be
        self._looking: asyncio.Task[None] | None = None
        self.addresses: list[Address] = []

    async def start(self) -> None:
        """The rules for binding are checked here too: nobody listens to the world by leaving out the command line."""
        config = self._config
        tokens = TokensFile(config.data).read()
        problems = check_bind(config, any(token.status(self._pond.clock.now()) == "active" for token in tokens))
        if problems:
            raise InvalidRequest("; ".join(problems))
        self._tls = tls_context(config.tls)
        await self._pond.open()
        self._looking = asyncio.ensure_future(self._look_at_owner())
        try:
            self._listener = listener = Listener(self._app(), Lean(self._pond), _connection_limits(config))
            for address in config.bind:
                await self._listen(listener, address, self._tls)
        except BaseException:
            if self._listener is not None:
                await self._listener.stop(0)
            await self._close()
            raise
        log.info("listening on %s, data in %s", ", ".join(map(str, self.addresses)), config.data)

    async def stop(self) -> None:
        """No more leases; what is leased may be completed until `timeouts.shutdown` is over. Cancelled, it hurries."""
        self._pond.drain()
        try:
            if self._listener is not None:
                await self._listener.stop(self._config.timeouts.shutdown, self._outstanding)
        finally:
            await self._close()

    async def reload(self) -> Reloaded:
        """The configuration again: what of it can change in a running server does, all of that or nothing."""
        async with self._reloading:
            try:
                told = await self._reload()
            except MillpondError as error:
                told = Reloaded(problems=error.details.get("problems") or [error.message])
        for problem in told.problems:
            log.error("the configuration was read again and nothing has changed: %s", problem)
        for change in told.changed:
            log.info("the configuration was read again: %s", change)
        for key in told.restart:
            log.warning("%s has another value in the configuration; restart the server to use it", key)
        return told

    async def _reload(self) -> Reloaded:
        if self._read_again is None:
            raise Conflict("this server was not started from a configuration; restart it with another one")
        loaded = self._read_again()
        if loaded.problems:
            return Reloaded(problems=[str(one) for one in loaded.problems])
        if self._pond.engine is None:
            raise Conflict("the data directory is another process's, and so are its stores; reload that one")
        old, new = self._config, loaded.config
        has_tls = self._tls is not None and tls_context(new.tls) is not None
        changed = await self._pond.engine.change_stores(new.stores)
        fixed = FIXED if has_tls else (*FIXED, "tls.cert", "tls.key")
        others = [key for key in KEYS if key.value_in(new) != key.value_in(old)]
        self._use(with_values(new, old, fixed))
        changed += [f"{key.name} is {key.text_in(new)}" for key in others if key.name not in fixed]
        if has_tls:
            changed.append("the certificate was read again")
        return Reloaded(changed=changed, restart=[key.name for key in others if key.name in fixed])

    def _use(self, config: Config) -> None:
        """From now on; requests and connections that are there already may be held to what was."""
        if config.log != self._config.log:
            configure(config.log.format, config.log.level)
        self._config = config
        if self._tls is not None:
            read_certificate(self._tls, config.tls)
        if self._listener is not None:
            self._listener.limit(_connection_limits(config), _limits(config), host_names(config))

    async def _close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for path in self._sockets:
            with suppress(FileNotFoundError):
                os.unlink(path)
        await asyncio.shield(self._pond.close())

    def _app(self) -> App:
        config = self._config
        pond: Any = self._pond  # it has the methods of Api once it is open
        return App(
            pond,
            gate=Guard(config.data, self._pond.clock.now, open_to_local=only_local(config)),
            queue_of=self._queue_of,
            allowed_hosts=host_names(config),
            live=self._live,
            ready=self._ready,
            metrics=self._metrics,
            now=self._pond.clock.now,
            limits=_limits(config),
        )

    async def _listen(self, listener: Listener, address: Address, tls: ssl.SSLContext | None) -> None:
        try:
            if address.path:
                make_way(address.path)
                await listener.listen_unix(address.path)
                self._sockets.append(address.path)
                self.addresses.append(address)
            else:
                bound = await listener.listen(address.host, address.port, tls)
                self.addresses += [Address(host, port) for host, port in bound]
        except OSError as error:
            raise InvalidRequest(f"cannot listen on {address} ({error.strerror or error}); bind another") from error

    def _live(self) -> Health:
        return Health(status="ok", checks={}) if self._pond.engine is None else self._pond.engine.live()

    def _ready(self, draining: bool) -> Health:
        if self._pond.engine is None:
            return guest_readiness(draining=draining, owner_answers=self._owner_answers)
        return self._pond.engine.ready(draining=draining)

    async def _look_at_owner(self) -> None:
        """Until that is this process: then it stays so."""
        while self._pond.engine is None:
            self._owner_answers = await self._pond.owner_answers()
            await asyncio.sleep(OWNER_LOOK_S)

    def _metrics(self, accept: str) -> tuple[bytes, str]:
        engine, listener = self._pond.engine, self._listener
        if engine is None or listener is None:
            raise NotFound("another process owns the data directory, and the metrics; they are here once it has gone")
        meter = listener.app.meter
        meter.connections, meter.in_flight = listener.connections, listener.in_flight
        meter.streams = len(listener.app.streams)
        if self._page is None:
            self._page = MetricsPage(engine.reading, meter, version("millpond"))
        return self._page(accept)

    def _queue_of(self, lease: str) -> str | None:
        return None if self._pond.engine is None else self._pond.engine.queue_of(lease)

    def _outstanding(self) -> int:
        """Items that somebody works on; a guest leaves that to the owner."""
        return 0 if self._pond.engine is None else self._pond.engine.leased_count()


class Lean:
    """The lean calls, while the engine is in this process."""

    def __init__(self, pond: SharedPond) -> None:
        self._pond = pond
        self._engine: LeanService | None = None

    def __getattr__(self, name: str) -> Any:
        """Bound for good once the engine is here: it does not leave while the process lives."""
        if self._pond.engine is None:
            return _not_here
        if self._engine is None:
            self._engine = self._pond.engine.lean
        method = getattr(self._engine, name)
        setattr(self, name, method)
        return method


def _not_here(*_: Any) -> None:
    """The queue is not awake here: the long way leads to the owner."""


def _limits(config: Config) -> Limits:
    return Limits(
        body_bytes_max=config.limits.body_bytes,
        body_timeout_s=config.timeouts.body,
        parked_max=config.limits.parked_leases,
    )


def _connection_limits(config: Config) -> ConnectionLimits:
    return ConnectionLimits(
        header_bytes_max=config.limits.header_bytes,
        header_timeout_s=config.timeouts.header,
        idle_timeout_s=config.timeouts.keep_alive,
        connections_max=config.limits.connections,
    )
