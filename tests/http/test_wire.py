"""The codecs by themselves, and the clients' side of them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import product
from random import Random
from typing import Any

import msgspec
import pytest

from millpond import AsyncPond, NewItem
from millpond.errors import InvalidRequest, MillpondError
from millpond.http.app import decoded
from millpond.model import CompletedItems, ItemPage, LeasedItems, LeasedRun, ProducedItems
from millpond.queue.tokens import ChunkGrant, Mint
from millpond.wire import CALLS, JSON, MSGPACK, Codec, codec_of, forms
from millpond.wire.payloads import (
    Producing,
    kinds_of,
    lease_item,
    lease_reply,
    leased_item,
    look_item,
    look_page,
    looked_item,
    new_items,
    produce_items,
)
from millpond.wire.replies import LeaseItem, LeaseReply, LookItem, LookPage, ProduceReply, Results
from millpond.wire.requests import Produce, ProducePlain, Stage, StagePlain


@pytest.fixture(scope="module", autouse=True)
def way() -> str:
    """Once is enough: nothing here depends on which way a call goes."""
    return "lean"


both = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=["json", "msgpack"])
ITEMS: list[NewItem] = [
    NewItem(payload=b"\xff\x00"),
    NewItem(payload="text", id="own", key="key", kind="kind", encoding="e", reference="r", priority=-1),
    NewItem(payload=b"utf-8", delay="1m", max_attempts=3, expire_timeout=5.5, correlation_id="c"),
    NewItem(payload=bytearray(b"x"), enqueue_at=datetime(2030, 1, 1, tzinfo=UTC)),
]


def as_bytes(item: Any) -> NewItem:
    payload = item.payload.encode() if isinstance(item.payload, str) else bytes(item.payload)
    return msgspec.structs.replace(item, payload=payload)  # type: ignore[no-any-return]


@both
def test_what_a_client_sends_is_what_the_engine_gets(codec: Codec) -> None:
    body = codec.encode(Produce("q", produce_items(ITEMS, codec)))
    request = codec.decode_produce(body)
    assert isinstance(request, Produce)
    assert new_items(request, codec) == [as_bytes(item) for item in ITEMS]
    assert kinds_of(request) == {"kind"}


@both
def test_plain_items_become_bare_bytes(codec: Codec) -> None:
    request = codec.decode_produce(codec.encode(Produce("q", produce_items([b"1", "2", b"\xff"], codec))))
    assert isinstance(request, ProducePlain)
    assert new_items(request, codec) == [b"1", b"2", b"\xff"]
    assert new_items(request, codec, "c")[0] == NewItem(payload=b"1", correlation_id="c")


@both
@pytest.mark.parametrize("count", [1, 2, 5])
def test_plain_items_may_be_text_bytes_or_nothing_in_any_mixture(codec: Codec, count: int) -> None:
    kinds: list[tuple[dict[str, Any], bytes]] = [
        ({"bytes": b"\xff"}, b"\xff"), ({"bytes": b""}, b""), ({"text": "é"}, "é".encode()), ({"text": ""}, b""),
        ({}, b""), ({"bytes": None, "text": None}, b""), ({"bytes": b"x", "text": None}, b"x"),
    ]  # fmt: skip
    for some in product(kinds, repeat=count) if count < 3 else [kinds[:5], kinds[2:], kinds[::-1]]:
        request = codec.decode_produce(codec.encode({"queue": "q", "items": [item for item, _ in some]}))
        assert isinstance(request, ProducePlain)
        assert new_items(request, codec) == [payload for _, payload in some]
        two = codec.encode({"queue": "q", "items": [*(item for item, _ in some), {"bytes": b"", "text": ""}]})
        with pytest.raises(InvalidRequest, match=rf"items\[{len(some)}\] has more than one payload"):
            new_items(codec.decode_produce(two), codec)


@both
def test_what_is_staged_is_read_as_what_is_produced(codec: Codec) -> None:
    plain = codec.decode_stage(codec.encode(Stage("q", "t", "c", produce_items([b"1", "2", b"\xff"], codec))))
    assert isinstance(plain, StagePlain)
    assert new_items(plain, codec) == [b"1", b"2", b"\xff"]
    request = codec.decode_stage(codec.encode(Stage("q", "t", "c", produce_items(ITEMS, codec))))
    assert new_items(request, codec) == [as_bytes(item) for item in ITEMS]
    assert not kinds_of(plain)
    assert kinds_of(request) == {"kind"}


@both
def test_a_page_of_a_claim_is_shown_as_its_items_are(codec: Codec) -> None:
    async def run() -> None:
        async with AsyncPond(":memory:") as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"\xff", *ITEMS[1:3], "plain"])
            await pond.claim("q", "c")
            page = await pond.read_claim("q", "c")
            shown = codec.decode(codec.encode(look_page(page, codec)), LookPage)
            assert [looked_item(item) for item in shown.items] == list(page.items)
            assert shown == codec.decode(codec.encode(look_page(ItemPage(list(page.items)), codec)), LookPage)

    asyncio.run(run())


@both
def test_durations_and_naive_instants_of_python_are_understood(codec: Codec) -> None:
    naive = datetime(2030, 1, 1)  # noqa: DTZ001 - what users write
    body = codec.encode(
        Produce("q", produce_items([NewItem(enqueue_at=naive, expire_timeout=timedelta(minutes=1))], codec))
    )
    [item] = new_items(codec.decode_produce(body), codec)
    assert isinstance(item, NewItem)
    assert (item.enqueue_at, item.expire_timeout) == (naive.replace(tzinfo=UTC), 60.0)


@both
def test_leased_and_looked_at_items_come_back_whole(codec: Codec) -> None:
    async def run() -> None:
        async with AsyncPond(":memory:") as pond:
            await pond.create_queue("q")
            await pond.produce("q", ITEMS[:2])
            items = await pond.lease("q", batch=5)
            await pond.write_state(items[0], {"a": [1, b"raw" if codec.binary else "text"]}, version=0)
            reply = codec.decode(codec.encode(lease_reply(items, codec)), LeaseReply)
            assert [leased_item(item).fields for item in reply.items] == [item.fields for item in items]
            for item in (await pond.list_items("q")).items:
                assert looked_item(codec.decode(codec.encode(look_item(item, codec)), LookItem)) == item

    asyncio.run(run())


TEXTS = [
    b"",
    b"text",
    b'quoted "%d" \\ @',
    "\u00fc\u2028\U0001f9ca".encode(),
    b"\x00\x1f\x7f",
    b"100%" * 999,
    b"0" * 256,
]


@both
@pytest.mark.parametrize("batch", [1, 2, 15, 16, 300])
def test_plain_items_are_told_by_a_form_as_they_are_one_by_one(codec: Codec, batch: int) -> None:
    payloads = [*TEXTS, *([b"\xff\x00"] if codec.binary else [])]

    async def scenario() -> None:
        async with AsyncPond(":memory:") as pond:
            await pond.create_queue("q")
            for start in range(0, 1_200, 300):  # numbers of all lengths up to four digits, and across their limits
                some = [payloads[n % len(payloads)] for n in range(start, start + 300)]
                await pond.produce("q", [b"x" * 70_000, *some[1:]])
            formed = 0
            while items := await pond.lease("q", batch=batch):
                expected = lease_reply(items, codec)
                told = forms.leased(items, codec)
                name = expected.items[0].correlation_id if batch == 1 else None
                assert told == (name, codec.encode(expected))
                formed += len(items)
            assert formed == 1_200

    asyncio.run(scenario())


@both
def test_a_lease_of_many_bytes_is_left_to_the_codec_in_json(codec: Codec) -> None:
    async def scenario() -> None:
        async with AsyncPond(":memory:") as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"x" * (forms.FORMED_BYTES_MAX // 2)] * 6)
            assert forms.leased(await pond.lease("q", batch=2), codec) is not None
            many = await pond.lease("q", batch=3)
            expected = (None, codec.encode(lease_reply(many, codec))) if codec.binary else None
            assert forms.leased(many, codec) == expected
            assert forms.leased(await pond.lease("q"), codec) is not None

    asyncio.run(scenario())


@both
def test_runs_of_any_place_and_length_are_told_by_a_form_as_they_are_one_by_one(codec: Codec) -> None:
    """Also where more digits change than the last three, in decimal, in hex, or in both."""
    rng, mint = Random(7), Mint("inc", 3)
    starts = [1, 7, 95, 990, 999, 9_990, 4_090, 8_190, 40_950, 99_999, 1_023_995, 4_095_999, (1 << 44) - 40]
    for first in [*starts, *(rng.randrange(1, 1 << rng.randint(4, 43)) for _ in range(200))]:
        grants = [ChunkGrant("inc", 3, rng.randrange(1 << 40), rng.randrange(1 << 41), 5, 2, mint) for _ in range(2)]
        counts = rng.randint(1, 20), rng.randint(2, 20)
        sizes = rng.choice([[0], [5], [3, 255, 256]])
        runs = [
            LeasedRun(grant, first + place * counts[0], [b"x" * rng.choice(sizes) for _ in range(count)], {})
            for place, (grant, count) in enumerate(zip(grants, counts, strict=True))
        ]
        for items in (LeasedItems(runs), LeasedItems(runs[1:])):
            assert forms.leased(items, codec) == (None, codec.encode(LeaseReply(one_by_one(items, codec))))


def one_by_one(items: LeasedItems, codec: Codec) -> list[LeaseItem]:
    """From each item's own fields, which share nothing with those of its neighbours."""
    return [lease_item(item.fields, codec.binary) for item in items]


