"""From a stranger's Arrow stream to items: what is right comes through whole, what is wrong says where."""

from __future__ import annotations

import gc
import random
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from millpond.errors import BatchTooLarge, InvalidRequest
from millpond.model import STAGE_ITEMS_MAX, NewItem, PlainItems
from millpond.wire.staged import COLUMNS, decode_items, parameters, read_stage
from tests.http.streams import stream

INSTANT = datetime(2030, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
FULL: dict[str, Any] = {
    "payload": b"\x00\xff",
    "key": "schlüssel",
    "id": "own",
    "kind": "k",
    "encoding": "gzip",
    "reference": "r",
    "priority": -3,
    "enqueue_at": INSTANT,
    "delay": "1m",
    "max_attempts": 7,
    "expire_timeout": 90.5,
    "correlation_id": "c",
}
INSTANTS = pa.timestamp("us", tz="UTC")


def columns(*items: dict[str, Any]) -> dict[str, Any]:
    return {name: [item.get(name) for item in items] for name in COLUMNS}


def test_every_column_comes_through() -> None:
    body = stream(**columns(FULL))
    assert decode_items(body) == [NewItem(**FULL)]


def test_null_is_left_out_and_a_row_of_nothing_else_is_its_payload() -> None:
    body = stream(**columns({"payload": b"1"}, {"payload": b"2", "key": "k"}, FULL, {"payload": b""}))
    assert decode_items(body) == [b"1", NewItem(payload=b"2", key="k"), NewItem(**FULL), b""]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()])
def test_payloads_are_bytes_or_text_of_either_size(kind: Any) -> None:
    items = decode_items(stream(payload=pa.array(["é", "", "x" * 300], kind)))
    assert items == ["é".encode(), b"", b"x" * 300]
    assert {type(item) for item in items} == {bytes}


@pytest.mark.parametrize(
    ("column", "values", "wanted"),
    [
        ("priority", pa.array([1], pa.int8()), 1),
        ("priority", pa.array([1], pa.uint64()), 1),
        ("key", pa.array(["k"], pa.large_string()), "k"),
        ("delay", pa.array([2.5], pa.float32()), 2.5),
        ("delay", pa.array([2], pa.int32()), 2),
        ("expire_timeout", pa.array(["PT1M"]), "PT1M"),
        ("enqueue_at", pa.array([INSTANT], pa.timestamp("ns", tz="Europe/Berlin")), INSTANT),
        ("enqueue_at", pa.array([INSTANT.replace(microsecond=0)], pa.timestamp("s", tz="UTC")), None),
        ("enqueue_at", pa.array([-1], pa.timestamp("ms", tz="UTC")), datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC)),
        ("kind", pa.nulls(1), ""),
    ],
)
def test_types_that_mean_the_same_are_taken(column: str, values: Any, wanted: Any) -> None:
    [item] = decode_items(stream(payload=[b"x"], id=["i"], **{column: values}))
    assert isinstance(item, NewItem)
    assert getattr(item, column) == (INSTANT.replace(microsecond=0) if wanted is None else wanted)


def test_a_stream_of_several_batches_is_one_chunk() -> None:
    keys = [f"k{number}" if number % 3 else None for number in range(100)]
    payloads = [b"%d" % number for number in range(100)]
    items = decode_items(stream(rows_a_batch=7, payload=payloads, key=keys))
    assert items == [
        payload if key is None else NewItem(payload=payload, key=key)
        for payload, key in zip(payloads, keys, strict=True)
    ]


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
def test_payloads_alone_are_not_looked_at_one_by_one(kind: Any) -> None:
    items = decode_items(stream(payload=pa.array(["", "some", "", "longest"], kind).slice(1)))
    assert isinstance(items, PlainItems)
    assert (items.size, items.largest) == (11, 7)
    assert items == [b"some", b"", b"longest"]
    nothing = decode_items(stream(payload=pa.array(["", ""], kind)))
    assert nothing == [b"", b""]


def test_an_empty_stream_has_no_items() -> None:
    assert decode_items(stream(payload=pa.array([], pa.binary()))) == []


# ---- what is wrong ----------------------------------------------------------------------------------------


