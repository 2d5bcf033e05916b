"""The operations of `millpond.api.Api`, on the queues of this process: check the arguments, ask the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from millpond.clock import Clock
from millpond.errors import InvalidRequest, LeaseLost, MillpondError
from millpond.model import (
    CLAIM_PAGE_MAX,
    CLEAR_STATES,
    AuditPage,
    Batch,
    Claim,
    ClaimEnded,
    Consumer,
    DeadReason,
    Duration,
    ErrorInfo,
    Item,
    ItemPage,
    Items,
    JournalPage,
    LeasedItem,
    LeasedItems,
    LeaseLike,
    OnConflict,
    Produced,
    Published,
    QueueDefinition,
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
    to_datetime,
)
from millpond.queue.dedup import request_digest
from millpond.queue.holders import foreign
from millpond.queue.requests import (
    AbortStage,
    Bury,
    Cancel,
    Clear,
    Complete,
    EndClaim,
    Extend,
    GetItem,
    JudgeClaim,
    Lease,
    ListClaims,
    ListItems,
    MakeReady,
    OpenConsumer,
    Produce,
    PublishStage,
    ReadClaim,
    ReadJournal,
    Redrive,
    Request,
    RetryItems,
    StageItems,
    WriteState,
)
from millpond.queue.tokens import lease_incarnation
from millpond.service import validate, validate_claims, validate_columns
from millpond.service.manager import QueuesManager

TERMS_KEPT = 1_000  # terms of leases remembered, once checked: consumers ask for the same again and again

T = TypeVar("T")


class Service:
    def __init__(self, manager: QueuesManager, clock: Clock) -> None:
        self._manager = manager
        self._clock = clock

    # ---- queues -------------------------------------------------------------------------------------------

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
        name = validate.queue_name(name)
        partitions = validate.partitions(partitions)
        settings = validate.settings(
            {
                "lease_timeout": lease_timeout,
                "expire_timeout": expire_timeout,
                "max_attempts": max_attempts,
                "dead_queue": dead_queue,
                "dead": dead,
                "backoff": {} if backoff is None else backoff,
                "dedup_window": dedup_window,
                "completed_retention": completed_retention,
                "durability": durability,
                "reference": reference,
            }
        )
        return self._info(await self._manager.create(name, settings, partitions))

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
        name = validate.queue_name(name)
        given = {
            "lease_timeout": lease_timeout,
            "expire_timeout": expire_timeout,
            "max_attempts": max_attempts,
            "dead_queue": dead_queue,
            "dead": dead,
            "backoff": backoff,
            "dedup_window": dedup_window,
            "completed_retention": completed_retention,
            "reference": reference,
        }
        changes = validate.settings({field: value for field, value in given.items() if value is not UNSET})
        return self._info(await self._manager.update(name, changes))

    async def queue_info(self, name: str) -> QueueInfo:
        await self._manager.known(validate.queue_name(name))
        return self._info(self._manager.definition(name))

    async def list_queues(self, *, prefix: str = "", after: str = "", limit: int = 100) -> QueuePage:
        prefix, after = validate.string(prefix, "prefix"), validate.string(after, "after")
        definitions, following = self._manager.definitions(prefix, after, validate.list_limit(limit))
        return QueuePage([self._info(one) for one in definitions], following)

    async def delete_queue(self, name: str, *, force: bool = False) -> None:
        await self._manager.delete(validate.queue_name(name), force=validate.boolean(force, "force"))

    async def pause(self, queue: str) -> QueueInfo:
        return self._info(await self._manager.update(validate.queue_name(queue), {}, paused=True))

    async def resume(self, queue: str) -> QueueInfo:
        return self._info(await self._manager.update(validate.queue_name(queue), {}, paused=False))

    async def stats(self, queue: str) -> QueueStats:
        return await self._manager.stats(validate.queue_name(queue))

    async def rebalance(self, queue: str, *, partitions: int | None = None, dry_run: bool = False) -> Rebalance:
        name = validate.queue_name(queue)
        count = None if partitions is None else validate.partitions(partitions)
        return await self._manager.rebalance(name, count, dry_run=validate.boolean(dry_run, "dry_run"))

    async def audit(self, queue: str, *, after: str | None = None, limit: int = 100) -> AuditPage:
        before = validate.audit_cursor(after)
        return AuditPage(*await self._manager.audit(validate.queue_name(queue), before, validate.list_limit(limit)))

    # ---- items --------------------------------------------------------------------------------------------

    async def produce(
        self, queue: str, items: Items, *, on_conflict: OnConflict = "ignore", request_id: str | None = None
    ) -> Sequence[Produced]:
        produced: Sequence[Produced] = await self._ask(
            queue, produce_request(items, on_conflict, request_id, self._clock)
        )
        return produced

    async def lease(
        self,
        queue: str,
        *,
        batch: int = 1,
        wait: Duration = 0,
        lease_timeout: Duration | None = None,
        client_id: str = "",
    ) -> Sequence[LeasedItem]:
        items: Sequence[LeasedItem] = await self._ask(queue, lease_request(batch, wait, lease_timeout, client_id))
        return items

    async def complete(
        self, leases: Sequence[LeaseLike], *, queue: str | None = None, result: Any = None
    ) -> Sequence[Result]:
        leases = _own(validate.leases(leases))
        if result is not None and len(leases) > 1:
            raise InvalidRequest("a result goes with one lease; complete the items one by one, or leave it out")
        stored = None if result is None else validate.document(result, "result")
        return await self._ask_holders(queue, leases, leases, lambda some: Complete(some, stored))

    async def retry(self, items: Sequence[Retry | LeaseLike], *, queue: str | None = None) -> Sequence[Result]:
        checked = validate.retries(items, self._clock.now())
        return await self._ask_holders(queue, checked, [one.lease for one in checked], RetryItems)

    async def extend(
        self, leases: Sequence[LeaseLike], *, queue: str | None = None, lease_timeout: Duration | None = None
    ) -> Sequence[Result]:
        leases = _own(validate.leases(leases))
        timeout = validate.lease_timeout_ms(lease_timeout, low=0)
        return await self._ask_holders(queue, leases, leases, lambda some: Extend(some, timeout))

    async def write_state(
        self, lease: LeaseLike, state_doc: Any, *, version: int, queue: str | None = None
    ) -> StateWritten:
        [checked_lease] = validate.leases([lease])
        checked = validate.integer(version, "version", 0, 1 << 62)
        request = WriteState(checked_lease, checked, validate.document(state_doc, "state_doc"))
        if queue is None:
            queue = self._manager.name_of(lease_incarnation(checked_lease))
            if queue is None:
                refused = foreign(checked_lease)
                raise (LeaseLost if refused.code == LeaseLost.code else InvalidRequest)(refused.message)
        written: StateWritten = await self._ask(queue, request)
        return written

    async def cancel(self, queue: str, ids: Sequence[str]) -> Sequence[Result]:
        results: Sequence[Result] = await self._ask(queue, Cancel(validate.ids(ids)))
        return results

    async def bury(
        self, queue: str, ids: Sequence[str], *, reason: str = "rejected", error: str | None = None
    ) -> Sequence[Result]:
        why = DeadReason(validate.one_of(reason, "reason", list(DeadReason)))
        request = Bury(validate.ids(ids), why, validate.error_text(error, "error"))
        results: Sequence[Result] = await self._ask(queue, request)
        return results

    async def make_ready(self, queue: str, ids: Sequence[str]) -> Sequence[Result]:
        results: Sequence[Result] = await self._ask(queue, MakeReady(validate.ids(ids)))
        return results

    async def clear(self, queue: str, states: Sequence[str] = CLEAR_STATES) -> dict[str, int]:
        request = Clear(validate.states(states))
        asked = {"states": [str(state) for state in request.states]}
        removed: dict[str, int] = await self._audited(queue, "clear", asked, request, lambda done: {"removed": done})
        return removed

    async def redrive(
        self,
        queue: str,
        *,
        ids: Sequence[str] | None = None,
        filter: RedriveFilter | Mapping[str, str] | None = None,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        request = Redrive(
            None if ids is None else validate.ids(ids),
            validate.redrive_filter(filter),
            validate.rate(rate),
            validate.boolean(dry_run, "dry_run"),
        )
        if request.dry_run:
            return await self._ask(queue, request)  # type: ignore[no-any-return]
        redriven: Redriven = await self._audited(queue, "redrive", _redrive_detail(request), request, _redriven_detail)
        return redriven

    async def get_item(self, queue: str, id: str, *, wait: Duration = 0) -> Item:
        item: Item = await self._ask(queue, GetItem(validate.string(id, "id"), validate.wait_ms(wait)))
        return item

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
        place, order = validate.cursor(after)
        request = ListItems(
            validate.state(state),
            None if partition is None else validate.integer(partition, "partition", 0, 1 << 16),
            None if kind is None else validate.string(kind, "kind"),
            place,
            validate.list_limit(limit, CLAIM_PAGE_MAX),
            None if until is None else validate.integer(until, "until", 0, 1 << 62),
            order,
        )
        page: ItemPage = await self._ask(queue, request)
        return page

    # ---- claims -------------------------------------------------------------------------------------------

    async def open_consumer(self, queue: str, consumer: str, *, after: int | None = None) -> Consumer:
        last = None if after is None else validate.integer(after, "after", 0, 1 << 62)
        opened: Consumer = await self._ask(queue, OpenConsumer(validate_claims.consumer(consumer), last))
        return opened

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
        request = validate_claims.claim(claim_id, max_items, max_bytes, parts, wait, epoch, owner)
        claim: Claim = await self._ask(queue, request)
        return claim

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
        request = ReadClaim(
            validate_claims.name(claim_id, "claim_id"),
            validate.integer(part, "part", 0, 1 << 31),
            validate_claims.after(after),
            validate_claims.page_limit(limit),
            validate_claims.epoch(epoch),
        )
        page: ItemPage = await self._ask(queue, request)
        return page

    async def give_verdicts(
        self, queue: str, claim_id: str, verdicts: Sequence[Verdict], *, epoch: int | None = None
    ) -> Sequence[Result]:
        checked, given = validate_claims.name(claim_id, "claim_id"), validate_claims.verdicts(verdicts)
        results: Sequence[Result] = await self._ask(queue, JudgeClaim(checked, given, validate_claims.epoch(epoch)))
        return results

    async def complete_claim(self, queue: str, claim_id: str, *, epoch: int | None = None) -> ClaimEnded:
        return await self._end_claim(queue, claim_id, True, epoch)

    async def release_claim(self, queue: str, claim_id: str, *, epoch: int | None = None) -> ClaimEnded:
        return await self._end_claim(queue, claim_id, False, epoch)

    async def _end_claim(self, queue: str, claim_id: str, completed: bool, epoch: int | None) -> ClaimEnded:
        checked = validate_claims.name(claim_id, "claim_id")
        request = EndClaim(checked, completed, validate_claims.epoch(epoch))
        ended: ClaimEnded
        if completed:
            ended = await self._ask(queue, request)
        else:  # by its reader, or by somebody who tidies up: the log says who
            ended = await self._audited(
                queue, "claim.release", {"claim_id": checked}, request, lambda done: {"items": done.items}
            )
        return ended

    async def list_claims(self, queue: str) -> Sequence[Claim]:
        claims: Sequence[Claim] = await self._ask(queue, ListClaims())
        return claims

    # ---- stages -------------------------------------------------------------------------------------------

    async def stage(self, queue: str, txn: str, chunk: str, items: Items) -> Staged:
        named = validate_claims.name(txn, "txn"), validate_claims.name(chunk, "chunk")
        records, size, own = validate_columns.staged_items(items, self._clock.now)
        staged: Staged = await self._ask(queue, StageItems(*named, records, size, own))
        return staged

    async def publish_stage(self, queue: str, txn: str, chunks: Sequence[str]) -> Published:
        request = PublishStage(validate_claims.name(txn, "txn"), validate_claims.chunks(chunks))
        published: Published = await self._ask(queue, request)
        return published

    async def abort_stage(self, queue: str, txn: str) -> Staged:
        staged: Staged = await self._ask(queue, AbortStage(validate_claims.name(txn, "txn")))
        return staged

    # ---- history ------------------------------------------------------------------------------------------

    async def read_journal(self, queue: str, *, partition: int = 0, after: int = 0, limit: int = 500) -> JournalPage:
        request = ReadJournal(
            validate.integer(partition, "partition", 0, 1 << 16),
            validate.integer(after, "after", 0, 1 << 62),
            validate_claims.journal_limit(limit),
        )
        page: JournalPage = await self._ask(queue, request)
        return page

    # ---- shared -------------------------------------------------------------------------------------------

    async def _ask(self, queue: str, request: Request) -> Any:
        try:
            runner = self._manager.awake(queue)
        except TypeError:  # an unhashable name
            runner = None
        if runner is None:
            runner = await self._manager.runner(validate.queue_name(queue))
        future = runner.ask(request)
        try:
            return await future
        except asyncio.CancelledError:
            request.withdraw()
            raise

    async def _audited(
        self, queue: str, action: str, detail: dict[str, Any], request: Request, told: Callable[[Any], dict[str, Any]]
    ) -> Any:
        """Into the audit log before it is begun, and how it went: of one that a crash cut short, that it was begun."""
        queue = validate.queue_name(queue)
        await self._manager.runner(queue)
        await self._manager.note(queue, action, detail)
        try:
            done = await self._ask(queue, request)
        except (MillpondError, asyncio.CancelledError) as error:
            why = error.message if isinstance(error, MillpondError) else "whoever asked for it has gone"
            await self._manager.note(queue, f"{action} failed", {}, why)
            raise
        await self._manager.note(queue, f"{action} done", told(done))
        return done

    def _ask_holders(
        self,
        queue: str | None,
        entries: Sequence[T],
        leases: Sequence[LeaseLike],
        request: Callable[[Sequence[T]], Request],
    ) -> Coroutine[Any, Any, Sequence[Result]]:
        """Ask with one entry a lease. A token names its queue, so callers may leave it out, and mix queues."""
        if queue is None:
            return self._ask_named(entries, leases, request)
        return self._ask(queue, request(entries))

    async def _ask_named(
        self, entries: Sequence[T], leases: Sequence[LeaseLike], request: Callable[[Sequence[T]], Request]
    ) -> Sequence[Result]:
        """The queue that the first of the leases names, and then those that others do."""
        named = self._manager.name_of(lease_incarnation(leases[0]))
        results: Sequence[Result]
        if named is None:
            results = [Result(error=foreign(lease)) for lease in leases]
        else:
            results = await self._ask(named, request(entries))
        if not isinstance(results, Batch):  # a Batch has no errors in it
            results = await self._ask_others(named, entries, leases, request, results)
        return results

    async def _ask_others(
        self,
        asked: str | None,
        entries: Sequence[T],
        leases: Sequence[LeaseLike],
        request: Callable[[Sequence[T]], Request],
        results: Sequence[Result],
    ) -> Sequence[Result]:
        """Those that the first one's queue refused, and that name another: each takes effect by itself."""
        others: dict[str, list[int]] = {}
        for place, result in enumerate(results):
            if result.error is not None:
                name = self._manager.name_of(lease_incarnation(leases[place]))
                if name is not None and name != asked:
                    others.setdefault(name, []).append(place)
        results = list(results)
        for name, places in others.items():
            try:
                answers = await self._ask(name, request([entries[place] for place in places]))
            except MillpondError as error:
                answers = [Result(error=ErrorInfo(error.code, error.message))] * len(places)
            for place, answer in zip(places, answers, strict=True):
                results[place] = answer
        return results

    def _info(self, definition: QueueDefinition) -> QueueInfo:
        settings = definition.settings
        return QueueInfo(
            name=definition.name,
            incarnation=definition.incarnation,
            partitions=self._manager.partitions(definition.name),
            lease_timeout=settings.lease_timeout_ms / 1000,
            expire_timeout=settings.expire_timeout_ms / 1000,
            max_attempts=settings.max_attempts,
            dead_queue=settings.dead_queue,
            dead=settings.dead,
            backoff={
                "base": settings.backoff.base,
                "cap": settings.backoff.cap_ms / 1000,
                "jitter": settings.backoff.jitter,
            },
            dedup_window=settings.dedup_window_ms / 1000,
            completed_retention=settings.completed_retention_ms / 1000,
            durability=settings.durability,
            reference=settings.reference,
            paused=definition.paused,
            created_at=to_datetime(definition.created_at),
            updated_at=to_datetime(definition.updated_at),
            loaded=self._manager.is_loaded(definition.name),
            rebalance=self._manager.rebalance_of(definition.name),
        )


