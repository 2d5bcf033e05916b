"""A full disk refuses turns whole, and with the reserve given up small turns go on."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from millpond.model import QueueDefinition, QueueSettings
from millpond.store import sqlite, turnlog
from millpond.store.base import Chunk, Recovered, Store, StoreFailed, StoreFull, Stores, Turn
from millpond.store.memory import MemoryStores
from millpond.store.sqlite import SqliteStores
from millpond.store.sqlite_registry import SqliteRegistry
from tests.crash.fulldisk import FullDisk, full_disk
from tests.seeds import seeds

QUOTA = 8 << 20
SCALE = 4  # everything is that much smaller than it really is
RESERVE_BYTES = sqlite.RESERVE_BYTES // SCALE
BODY_BYTES = 200_000
SLOW = pytest.mark.slow
WAYS: list[dict[str, int]] = [{}, {"bulk_bytes_min": 1}, {"turns_before": 0}]


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FullDisk]:
    made = FullDisk(tmp_path, QUOTA)
    monkeypatch.setattr(os, "posix_fallocate", made.allocate)
    with full_disk(made):
        yield made


@pytest.fixture(params=[pytest.param(ways, id="-".join(ways) or "tables", marks=SLOW if ways else ()) for ways in WAYS])
def stores(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    monkeypatch.setattr(turnlog, "FILE_BYTES", turnlog.FILE_BYTES // SCALE)
    return SqliteStores(tmp_path, reserve_bytes=RESERVE_BYTES, **request.param)


@pytest.fixture
def store(stores: Stores) -> Iterator[Store]:
    made = stores.open("incarnation", 0, "full")
    made.recover()
    yield made
    made.close()


def producing(number: int) -> Turn:
    body = Random(number).randbytes(BODY_BYTES)
    return Turn(number=number, at=number, events=b"produced", chunks=[Chunk(number, 1, body)])


def completing(number: int, first: int) -> Turn:
    return Turn(number=number, at=number, events=b"completed", ended=(first, first), chunk_drops=[first])


def produce_until_full(store: Store, number: int = 1) -> int:
    """The number of the turn that was refused."""
    while True:
        try:
            store.commit(producing(number))
        except StoreFull:
            return number
        number += 1


def last_turn(recovered: Recovered) -> int:
    return recovered.rows[-1].turn if recovered.rows else recovered.snapshot_turn


def test_a_turn_that_does_not_fit_is_refused_whole(store: Store) -> None:
    refused = produce_until_full(store)
    assert refused > 3
    with pytest.raises(StoreFailed):
        store.commit(completing(refused, 1))
    assert last_turn(store.recover()) == refused - 1
    assert set(store.read(range(refused + 1), [])[0]) == set(range(1, refused))
    assert store.check() == []


def test_completes_go_on_when_the_reserve_is_given_up(store: Store, disk: FullDisk) -> None:
    refused = produce_until_full(store)
    disk.quota = QUOTA - disk.free()  # somebody else takes the rest
    store.relieve(full=True)
    store.recover()
    for number in range(refused, refused + 500):
        store.commit(completing(number, number - refused + 1))
    assert last_turn(store.recover()) == refused + 499


def test_completes_go_on_beside_a_sparse_file_that_cannot_be_emptied(store: Store, disk: FullDisk) -> None:
    bodies = [Chunk(first, 1, bytes(BODY_BYTES)) for first in range(25)]
    store.commit(Turn(number=1, at=1, events=b"", chunks=bodies))
    store.commit(Turn(number=2, at=2, events=b"", chunk_drops=range(19)))
    store.relieve(full=True)
    store.recover()
    disk.quota -= disk.free() - 4 * BODY_BYTES  # less than is left in the file
    for number in range(3, 8):
        store.commit(completing(number, number + 16))
    assert set(store.read(range(25), [])[0]) == {24}


def test_the_room_of_completed_items_is_used_again(store: Store) -> None:
    refused = produce_until_full(store)
    store.recover()
    store.relieve(full=True)
    for number in range(refused, 2 * refused - 1):
        store.commit(completing(number, number - refused + 1))
    assert store.relieve(full=False) is True
    for number in range(2 * refused - 1, 2 * refused + 5):
        store.commit(producing(number))


@pytest.mark.slow
def test_all_partitions_live_on_one_reserve(stores: Stores, disk: FullDisk) -> None:
    opened = [stores.open("incarnation", partition, "full") for partition in range(4)]
    for each in opened:
        each.recover()
        each.commit(producing(1))
    refused = produce_until_full(opened[0], 2)
    opened[0].relieve(full=True)
    opened[0].recover()
    for step in range(200):
        opened[0].commit(completing(refused + step, 1))
        for each in opened[1:]:
            each.commit(completing(2 + step, 1))
    for each in opened:
        each.close()


@pytest.mark.slow
def test_after_a_crash_all_partitions_live_on_one_reserve(
    stores: Stores, disk: FullDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room that was made for what their logs hold is gone then, and somebody else has it."""
    for name in ("GATHERED_PAGES_MAX", "CHECKPOINT_PAGES_RELIEVED"):
        monkeypatch.setattr(sqlite, name, getattr(sqlite, name) // SCALE)
    disk.quota = 10 * QUOTA
    opened = [stores.open("incarnation", partition, "full") for partition in range(10)]
    for each in opened:
        each.recover()
        for number in range(1, 9):  # a log is about full then
            each.commit(Turn(number=number, at=number, events=b"", docs={number: bytes(50_000)}))
    files = {path: path.read_bytes() for path in (tmp_path / "queues" / "incarnation").iterdir()}
    for each in opened:
        each.close()
    for path, data in files.items():
        path.write_bytes(data)
    for each in opened:
        each.recover()
    disk.quota -= disk.free()
    opened[0].relieve(full=True)
    for each in opened:
        for number in range(9, 14):
            each.commit(completing(number, 1))
    for each in opened:
        each.close()


def test_a_reserve_that_cannot_be_removed_is_no_error(store: Store, tmp_path: Path) -> None:
    (tmp_path / "reserve").unlink()
    (tmp_path / "reserve").mkdir()
    assert store.relieve(full=True) is False
    store.commit(completing(1, 1))


def test_the_reserve_is_taken_back_only_when_there_is_room(store: Store, disk: FullDisk, tmp_path: Path) -> None:
    reserve = tmp_path / "reserve"
    assert reserve.stat().st_size == RESERVE_BYTES
    produce_until_full(store)
    store.relieve(full=True)
    assert not reserve.exists()
    disk.quota -= disk.free() - RESERVE_BYTES
    assert store.relieve(full=False) is False  # it would fit, with nothing left
    assert not reserve.exists()
    disk.quota += RESERVE_BYTES
    assert store.relieve(full=False) is True
    assert reserve.stat().st_size == RESERVE_BYTES


def test_a_snapshot_that_does_not_fit_leaves_the_earlier_one(store: Store) -> None:
    store.commit(Turn(number=1, at=1, events=b"", snapshot=b"small"))
    with pytest.raises(StoreFull):
        store.commit(Turn(number=2, at=2, events=b"", snapshot=bytes(2 * QUOTA)))
    assert store.recover() == Recovered(snapshot_turn=1, snapshot=b"small", rows=[])
    store.commit(producing(2))


def test_a_store_is_opened_on_a_full_disk(store: Store, stores: Stores, disk: FullDisk) -> None:
    refused = produce_until_full(store)
    store.close()
    disk.quota -= disk.free()
    assert last_turn(store.recover()) == refused - 1
    assert len(store.read([1], [])[0]) == 1
    with pytest.raises(StoreFull):
        store.commit(completing(refused, 1))
    store.relieve(full=True)
    store.recover()
    store.commit(completing(refused, 1))


def test_a_store_left_unclean_is_opened_on_a_full_disk(store: Store, disk: FullDisk, tmp_path: Path) -> None:
    """As after a crash: the log cannot be moved into the file, and is read all the same."""
    store.commit(producing(1))
    store.commit(producing(2))
    files = {path: path.read_bytes() for path in (tmp_path / "queues" / "incarnation").iterdir()}
    store.close()
    for path, data in files.items():
        path.write_bytes(data)
    disk.quota -= disk.free()
    assert last_turn(store.recover()) == 2
    assert len(store.read([1, 2], [])[0]) == 2


def test_a_store_that_could_not_be_made_is_made_when_there_is_room(stores: Stores, disk: FullDisk) -> None:
    disk.quota = 10_000
    store = stores.open("incarnation", 0, "full")
    with pytest.raises(StoreFull):
        store.recover()
    disk.quota = QUOTA
    assert store.recover() == Recovered(snapshot_turn=0, snapshot=None, rows=[])
    store.commit(producing(1))
    store.close()


@pytest.mark.parametrize("lies", [1, 5, 100])
def test_full_means_not_written_whatever_the_disk_says(stores: Stores, disk: FullDisk, lies: int) -> None:
    """Each write of a commit in turn is taken and yet refused, the last one too; then some of the clean-up's."""
    for writes_before in range(50):
        store = stores.open(f"incarnation-{writes_before}", 0, "full")
        store.recover()
        store.commit(producing(1))
        disk.writes_before_lie, disk.lies = writes_before, lies
        try:
            store.commit(Turn(number=2, at=2, events=b"two", docs={1: bytes(20_000)}))
            outcomes = {2}
        except StoreFull:
            outcomes = {1}
        except StoreFailed:
            outcomes = {1, 2}
        if disk.lies == lies:
            store.close()
            return
        disk.lies = 0
        found = last_turn(store.recover())
        assert found in outcomes
        store.commit(producing(found + 1))
        store.close()
        stores.destroy(f"incarnation-{writes_before}")
    pytest.fail("a commit has fewer writes than that")


def test_a_used_up_quota_of_a_user_is_a_full_disk(store: Store, disk: FullDisk) -> None:
    disk.error = errno.EDQUOT
    refused = produce_until_full(store)
    assert last_turn(store.recover()) == refused - 1


def test_a_file_system_that_cannot_allocate_is_used_without(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, count: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for number in range(1, 5):
        store.commit(producing(number))
    assert store.relieve(full=True) is False
    assert store.relieve(full=False) is False
    assert last_turn(store.recover()) == 4


def test_another_error_is_not_a_full_disk(store: Store, disk: FullDisk) -> None:
    disk.error = errno.EIO
    disk.quota -= disk.free()
    with pytest.raises(StoreFailed) as caught:
        store.commit(producing(1))
    assert caught.type is StoreFailed


@pytest.mark.parametrize("seed", seeds(10, fast=3), ids=lambda seed: f"seed-{seed}-")
def test_on_a_disk_that_fills_and_empties_refused_turns_leave_no_trace(
    seed: int, store: Store, disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    monkeypatch.setattr(sqlite, "CHECKPOINT_PAGES", random.choice([10, 100]))
    expected = MemoryStores().open("incarnation", 0, "full")
    expected.recover()
    number, refusals = 1, 0
    for _ in range(100):
        disk.quota = random.randrange(QUOTA // 2, QUOTA)
        turn = random.choice([producing(number), completing(number, random.randrange(1, number + 1))])
        try:
            store.commit(turn)
        except StoreFull:
            refusals += 1
            store.relieve(full=random.random() < 0.5)
            assert store.recover() == expected.recover()
        else:
            expected.commit(turn)
            number += 1
    assert refusals > 0
    assert store.recover() == expected.recover()
    assert store.read(range(number), []) == expected.read(range(number), [])
    assert store.check() == []


def test_the_registry_refuses_on_a_full_disk_and_keeps_what_it_has(disk: FullDisk, tmp_path: Path) -> None:
    def definition(name: str) -> QueueDefinition:
        settings = QueueSettings(reference="x" * 1000)
        return QueueDefinition(name=name, incarnation="i", settings=settings, partitions=(), created_at=1, updated_at=1)

    registry = SqliteRegistry(tmp_path)
    registry.put([definition("a")])
    disk.quota = QUOTA - disk.free()
    with pytest.raises(StoreFull):
        registry.put([definition(f"b{number}") for number in range(1000)])
    assert registry.load() == [definition("a")]
    disk.quota = QUOTA
    registry.put([definition("b")])
    assert registry.load() == [definition("a"), definition("b")]
    registry.close()
