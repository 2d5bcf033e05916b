"""The operations of millpond as one Protocol: what the service, the clients and fakes implement.

Durations are seconds, `timedelta` or strings ("90s", "1m30s", "PT1M30S"); instants are `datetime`. Every call raises
errors of `millpond.errors`. The blocking engine and client have the same methods without `await`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from millpond.errors import MillpondError
from millpond.model import (
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

caller: ContextVar[str] = ContextVar("caller", default="embedded")
"""Who makes the call, for the audit log. Set where a request begins; tasks that it starts inherit it."""


class Reply(Protocol):
    """An answered call: its value, or the error in its place."""

    value: Any
    error: MillpondError | None


class Begun(Protocol):
    def withdraw(self) -> None:
        """Nobody waits for the reply any more: what it would have brought goes back, and it comes at once."""
        ...


class Begin(Protocol):
    """The calls of every item's life without a coroutine, for a server that has thousands of them a second.

    Arguments are checked as in `Api`, and wrong ones raise. `done` is called once, perhaps before the call returns.
    None: the queue is asleep or unknown, nothing was begun and `done` is not called; ask `Api`.
    """

    def begin_produce(
        self, queue: str, items: Items, on_conflict: OnConflict, request_id: str | None, done: Callable[[Reply], None]
    ) -> Begun | None: ...

    def begin_lease(
        self,
        queue: str,
        batch: int,
        wait: Duration,
        lease_timeout: Duration | None,
        client_id: str,
        done: Callable[[Reply], None],
    ) -> Begun | None: ...

    def begin_complete(self, queue: str, leases: Sequence[str], done: Callable[[Reply], None]) -> Begun | None: ...

    def begin_retry(self, queue: str, items: Sequence[Retry], done: Callable[[Reply], None]) -> Begun | None: ...

    def begin_extend(
        self, queue: str, leases: Sequence[str], lease_timeout: Duration | None, done: Callable[[Reply], None]
    ) -> Begun | None: ...


class Api(Protocol):
    # ---- queues ---------------------------------------------------------------------------------------------

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
    ) -> QueueInfo: ...

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
        """What is left out stays as it was."""
        ...

    async def queue_info(self, name: str) -> QueueInfo: ...

    async def list_queues(self, *, prefix: str = "", after: str = "", limit: int = 100) -> QueuePage: ...

    async def delete_queue(self, name: str, *, force: bool = False) -> None:
        """`force` deletes a queue that still has items, and the items with it."""
        ...

    async def pause(self, queue: str) -> QueueInfo: ...

    async def resume(self, queue: str) -> QueueInfo: ...

    async def stats(self, queue: str) -> QueueStats: ...

    async def rebalance(self, queue: str, *, partitions: int | None = None, dry_run: bool = False) -> Rebalance:
        """Change how many partitions a queue has, and in which stores they are, by the stores' affinities.

        New partitions take new items, old ones drain through consumers and are removed. None: as many as there are.
        It goes on by itself; `queue_info` tells how far it is. One at a time: 409, with the one that runs.
        """
        ...

    async def audit(self, queue: str, *, after: str | None = None, limit: int = 100) -> AuditPage:
        """What was done to a queue by hand, the newest first; also if it was deleted. `after` is a page's `next`."""
        ...

    # ---- items ----------------------------------------------------------------------------------------------

    async def produce(
        self, queue: str, items: Items, *, on_conflict: OnConflict = "ignore", request_id: str | None = None
    ) -> Sequence[Produced]:
        """All of the items or none, durable before it returns. The same `request_id` again adds nothing."""
        ...

    async def lease(
        self,
        queue: str,
        *,
        batch: int = 1,
        wait: Duration = 0,
        lease_timeout: Duration | None = None,
        client_id: str = "",
    ) -> Sequence[LeasedItem]:
        """Up to `batch` items. Waits up to `wait` for the first; a partial batch returns at once."""
        ...

    async def complete(
        self, leases: Sequence[LeaseLike], *, queue: str | None = None, result: Any = None
    ) -> Sequence[Result]: ...

    async def retry(self, items: Sequence[Retry | LeaseLike], *, queue: str | None = None) -> Sequence[Result]:
        """A bare item or token is a failure without a word."""
        ...

    async def extend(
        self, leases: Sequence[LeaseLike], *, queue: str | None = None, lease_timeout: Duration | None = None
    ) -> Sequence[Result]:
        """A `lease_timeout` of 0 releases the items at once."""
        ...

    async def write_state(
        self, lease: LeaseLike, state_doc: Any, *, version: int, queue: str | None = None
    ) -> StateWritten: ...

    async def cancel(self, queue: str, ids: Sequence[str]) -> Sequence[Result]: ...

    async def bury(
        self, queue: str, ids: Sequence[str], *, reason: str = "rejected", error: str | None = None
    ) -> Sequence[Result]:
        """Items that wait die, as if their last attempt had failed: what undoes a redrive."""
        ...

    async def make_ready(self, queue: str, ids: Sequence[str]) -> Sequence[Result]:
        """Scheduled and retrying items are leasable now, at the tail, as if they had fallen due."""
        ...

    async def clear(self, queue: str, states: Sequence[str] = ...) -> dict[str, int]: ...

    async def redrive(
        self,
        queue: str,
        *,
        ids: Sequence[str] | None = None,
        filter: RedriveFilter | Mapping[str, str] | None = None,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Dead items back to where they came from; `rate` is items a second."""
        ...

    async def get_item(self, queue: str, id: str, *, wait: Duration = 0) -> Item:
        """Waits up to `wait` for the item to end (completed, dead or cancelled), and returns it as it is then.

        An item of which its queue keeps nothing comes with its last state and its result to those who wait as it ends;
        who asks later, or waits for one that is removed otherwise, gets NotFound.
        """
        ...

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
        """`until` is the number of the last item looked at, of those in `partition`."""
        ...

    # ---- claims: items for a batch reader -------------------------------------------------------------------

    async def open_consumer(self, queue: str, consumer: str, *, after: int | None = None) -> Consumer:
        """Begin an epoch: whoever had opened the consumer before is fenced off.

        `after` is the last claim that the caller knows of: if that is not the consumer's, nothing is begun (409).
        """
        ...

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
        """A named set of the oldest ready items; the same set again under the same name.

        `parts` is how many may read at a time; every partition that has items of it is one at least. Waits up to
        `wait` for the first item. A name `consumer:seq` belongs to that consumer, needs its `epoch`, and must be the
        one after the last completed.
        """
        ...

    async def read_claim(
        self,
        queue: str,
        claim_id: str,
        *,
        part: int = 0,
        after: str | None = None,
        limit: int = 1_000,
        epoch: int | None = None,
    ) -> ItemPage: ...

    async def give_verdicts(
        self, queue: str, claim_id: str, verdicts: Sequence[Verdict], *, epoch: int | None = None
    ) -> Sequence[Result]:
        """What completing the claim does to these items instead; given again, the newest counts."""
        ...

    async def complete_claim(self, queue: str, claim_id: str, *, epoch: int | None = None) -> ClaimEnded: ...

    async def release_claim(self, queue: str, claim_id: str, *, epoch: int | None = None) -> ClaimEnded:
        """The items back to the head of the queue, as if they had never been claimed."""
        ...

    async def list_claims(self, queue: str) -> Sequence[Claim]: ...

    # ---- stages: items that appear all at once ----------------------------------------------------------------

    async def stage(self, queue: str, txn: str, chunk: str, items: Items) -> Staged:
        """Durable, and invisible until the transaction is published. The same chunk again adds nothing.

        To a transaction that was published nothing can be added: 0 items are staged then.
        """
        ...

    async def publish_stage(self, queue: str, txn: str, chunks: Sequence[str]) -> Published:
        """Show these chunks at once and drop the transaction's others; again, it does nothing.

        Of transactions named `name:seq` only ever later ones can be published, so that none is done twice.
        """
        ...

    async def abort_stage(self, queue: str, txn: str) -> Staged:
        """Drop what was staged."""
        ...

    # ---- history ----------------------------------------------------------------------------------------------

    async def read_journal(self, queue: str, *, partition: int = 0, after: int = 0, limit: int = 500) -> JournalPage:
        """Rows of a partition's journal, for who keeps the history."""
        ...
