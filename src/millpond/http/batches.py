"""The calls of batch readers and writers on the operations of `Api`: claims, stages, and the journal."""

from __future__ import annotations

from functools import partial

from msgspec import Struct, structs

from millpond.api import Api
from millpond.http.aside import ON_LOOP_BYTES, ON_LOOP_ITEMS, Aside
from millpond.http.exchange import Exchange, Headers
from millpond.http.parked import Parked, is_zero
from millpond.http.refusals import ClientGone
from millpond.model import (
    Claim,
    ClaimEnded,
    ClaimRows,
    Consumer,
    ItemPage,
    JournalPage,
    NewItem,
    Payload,
    Published,
    Staged,
)
from millpond.wire import arrow, payloads, requests
from millpond.wire.replies import ClaimList, LookPage, Results
from millpond.wire.staged import StagedRows

NEXT_HEADER = arrow.NEXT_HEADER.lower().encode()


class Encoded(Struct, frozen=True):
    """A reply that was made into bytes already."""

    body: bytes
    media_type: str
    headers: Headers = ()


class BatchAnswers:
    def __init__(self, api: Api, parked: Parked, aside: Aside) -> None:
        self._api = api
        self._parked = parked
        self._aside = aside

    # ---- claims -------------------------------------------------------------------------------------------

    async def open_consumer(self, request: requests.OpenConsumer, exchange: Exchange) -> Consumer:
        return await self._api.open_consumer(request.queue, request.consumer, after=request.after)

    async def claim(self, request: requests.MakeClaim, exchange: Exchange) -> Claim:
        """One that waits goes with its client, and ends with a drain. What was claimed by then has a name to ask by."""
        self._parked.check_open()
        ask = partial(self._api.claim, **structs.asdict(request))
        if is_zero(request.wait):
            return await ask()
        self._parked.check_room()
        gone = exchange.gone()
        claim = await self._parked.wait(ask, gone, Claim(claim_id=request.claim_id, items=0))
        if gone.done():
            raise ClientGone
        exchange.authenticate()
        return claim

    async def read_claim(self, request: requests.ReadClaim, exchange: Exchange) -> LookPage | Encoded:
        return await self.shown(await self._api.read_claim(**structs.asdict(request)), exchange)

    async def give_verdicts(self, request: requests.GiveVerdicts, exchange: Exchange) -> Results:
        verdicts = payloads.verdicts(request.verdicts)
        results = await self._api.give_verdicts(request.queue, request.claim_id, verdicts, epoch=request.epoch)
        exchange.mirror(results)
        return Results(list(results))

    async def complete_claim(self, request: requests.OneClaim, exchange: Exchange) -> ClaimEnded:
        return await self._api.complete_claim(request.queue, request.claim_id, epoch=request.epoch)

    async def release_claim(self, request: requests.OneClaim, exchange: Exchange) -> ClaimEnded:
        return await self._api.release_claim(request.queue, request.claim_id, epoch=request.epoch)

    async def list_claims(self, request: requests.OneQueue, exchange: Exchange) -> ClaimList:
        return ClaimList(list(await self._api.list_claims(request.queue)))

    # ---- stages -------------------------------------------------------------------------------------------

    async def stage(self, request: requests.Stage | requests.StagePlain | StagedRows, exchange: Exchange) -> Staged:
        named = exchange.asked_correlation_id
        if isinstance(request, StagedRows):
            items = request.items if named is None else [_named(item, named) for item in request.items]
        else:
            items = payloads.new_items(request, exchange.request_codec, named)
        return await self._api.stage(request.queue, request.txn, request.chunk, items)

    async def publish_stage(self, request: requests.PublishStage, exchange: Exchange) -> Published:
        return await self._api.publish_stage(request.queue, request.txn, request.chunks)

    async def abort_stage(self, request: requests.AbortStage, exchange: Exchange) -> Staged:
        return await self._api.abort_stage(request.queue, request.txn)

    # ---- history ------------------------------------------------------------------------------------------

    async def read_journal(self, request: requests.ReadJournal, exchange: Exchange) -> JournalPage | Encoded:
        page = await self._api.read_journal(**structs.asdict(request))
        if sum([len(row.events) for row in page.rows]) <= ON_LOOP_BYTES:
            return page
        codec = exchange.reply_codec
        return Encoded(await self._aside.run(codec.encode, page), codec.media_type)

    # ---- pages of items -----------------------------------------------------------------------------------

    async def shown(self, page: ItemPage, exchange: Exchange) -> LookPage | Encoded:
        """As the client likes it: by columns, or an object an item."""
        if exchange.wants_arrow:
            body = await self._aside.run(arrow.encode_items, page.items)
            headers = () if page.next is None else ((NEXT_HEADER, page.next.encode()),)
            return Encoded(body, arrow.MEDIA_TYPE, headers)
        codec = exchange.reply_codec
        if len(page.items) <= ON_LOOP_ITEMS and _payload_bytes(page) <= ON_LOOP_BYTES:
            return payloads.look_page(page, codec)
        body = await self._aside.run(lambda: codec.encode(payloads.look_page(page, codec)))
        return Encoded(body, codec.media_type)


def _payload_bytes(page: ItemPage) -> int:
    if isinstance(page.items, ClaimRows):
        return sum([len(payload) for run in page.items.runs for payload in run.payloads])
    return sum([len(item.payload) for item in page.items])


def _named(item: Payload, correlation_id: str) -> Payload:
    if not isinstance(item, NewItem):
        return NewItem(payload=item, correlation_id=correlation_id)
    return item if item.correlation_id is not None else structs.replace(item, correlation_id=correlation_id)
