"""The operations of batch readers and writers, blocking; see operations.py."""

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


class BatchOperations(BaseClient):
    @abstractmethod
    def _call(self, ask: Ask[T]) -> T: ...

    # ---- claims: items for a batch reader -----------------------------------------------------------------

    def open_consumer(self, queue: str, consumer: str, *, after: int | None = None) -> Consumer:
        return self._call(asks.open_consumer(queue, consumer, after))

    def claim(
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
        return self._call(asks.claim(queue, claim_id, max_items, max_bytes, parts, wait, epoch, owner))

    def read_claim(
        self,
        queue: str,
        claim_id: str,
        *,
        part: int = 0,
        after: str | None = None,
        limit: int = 1_000,
        epoch: int | None = None,
    ) -> ItemPage:
        return self._call(asks.read_claim(queue, claim_id, part, after, limit, epoch))

    def give_verdicts(
        self, queue: str, claim_id: str, verdicts: Sequence[Verdict], *, epoch: int | None = None
    ) -> Sequence[Result]:
        return self._call(asks.give_verdicts(queue, claim_id, verdicts, epoch))

    def complete_claim(self, queue: str, claim_id: str, *, epoch: int | None = None) -> ClaimEnded:
        return self._call(asks.complete_claim(queue, claim_id, epoch))

    def release_claim(self, queue: str, claim_id: str, *, epoch: int | None = None) -> ClaimEnded:
        return self._call(asks.release_claim(queue, claim_id, epoch))

    def list_claims(self, queue: str) -> Sequence[Claim]:
        return self._call(asks.list_claims(queue))

    # ---- stages: items that appear all at once ------------------------------------------------------------

    def stage(self, queue: str, txn: str, chunk: str, items: Items) -> Staged:
        return self._call(asks.stage(queue, txn, chunk, items))

    def publish_stage(self, queue: str, txn: str, chunks: Sequence[str]) -> Published:
        return self._call(asks.publish_stage(queue, txn, chunks))

    def abort_stage(self, queue: str, txn: str) -> Staged:
        return self._call(asks.abort_stage(queue, txn))

    # ---- history ------------------------------------------------------------------------------------------

    def read_journal(self, queue: str, *, partition: int = 0, after: int = 0, limit: int = 500) -> JournalPage:
        return self._call(asks.read_journal(queue, partition, after, limit))