@both
def test_a_form_is_of_its_codec(codec: Codec) -> None:
    async def scenario() -> None:
        async with AsyncPond(":memory:") as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"a", b"b"])
            items = await pond.lease("q", batch=2)
            for one in (codec, JSON, MSGPACK):
                assert forms.leased(items, one) == (None, one.encode(lease_reply(items, one)))

    asyncio.run(scenario())


@both
@pytest.mark.parametrize("count", [2, 15, 16, 1_000])
def test_what_was_produced_or_completed_together_is_told_by_a_form(codec: Codec, count: int) -> None:
    for first in (1, 8, 995, 4_095, 99_999, 1_023_999, (1 << 48) - 1 - count):
        numbers = range(first, first + count)
        made = ProducedItems("abc%d-0-", "019c-%b-", numbers)
        assert forms.produced(made, codec) == codec.encode(ProduceReply(list(made)))
        for some in (numbers, [*numbers[1:], 7]):
            done = CompletedItems("019c-%b-", some)
            assert forms.completed(done, codec) == codec.encode(Results(list(done)))


def test_what_is_not_plain_is_told_item_by_item() -> None:
    async def scenario() -> None:
        async with AsyncPond(":memory:") as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"a", b"b"])
            items = await pond.lease("q", batch=2)
            assert forms.leased([items[0]], JSON) is None
            assert forms.leased(await pond.lease("q"), JSON) is None  # there is none
            for item in (b"\xff", NewItem(payload=b"x", kind="k")):
                await pond.produce("q", [item])
                assert forms.leased(await pond.lease("q"), JSON) is None
                await pond.produce("q", [b"a", item])
                assert forms.leased(await pond.lease("q", batch=2), JSON) is None

    asyncio.run(scenario())


