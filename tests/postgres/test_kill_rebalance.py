"""tests/crash/test_kill_rebalance.py with partitions in PostgreSQL, and between it and the data directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond import Pond
from millpond.queue import draining
from tests.crash.doomed_rebalance import at_once
from tests.crash.test_kill_rebalance import live_through
from tests.postgres.doomed_pond import URL
from tests.postgres.doomed_rebalance import open_pond
from tests.postgres.server import Server

pytestmark = pytest.mark.slow

LIVES = 5
LIVES_MAX = 30  # should none of the first have lasted until partitions of each store were to go


def stores_left(pond: Pond) -> set[str]:
    """Those that rebalances have taken partitions from."""
    begun = [entry.detail for entry in pond.audit("work", limit=1_000).entries if "removing" in entry.detail]
    return {store for one in begun for store in one["removing"].values()}


@pytest.mark.parametrize("places", [["pg"], ["default", "pg"]], ids=["within", "between"])
def test_kill_in_the_middle_of_a_rebalance_loses_and_doubles_nothing(
    places: list[str], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = f"rebalanced_{len(places)}"
    url = server.url(schema=schema)
    monkeypatch.setenv(URL, url)
    monkeypatch.setattr(draining, "removable_at", at_once)
    directory = tmp_path / "data"

    def opened(directory: Path) -> Pond:
        return open_pond(directory, url, places[0])

    def lives() -> Iterator[str]:
        for life in range(LIVES_MAX):
            if life >= LIVES:
                with opened(directory) as pond:
                    if stores_left(pond) == set(places):
                        return
            yield f"{places[life % len(places)]}-{life}"

    live_through(lives(), directory, "tests.postgres.doomed_rebalance", opened, seed=0)
    with opened(directory) as pond:
        assert stores_left(pond) == set(places)
        info = pond.queue_info("work")
        there = {one.partition for one in info.partitions if one.store == "pg"}
    rows = server.ask(f"SELECT partition FROM {schema}.owner WHERE incarnation = '{info.incarnation}'")
    assert {partition for (partition,) in rows} == there
    server.ask(f"DROP SCHEMA {schema} CASCADE")
