"""A queue in several stores: where its partitions go, and what is left of it when a store is away."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Pond, StoreSettings
from millpond.errors import Conflict, InvalidRequest, MillpondError, Unavailable
from millpond.store.base import StoreFailed, Turn
from millpond.store.drivers import MARK
from millpond.store.sqlite import SqliteStore

PATIENCE_S = 20.0  # the machine may be busy
NO_DEFAULT = StoreSettings(name="default", affinity=0.0)


def disk(folder: Path, name: str, affinity: float = 1.0) -> StoreSettings:
    return StoreSettings(name=name, driver="sqlite", path=str(folder / name), affinity=affinity)


def stores_of(pond: Pond, queue: str = "q") -> list[str]:
    return [one.store for one in pond.queue_info(queue).partitions]


def statuses(pond: Pond, queue: str = "q") -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in pond.stats(queue).partitions:
        found.setdefault(one.store, set()).add(one.status)
    return found


def texts(pond: Pond, queue: str = "q") -> list[str]:
    """All that can be had now, completed."""
    found: list[str] = []
    while items := pond.lease(queue, batch=100):
        assert all(result.ok for result in pond.complete(items))
        found += [item.text for item in items]
    return found


def change(pond: Pond, *stores: StoreSettings) -> list[str]:
    engine: Any = pond._pond
    return pond._call(engine._engine.change_stores(stores))


def until(pond: Pond, happened: Callable[[], bool]) -> None:
    """Each look waits for a turn of the engine's loop."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < give_up_at, "it has not happened"
        pond.list_queues()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Directories whose commits fail."""
    folders: set[str] = set()
    commit = SqliteStore.commit

    def failing(store: SqliteStore, turn: Turn) -> None:
        if any(folder in str(store._path) for folder in folders):
            store.close()
            raise StoreFailed("the disk has gone")
        commit(store, turn)

    monkeypatch.setattr(SqliteStore, "commit", failing)
    return folders


# ---- where partitions go --------------------------------------------------------------------------------------


def test_partitions_are_placed_by_affinity_and_stay_where_they_are(tmp_path: Path) -> None:
    with millpond.open(tmp_path / "data", stores=[disk(tmp_path, "b", 0.5)]) as pond:
        assert Counter(one.store for one in pond.create_queue("q", partitions=6).partitions) == {"default": 4, "b": 2}
        pond.produce("q", [str(number) for number in range(60)])
    with millpond.open(tmp_path / "data", stores=[disk(tmp_path, "b", 0.0)]) as pond:
        assert Counter(stores_of(pond)) == {"default": 4, "b": 2}
        assert sorted(texts(pond), key=int) == [str(number) for number in range(60)]
        pond.create_queue("r", partitions=3)
        assert stores_of(pond, "r") == ["default"] * 3


def test_the_data_directory_itself_can_be_left_out(tmp_path: Path) -> None:
    stores = [NO_DEFAULT, disk(tmp_path, "b"), StoreSettings(name="m", driver="memory")]
    with millpond.open(tmp_path / "data", stores=stores) as pond:
        pond.create_queue("q", partitions=3)
        assert stores_of(pond) == ["b", "b", "m"]
        pond.produce("q", ["1", "2"])
        pond.stage("q", "t", "c", ["3"])
        assert pond.publish_stage("q", "t", ["c"]).items == 1
        assert sorted(texts(pond)) == ["1", "2", "3"]


def test_where_every_affinity_is_0_no_queue_is_created(tmp_path: Path) -> None:
    with millpond.open(tmp_path / "data", stores=[NO_DEFAULT, disk(tmp_path, "b", 0)]) as pond:
        with pytest.raises(InvalidRequest, match="affinity 0; raise"):
            pond.create_queue("q")
        assert pond.list_queues().queues == []


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "partitions is 0; use 1 to 1000"),
        (-1, "partitions is -1; use 1 to 1000"),
        (1_000_000, "partitions is 1000000; use 1 to 1000"),
        ("3", "partitions is str; give a whole number from 1 to 1000"),
        (1.5, "partitions is float; give a whole number from 1 to 1000"),
        (True, "partitions is bool; give a whole number from 1 to 1000"),
    ],
)
def test_a_wrong_number_of_partitions_is_refused(count: Any, expected: str) -> None:
    with millpond.open(":memory:") as pond, pytest.raises(InvalidRequest) as caught:
        pond.create_queue("q", partitions=count)
    assert caught.value.message == expected


@pytest.mark.parametrize(
    ("stores", "expected"),
    [
        ("b", "stores is 'b'; give a list of StoreSettings"),
        ([{"name": "b"}], "stores[0] is "),
        ([StoreSettings(name="b", driver="oracle")], "stores[0].driver is 'oracle'; use sqlite or postgres or memory"),
        ([StoreSettings(name="b", driver="sqlite")], "stores[0].path is missing; a store of driver 'sqlite' needs it"),
        ([StoreSettings(name="b")], "stores[0].driver is missing; use sqlite"),
        ([StoreSettings(name="", driver="memory")], "stores[0].name is ''; use 1 to 63 letters"),
        ([StoreSettings(name="m", driver="memory")] * 2, "stores[1].name is 'm' a second time; give each store"),
        ([StoreSettings(name="m", driver="memory", affinity=2)], "stores[0].affinity is 2; use a number from 0.0"),
        ([StoreSettings(name="p", driver="postgres", url="x://y")], "stores[0].url is no address of a database; write"),
        (
            [StoreSettings(name="p", driver="postgres", url="postgresql://a@b@c/d")],
            "store 'p': the url of a PostgreSQL",
        ),
        ([StoreSettings(name="default", driver="memory")], "stores[0].driver is set for store 'default', which is"),
        ([StoreSettings(name=f"m{n}", driver="memory") for n in range(101)], "stores are 101; use at most 100"),
    ],
)
def test_wrong_settings_of_stores_are_refused_before_anything_is_opened(
    tmp_path: Path, stores: Any, expected: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        millpond.open(tmp_path / "data", stores=stores)
    assert caught.value.message.startswith(expected)
    assert not (tmp_path / "data").exists()


def test_the_data_directory_is_no_place_for_another_store(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="path is that of store 'default' too; give each store a place of its own"):
        millpond.open(tmp_path / "data", stores=[disk(tmp_path, "data")])


# ---- a store that is away -------------------------------------------------------------------------------------


def test_a_store_that_fails_leaves_the_queue_working_on_the_others(tmp_path: Path, broken: set[str]) -> None:
    with millpond.open(tmp_path / "data", stores=[NO_DEFAULT, disk(tmp_path, "b"), disk(tmp_path, "c")]) as pond:
        pond.create_queue("q", partitions=4)
        for number in range(20):
            pond.produce("q", [str(number)])
        broken.add(str(tmp_path / "b"))
        for number in range(20, 60):
            pond.produce("q", [str(number)])  # none is refused: what goes to b at first goes on to c
        assert statuses(pond)["c"] == {"open"}
        early = texts(pond)
        until(pond, lambda: statuses(pond)["b"] == {"failed"})
        [error] = {one.error for one in pond.stats("q").partitions if one.store == "b"}
        assert error == "the disk has gone"
        assert len(early) >= 40
        broken.clear()
        until(pond, lambda: statuses(pond)["b"] == {"open"})
        assert sorted(early + texts(pond), key=int) == [str(number) for number in range(60)]


def test_a_partition_that_is_back_shows_no_error(tmp_path: Path, broken: set[str]) -> None:
    with millpond.open(tmp_path / "data", stores=[NO_DEFAULT, disk(tmp_path, "b"), disk(tmp_path, "c")]) as pond:
        pond.create_queue("q", partitions=2)
        broken.add(str(tmp_path / "b"))
        for number in range(20):
            pond.produce("q", [str(number)])
        until(pond, lambda: statuses(pond)["b"] == {"open"})  # it can be read, and nobody writes there
        assert [one.error for one in pond.stats("q").partitions] == [None, None]


def test_a_store_that_is_away_at_the_start_comes_back_with_all_that_is_in_it(tmp_path: Path) -> None:
    stores = [disk(tmp_path, "b")]
    with millpond.open(tmp_path / "data", stores=stores) as pond:
        pond.create_queue("q", partitions=2)
        pond.queue_info("q")  # each partition has been read by then
        for number in range(10):
            pond.produce("q", [str(number)])
    (tmp_path / "b").rename(tmp_path / "unmounted")
    (tmp_path / "b").mkdir()  # the mount point
    with millpond.open(tmp_path / "data", stores=stores) as pond:
        assert len(found := texts(pond)) == 5
        [away] = [one for one in pond.stats("q").partitions if one.store == "b"]
        assert away.status == "failed"
        assert str(away.error).endswith("; see whether its disk is mounted")
        pond.produce("q", ["10"])
        assert (found := found + texts(pond))[-1] == "10"
        with pytest.raises(
            Unavailable, match=r"store 'b' cannot take partitions .*; bring it back, or set its affinity"
        ):
            pond.create_queue("r", partitions=2)
        assert [one.name for one in pond.list_queues().queues] == ["q"]
        with pytest.raises(Unavailable, match="is away and may hold items"):
            pond.delete_queue("q")
        assert list((tmp_path / "b").iterdir()) == [], "nothing is made in the wrong place"
        (tmp_path / "b").rmdir()
        (tmp_path / "unmounted").rename(tmp_path / "b")
        until(pond, lambda: statuses(pond)["b"] == {"open"})
        assert sorted(found + texts(pond), key=int) == [str(number) for number in range(11)]


def test_partitions_in_a_store_that_nobody_configured_wait_for_it(tmp_path: Path) -> None:
    with millpond.open(tmp_path / "data", stores=[disk(tmp_path, "b")]) as pond:
        pond.create_queue("q", partitions=2)
        pond.queue_info("q")  # each partition has been read by then
        for number in range(10):
            pond.produce("q", [str(number)])
    with millpond.open(tmp_path / "data") as pond:
        found = texts(pond)
        [away] = [one for one in pond.stats("q").partitions if one.store == "b"]
        assert away.error == (
            "store 'b' is not configured here; add it under [[stores]] as it was, then `millpond config reload`"
        )
        assert change(pond, disk(tmp_path, "b")) == ["store 'b' is new, affinity 1"]
        until(pond, lambda: statuses(pond)["b"] == {"open"})
        assert sorted(found + texts(pond), key=int) == [str(number) for number in range(10)]


def test_what_a_deleted_queue_has_in_a_store_that_is_away_goes_with_the_next_open(tmp_path: Path) -> None:
    stores, kept = [disk(tmp_path, "b")], tmp_path / "b" / "queues"
    with (
        millpond.open(tmp_path / "data", stores=stores) as pond,
        millpond.open(tmp_path / "other", stores=stores) as two,
    ):
        for each in (pond, two):
            each.create_queue("q", partitions=2)
            each.produce("q", ["x"])
            each.produce("q", ["y"])
        ours, theirs = pond.queue_info("q").incarnation, two.queue_info("q").incarnation
    with millpond.open(tmp_path / "data") as pond:
        pond.delete_queue("q", force=True)
    assert {path.name for path in kept.iterdir()} == {ours, theirs}
    with millpond.open(tmp_path / "data", stores=stores) as pond:
        until(pond, lambda: {path.name for path in kept.iterdir()} == {theirs})  # never another pond's
    with millpond.open(tmp_path / "other", stores=stores) as two:
        assert sorted(texts(two)) == ["x", "y"]
        two.delete_queue("q")
    assert list(kept.iterdir()) == []


# ---- changes while the engine runs ----------------------------------------------------------------------------


def refused(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(Conflict) as caught:
        call()
    problems: list[str] = caught.value.details["problems"]
    return problems


def test_stores_come_and_go_and_change_their_affinity_while_the_engine_runs(tmp_path: Path) -> None:
    with millpond.open(tmp_path / "data") as pond:
        pond.create_queue("q", partitions=2)
        assert change(pond, disk(tmp_path, "b")) == ["store 'b' is new, affinity 1"]
        pond.create_queue("r", partitions=2)
        assert stores_of(pond, "r") == ["default", "b"]
        assert change(pond, NO_DEFAULT, disk(tmp_path, "b", 0.5)) == [
            "store 'default' has affinity 0, not 1",
            "store 'b' has affinity 0.5, not 1",
        ]
        pond.create_queue("s", partitions=2)
        assert stores_of(pond, "s") == ["b", "b"]
        assert change(pond, NO_DEFAULT, disk(tmp_path, "b", 0.5)) == []
        newest = pond.audit("r").entries[:2]
        assert {(one.action, one.detail["store"], one.detail["affinity"]) for one in newest} == {
            ("store", "default", 0.0),
            ("store", "b", 0.5),
        }


def test_a_store_that_has_partitions_is_neither_removed_nor_moved(tmp_path: Path) -> None:
    stores = [disk(tmp_path, "b"), disk(tmp_path, "c")]
    with millpond.open(tmp_path / "data", stores=stores) as pond:
        for name in "qrst":
            pond.create_queue(name, partitions=2)
        [problem] = refused(lambda: change(pond, disk(tmp_path, "c", 0.3)))
        assert problem == (
            "store 'b' cannot be removed, as it has partitions of 'q', 'r', 's' and 1 more; set its affinity to 0,"
            " rebalance them off it, then remove it"
        )
        moved = StoreSettings(name="b", driver="sqlite", path=str(tmp_path / "d"))
        [problem] = refused(lambda: change(pond, moved))
        assert problem.startswith("store 'b' cannot have another driver, path or url while the server runs")
        assert change(pond, disk(tmp_path, "b"), disk(tmp_path, "c")) == [], "nothing of it had been done"
        assert change(pond, disk(tmp_path, "b")) == ["store 'c' is removed"]  # none of its own
        with pytest.raises(InvalidRequest, match="oracle"):
            change(pond, disk(tmp_path, "b"), StoreSettings(name="x", driver="oracle"))
        (tmp_path / "file").touch()
        with pytest.raises(
            Unavailable, match=r"store 'x' cannot take partitions \(.*cannot be used.*\); bring it back"
        ):
            change(
                pond, disk(tmp_path, "b"), StoreSettings(name="x", driver="sqlite", path=str(tmp_path / "file" / "x"))
            )
        assert change(pond, disk(tmp_path, "b")) == []


# ---- the audit log --------------------------------------------------------------------------------------------


def test_all_that_is_done_to_a_queue_by_hand_is_told_also_after_a_restart_and_its_end(tmp_path: Path) -> None:
    with millpond.open(tmp_path) as pond:
        made = pond.create_queue("q", partitions=2, max_attempts=1)
        pond.update_queue("q", lease_timeout="1m")
        pond.pause("q")
        pond.resume("q")
        pond.produce("q", ["a", "b"])
        pond.clear("q", ["ready"])
        pond.redrive("q", dry_run=True)  # changes nothing
        pond.redrive("q", filter={"kind": "k"})
        pond.produce("q", ["c"])
        pond.claim("q", "left")
        pond.release_claim("q", "left")
    with millpond.open(tmp_path) as pond:
        pond.delete_queue("q", force=True)
        entries = pond.audit("q").entries
        assert {(one.who, one.queue) for one in entries} == {("embedded", "q")}
        assert [one.at for one in entries] == sorted((one.at for one in entries), reverse=True)
        assert [(one.action, one.detail) for one in reversed(entries)] == [
            ("create", {"incarnation": made.incarnation, "partitions": {"default": 2}, "max_attempts": 1}),
            ("update", {"lease_timeout_ms": 60_000}),
            ("pause", {}),
            ("resume", {}),
            ("clear", {"states": ["ready"]}),
            ("clear done", {"removed": {"ready": 2}}),
            ("redrive", {"filter": {"kind": "k"}}),
            ("redrive done", {"matched": 0, "moved": 0, "errors": 0}),
            ("claim.release", {"claim_id": "left"}),
            ("claim.release done", {"items": 1}),
            ("delete", {"incarnation": made.incarnation, "force": True}),
        ]
        first = pond.audit("q", limit=4)
        second = pond.audit("q", after=first.next, limit=100)
        assert (first.entries + second.entries, second.next) == (entries, None)


def test_what_is_refused_is_not_told_and_what_fails_is_told_with_its_error(tmp_path: Path) -> None:
    with millpond.open(tmp_path) as pond:
        pond.create_queue("q")
        for call in (
            lambda: pond.create_queue("q"),
            lambda: pond.update_queue("q", max_attempts=-1),
            lambda: pond.update_queue("q", dead_queue="none"),
            lambda: pond.clear("q", ["nonsense"]),
            lambda: pond.clear("none"),
            lambda: pond.delete_queue("none"),
        ):
            with pytest.raises(MillpondError):
                call()
        assert [one.action for one in pond.audit("q").entries] == ["create"]
        with pytest.raises(MillpondError):
            pond.release_claim("q", "none")
        failed, begun, _ = pond.audit("q").entries
        assert (begun.action, failed.action) == ("claim.release", "claim.release failed")
        assert "none" in str(failed.error)


def test_a_store_is_made_with_the_first_queue_that_is_placed_there(tmp_path: Path) -> None:
    with millpond.open(tmp_path / "data", stores=[disk(tmp_path, "b")]) as pond:
        pond.create_queue("q")
        assert not (tmp_path / "b").exists()
        pond.create_queue("r", partitions=2)
        assert (tmp_path / "b" / MARK).exists()
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o700
