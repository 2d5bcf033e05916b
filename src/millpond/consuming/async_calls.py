"""`consume` and `subscribe` of clients and ponds on the event loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, overload

from millpond.consuming.async_consume import AsyncConsumer, AsyncSource
from millpond.consuming.async_keeper import AsyncKeeper
from millpond.consuming.async_subscribe import AsyncPlaces, AsyncPrefetch, AsyncSubscription
from millpond.consuming.consume import WAIT_S, Consuming
from millpond.consuming.held import AsyncHeldItem, Holding
from millpond.consuming.subscribe import PREFETCH, checked_prefetch
from millpond.consuming.watch import half_of
from millpond.durations import checked_seconds
from millpond.errors import Forbidden
from millpond.model import Duration, LeasedItem


class AsyncConsumes:
    """For who has the methods of `millpond.api.Api`."""

    @abstractmethod
    def _keeper_of_leases(self) -> AsyncKeeper: ...

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
        """Items for ever, or until none came for `idle_timeout`. See `millpond.consuming.consume` for how they end.

        `batch` items are leased at a time, and their leases kept alive in the background until it is their turn.
        """
        consuming = Consuming(
            queue=queue,
            batch=batch,
            wait=checked_seconds(wait, "wait"),
            idle=None if idle_timeout is None else checked_seconds(idle_timeout, "idle_timeout"),
        )
        keeper = self._keeper_of_leases()
        holding = Holding(self, queue, lease_timeout, keeper, kept=True, completing=True)
        consumer = AsyncConsumer(consuming, self._source(holding, client_id), keeper)
        return consumer if handler is None else consumer.run(handler)

    def subscribe(
        self, queue: str, *, prefetch: int = PREFETCH, lease_timeout: Duration | None = None, client_id: str = ""
    ) -> AsyncSubscription:
        """Items as they come, at most `prefetch` of them unfinished, their leases kept alive in the background.

        Finish them with `item.complete()`, `item.retry()` or `async with item:`, here or in other tasks; the next
        one waits for that when there are as many as there may be. What is unfinished when the loop is left goes back.
        """
        keeper = self._keeper_of_leases()
        places = AsyncPlaces(keeper, checked_prefetch(prefetch))
        holding = Holding(self, queue, lease_timeout, places, kept=True)
        return AsyncPrefetch(queue, self._source(holding, client_id), places, keeper)

    def _source(self, holding: Holding, client_id: str) -> AsyncSource:
        queue, timeout = holding.queue, holding.lease_timeout

        def lease(batch: int, wait: float) -> Coroutine[Any, Any, Sequence[LeasedItem]]:
            leased: Coroutine[Any, Any, Sequence[LeasedItem]] = holding.holder.lease(
                queue, batch=batch, wait=wait, lease_timeout=timeout, client_id=client_id
            )
            return leased

        return AsyncSource(lease, holding, partial(_extension_period, holding), self._keeper_of_leases())


async def _extension_period(holding: Holding) -> float | None:
    """None: who may not ask must go by the leases' deadlines."""
    if holding.lease_timeout is not None:
        return half_of(checked_seconds(holding.lease_timeout, "lease_timeout"))
    try:
        return half_of((await holding.holder.queue_info(holding.queue)).lease_timeout)
    except Forbidden:
        return None
