"""Payloads between the engine, which knows bytes, and the wire, where they are `text`, `bytes` or `json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec
from msgspec import UNSET, Raw, structs

from millpond.errors import InvalidRequest
from millpond.model import (
    ClaimRows,
    ClaimRun,
    Item,
    ItemPage,
    LeasedFields,
    LeasedItem,
    LeasedItems,
    LeasedRun,
    NewItem,
    Payload,
    Retry,
    Verdict,
    to_datetime,
)
from millpond.wire.codec import Codec
from millpond.wire.replies import LeaseItem, LeaseReply, LookItem, LookPage
from millpond.wire.requests import (
    PlainItem,
    Produce,
    ProduceItem,
    ProducePlain,
    RetryItem,
    Stage,
    StagePlain,
    VerdictItem,
)
from millpond.wire.staged import StagedRows

Producing = Produce | ProducePlain | Stage | StagePlain
_PLAIN = (ProducePlain, StagePlain)
_NEW_FIELDS = [name for name in NewItem.__struct_fields__ if name != "payload"]

# ---- from the wire ----------------------------------------------------------------------------------------


def new_items(request: Producing, codec: Codec, correlation_id: str | None = None) -> list[Payload]:
    """What the engine's produce takes; items that have no correlation id get the one given."""
    if isinstance(request, _PLAIN):
        if len(request.items) == 1 and correlation_id is None:
            return [_plain(request.items[0], 0)]
        payloads = _payloads(request.items)
        if correlation_id is None:
            return payloads  # type: ignore[return-value]
        return [NewItem(payload=payload, correlation_id=correlation_id) for payload in payloads]
    return [_new_item(item, place, codec, correlation_id) for place, item in enumerate(request.items)]


def kinds_of(request: Producing | StagedRows) -> frozenset[str]:
    """The kinds that a produce names: some need a permission of their own."""
    if isinstance(request, _PLAIN):
        return frozenset()
    if isinstance(request, StagedRows):
        return request.kinds
    return frozenset(item.kind for item in request.items if item.kind)


def _payloads(items: list[PlainItem]) -> list[bytes]:
    """Mostly all of them are bytes, which is told without a call for each."""
    payloads = [item.data for item in items if item.data is not None and item.text is None]
    if len(payloads) < len(items):
        return [_plain(item, place) for place, item in enumerate(items)]
    return payloads


def _plain(item: PlainItem, place: int) -> bytes:
    if item.data is None:
        return b"" if item.text is None else item.text.encode()
    if item.text is not None:
        raise _two_payloads(place)
    return item.data


def _new_item(item: ProduceItem, place: int, codec: Codec, correlation_id: str | None) -> NewItem:
    return NewItem(
        payload=_payload(item, place, codec),
        id=item.id,
        key=item.key,
        kind=item.kind,
        encoding=item.encoding,
        reference=item.reference,
        priority=item.priority,
        group=item.group,
        enqueue_at=item.enqueue_at,
        delay=item.delay,
        max_attempts=item.max_attempts,
        expire_timeout=item.expire_timeout,
        correlation_id=correlation_id if item.correlation_id is None else item.correlation_id,
    )


def _payload(item: ProduceItem, place: int, codec: Codec) -> bytes:
    if (item.text is not None) + (item.data is not None) + (item.json is not UNSET) > 1:
        raise _two_payloads(place)
    if item.text is not None:
        return item.text.encode()
    if item.data is not None:
        return item.data
    return b"" if item.json is UNSET else _compact(item.json, place, codec)


def _two_payloads(place: int) -> InvalidRequest:
    return InvalidRequest(
        f"items[{place}] has more than one payload; give one of text, bytes and json", path=f"$.items[{place}]"
    )


def _compact(raw: Raw, place: int, codec: Codec) -> bytes:
    """A copy: the raw value is a view of the request's body."""
    try:
        if codec.binary:
            return msgspec.json.encode(msgspec.msgpack.decode(raw))
        compact = msgspec.json.format(bytes(raw), indent=-1)
        compact.decode()  # what is skipped over is not checked for being text
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError, TypeError, OverflowError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(
            f"items[{place}].json cannot be kept as JSON ({what}); mend it, or send bytes",
            path=f"$.items[{place}].json",
        ) from None
    return compact


def retries(items: Sequence[RetryItem]) -> list[Retry]:
    return [
        Retry(
            lease=item.lease,
            intent=item.intent,
            delay=item.delay,
            retry_at=item.retry_at,
            error=item.error,
            dead=item.dead,
        )
        for item in items
    ]


def verdicts(items: Sequence[VerdictItem]) -> list[Verdict]:
    return [Verdict(id=item.id, verdict=item.verdict, error=item.error, delay=item.delay) for item in items]


# ---- to the wire ------------------------------------------------------------------------------------------


