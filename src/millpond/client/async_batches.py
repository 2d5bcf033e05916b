"""The operations of batch readers and writers on the event loop; see async_operations.py."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from millpond.client import batch_asks as asks
from millpond.client.asks import Ask
from millpond.client.base import BaseClient
from millpond.model import (
    Claim,
    ClaimEnded,
    Consumer,
    Duration,
    ItemPage,
    Items,
    JournalPage,
    Published,
    Result,
    Staged,
    Verdict,
)

T = TypeVar("T")


class AsyncBatchOperations(BaseClient):
    @abstractmethod
    async def _call(self, ask: Ask[T]) -> T: ...

    # ---- claims: items for a batch reader -----------------------------------------------------------------

    async def open_consumer(self, queue: str, consumer: str, *, after: int | None = None) -> Consumer:
        return await self._call(asks.open_consumer(queue, consumer, after))

    async def claim(
        self,
        queue: str,
        claim_id: str,
        *,
        max_items: int = 10_000,
        max_bytes: int | None = None,
        parts: int = 1,
        wait: Duration = 0,
        epoch: int | None = None,
        owner: str = "",
    ) -> Claim:
        return await self._call(asks.claim(queue, claim_id, max_items, max_bytes, parts, wait, epoch, owner))

    async def read_claim(
        self,
        queue: str,
        claim_id: str,
        *,
        part: int = 0,
        after: str | None = None,
        limit: int = 1_000,
        epoch: int | None = None,
    ) -> ItemPage:
        return await self._call(asks.read_claim(queue, claim_id, part, after, limit, epoch))

    async def give_verdicts(
        self, queue: str, claim_id: str, verdicts: Sequence[Verdict], *, epoch: int | None = None
    ) -> Sequence[Result]:
        return await self._call(asks.give_verdicts(queue, claim_id, verdicts, epoch))

    async def complete_claim(self, queue: str, claim_id: str, *, epoch: int | None = None) -> ClaimEnded:
        return await self._call(asks.complete_claim(queue, claim_id, epoch))

    async def release_claim(self, queue: str, claim_id: str, *, epoch: int | None = None) -> ClaimEnded:
        return await self._call(asks.release_claim(queue, claim_id, epoch))

    async def list_claims(self, queue: str) -> Sequence[Claim]:
        return await self._call(asks.list_claims(queue))

    # ---- stages: items that appear all at once ------------------------------------------------------------

    async def stage(self, queue: str, txn: str, chunk: str, items: Items) -> Staged:
        return await self._call(asks.stage(queue, txn, chunk, items))

    async def publish_stage(self, queue: str, txn: str, chunks: Sequence[str]) -> Published:
        return await self._call(asks.publish_stage(queue, txn, chunks))

    async def abort_stage(self, queue: str, txn: str) -> Staged:
        return await self._call(asks.abort_stage(queue, txn))

    # ---- history ------------------------------------------------------------------------------------------

    async def read_journal(self, queue: str, *, partition: int = 0, after: int = 0, limit: int = 500) -> JournalPage:
        return await self._call(asks.read_journal(queue, partition, after, limit))
