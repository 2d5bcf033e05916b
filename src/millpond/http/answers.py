"""Each call of the API on the operations of `Api`: from a decoded request to a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from millpond import model
from millpond.api import Api
from millpond.errors import Closed, MillpondError
from millpond.http.aside import Aside
from millpond.http.batches import BatchAnswers, Encoded
from millpond.http.exchange import Exchange
from millpond.http.parked import Parked, is_zero
from millpond.http.refusals import ClientGone
from millpond.http.streaming import GiveBack, Streams
from millpond.model import (
    LIST_LIMIT_MAX,
    AuditPage,
    Item,
    LeasedItem,
    QueueInfo,
    QueuePage,
    QueueStats,
    Rebalance,
    Redriven,
    Result,
    StateWritten,
)
from millpond.wire import payloads, requests
from millpond.wire.replies import Cleared, Empty, LeaseReply, LookItem, LookPage, ProduceReply, Results

QueueOf = Callable[[str], str | None]


class Answers(BatchAnswers):
    """What answering needs: the engine, who waits, which streams are open, and where to do what takes long."""

    def __init__(self, api: Api, parked: Parked, aside: Aside, streams: Streams, give_back: GiveBack) -> None:
        super().__init__(api, parked, aside)
        self._streams = streams
        self._give_back = give_back

    # ---- queues -------------------------------------------------------------------------------------------

    async def create_queue(self, request: requests.CreateQueue, exchange: Exchange) -> QueueInfo:
        return await self._api.create_queue(**_given(request))

    async def update_queue(self, request: requests.UpdateQueue, exchange: Exchange) -> QueueInfo:
        return await self._api.update_queue(**_given(request))

    async def queue_info(self, request: requests.NamedQueue, exchange: Exchange) -> QueueInfo:
        return await self._api.queue_info(request.name)

    async def delete_queue(self, request: requests.DeleteQueue, exchange: Exchange) -> Empty:
        await self._api.delete_queue(request.name, force=request.force)
        return Empty()

    async def list_queues(self, request: requests.ListQueues, exchange: Exchange) -> QueuePage:
        """Those for this caller. `next` names one of them too: what else there is, they are not told."""
        page = await self._api.list_queues(**_given(request))
        found = [queue for queue in page.queues if exchange.identity.sees(queue.name)]
        if len(found) == len(page.queues):
            return page
        limit = min(request.limit, LIST_LIMIT_MAX)
        while len(found) <= limit and page.next is not None:
            await asyncio.sleep(0)  # there may be many that are not
            page = await self._api.list_queues(prefix=request.prefix, after=page.next, limit=LIST_LIMIT_MAX)
            found += [queue for queue in page.queues if exchange.identity.sees(queue.name)]
        return QueuePage(found[:limit], found[limit - 1].name if len(found) > limit else None)

    async def pause(self, request: requests.OneQueue, exchange: Exchange) -> QueueInfo:
        return await self._api.pause(request.queue)

    async def resume(self, request: requests.OneQueue, exchange: Exchange) -> QueueInfo:
        return await self._api.resume(request.queue)

    async def stats(self, request: requests.OneQueue, exchange: Exchange) -> QueueStats:
        return await self._api.stats(request.queue)

    async def rebalance(self, request: requests.RebalanceQueue, exchange: Exchange) -> Rebalance:
        return await self._api.rebalance(request.queue, partitions=request.partitions, dry_run=request.dry_run)

    async def audit(self, request: requests.Audit, exchange: Exchange) -> AuditPage:
        return await self._api.audit(request.queue, after=request.after, limit=request.limit)

    async def clear(self, request: requests.ClearQueue, exchange: Exchange) -> Cleared:
        return Cleared(await self._api.clear(request.queue, request.states))

    async def redrive(self, request: requests.Redrive, exchange: Exchange) -> Redriven:
        given = _given(request)
        if request.filter is not None:
            given["filter"] = model.RedriveFilter(**msgspec.structs.asdict(request.filter))
        return await self._api.redrive(**given)

    # ---- items --------------------------------------------------------------------------------------------

    async def produce(self, request: requests.Produce | requests.ProducePlain, exchange: Exchange) -> ProduceReply:
        items = payloads.new_items(request, exchange.request_codec, exchange.asked_correlation_id)
        produced = await self._api.produce(
            request.queue, items, on_conflict=request.on_conflict, request_id=request.request_id
        )
        exchange.mirror(produced)
        return ProduceReply(list(produced))

    async def lease(self, request: requests.Lease, exchange: Exchange) -> LeaseReply:
        self._parked.check_open()
        if not is_zero(request.wait):
            self._parked.check_room()
        gone = exchange.gone()
        items: Sequence[LeasedItem] = await self._parked.wait(
            lambda: self._api.lease(
                request.queue,
                batch=request.batch,
                wait=request.wait,
                lease_timeout=request.lease_timeout,
                client_id=request.client_id,
            ),
            gone,
            (),
        )
        if gone.done():
            await self._return(request.queue, items)
            raise ClientGone
        try:
            exchange.authenticate()
        except MillpondError:
            await self._return(request.queue, items)
            raise
        exchange.mirror(items)
        return payloads.lease_reply(items, exchange.reply_codec)

    async def _return(self, queue: str, items: Sequence[LeasedItem]) -> None:
        if items:
            await self._give_back(queue, [item.lease for item in items])

    async def complete(self, request: requests.Complete, exchange: Exchange) -> Results:
        results = await self._api.complete(request.leases, queue=request.queue, result=request.result)
        return self._settled(request.leases, results, exchange)

    async def retry(self, request: requests.Retry, exchange: Exchange) -> Results:
        results = await self._api.retry(payloads.retries(request.items), queue=request.queue)
        return self._settled([item.lease for item in request.items], results, exchange)

    async def extend(self, request: requests.Extend, exchange: Exchange) -> Results:
        results = await self._api.extend(request.leases, queue=request.queue, lease_timeout=request.lease_timeout)
        if is_zero(request.lease_timeout):
            return self._settled(request.leases, results, exchange)
        exchange.mirror(results)
        return Results(list(results))

    def _settled(self, leases: Sequence[str], results: Sequence[Result], exchange: Exchange) -> Results:
        """Streams that hold these leases have room for more."""
        self._streams.settle(leases, results)
        exchange.mirror(results)
        return Results(list(results))

    async def write_state(self, request: requests.WriteState, exchange: Exchange) -> StateWritten:
        written = await self._api.write_state(
            request.lease, request.state_doc, version=request.version, queue=request.queue
        )
        exchange.correlation_id = written.correlation_id
        return written

    async def cancel(self, request: requests.Cancel, exchange: Exchange) -> Results:
        results = await self._api.cancel(request.queue, request.ids)
        exchange.mirror(results)
        return Results(list(results))

    async def bury(self, request: requests.Bury, exchange: Exchange) -> Results:
        results = await self._api.bury(request.queue, request.ids, reason=request.reason, error=request.error)
        exchange.mirror(results)
        return Results(list(results))

    async def make_ready(self, request: requests.MakeReady, exchange: Exchange) -> Results:
        results = await self._api.make_ready(request.queue, request.ids)
        exchange.mirror(results)
        return Results(list(results))

    async def get_item(self, request: requests.GetItem, exchange: Exchange) -> LookItem:
        if is_zero(request.wait):
            item = await self._api.get_item(request.queue, request.id)
        else:
            item = await self._ended_item(request, exchange)
        exchange.correlation_id = item.correlation_id
        return payloads.look_item(item, exchange.reply_codec)

    async def _ended_item(self, request: requests.GetItem, exchange: Exchange) -> Item:
        """A wait goes with its client. A drain refuses it: the item as it is would be no answer."""
        self._parked.check_room()
        gone, item = exchange.gone(), None
        if not self._parked.draining:
            ask = partial(self._api.get_item, request.queue, request.id, wait=request.wait)
            item = await self._parked.wait(ask, gone, None)
        if gone.done():
            raise ClientGone
        if item is None:
            raise Closed("the server is shutting down and waits for nothing more; ask again in a moment")
        exchange.authenticate()
        return item

    async def list_items(self, request: requests.ListItems, exchange: Exchange) -> LookPage | Encoded:
        return await self.shown(await self._api.list_items(**_given(request)), exchange)


Answer = Callable[[Answers, Any, Exchange], Awaitable[Any]]

ANSWERS: dict[str, Answer] = {
    "queues.create": Answers.create_queue,
    "queues.update": Answers.update_queue,
    "queues.info": Answers.queue_info,
    "queues.delete": Answers.delete_queue,
    "queues.list": Answers.list_queues,
    "queue.produce": Answers.produce,
    "queue.lease": Answers.lease,
    "queue.complete": Answers.complete,
    "queue.retry": Answers.retry,
    "queue.extend": Answers.extend,
    "queue.state": Answers.write_state,
    "queue.cancel": Answers.cancel,
    "queue.bury": Answers.bury,
    "queue.ready": Answers.make_ready,
    "queue.stats": Answers.stats,
    "queue.audit": Answers.audit,
    "queue.rebalance": Answers.rebalance,
    "queue.pause": Answers.pause,
    "queue.resume": Answers.resume,
    "queue.clear": Answers.clear,
    "queue.redrive": Answers.redrive,
    "items.get": Answers.get_item,
    "items.list": Answers.list_items,
    "consumer.open": Answers.open_consumer,
    "queue.claim": Answers.claim,
    "claim.read": Answers.read_claim,
    "claim.verdict": Answers.give_verdicts,
    "claim.complete": Answers.complete_claim,
    "claim.release": Answers.release_claim,
    "claims.list": Answers.list_claims,
    "queue.stage": Answers.stage,
    "stage.publish": Answers.publish_stage,
    "stage.abort": Answers.abort_stage,
    "journal.read": Answers.read_journal,
}


def queues_named(request: Any, queue_of: QueueOf) -> Iterator[str]:
    """Every queue that a request touches: by name, as its dead queue, or by a lease token of it."""
    name = getattr(request, "queue", None) or getattr(request, "name", None)
    if name is not None:
        yield name
    dead_queue = getattr(request, "dead_queue", None)
    if isinstance(dead_queue, str):
        yield dead_queue
    if name is None:
        yield from {found for lease in _leases_of(request) if (found := queue_of(lease)) is not None}


def _leases_of(request: Any) -> Iterable[str]:
    if isinstance(request, requests.Retry):
        return [item.lease for item in request.items]
    return [request.lease] if isinstance(request, requests.WriteState) else getattr(request, "leases", ())


def _given(request: Any) -> dict[str, Any]:
    """A request's fields as arguments, without those that were left out."""
    return {name: _plain(value) for name, value in msgspec.structs.asdict(request).items() if value is not UNSET}


def _plain(value: Any) -> Any:
    return _given(value) if isinstance(value, requests.BackoffFields) else value
