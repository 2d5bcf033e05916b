from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from millpond.model import (
    Batch,
    ClaimRows,
    CompletedItems,
    ItemColumns,
    LeasedItems,
    LeasedRun,
    PlainItems,
    ProducedItems,
)
from millpond.queue.holders import ItemResults
from millpond.queue.tokens import ChunkGrant, Mint


def leased() -> LeasedItems:
    grant = ChunkGrant("inc", 0, 1, 2, 3, 4, Mint("inc", 0))
    return LeasedItems([LeasedRun(grant, 1, [b"a"], {}), LeasedRun(grant, 7, [b"b", b"c"], {})])


BATCHES: dict[str, Callable[[], Batch[Any]]] = {
    "columns": lambda: ItemColumns([b"a", b"b"], {"kind": ["k", None]}),
    "plain": lambda: PlainItems(memoryview(bytes(8)).cast("I"), memoryview(b""), 0),
    "produced": lambda: ProducedItems("inc-0-", "c-", range(1, 4)),
    "completed": lambda: CompletedItems("c-", [1, 5, 1]),
    "results": lambda: ItemResults(leased()),
    "claimed": lambda: ClaimRows([]),
    "leased": leased,
}
each = pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)


@each
def test_a_batch_has_as_many_entries_as_it_says(make: Callable[[], Batch[Any]]) -> None:
    assert len(make()) == len(list(make())) == len(make()[:])


@each
@pytest.mark.parametrize("looked_at", [False, True])
def test_a_batch_that_nobody_holds_is_gone_before_the_collector_comes(
    make: Callable[[], Batch[Any]], looked_at: bool
) -> None:
    kind = type(make())
    gc.collect()
    gc.disable()
    try:
        before = living(kind)
        batch = make()
        if looked_at:
            list(batch)
        assert living(kind) == before + 1
        del batch
        assert living(kind) == before
    finally:
        gc.enable()


def living(kind: type[Any]) -> int:
    return sum(type(one) is kind for one in gc.get_objects())