def test_a_json_payload_does_not_keep_the_body_alive() -> None:
    body = bytearray(b'{"queue":"q","items":[{"json":[1]}]}')
    request = JSON.decode_produce(bytes(body))
    [item] = new_items(request, JSON)
    assert isinstance(item, NewItem)
    assert type(item.payload) is bytes
    assert item.payload == b"[1]"


@both
def test_json_in_messagepack_is_kept_as_json_text(codec: Codec) -> None:
    body = codec.encode({"queue": "q", "items": [{"json": {"a": [1, None, "é"]}}]})
    [item] = new_items(codec.decode_produce(body), codec)
    assert isinstance(item, NewItem)
    assert item.payload == '{"a":[1,null,"é"]}'.encode()


def test_an_instant_without_an_offset_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"items\[0\].enqueue_at: expected `datetime` with a timezone"):
        JSON.decode_produce(b'{"queue":"q","items":[{"enqueue_at":"2030-01-01T00:00:00"}]}')


def test_media_types_are_known_by_any_of_their_names() -> None:
    assert codec_of("Application/JSON; charset=utf-8") is JSON
    assert codec_of("application/x-msgpack") is codec_of(" application/vnd.msgpack ") is MSGPACK
    assert codec_of("text/json") is None


@both
@pytest.mark.parametrize("details", [{}, {"n": 1}, {"bad": object()}, {"surrogate": "\ud800"}])
def test_every_error_can_be_told(codec: Codec, details: dict[str, Any]) -> None:
    error = (
        MillpondError("what \ud800 is; do", **details) if "surrogate" in details else MillpondError("is; do", **details)
    )
    decode = msgspec.msgpack.decode if codec.binary else msgspec.json.decode
    assert decode(codec.encode_error(error))["error"]["code"] == "error"


@both
@pytest.mark.parametrize("call", CALLS.values(), ids=lambda call: call.name)
def test_no_cut_or_changed_byte_makes_a_decoder_fail_otherwise(codec: Codec, call: Any) -> None:
    """Every prefix of a request, and every request with one byte turned, is decoded or InvalidRequest."""
    names = {"items": [{"text": "x", "json": 1}], "leases": ["l"], "ids": ["i"], "chunks": ["c"], "states": ["ready"]}
    names |= {"verdicts": [{"id": "x", "verdict": "dead"}]}
    body = codec.encode({name: names.get(name, "x") for name in call.request.__struct_fields__})
    turned = [
        body[:at] + bytes([body[at] ^ mask]) + body[at + 1 :] for at in range(len(body)) for mask in (1, 0x80, 0xFF)
    ]
    for wrong in [*(body[:at] for at in range(len(body))), *turned]:
        try:
            request = decoded(call, codec, wrong)
            if isinstance(request, Producing):
                new_items(request, codec)
        except InvalidRequest:
            pass
