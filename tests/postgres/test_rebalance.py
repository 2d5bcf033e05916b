"""A queue moves from its data directory into PostgreSQL and back, with all that it has."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import millpond
from millpond import NewItem, Pond, Retry, StoreSettings
from millpond.clock import ManualClock
from millpond.errors import Unavailable
from millpond.queue.lane import PROBE_MS_MAX
from tests.postgres.server import Server
from tests.service.test_rebalance import empty_then_over
from tests.service.test_stores import change, statuses, texts, until

pytestmark = pytest.mark.slow

DAY_MS = 86_400_000


def shares(server: Server, directory: float, postgres: float) -> list[StoreSettings]:
    return [
        StoreSettings(name="default", affinity=directory),
        StoreSettings(name="pg", driver="postgres", url=server.url(), affinity=postgres),
    ]


def fill(pond: Pond) -> dict[str, str]:
    """Ids by what each item is; and some that are ready."""
    pond.create_queue("q", partitions=3, max_attempts=0, dedup_window="2d", backoff={"base": 1, "cap": "2d"})
    ids: dict[str, str] = {}
    for name in ("dead", "retrying", "ended"):
        ids[name] = pond.produce("q", [NewItem(payload=name, key=f"key of {name}")])[0].id
        [item] = pond.lease("q")
        if name == "dead":
            pond.retry([Retry(lease=item, error="broken", dead=True)])
        elif name == "retrying":
            pond.write_state(item, {"page": 3}, version=0)
            pond.retry([Retry(lease=item, error="busy", delay="1d")])
        else:
            pond.complete([item])
    ids["scheduled"] = pond.produce("q", [NewItem(payload="scheduled", key="key of scheduled", delay="1d")])[0].id
    for number in range(9):
        pond.produce("q", [str(number)])
    return ids


def move(pond: Pond, clock: ManualClock, store: str, server: Server) -> None:
    change(pond, *shares(server, float(store == "default"), float(store == "pg")))
    pond.rebalance("q")
    texts(pond)
    assert empty_then_over(pond, clock).stores == {store: 3}
    assert statuses(pond) == {store: {"open"}}


def check(pond: Pond, ids: dict[str, str]) -> None:
    for name, item_id in ids.items():
        [again] = pond.produce("q", [NewItem(payload="another", key=f"key of {name}")])
        assert (again.id, again.duplicate) == (item_id, True), name
    assert pond.get_item("q", ids["dead"]).last_error == "broken"
    retrying = pond.get_item("q", ids["retrying"])
    assert (retrying.state, retrying.attempts, retrying.state_doc) == ("retrying", 1, {"page": 3})
    counts = {state: count for state, count in pond.stats("q").counts.items() if count}
    assert counts == {"dead": 1, "retrying": 1, "scheduled": 1}


def test_a_queue_moves_into_postgresql_and_back_with_all_that_it_has(tmp_path: Path, own_server: Server) -> None:
    clock = ManualClock()
    with millpond.open(tmp_path, stores=shares(own_server, 1.0, 0.0), clock=clock) as pond:
        ids = fill(pond)
        move(pond, clock, "pg", own_server)
        check(pond, ids)
        assert not list((tmp_path / "queues").glob("*/[0-9]*.db"))
    with millpond.open(tmp_path, stores=shares(own_server, 0.0, 1.0), clock=clock) as pond:
        check(pond, ids)
        move(pond, clock, "default", own_server)
        check(pond, ids)
        assert own_server.ask("SELECT count(*) FROM millpond.owner")[0][0] == 0
        clock.advance(DAY_MS)
        assert sorted(texts(pond)) == ["retrying", "scheduled"]


def test_a_server_that_goes_away_in_the_middle_holds_it_up_and_loses_nothing(
    tmp_path: Path, own_server: Server
) -> None:
    clock = ManualClock()
    with millpond.open(tmp_path, stores=shares(own_server, 0.0, 1.0), clock=clock) as pond:
        ids = fill(pond)
        change(pond, *shares(own_server, 1.0, 0.0))
        own_server.stop(signal.SIGQUIT)
        told = pond.rebalance("q")
        assert told.status == "running"
        pond.produce("q", ["new"])
        assert texts(pond) == ["new"], "those in the data directory go on"
        own_server.start()
        clock.advance(PROBE_MS_MAX)
        until(pond, lambda: statuses(pond)["pg"] == {"draining"})
        assert len(texts(pond)) == 9
        assert empty_then_over(pond, clock).stores == {"default": 3}
        check(pond, ids)


def test_a_store_that_is_away_takes_no_new_partitions(tmp_path: Path, own_server: Server) -> None:
    with millpond.open(tmp_path, stores=shares(own_server, 1.0, 0.0)) as pond:
        pond.create_queue("q", partitions=2)
        change(pond, *shares(own_server, 0.0, 1.0))
        own_server.stop()
        with pytest.raises(Unavailable, match=r"store 'pg' cannot take partitions \(.*\); bring it back"):
            pond.rebalance("q")
        assert pond.queue_info("q").rebalance is None
        assert statuses(pond) == {"default": {"open"}}
