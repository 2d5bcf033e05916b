"""`consume` and `subscribe` of blocking clients and ponds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

from millpond.consuming.consume import WAIT_S, Consumer, Consuming, Lease, Source
from millpond.consuming.held import HeldItem, Holding
from millpond.consuming.keeper import Keeper
from millpond.consuming.subscribe import PREFETCH, BlockingPlaces, Prefetch, Subscription, checked_prefetch
from millpond.consuming.watch import half_of
from millpond.durations import checked_seconds
from millpond.errors import Forbidden
from millpond.model import Duration

Wake = Callable[[], None]


class Consumes:
    """For who has the methods of `millpond.api.Api`, blocking."""

    @abstractmethod
    def _keeper_of_leases(self) -> Keeper: ...

    @abstractmethod
    def _leasing(self, queue: str, lease_timeout: Duration | None, client_id: str) -> tuple[Lease, Wake]:
        """Leases, and what ends a wait for one from another thread."""

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
    ) -> Consumer: ...

    @overload
    def consume(
        self,
        queue: str,
        handler: Callable[[HeldItem], Any],
        *,
        batch: int = 1,
        wait: Duration = WAIT_S,
        lease_timeout: Duration | None = None,
        client_id: str = "",
        idle_timeout: Duration | None = None,
    ) -> None: ...

    def consume(
        self,
        queue: str,
        handler: Callable[[HeldItem], Any] | None = None,
        *,
        batch: int = 1,
        wait: Duration = WAIT_S,
        lease_timeout: Duration | None = None,
        client_id: str = "",
        idle_timeout: Duration | None = None,
    ) -> Consumer | None:
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
        consumer = Consumer(consuming, self._source(holding, client_id), keeper)
        if handler is None:
            return consumer
        consumer.run(handler)
        return None

    def subscribe(
        self, queue: str, *, prefetch: int = PREFETCH, lease_timeout: Duration | None = None, client_id: str = ""
    ) -> Subscription:
        """Items as they come, at most `prefetch` of them unfinished, their leases kept alive in the background.

        Finish them with `item.complete()`, `item.retry()` or `with item:`, here or in other threads; `next` waits
        for that when there are as many as there may be. What is unfinished when the loop is left goes back.
        """
        keeper = self._keeper_of_leases()
        places = BlockingPlaces(keeper, checked_prefetch(prefetch))
        holding = Holding(self, queue, lease_timeout, places, kept=True)
        return Prefetch(queue, self._source(holding, client_id), places, keeper)

    def _source(self, holding: Holding, client_id: str) -> Source:
        lease, wake = self._leasing(holding.queue, holding.lease_timeout, client_id)
        return Source(lease, wake, holding, _extension_period(holding), self._keeper_of_leases())


def _extension_period(holding: Holding) -> float | None:
    """None: who may not ask must go by the leases' deadlines."""
    if holding.lease_timeout is not None:
        return half_of(checked_seconds(holding.lease_timeout, "lease_timeout"))
    try:
        return half_of(holding.holder.queue_info(holding.queue).lease_timeout)
    except Forbidden:
        return None
