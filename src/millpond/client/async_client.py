"""The blocking client, for any number of threads.

with millpond.Client("http://127.0.0.1:7410") as client:
    client.produce("jobs", [b"work"])
"""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from millpond.client import asks
from millpond.client.address import DEFAULT_URL, PathLike
from millpond.client.asks import Ask
from millpond.client.async_consume import AsyncConsumer
from millpond.client.async_gather import AsyncGather
from millpond.client.async_keeper import AsyncKeeper
from millpond.client.async_operations import AsyncOperations
from millpond.client.async_pool import AsyncPool
from millpond.client.async_subscribe import AsyncSubscription
from millpond.client.base import (
    CLOSE_GRACE_S,
    CONNECT_TIMEOUT_S,
    CONNECTIONS_MAX,
    REPLY_BYTES_MAX,
    TIMEOUT_S,
    Encoding,
    Options,
    Settings,
    options,
    settings,
)
from millpond.client.consume import WAIT_S, Consuming, idle_seconds
from millpond.client.durations import seconds
from millpond.client.held import AsyncHeldItem, Held
from millpond.client.merging import Part
from millpond.client.retrying import Pauses, Tries, closed
from millpond.client.watch import period
from millpond.errors import Forbidden, MillpondError
from millpond.model import Duration
from millpond.wire.replies import LeaseItem

T = TypeVar("T")


