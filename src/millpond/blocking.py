"""Blocking calls on an async pond: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop
from msgspec import UNSET, UnsetType

from millpond.consuming.calls import Consumes, Wake
from millpond.consuming.consume import Lease
from millpond.consuming.held import HeldItem, Holding, held
from millpond.consuming.keeper import Keeper
from millpond.consuming.polls import Poll
from millpond.embedded import CLOSE_GRACE_S, AsyncPond
from millpond.errors import Closed
from millpond.model import (
    CLEAR_STATES,
    AuditPage,
    Claim,
    ClaimEnded,
    Consumer,
    Duration,
    Item,
    ItemPage,
    Items,
    JournalPage,
    LeasedItem,
    LeaseLike,
    OnConflict,
    Produced,
    Published,
    QueueInfo,
    QueuePage,
    QueueStats,
    Rebalance,
    RedriveFilter,
    Redriven,
    Result,
    Retry,
    Staged,
    StateWritten,
    Verdict,
)

T = TypeVar("T")


class Pond(Consumes):
    """A pond for any number of threads. It is open once it is made; `close` it, or use `with`.

    In a forked child it is of no use, and says so: the thread of its loop has stayed with the parent.
    """

    def __init__(self, pond: AsyncPond) -> None:
        self._pond = pond
        self._process = os.getpid()
        self._gate = threading.Lock()  # no call comes in behind `close`
        self._closing: Future[None] | None = None
        self._keeper = Keeper(self)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="millpond-engine", daemon=True)
        self._thread.start()
        try:
            self._call(self._pond.open())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """What loops left is handed back, commits under way are finished, parked leases return empty. Twice is once."""
        if self._is_forked():
            return
        self._keeper.close(CLOSE_GRACE_S)
        with self._gate:
            if self._closing is None:
                self._closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
                self._closing.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._closing.result()
        self._thread.join()

    async def _close(self) -> None:
        """Ends when all calls of other threads have their answers too."""
        await self._pond.close()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        if self._is_forked():
            call.close()
            raise Closed("the pond was opened before a fork; open it again in the child")
        with self._gate:
            if self._closing is not None:
                call.close()
                raise Closed("the engine is closed; open it again and retry")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt: the call must not go on behind the caller's back
            future.cancel()
            raise

    def _keeper_of_leases(self) -> Keeper:
        return self._keeper

    def _leasing(self, queue: str, lease_timeout: Duration | None, client_id: str) -> tuple[Lease, Wake]:
        poll = Poll()

        def lease(batch: int, wait: float) -> Sequence[LeasedItem]:
            options: dict[str, Any] = {
                "batch": batch,
                "wait": wait,
                "lease_timeout": lease_timeout,
                "client_id": client_id,
            }
            return self._call(poll.wait(partial(self._pond.lease, queue, **options)))

        def wake() -> None:
            if self._is_forked():
                return
            with suppress(RuntimeError):  # a loop that has ended waits for nothing
                self._loop.call_soon_threadsafe(poll.end)

        return lease, wake

    # ---- the operations ------------------------------------------------------------------------------------

    def create_queue(
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
        return self._call(
            self._pond.create_queue(
                name,
                partitions=partitions,
                lease_timeout=lease_timeout,
                expire_timeout=expire_timeout,
                max_attempts=max_attempts,
                dead_queue=dead_queue,
                dead=dead,
                backoff=backoff,
                dedup_window=dedup_window,
                completed_retention=completed_retention,
                durability=durability,
                reference=reference,
            )
        )

    def update_queue(
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
        return self._call(
            self._pond.update_queue(
                name,
                lease_timeout=lease_timeout,
                expire_timeout=expire_timeout,
                max_attempts=max_attempts,
                dead_queue=dead_queue,
                dead=dead,
                backoff=backoff,
                dedup_window=dedup_window,
                completed_retention=completed_retention,
                reference=reference,
            )
        )

    def queue_info(self, name: str) -> QueueInfo:
        return self._call(self._pond.queue_info(name))

    def list_queues(self, *, prefix: str = "", after: str = "", limit: int = 100) -> QueuePage:
        return self._call(self._pond.list_queues(prefix=prefix, after=after, limit=limit))

    def delete_queue(self, name: str, *, force: bool = False) -> None:
        return self._call(self._pond.delete_queue(name, force=force))

    def pause(self, queue: str) -> QueueInfo:
        return self._call(self._pond.pause(queue))

    def resume(self, queue: str) -> QueueInfo:
        return self._call(self._pond.resume(queue))

    def stats(self, queue: str) -> QueueStats:
        return self._call(self._pond.stats(queue))

    def rebalance(self, queue: str, *, partitions: int | None = None, dry_run: bool = False) -> Rebalance:
        return self._call(self._pond.rebalance(queue, partitions=partitions, dry_run=dry_run))

    def audit(self, queue: str, *, after: str | None = None, limit: int = 100) -> AuditPage:
        return self._call(self._pond.audit(queue, after=after, limit=limit))

    def produce(
        self, queue: str, items: Items, *, on_conflict: OnConflict = "ignore", request_id: str | None = None
    ) -> Sequence[Produced]:
        return self._call(self._pond.produce(queue, items, on_conflict=on_conflict, request_id=request_id))

    def lease(
        self,
        queue: str,
        *,
        batch: int = 1,
        wait: Duration = 0,
        lease_timeout: Duration | None = None,
        client_id: str = "",
    ) -> Sequence[HeldItem]:
        leased = self._call(
            self._pond.lease(queue, batch=batch, wait=wait, lease_timeout=lease_timeout, client_id=client_id)
        )
        return held(leased, HeldItem, Holding(self, queue, lease_timeout, self._keeper))

    def complete(
        self, leases: Sequence[LeaseLike], *, queue: str | None = None, result: Any = None
    ) -> Sequence[Result]:
        return self._call(self._pond.complete(leases, queue=queue, result=result))

    def retry(self, items: Sequence[Retry | LeaseLike], *, queue: str | None = None) -> Sequence[Result]:
        return self._call(self._pond.retry(items, queue=queue))

    def extend(
        self, leases: Sequence[LeaseLike], *, queue: str | None = None, lease_timeout: Duration | None = None
    ) -> Sequence[Result]:
        return self._call(self._pond.extend(leases, queue=queue, lease_timeout=lease_timeout))

    def write_state(self, lease: LeaseLike, state_doc: Any, *, version: int, queue: str | None = None) -> StateWritten:
        return self._call(self._pond.write_state(lease, state_doc, version=version, queue=queue))

    def cancel(self, queue: str, ids: Sequence[str]) -> Sequence[Result]:
        return self._call(self._pond.cancel(queue, ids))

    def bury(
        self, queue: str, ids: Sequence[str], *, reason: str = "rejected", error: str | None = None
    ) -> Sequence[Result]:
        return self._call(self._pond.bury(queue, ids, reason=reason, error=error))

    def make_ready(self, queue: str, ids: Sequence[str]) -> Sequence[Result]:
        return self._call(self._pond.make_ready(queue, ids))

    def clear(self, queue: str, states: Sequence[str] = CLEAR_STATES) -> dict[str, int]:
        return self._call(self._pond.clear(queue, states))

    def redrive(
        self,
        queue: str,
        *,
        ids: Sequence[str] | None = None,
        filter: RedriveFilter | Mapping[str, str] | None = None,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        return self._call(self._pond.redrive(queue, ids=ids, filter=filter, rate=rate, dry_run=dry_run))

    def get_item(self, queue: str, id: str, *, wait: Duration = 0) -> Item:
        return self._call(self._pond.get_item(queue, id, wait=wait))

    def list_items(
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
        return self._call(
            self._pond.list_items(
                queue, state=state, partition=partition, kind=kind, after=after, until=until, limit=limit
            )
        )

    def open_consumer(self, queue: str, consumer: str, *, after: int | None = None) -> Consumer:
        return self._call(self._pond.open_consumer(queue, consumer, after=after))

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
        return self._call(
            self._pond.claim(
                queue,
                claim_id,
                max_items=max_items,
                max_bytes=max_bytes,
                parts=parts,
                wait=wait,
                epoch=epoch,
                owner=owner,
            )
        )

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
        return self._call(self._pond.read_claim(queue, claim_id, part=part, after=after, limit=limit, epoch=epoch))

    def give_verdicts(
        self, queue: str, claim_id: str, verdicts: Sequence[Verdict], *, epoch: int | None = None
    ) -> Sequence[Result]:
        return self._call(self._pond.give_verdicts(queue, claim_id, verdicts, epoch=epoch))

    def complete_claim(self, queue: str, claim_id: str, *, epoch: int | None = None) -> ClaimEnded:
        return self._call(self._pond.complete_claim(queue, claim_id, epoch=epoch))

    def release_claim(self, queue: str, claim_id: str, *, epoch: int | None = None) -> ClaimEnded:
        return self._call(self._pond.release_claim(queue, claim_id, epoch=epoch))

    def list_claims(self, queue: str) -> Sequence[Claim]:
        return self._call(self._pond.list_claims(queue))

    def stage(self, queue: str, txn: str, chunk: str, items: Items) -> Staged:
        return self._call(self._pond.stage(queue, txn, chunk, items))

    def publish_stage(self, queue: str, txn: str, chunks: Sequence[str]) -> Published:
        return self._call(self._pond.publish_stage(queue, txn, chunks))

    def abort_stage(self, queue: str, txn: str) -> Staged:
        return self._call(self._pond.abort_stage(queue, txn))

    def read_journal(self, queue: str, *, partition: int = 0, after: int = 0, limit: int = 500) -> JournalPage:
        return self._call(self._pond.read_journal(queue, partition=partition, after=after, limit=limit))
