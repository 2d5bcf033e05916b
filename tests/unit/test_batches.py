from __future__ import annotations

import gc
from collections.abc import Callable
from types import FunctionType, ModuleType
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
def test_a_batch_does_not_hold_itself_until_the_collector_comes(
    make: Callable[[], Batch[Any]], looked_at: bool
) -> None:
    batch = make()
    if looked_at:
        list(batch)
    assert not holds(batch, batch)


def test_what_holds_itself_by_a_function_is_found_out() -> None:
    held = leased()
    held._kind = held.held  # type: ignore[assignment]
    assert holds(held, held)


def holds(one: object, other: object) -> bool:
    """By way of whatever it refers to, but for what is there all the time."""
    seen, looked_for = set[int](), gc.get_referents(one)
    while looked_for:
        found = looked_for.pop()
        if found is other:
            return True
        if id(found) not in seen and not isinstance(found, type | ModuleType | FunctionType):
            seen.add(id(found))
            looked_for += gc.get_referents(found)
    return False