def lease_reply(items: Iterable[LeasedItem], codec: Codec) -> LeaseReply:
    if type(items) is not LeasedItems:
        return LeaseReply([lease_item(item.fields, codec.binary) for item in items])
    if len(items.runs) == 1:
        return LeaseReply(_run_items(items.runs[0], codec.binary))
    return LeaseReply([item for run in items.runs for item in _run_items(run, codec.binary)])


def _run_items(run: LeasedRun, binary: bool) -> list[LeaseItem]:
    """Straight from what the items share: no noun of the model is made on the way."""
    grant, payloads = run.grant, run.payloads
    fencing_token, deadline, created_at = grant.fencing_token, grant.lease_deadline, grant.created_at
    shown = [(None, payload) for payload in payloads] if binary else [_shown(payload, False) for payload in payloads]
    made = [
        LeaseItem(item_id, lease, correlation_id, 1, 1, fencing_token, deadline, created_at, text, data)
        for (item_id, lease, correlation_id), (text, data) in zip(
            grant.names(run.first, len(payloads)), shown, strict=True
        )
    ]
    for number, fields in run.known.items():
        made[number - run.first] = lease_item(fields, binary)
    return made


def lease_item(fields: LeasedFields, binary: bool) -> LeaseItem:
    text, data = _shown(fields.payload, binary)
    return LeaseItem(
        fields.id,
        fields.lease,
        fields.correlation_id,
        fields.attempts,
        fields.deliveries,
        fields.fencing_token,
        fields.lease_deadline,
        fields.created_at,
        text,
        data,
        fields.kind,
        fields.encoding,
        fields.reference,
        fields.priority,
        fields.group,
        fields.key,
        fields.state_doc,
        fields.state_version,
        fields.last_error,
        fields.dead_reason,
        fields.source_queue,
        fields.source_id,
        fields.source_attempts,
    )


def look_item(item: Item, codec: Codec) -> LookItem:
    fields = structs.asdict(item)
    text, data = _shown(fields.pop("payload"), codec.binary)
    return LookItem(text=text, data=data, **fields)


def look_page(page: ItemPage, codec: Codec) -> LookPage:
    items = page.items
    if isinstance(items, ClaimRows):
        return LookPage([item for run in items.runs for item in _claimed_items(run, codec)], page.next)
    return LookPage([look_item(item, codec) for item in items], page.next)


def _claimed_items(run: ClaimRun, codec: Codec) -> list[LookItem]:
    """Straight from what the items share: of plain ones no noun of the model is made on the way."""
    if run.records:
        return [look_item(item, codec) for item in run.items()]
    partition, max_attempts = run.partition, run.max_attempts
    created_at, deadline = to_datetime(run.created), to_datetime(run.deadline)
    ids, correlations = run.mint.id_prefix, run.mint.correlation_prefix(run.created)
    made = []
    for number, payload in zip(run.numbers, run.payloads, strict=True):
        text, data = _shown(payload, codec.binary)
        made.append(
            LookItem(
                id=f"{ids}{number}",
                state=run.state,
                partition=partition,
                correlation_id=f"{correlations}{number:012x}",
                created_at=created_at,
                updated_at=created_at,
                expire_deadline=deadline,
                text=text,
                data=data,
                max_attempts=max_attempts,
            )
        )
    for number, item in run.known.items():
        made[run.numbers.index(number)] = look_item(item, codec)
    return made


def _shown(payload: bytes, binary: bool) -> tuple[str | None, bytes | None]:
    if binary:
        return None, payload
    try:
        return payload.decode(), None
    except UnicodeDecodeError:
        return None, payload


# ---- the clients' side: the same, the other way round -----------------------------------------------------


def produce_items(items: Sequence[Payload], codec: Codec) -> list[ProduceItem]:
    """What a client sends. In MessagePack bytes go as they are; in JSON what is text goes as text."""
    return [_produce_item(item if isinstance(item, NewItem) else NewItem(payload=item), codec) for item in items]


def _produce_item(item: NewItem, codec: Codec) -> ProduceItem:
    payload = item.payload
    text, data = (payload, None) if isinstance(payload, str) else _shown(bytes(payload), codec.binary)
    given = {name: getattr(item, name) for name in _NEW_FIELDS}
    for name in ("delay", "expire_timeout"):
        if isinstance(given[name], timedelta):
            given[name] = given[name].total_seconds()
    if isinstance(item.enqueue_at, datetime) and item.enqueue_at.tzinfo is None:
        given["enqueue_at"] = item.enqueue_at.replace(tzinfo=UTC)  # as the engine takes it
    return ProduceItem(text=text, data=data, **given)


def leased_item(item: LeaseItem) -> LeasedItem:
    payload = item.data if item.data is not None else (item.text or "").encode()
    shared = [name for name in LeasedFields.__struct_fields__ if name != "payload"]
    fields = LeasedFields(payload=payload, **{name: getattr(item, name) for name in shared})
    return LeasedItem(payload, 0, None, fields)


def looked_item(item: LookItem) -> Item:
    fields = structs.asdict(item)
    text, data = fields.pop("text"), fields.pop("data")
    return Item(payload=data if data is not None else (text or "").encode(), **fields)
