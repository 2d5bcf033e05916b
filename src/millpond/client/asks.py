"""Each operation as a request to be sent and a way to read its reply. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

from msgspec import UNSET, Struct, structs

from millpond import model
from millpond.client.faults import decoded
from millpond.client.http1 import Reply
from millpond.durations import seconds
from millpond.errors import InvalidRequest, NotFound, OutcomeUnknown, QueueExists, VersionConflict
from millpond.model import (
    STATE_DOC_DEPTH_MAX,
    WAIT_MAX_MS,
    AuditPage,
    Duration,
    Item,
    ItemPage,
    LeasedFields,
    LeaseLike,
    NewItem,
    OnConflict,
    Produced,
    QueueInfo,
    QueuePage,
    QueueStats,
    Rebalance,
    RedriveFilter,
    Redriven,
    Result,
    StateWritten,
)
from millpond.wire import MSGPACK, payloads, replies, requests
from millpond.wire.replies import LeaseItem

T = TypeVar("T")
_STATES: dict[str, str] = {state.value: state for state in model.State}


class Ask(Struct, Generic[T]):
    """`read` takes the reply's decoded body. A call may be repeated after its reply was lost, but for two things.

    `once`: what the first try did would be done again, or be lost (a lease). `doubt`: the code of the error that a
    repeat meets if the first try took effect after all; `settle` is then what the caller gets, instead of nothing
    but doubt.
    """

    name: str
    request: Struct
    reply: type[Any]
    read: Callable[[Any], T]
    wait: float = 0.0
    once: bool = False
    doubt: str = ""
    settle: Callable[[], T] | None = None

    def request_after(self, elapsed: float) -> Struct:
        """A poll that is begun again waits for what is left of its wait."""
        if not self.wait or not elapsed:
            return self.request
        return structs.replace(self.request, wait=max(0.0, self.wait - elapsed))

    def answer(self, reply: Reply) -> T:
        return self.read(decoded(reply, self.reply))

    def in_doubt(self) -> T:
        if self.settle is not None:
            return self.settle()
        raise OutcomeUnknown(
            f"the reply to {self.name} was lost, and sent again it was refused as {self.doubt}: by what the first one"
            " did, or by somebody else; look, and decide"
        )


def itself(value: Any) -> Any:
    return value


def on_wire(duration: Any) -> Any:
    """A timedelta has no form of its own there. Whatever is wrong is for the server to say."""
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


# ---- queues -----------------------------------------------------------------------------------------------


def create_queue(name: str, given: dict[str, Any], backoff: Mapping[str, Any] | None) -> Ask[QueueInfo]:
    request = requests.CreateQueue(name=name, backoff=_backoff(backoff), **_durations(given))
    return Ask("queues.create", request, QueueInfo, itself, doubt=QueueExists.code)


def update_queue(name: str, given: dict[str, Any], backoff: Any) -> Ask[QueueInfo]:
    changes: Any = UNSET if backoff is UNSET else _backoff(backoff)
    request = requests.UpdateQueue(name=name, backoff=changes, **_durations(given))
    return Ask("queues.update", request, QueueInfo, itself)


def _durations(given: dict[str, Any]) -> dict[str, Any]:
    return {name: on_wire(value) for name, value in given.items()}


def _backoff(given: Mapping[str, Any] | None) -> Any:
    """As a mapping: wrong names in it are for the server to name."""
    return dict(_durations(dict(given))) if isinstance(given, Mapping) else given


def queue_info(name: str) -> Ask[QueueInfo]:
    return Ask("queues.info", requests.NamedQueue(name), QueueInfo, itself)


def list_queues(prefix: str, after: str, limit: int) -> Ask[QueuePage]:
    return Ask("queues.list", requests.ListQueues(prefix, after, limit), QueuePage, itself)


def delete_queue(name: str, force: bool) -> Ask[None]:
    """Gone is gone, whichever of two tries did it."""
    request = requests.DeleteQueue(name, force)
    return Ask("queues.delete", request, replies.Empty, _none, doubt=NotFound.code, settle=lambda: None)


def _none(_: Any) -> None:
    return None


def pause(queue: str) -> Ask[QueueInfo]:
    return Ask("queue.pause", requests.OneQueue(queue), QueueInfo, itself)


def resume(queue: str) -> Ask[QueueInfo]:
    return Ask("queue.resume", requests.OneQueue(queue), QueueInfo, itself)


def stats(queue: str) -> Ask[QueueStats]:
    return Ask("queue.stats", requests.OneQueue(queue), QueueStats, _stats)


def rebalance(queue: str, partitions: int | None, dry_run: bool) -> Ask[Rebalance]:
    return Ask("queue.rebalance", requests.RebalanceQueue(queue, partitions, dry_run), Rebalance, itself)


def audit(queue: str, after: str | None, limit: int) -> Ask[AuditPage]:
    return Ask("queue.audit", requests.Audit(queue, after, limit), AuditPage, itself)


def _stats(reply: QueueStats) -> QueueStats:
    """Counted by states, as the engine does."""
    reply.counts = _by_state(reply.counts)
    for partition in reply.partitions:
        partition.counts = _by_state(partition.counts)
    return reply


def _by_state(counts: dict[str, int]) -> dict[str, int]:
    """A newer server may know more of them."""
    return {_STATES.get(state, state): count for state, count in counts.items()}


def clear(queue: str, states: Sequence[str]) -> Ask[dict[str, int]]:
    request = requests.ClearQueue(queue, many(states, "states"))
    return Ask("queue.clear", request, replies.Cleared, lambda reply: dict(reply.cleared))


# ---- produce ----------------------------------------------------------------------------------------------


def produce(queue: str, items: list[Any], on_conflict: OnConflict, request_id: str) -> Ask[Sequence[Produced]]:
    request = requests.Produce(queue, items, on_conflict, request_id)
    return Ask("queue.produce", request, replies.ProduceReply, lambda reply: reply.items)


def produce_items(items: Sequence[Any]) -> list[Any]:
    """As they go on the wire. The types are checked: a number would go as that many zero bytes."""
    return [_produce_item(item, place) for place, item in enumerate(many(items, "items"))]


def _produce_item(item: Any, place: int) -> Any:
    if type(item) is bytes:
        return requests.PlainItem(None, item)
    if isinstance(item, NewItem):
        if not isinstance(item.payload, str | bytes | bytearray | memoryview):
            raise InvalidRequest(f"items[{place}].payload is {type_of(item.payload)}; give bytes or a string")
        [on_the_wire] = payloads.produce_items([item], MSGPACK)
        return on_the_wire
    if isinstance(item, str):
        return requests.PlainItem(item)
    if isinstance(item, bytes | bytearray | memoryview):
        return requests.PlainItem(None, bytes(item))
    raise InvalidRequest(f"items[{place}] is {type_of(item)}; give bytes, a string or a NewItem")


def size_of(items: Sequence[Any]) -> int:
    """Bytes of payload, nearly: for a bound, not for a bill."""
    return sum(len(item.data or b"") + len(item.text or "") for item in items)


# ---- leases -----------------------------------------------------------------------------------------------


def lease(
    queue: str, batch: int, wait: Duration, lease_timeout: Duration | None, client_id: str
) -> Ask[list[LeaseItem]]:
    """One that waits is begun again when its connection breaks: most likely it had been given nothing yet."""
    waits = waits_for(wait)
    request = requests.Lease(queue, batch, on_wire(wait), on_wire(lease_timeout), client_id)
    return Ask("queue.lease", request, replies.LeaseReply, lambda reply: reply.items, waits, once=not waits)


def waits_for(wait: Duration) -> float:
    """Seconds for which the server may say nothing; 0 for what is no duration, not a number among it."""
    return min(max(0.0, seconds(wait) or 0.0), WAIT_MAX_MS / 1000)


def leased_fields(item: LeaseItem) -> LeasedFields:
    return LeasedFields(
        item.id,
        item.lease,
        item.data if item.data is not None else (item.text or "").encode(),
        item.correlation_id,
        item.attempts,
        item.deliveries,
        item.fencing_token,
        item.lease_deadline,
        item.created_at,
        item.kind,
        item.encoding,
        item.reference,
        item.priority,
        item.group,
        item.key,
        item.state_doc,
        item.state_version,
        item.last_error,
        item.dead_reason,
        item.source_queue,
        item.source_id,
        item.source_attempts,
    )


def tokens(leases: Sequence[LeaseLike]) -> list[str]:
    return [_token(lease, f"leases[{place}]") for place, lease in enumerate(many(leases, "leases"))]


def _token(lease: Any, where: str) -> str:
    if isinstance(lease, model.LeasedItem):
        return lease.lease
    if not isinstance(lease, str):
        raise InvalidRequest(f"{where} is {type_of(lease)}; give the leased item or its `lease`")
    return lease


def complete(leases: list[str], queue: str | None, result: Any) -> Ask[Sequence[Result]]:
    _check_document(result, "result")
    return Ask("queue.complete", requests.Complete(leases, queue, result), replies.Results, results)


def extend(leases: list[str], queue: str | None, lease_timeout: Duration | None) -> Ask[Sequence[Result]]:
    request = requests.Extend(leases, queue, on_wire(lease_timeout))
    return Ask("queue.extend", request, replies.Results, results)


def retry(items: Sequence[model.Retry | LeaseLike], queue: str | None) -> Ask[Sequence[Result]]:
    """Repeated after a lost reply it may say lease_lost of what the first try handed back: the lease is over."""
    given = [_retry_item(item, place) for place, item in enumerate(many(items, "items"))]
    return Ask("queue.retry", requests.Retry(given, queue), replies.Results, results)


def _retry_item(item: model.Retry | LeaseLike, place: int) -> requests.RetryItem:
    if not isinstance(item, model.Retry):
        return requests.RetryItem(_token(item, f"items[{place}]"))
    lease = _token(item.lease, f"items[{place}].lease")
    return requests.RetryItem(lease, item.intent, on_wire(item.delay), item.retry_at, item.error, item.dead)


def results(reply: replies.Results) -> Sequence[Result]:
    return reply.results


def write_state(lease: LeaseLike, state_doc: Any, version: int, queue: str | None) -> Ask[StateWritten]:
    _check_document(state_doc, "state_doc")
    request = requests.WriteState(_token(lease, "lease"), version, state_doc, queue)
    return Ask("queue.state", request, StateWritten, itself, doubt=VersionConflict.code)


def _check_document(value: Any, name: str) -> None:
    """What would go as something else, such as a set as a list. All else that is wrong is for the server to say."""
    level = [value]
    for _ in range(STATE_DOC_DEPTH_MAX):
        inside: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inside += one.values()
            elif isinstance(one, list | tuple):
                inside += one
            elif not (one is None or isinstance(one, str | int | float | bytes)):
                raise InvalidRequest(f"{name} holds a {type_of(one)}; use JSON values or bytes")
        level = inside


# ---- items ------------------------------------------------------------------------------------------------


def cancel(queue: str, ids: Sequence[str]) -> Ask[Sequence[Result]]:
    return Ask("queue.cancel", requests.Cancel(queue, many(ids, "ids")), replies.Results, results)


def bury(queue: str, ids: Sequence[str], reason: str, error: str | None) -> Ask[Sequence[Result]]:
    """Repeated after a lost reply it finds the items dead, and says so."""
    request = requests.Bury(queue, many(ids, "ids"), reason, error)
    return Ask("queue.bury", request, replies.Results, results)


def make_ready(queue: str, ids: Sequence[str]) -> Ask[Sequence[Result]]:
    """Repeated after a lost reply it may find the items leased already, and say so."""
    return Ask("queue.ready", requests.MakeReady(queue, many(ids, "ids")), replies.Results, results)


def redrive(
    queue: str,
    ids: Sequence[str] | None,
    filter: RedriveFilter | Mapping[str, str] | None,
    rate: float | None,
    dry_run: bool,
) -> Ask[Redriven]:
    """The filter as it is, a mapping or its like: wrong names in it are for the server to name."""
    chosen = None if ids is None else many(ids, "ids")
    like: Any = dict(filter) if isinstance(filter, Mapping) else filter
    return Ask("queue.redrive", requests.Redrive(queue, chosen, like, rate, dry_run), Redriven, itself)


def get_item(queue: str, id: str, wait: Duration) -> Ask[Item]:
    request = requests.GetItem(queue, id, on_wire(wait))
    return Ask("items.get", request, replies.LookItem, payloads.looked_item, waits_for(wait))


def list_items(request: requests.ListItems) -> Ask[ItemPage]:
    return Ask("items.list", request, replies.LookPage, items_page)


def items_page(page: replies.LookPage) -> ItemPage:
    return ItemPage([payloads.looked_item(item) for item in page.items], page.next)


def many(value: Any, name: str, *, at_least: int = 1) -> list[Any]:
    if isinstance(value, str | bytes | bytearray | model.LeasedItem) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{name} is a list, not {type_of(value)}; put a single one into a list")
    if len(value) < at_least:
        raise InvalidRequest(f"{name} is empty; give at least one")
    return list(value)


def type_of(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