def refused(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode_items(body)
    assert "; " in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"payloads": [b"x"]}, "unknown column 'payloads'; did you mean 'payload'?"),
        ({"payload": [b"x"], "prioriti": [1]}, "unknown column 'prioriti'; did you mean 'priority'?"),
        ({"payload": [b"x"], "zzzz": [1]}, "unknown column 'zzzz'; use payload, key, id"),
        ({"key": ["x"]}, "no column 'payload'"),
        ({"payload": [1]}, "column 'payload' is int64; make it binary or string"),
        ({"payload": pa.nulls(1)}, "column 'payload' is null"),
        ({"payload": pa.array([b"xy"], pa.binary(2))}, "column 'payload' is fixed_size_binary[2]"),
        ({"payload": pa.array(["x"]).dictionary_encode()}, "column 'payload' is dictionary"),
        ({"payload": pa.array(["x"], pa.string_view())}, "column 'payload' is string_view"),
        ({"payload": [["x"]]}, "column 'payload' is list"),
        ({"payload": [b"x"], "key": [b"k"]}, "column 'key' is binary; make it string"),
        ({"payload": [b"x"], "priority": ["1"]}, "column 'priority' is string; make it an integer"),
        ({"payload": [b"x"], "priority": [1.5]}, "column 'priority' is double"),
        ({"payload": [b"x"], "delay": pa.array([1], pa.duration("s"))}, "column 'delay' is duration[s]"),
        ({"payload": [b"x"], "enqueue_at": ["2030-01-01"]}, "make it a timestamp with a time zone"),
        ({"payload": [b"x"], "enqueue_at": pa.array([1], pa.timestamp("us"))}, "'enqueue_at' is timestamp[us]"),
    ],
)
def test_a_wrong_column_is_named(given: dict[str, Any], words: str) -> None:
    error = refused(stream(**given))
    assert words in error.message
    assert "column" in error.details


def test_the_row_of_what_is_wrong_is_named() -> None:
    error = refused(stream(rows_a_batch=2, payload=[b"0", b"1", b"2", None]))
    assert (error.details["column"], error.details["row"]) == ("payload", 3)
    far = pa.array([0, None, 1 << 62], INSTANTS)
    error = refused(stream(payload=[b"x"] * 3, enqueue_at=far))
    assert (error.details["column"], error.details["row"]) == ("enqueue_at", 2)


def test_text_that_is_not_utf8_is_refused_with_its_column() -> None:
    wrong = pa.array([b"ok", b"\xff"], pa.binary()).view(pa.string())
    assert "column 'key'" in refused(stream(payload=[b"x", b"y"], key=wrong)).message


def test_a_column_that_is_there_twice_is_refused() -> None:
    batch = pa.record_batch([pa.array([b"x"]), pa.array(["a"]), pa.array(["b"])], names=["payload", "key", "key"])
    assert "'key' is there twice" in refused(of_batch(batch)).message


def of_batch(batch: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    return body


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_stream_that_would_unfold_is_refused_before_it_does(codec: str) -> None:
    batch = pa.record_batch([pa.array([b"\0" * 1_000_000] * 100)], names=["payload"])
    body = of_batch(batch, compression=codec)
    assert len(body) < 1_000_000
    gc.collect()  # what other tests have left would be freed in between
    before = pa.total_allocated_bytes()
    assert "compressed" in refused(body).message
    assert pa.total_allocated_bytes() == before


def test_too_many_rows_are_413() -> None:
    limit = [b""] * STAGE_ITEMS_MAX
    assert len(decode_items(stream(payload=limit))) == STAGE_ITEMS_MAX
    for size in (None, 1_000):
        with pytest.raises(BatchTooLarge, match="several chunks"):
            decode_items(stream(rows_a_batch=size, payload=[*limit, b""]))


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"x" * 1_000, b"\xff\xff\xff\xff\x00\x00\x00\x00", b"ARROW1\x00\x00" + b"\x00" * 100]
)
def test_what_is_no_stream_is_refused(body: bytes) -> None:
    refused(body)


def test_a_stream_that_was_not_ended_is_refused() -> None:
    """Its last batches may be missing, and nobody would know."""
    assert "close its writer" in refused(stream(payload=[b"x"])[:-8]).message


def test_no_cut_or_changed_byte_makes_the_decoder_fail_otherwise() -> None:
    body = stream(rows_a_batch=2, **columns(FULL, {"payload": b"1"}, FULL, {"payload": b"2", "key": "k"}))
    ending, rng = body[-8:], random.Random(1)
    wrong = [body[:at] + ending for at in range(0, len(body), 3)]
    for _ in range(4_000):
        turned = bytearray(body)
        for _ in range(rng.choice((1, 1, 1, 4))):
            turned[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        wrong.append(bytes(turned))
    for one in wrong:
        try:
            decode_items(one)
        except InvalidRequest:
            pass


# ---- the query string -------------------------------------------------------------------------------------


def test_names_are_in_the_query_string_percent_encoded() -> None:
    rows = read_stage(b"queue=team%2Fq&txn=import%3A1&chunk=a%20b", stream(payload=["x"], kind=["command"]))
    assert (rows.queue, rows.txn, rows.chunk) == ("team/q", "import:1", "a b")
    assert rows.kinds == {"command"}


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (b"", "no queue in the query string"),
        (b"queue=q&txn=t", "no chunk in the query string"),
        (b"queue=q&txn=t&chunk=c&txn=u", "txn is there twice"),
        (b"queue=q&txn=t&chnk=c", "unknown parameter 'chnk'; did you mean 'chunk'?"),
        (b"queue=%ff&txn=t&chunk=c", "not percent-encoded UTF-8"),
        (b"queue=\xff&txn=t&chunk=c", "not percent-encoded UTF-8"),
        (b"&".join([b"a=b"] * 50), "query string"),
    ],
)
def test_a_wrong_query_string_is_refused(query: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parameters(query)
    assert words in caught.value.message