class AsyncCore:
    """What the views of one client share. On another event loop (a forked child's, too) it begins anew."""

    def __init__(self, settings: Settings, client: AsyncClient) -> None:
        self._settings = settings
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing = False

    def on_loop(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self.pool = AsyncPool(self._settings)
            self.gather = AsyncGather(self._settings.linger)
            self.keeper = AsyncKeeper(self._client)
        if self.closing:
            raise closed()
        return self

    async def close(self) -> None:
        if self._loop is not None and not self.closing:
            await self.keeper.close(CLOSE_GRACE_S)
            self.closing = True
            await self.pool.close()
            await self.gather.close()
            await self.keeper.join()
        self.closing = True


class AsyncClient(AsyncOperations):
    """`timeout` is for a whole call, its repeats included; a lease's `wait` comes on top.

    What fails for a reason that passes is tried again until then; nothing is produced twice by it. `token` is sent
    as `Authorization: Bearer`. `ca` and `cert` are files for TLS, `tls` a context for all else. `linger` is how long,
    in seconds, a small call may wait for company: it needs none to be sent with what gathers behind another.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout: Duration = TIMEOUT_S,
        client_id: str = "",
        correlation_id: str | None = None,
        ca: PathLike | None = None,
        cert: PathLike | tuple[PathLike, PathLike] | None = None,
        tls: ssl.SSLContext | None = None,
        connect_timeout: Duration = CONNECT_TIMEOUT_S,
        connections: int = CONNECTIONS_MAX,
        linger: float = 0.0,
        encoding: Encoding = "msgpack",
        reply_bytes_max: int = REPLY_BYTES_MAX,
    ) -> None:
        made = settings(
            url,
            token=token,
            ca=ca,
            cert=cert,
            tls=tls,
            connect_timeout=connect_timeout,
            connections=connections,
            linger=linger,
            encoding=encoding,
            reply_bytes_max=reply_bytes_max,
        )
        self._set_up(made, options(Options(), timeout, correlation_id, client_id))
        self._core = AsyncCore(made, self)

    def with_options(
        self,
        *,
        timeout: Duration | None = None,
        correlation_id: str | None = None,
        client_id: str | None = None,
    ) -> Self:
        """The same client for some calls: `await client.with_options(timeout=2).stats("jobs")`."""
        view = copy.copy(self)
        view._options = options(self._options, timeout, correlation_id, client_id)
        view._heads = {}
        return view

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """What loops left is handed back, calls under way end with an error, connections are closed. Twice is once."""
        await self._core.close()

    # ---- calls --------------------------------------------------------------------------------------------

    async def _call(self, ask: Ask[T]) -> T:
        return await self._call_until(ask, asyncio.get_running_loop().time() + ask.wait + self._options.timeout)

    async def _call_until(self, ask: Ask[T], deadline: float) -> T:
        core = self._core.on_loop()
        clock = core.pool.loop.time
        now = clock()
        tries = Tries(ask, now, deadline, self._rng)
        while True:
            request = self._request(ask.name, tries.request(now))
            try:
                return tries.answer(await core.pool.exchange(request, deadline))
            except MillpondError as error:
                if core.closing:
                    raise closed() from error
                pause = tries.pause(error, clock())
            await asyncio.sleep(pause)
            now = clock()

    async def _gather(self, part: Part) -> Sequence[Any]:
        core = self._core.on_loop()
        deadline = core.pool.loop.time() + self._options.timeout
        if not part.small:
            return await self._call_until(part.ask(), deadline)
        return await core.gather.submit(part, deadline, self._call_until)

    # ---- items --------------------------------------------------------------------------------------------

    async def _lease(
        self, queue: str, batch: int, wait: Duration, lease_timeout: Duration | None, client_id: str
    ) -> Sequence[AsyncHeldItem]:
        ask = asks.lease(queue, batch, wait, lease_timeout, client_id or self._options.client_id)
        return [self._held(item, queue, lease_timeout) for item in await self._call(ask)]

    def _held(self, item: LeaseItem, queue: str, lease_timeout: Duration | None) -> AsyncHeldItem:
        fields = asks.leased_fields(item)
        held = AsyncHeldItem(fields.payload, 0, None, fields, self, queue, lease_timeout)
        held.keep, held.drop = self._keep, self._core.keeper.drop
        return held

    def _keep(self, item: Held) -> None:
        """While a `with` has it."""
        self._core.on_loop().keeper.keep(item, period(item, item.lease_timeout))

    @overload
    def consume(
        self,
        queue: str,
        *,
        batch: int = 1,
        wait: Duration = WAIT_S,
        lease_timeout: Duration | None = None,
        client_id: str = "",
        idle_timeout: Duration | None = None,
    ) -> AsyncConsumer: ...

    @overload
    def consume(
        self,
        queue: str,
        handler: Callable[[AsyncHeldItem], Awaitable[Any]],
        *,
        batch: int = 1,
        wait: Duration = WAIT_S,
        lease_timeout: Duration | None = None,
        client_id: str = "",
        idle_timeout: Duration | None = None,
    ) -> Awaitable[None]: ...

    def consume(
        self,
        queue: str,
        handler: Callable[[AsyncHeldItem], Awaitable[Any]] | None = None,
        *,
        batch: int = 1,
        wait: Duration = WAIT_S,
        lease_timeout: Duration | None = None,
        client_id: str = "",
        idle_timeout: Duration | None = None,
    ) -> AsyncConsumer | Awaitable[None]:
        """Items for ever, or until none came for `idle_timeout`. See `millpond.client.consume` for how they end.

        `batch` items are leased at a time, and their leases kept alive in the background until it is their turn.
        """

        async def prepare() -> Consuming:
            known = await self._lease_timeout(queue) if lease_timeout is None else lease_timeout
            idle = idle_seconds(idle_timeout)
            return Consuming(queue=queue, wait=seconds(wait) or 0.0, idle=idle, lease_timeout=known)

        lease = partial(self._lease, queue, batch, lease_timeout=lease_timeout, client_id=client_id)
        consumer = AsyncConsumer(prepare, lease, self._core.on_loop().keeper, Pauses(self._rng))
        return consumer if handler is None else consumer.run(handler)

    async def _lease_timeout(self, queue: str) -> float | None:
        try:
            return (await self.queue_info(queue)).lease_timeout
        except Forbidden:  # then the leases' deadlines must do
            return None

    def subscribe(
        self, queue: str, *, prefetch: int = 10, lease_timeout: Duration | None = None, client_id: str = ""
    ) -> AsyncSubscription:
        """Items as they come, over one connection, at most `prefetch` of them unfinished.

        The server keeps their leases alive; finish them with `item.complete()`, `item.retry()` or `async with item:`.
        When the stream breaks, it is opened again, and what was unfinished comes anew.
        """

        def hold(item: LeaseItem) -> AsyncHeldItem:
            held = self._held(item, queue, lease_timeout)
            held.keep = None
            return held

        request = self._subscription(queue, prefetch, lease_timeout, client_id)
        return AsyncSubscription(self._core.on_loop().pool, request, self._options.timeout, Pauses(self._rng), hold)