def produce_request(items: Items, on_conflict: OnConflict, request_id: str | None, clock: Clock) -> Produce:
    records, size, named = validate.new_items(items, clock.now)
    conflict: Any = on_conflict
    if on_conflict != "ignore":
        conflict = validate.one_of(on_conflict, "on_conflict", ("ignore", "reject", "replace"))
    name = None if request_id is None else request_digest(validate.request_id(request_id))
    return Produce(records, size, conflict, name, named)


def _redrive_detail(request: Redrive) -> dict[str, Any]:
    wanted = {name: value for name, value in asdict(request.filter).items() if value is not None}
    return (
        ({} if request.ids is None else {"ids": len(request.ids)})
        | ({"filter": wanted} if wanted else {})
        | ({} if request.rate is None else {"rate": request.rate})
    )


def _redriven_detail(done: Redriven) -> dict[str, Any]:
    return {"matched": done.matched, "moved": done.moved, "errors": len(done.errors)}


def _own(leases: Sequence[LeaseLike]) -> Sequence[LeaseLike]:
    """A caller may change a list while its request is under way."""
    return leases if type(leases) is LeasedItems else list(leases)


def lease_request(batch: int, wait: Duration, lease_timeout: Duration | None, client_id: str) -> Lease:
    try:
        terms = _kept_terms(batch, wait, lease_timeout, client_id)
    except TypeError:  # what cannot be hashed is wrong, and is told what is
        terms = _terms(batch, wait, lease_timeout, client_id)
    return Lease(*terms)


def _terms(
    batch: int, wait: Duration, lease_timeout: Duration | None, client_id: str
) -> tuple[int, int, int | None, str]:
    return (
        validate.lease_batch(batch),
        validate.wait_ms(wait),
        validate.lease_timeout_ms(lease_timeout, low=1),
        validate.string(client_id, "client_id"),
    )


_kept_terms = lru_cache(TERMS_KEPT, typed=True)(_terms)  # typed: True is no number
