"""The client for an event loop.

async with millpond.AsyncClient("http://127.0.0.1:7410") as client:
    await client.produce("jobs", [b"work"])
"""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from millpond.client import asks
from millpond.client.address import DEFAULT_URL, PathLike
from millpond.client.asks import Ask
from millpond.client.async_gather import AsyncGather
from millpond.client.async_operations import AsyncOperations
from millpond.client.async_pool import AsyncPool, Left
from millpond.client.async_subscribe import AsyncStream
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
from millpond.client.http1 import Reply
from millpond.client.merging import Part
from millpond.client.retrying import Tries, closed
from millpond.consuming.async_calls import AsyncConsumes
from millpond.consuming.async_keeper import AsyncKeeper
from millpond.consuming.async_subscribe import AsyncSubscription
from millpond.consuming.held import AsyncHeldItem, Hand, Holding
from millpond.consuming.pauses import Pauses
from millpond.consuming.subscribe import PREFETCH
from millpond.errors import MillpondError
from millpond.model import Duration, LeaseLike, Retry
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


class AsyncClient(AsyncOperations, AsyncConsumes):
    """`timeout` is for a whole call, its repeats included; a lease's `wait` comes on top.

    What fails for a reason that passes is tried again until then; nothing is produced twice by it. `token` is sent
    as `Authorization: Bearer`. `ca` and `cert` are files for TLS, `tls` a context for all else. `linger` is how long,
    in seconds, a small call may wait for company: it needs none to be sent with what gathers behind another. Without
    `patient` a full disk is told at once: somebody waits who can mend it.
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
        patient: bool = True,
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
            patient=patient,
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

    async def _call_until(self, ask: Ask[T], deadline: float, left: Left | None = None) -> T:
        core = self._core.on_loop()
        clock = core.pool.loop.time
        now = clock()
        tries = Tries(ask, now, deadline, self._rng, patient=self._settings.patient)
        while True:
            request = self._request(ask.name, tries.request(now))
            try:
                return tries.answer(await core.pool.exchange(request, deadline, left, waits=ask.wait > 0))
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
        core = self._core.on_loop()

        def left(late: Coroutine[Any, Any, Reply | None]) -> None:
            core.keeper.give_back_late(queue, _leased_late(ask, late))

        items = await self._call_until(ask, core.pool.loop.time() + ask.wait + self._options.timeout, left)
        holding = Holding(self, queue, lease_timeout, core.keeper)
        return [_held(item, holding) for item in items]

    def _keeper_of_leases(self) -> AsyncKeeper:
        return self._core.on_loop().keeper

    def subscribe(
        self, queue: str, *, prefetch: int = PREFETCH, lease_timeout: Duration | None = None, client_id: str = ""
    ) -> AsyncSubscription:
        """Items as they come, over one connection, at most `prefetch` of them unfinished.

        The server keeps their leases alive; finish them with `item.complete()`, `item.retry()` or `async with item:`.
        When the stream breaks, it is opened again, and what was unfinished comes anew.
        """
        core = self._core.on_loop()
        holding = Holding(self, queue, lease_timeout, core.keeper, kept=True)

        def hold(item: LeaseItem) -> AsyncHeldItem:
            return _held(item, holding)

        request = self._subscription(queue, prefetch, lease_timeout, client_id)
        return AsyncStream(core.pool, request, self._options.timeout, Pauses(self._rng), hold)


async def _leased_late(ask: Ask[list[LeaseItem]], late: Coroutine[Any, Any, Reply | None]) -> list[Retry | LeaseLike]:
    reply = await late
    items = ask.answer(reply) if reply is not None and reply.status == 200 else []
    return [Retry(lease=item.lease, intent="defer") for item in items]


def _held(item: LeaseItem, holding: Holding) -> AsyncHeldItem:
    fields = asks.leased_fields(item)
    return AsyncHeldItem(fields.payload, 0, None, fields, Hand(holding))
