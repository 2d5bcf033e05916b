"""The hot calls without a coroutine."""

from __future__ import annotations

import asyncio

import pytest

from millpond import AsyncPond
from millpond.errors import InvalidRequest
from millpond.model import LeasedItem, LeasedItems


def test_terms_that_were_good_are_not_taken_for_others_that_look_alike() -> None:
    async def scenario() -> None:
        async with AsyncPond(":memory:") as pond:
            await pond.create_queue("q")
            await pond.stats("q")  # it is awake
            for batch, wait in ((1, 0), (1, 0.0)):
                assert pond.lean.begin_lease("q", batch, wait, None, "", lambda reply: None) is not None
            with pytest.raises(InvalidRequest, match="batch is bool"):
                pond.lean.begin_lease("q", True, 0, None, "", lambda reply: None)
            with pytest.raises(InvalidRequest, match="wait is bool"):
                pond.lean.begin_lease("q", 1, False, None, "", lambda reply: None)

    asyncio.run(scenario())


def test_leases_of_one_turn_are_held_each_by_its_own_holder() -> None:
    """They share what their turn granted, and not who holds it."""

    async def scenario() -> None:
        async with AsyncPond(":memory:") as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"x"] * 2)
            one, other = await asyncio.gather(pond.lease("q"), pond.lease("q"))
            assert isinstance(one, LeasedItems)
            assert isinstance(other, LeasedItems)
            assert one.runs[0].grant.turn == other.runs[0].grant.turn
            one.held(LeasedItem, "one")
            other.held(LeasedItem, "other")
            holders = [item.grant.holding for item in (*one, *other) if item.grant is not None]
            assert holders == ["one", "other"]
            assert {result.ok for result in await pond.complete([*one, *other])} == {True}

    asyncio.run(scenario())
