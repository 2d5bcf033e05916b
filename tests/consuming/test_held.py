"""Items that finish themselves are as quick to hand back as those that do not."""

from __future__ import annotations

from typing import Any

import millpond
from millpond import Client, LeasedItem
from millpond.consuming.held import AsyncHeldItem, HeldItem
from millpond.errors import LeaseLost
from millpond.model import LeasedItems
from millpond.queue.tokens import TokenReader
from tests.client.served import Served


def refuse(*_: Any) -> Any:
    raise AssertionError("the tokens of items that were leased together are not read")


def test_what_was_leased_together_is_completed_by_its_grant(monkeypatch: Any) -> None:
    with millpond.open(":memory:") as pond:
        pond.create_queue("q")
        pond.produce("q", [b"x"] * 6)
        whole, some = pond.lease("q", batch=3), pond.lease("q", batch=3)
        assert type(whole) is LeasedItems
        assert {type(item) for item in some} == {HeldItem}
        monkeypatch.setattr(TokenReader, "read_all", refuse)
        assert all(result.ok for result in pond.complete(whole))
        assert all(result.ok for result in pond.complete(list(some)[::-1]))
        assert pond.stats("q").counts["leased"] == 0


def test_items_and_tokens_may_be_mixed() -> None:
    with millpond.open(":memory:") as pond:
        pond.create_queue("q")
        pond.produce("q", [b"x"] * 3)
        one, two, three = pond.lease("q", batch=3)
        bare = LeasedItem(three.payload, three.number, three.grant)
        assert [result.ok for result in pond.complete([one, two.lease, bare])] == [True] * 3


def test_an_item_of_one_pond_means_nothing_to_another(server: Served) -> None:
    with millpond.open(":memory:") as pond, millpond.open(":memory:") as other, Client(server.url) as client:
        for one in (pond, other, client):
            one.create_queue("held-elsewhere")
        pond.produce("held-elsewhere", [b"x"])
        [item] = pond.lease("held-elsewhere")
        for stranger in (other, client):
            [result] = stranger.complete([item], queue="held-elsewhere")
            assert result.error is not None
            assert result.error.code == LeaseLost.code


def test_they_are_leased_items() -> None:
    assert issubclass(HeldItem, LeasedItem)
    assert issubclass(AsyncHeldItem, LeasedItem)
