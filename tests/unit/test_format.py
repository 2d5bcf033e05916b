"""The journal's format: what is encoded reads back, and runs fold numbers in their order."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import msgspec
import pytest

from millpond.history import format as module
from millpond.history.format import (
    NUMBER_MAX,
    RUN_MAX,
    Event,
    Record,
    Source,
    decode_entry,
    decode_meta,
    decode_records,
    decode_state,
    encode_entry,
    encode_meta,
    encode_plain,
    encode_records,
    encode_state,
    numbers_of,
    run_of,
    run_span,
    runs_of,
)
from millpond.model import PlainItems
from millpond.queue.decisions import Decisions
from millpond.queue.partition import Partition


@pytest.mark.parametrize("seed", range(5))
def test_runs_hold_the_same_numbers_in_the_same_order(seed: int) -> None:
    rng = Random(seed)
    numbers: list[int] = []
    for _ in range(rng.randint(0, 50)):
        first = rng.randint(1, 1_000)
        numbers += range(first, first + rng.randint(1, 10))
    runs = runs_of(numbers)
    assert list(numbers_of(runs)) == numbers
    assert sum(len(run_span(run)) for run in runs) == len(numbers)


def test_a_run_is_one_int_of_64_bits() -> None:
    run = run_of(NUMBER_MAX - 1, RUN_MAX)
    assert run < 1 << 64
    assert run_span(run) == range(NUMBER_MAX - 1, NUMBER_MAX - 1 + RUN_MAX)
    assert runs_of([5]) == [run_of(5, 1)]
    assert runs_of([]) == []


def test_a_stretch_longer_than_a_run_is_two_runs() -> None:
    runs = runs_of(range(1, RUN_MAX + 3))
    assert [len(run_span(run)) for run in runs] == [RUN_MAX, 2]
    assert [run_span(run)[0] for run in runs] == [1, RUN_MAX + 1]


def test_an_entry_reads_back() -> None:
    entry = decode_entry(encode_entry(7, [(int(Event.DUE), [1, 2])]))
    assert (entry.version, entry.next_number, entry.events) == (1, 7, [[9, [1, 2]]])


def test_an_entry_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 2"):
        decode_entry(msgspec.msgpack.encode((2, 7, [])))


def test_records_read_back() -> None:
    full = Record(
        b"p", "id", "key", "kind", "enc", "ref", -5, 1_000, 3, 2_000, "corr", Source("q", "s", 2, "rejected", "k", 4)
    )
    records: list[bytes | Record | None] = [b"bare", Record(b"p"), full, None, b""]
    assert decode_records(encode_records(records)) == records


def test_payloads_read_back_from_wherever_their_offsets_begin() -> None:
    data = b"before" + b"one" + b"" + b"three" + b"after"
    offsets = memoryview(array("I", [0, 6, 9, 9, 14, 19]))
    items = PlainItems(offsets, memoryview(data), 6)
    assert (list(items), items.size) == ([b"before", b"one", b"", b"three", b"after"], 19)
    assert decode_records(encode_plain(items, 0, 5)) == list(items)
    assert decode_records(encode_plain(items, 1, 4)) == [b"one", b"", b"three"]
    assert encode_plain(items, 2, 3).hex() == "02" + "01000000" + "09000000" * 2  # version, number, offsets, nothing


def test_meta_is_all_but_the_payloads() -> None:
    assert encode_meta([b"a", b"b"]) is None
    meta = encode_meta([b"a", Record(b"payload", key="k")])
    assert meta is not None
    assert b"payload" not in meta
    assert decode_meta(meta) == [None, Record(b"", key="k")]


@pytest.mark.parametrize("document", [None, True, 1, 1.5, "text", b"\xff", [1, [2]], {"a": {"b": None}}])
def test_state_documents_read_back(document: Any) -> None:
    assert decode_state(encode_state(document)) == document


def test_no_document_is_none() -> None:
    assert decode_state(None) is None


def test_every_kind_of_event_is_a_transition_of_the_partition() -> None:
    for event in Event:
        name = f"on_{event.name.lower()}"
        assert callable(getattr(Partition, name, None) or getattr(Decisions, name))
    assert module.JOURNAL_VERSION == 1


def test_a_chunk_of_a_version_to_come_is_refused() -> None:
    body = encode_records([b"a"])
    with pytest.raises(ValueError, match="chunk of version 3"):
        decode_records(b"\x03" + body[1:])
