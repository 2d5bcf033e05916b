"""The operations on the event loop: each is a request of asks.py, sent by who inherits them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from millpond.client import asks
from millpond.client.async_batches import AsyncBatchOperations
from millpond.client.merging import Part
from millpond.consuming.held import AsyncHeldItem
from millpond.model import (
    CLEAR_STATES,
    AuditPage,
    Duration,
    Item,
    ItemPage,
    Items,
    LeaseLike,
    OnConflict,
    Produced,
    QueueInfo,
    QueuePage,
    QueueStats,
    Rebalance,
    RedriveFilter,
    Redriven,
    Result,
    Retry,
    StateWritten,
)
from millpond.wire import requests


class AsyncOperations(AsyncBatchOperations):
    @abstractmethod
    async def _gather(self, part: Part) -> Sequence[Any]: ...

    @abstractmethod
    async def _lease(
        self, queue: str, batch: int, wait: Duration, lease_timeout: Duration | None, client_id: str
    ) -> Sequence[AsyncHeldItem]: ...

    # ---- the operations of `millpond.api` -----------------------------------------------------------------

    async def create_queue(
        self,
        name: str,
        *,
        partitions: int = 1,
        lease_timeout: Duration = "30s",
        expire_timeout: Duration = "14d",
        max_attempts: int = 5,
        dead_queue: str | None = None,
        dead: str = "keep",
        backoff: Mapping[str, Any] | None = None,
        dedup_window: Duration = "5m",
        completed_retention: Duration = "0s",
        durability: str = "full",
        reference: str = "",
    ) -> QueueInfo:
        return await self._call(
            asks.create_queue(
                name,
                {
                    "partitions": partitions,
                    "lease_timeout": lease_timeout,
                    "expire_timeout": expire_timeout,
                    "max_attempts": max_attempts,
                    "dead_queue": dead_queue,
                    "dead": dead,
                    "dedup_window": dedup_window,
                    "completed_retention": completed_retention,
                    "durability": durability,
                    "reference": reference,
                },
                backoff,
            )
        )

    async def update_queue(
        self,
        name: str,
        *,
        lease_timeout: Duration | UnsetType = UNSET,
        expire_timeout: Duration | UnsetType = UNSET,
        max_attempts: int | UnsetType = UNSET,
        dead_queue: str | UnsetType | None = UNSET,
        dead: str | UnsetType = UNSET,
        backoff: Mapping[str, Any] | UnsetType = UNSET,
        dedup_window: Duration | UnsetType = UNSET,
        completed_retention: Duration | UnsetType = UNSET,
        reference: str | UnsetType = UNSET,
    ) -> QueueInfo:
        return await self._call(
            asks.update_queue(
                name,
                {
                    "lease_timeout": lease_timeout,
                    "expire_timeout": expire_timeout,
                    "max_attempts": max_attempts,
                    "dead_queue": dead_queue,
                    "dead": dead,
                    "dedup_window": dedup_window,
                    "completed_retention": completed_retention,
                    "reference": reference,
                },
                backoff,
            )
        )

    async def queue_info(self, name: str) -> QueueInfo:
        return await self._call(asks.queue_info(name))

    async def list_queues(self, *, prefix: str = "", after: str = "", limit: int = 100) -> QueuePage:
        return await self._call(asks.list_queues(prefix, after, limit))

    async def delete_queue(self, name: str, *, force: bool = False) -> None:
        await self._call(asks.delete_queue(name, force))

    async def pause(self, queue: str) -> QueueInfo:
        return await self._call(asks.pause(queue))

    async def resume(self, queue: str) -> QueueInfo:
        return await self._call(asks.resume(queue))

    async def stats(self, queue: str) -> QueueStats:
        return await self._call(asks.stats(queue))

    async def rebalance(self, queue: str, *, partitions: int | None = None, dry_run: bool = False) -> Rebalance:
        return await self._call(asks.rebalance(queue, partitions, dry_run))

    async def audit(self, queue: str, *, after: str | None = None, limit: int = 100) -> AuditPage:
        return await self._call(asks.audit(queue, after, limit))

    async def produce(
        self, queue: str, items: Items, *, on_conflict: OnConflict = "ignore", request_id: str | None = None
    ) -> Sequence[Produced]:
        return await self._gather(self._produce(queue, items, on_conflict, request_id))

    async def lease(
        self,
        queue: str,
        *,
        batch: int = 1,
        wait: Duration = 0,
        lease_timeout: Duration | None = None,
        client_id: str = "",
    ) -> Sequence[AsyncHeldItem]:
        return await self._lease(queue, batch, wait, lease_timeout, client_id)

    async def complete(
        self, leases: Sequence[LeaseLike], *, queue: str | None = None, result: Any = None
    ) -> Sequence[Result]:
        return await self._gather(self._complete(leases, queue, result))

    async def retry(self, items: Sequence[Retry | LeaseLike], *, queue: str | None = None) -> Sequence[Result]:
        return await self._call(asks.retry(items, queue))

    async def extend(
        self, leases: Sequence[LeaseLike], *, queue: str | None = None, lease_timeout: Duration | None = None
    ) -> Sequence[Result]:
        return await self._gather(self._extend(leases, queue, lease_timeout))

    async def write_state(
        self, lease: LeaseLike, state_doc: Any, *, version: int, queue: str | None = None
    ) -> StateWritten:
        return await self._call(asks.write_state(lease, state_doc, version, queue))

    async def cancel(self, queue: str, ids: Sequence[str]) -> Sequence[Result]:
        return await self._call(asks.cancel(queue, ids))

    async def bury(
        self, queue: str, ids: Sequence[str], *, reason: str = "rejected", error: str | None = None
    ) -> Sequence[Result]:
        return await self._call(asks.bury(queue, ids, reason, error))

    async def make_ready(self, queue: str, ids: Sequence[str]) -> Sequence[Result]:
        return await self._call(asks.make_ready(queue, ids))

    async def clear(self, queue: str, states: Sequence[str] = CLEAR_STATES) -> dict[str, int]:
        return await self._call(asks.clear(queue, states))

    async def redrive(
        self,
        queue: str,
        *,
        ids: Sequence[str] | None = None,
        filter: RedriveFilter | Mapping[str, str] | None = None,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        return await self._call(asks.redrive(queue, ids, filter, rate, dry_run))

    async def get_item(self, queue: str, id: str, *, wait: Duration = 0) -> Item:
        return await self._call(asks.get_item(queue, id, wait))

    async def list_items(
        self,
        queue: str,
        *,
        state: str | None = None,
        partition: int | None = None,
        kind: str | None = None,
        after: str | None = None,
        until: int | None = None,
        limit: int = 100,
    ) -> ItemPage:
        return await self._call(asks.list_items(requests.ListItems(queue, state, partition, kind, after, until, limit)))
