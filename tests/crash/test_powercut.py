"""Acknowledged turns survive any power cut, whole; unacknowledged ones are there whole or not at all.

A failure names its seed: `pytest tests/crash/test_powercut.py -k seed-17-` plays it again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import apsw
import pytest

from millpond.store import bulk, sqlite, sqlite_connections, turnlog
from millpond.store.base import Chunk, Recovered, Store, StoreFailed, StoreFull, Stores, Trim, Turn
from millpond.store.memory import MemoryStores
from millpond.store.sqlite import SqliteStores
from tests.crash.powercut import PowerCutDisk, Truncate, Write, power_cut_vfs
from tests.seeds import seeds

SEEDS = 40
LIVES = 6  # cuts in a row, each on what the one before it left: 240 in all
RESERVE_BYTES = 4096
CUTS = 60  # of one moment


class Work:
    """The turns of a partition, drawn as they are asked for, and what a store must hold after them."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.turns: list[Turn] = []
        self.firsts: list[int] = []  # of chunks to drop some day
        self.firsts_ever: set[int] = set()

    def next(self) -> Turn:
        random, number = self.random, len(self.turns) + 1
        firsts = [number * 100 + place * 10 for place in range(random.choice([0, 1, 1, 3]))]
        numbers = [random.randrange(50) for _ in range(random.choice([0, 0, 4]))]
        turn = Turn(
            number=number,
            at=number * 10,
            events=random.randbytes(random.choice([0, 50, 9000])),
            ended=random.choice([None, (number, number + 5)]),
            chunks=[Chunk(first, 10, random.randbytes(random.choice([10, 3000, 30_000]))) for first in firsts],
            chunk_drops=[self.firsts.pop(random.randrange(len(self.firsts))) for _ in range(len(self.firsts) // 3)],
            docs={one: random.randbytes(100) for one in numbers},
            doc_drops=[random.randrange(50)] if random.random() < 0.3 else [],
            snapshot=random.randbytes(random.choice([10, 100_000])) if random.random() < 0.1 else None,
            trim=Trim(number * 10 - 100, 20_000, number) if random.random() < 0.3 else None,
        )
        self.firsts += firsts
        self.firsts_ever.update(firsts)
        self.turns.append(turn)
        return turn

    def forget_after(self, number: int) -> None:
        """What was not stored never happened; chunks that such a turn dropped simply stay."""
        del self.turns[number:]

    def expected(self) -> dict[str, object]:
        store = MemoryStores().open("expected", 0, "full")
        store.recover()
        for turn in self.turns:
            store.commit(turn)
        return self.look(store)

    def look(self, store: Store) -> dict[str, object]:
        chunks, docs = store.read(sorted(self.firsts_ever), range(50))
        return {
            "recovered": store.recover(),
            "chunks": chunks,
            "docs": docs,
            "journal": store.journal(0, 1000),
            "ended": list(store.ended(7, 7, 0)),
        }


def last_turn(recovered: Recovered) -> int:
    return recovered.rows[-1].turn if recovered.rows else recovered.snapshot_turn


@contextmanager
def stores_on(disk: PowerCutDisk, **ways: int) -> Iterator[Stores]:
    with power_cut_vfs(disk) as vfs:
        yield SqliteStores(disk.root, vfs=vfs, reserve_bytes=RESERVE_BYTES, **ways)


def live(store: Store, work: Work) -> int:
    """Recovers, and commits until the power is cut. Returns the last turn that was known to be stored."""
    known = 0
    try:
        known = last_turn(store.recover())
        work.forget_after(known)
        while True:
            turn = work.next()
            store.commit(turn)
            known = turn.number
    except StoreFailed:
        store.close()
        return known


def find(root: Path, work: Work, durability: str) -> int:
    """The last turn in a copy of what a cut left; asserts that the turns up to it are there, and nothing else."""
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    store = SqliteStores(copy, reserve_bytes=RESERVE_BYTES).open("incarnation", 0, durability)
    found = last_turn(store.recover())
    work.forget_after(found)
    seen, expected = work.look(store), work.expected()
    assert [part for part in expected if seen[part] != expected[part]] == []
    assert store.check() == []
    store.close()
    shutil.rmtree(copy)
    return found


def losses(seed: int, durability: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Life after life, each ended by a cut; yields how many known turns it lost."""
    random = Random(seed)
    monkeypatch.setattr(sqlite, "CHECKPOINT_PAGES", random.choice([20, 60, 300]))
    monkeypatch.setattr(bulk, "FILE_BYTES_MAX", random.choice([1, 50_000, 500_000]))
    monkeypatch.setattr(turnlog, "FILE_BYTES", random.choice([10_000, 150_000]))
    monkeypatch.setattr(turnlog, "TURNS_MAX", random.choice([2, 128]))
    ways = {
        "bulk_bytes_min": random.choice([1, 10_000, bulk.BULK_BYTES_MIN]),
        "turns_before": random.choice([0, 3, turnlog.TURNS_BEFORE]),
    }
    work, root, known = Work(random), path / "life-0", 0
    root.mkdir(parents=True)
    for number in range(1, LIVES + 1):
        disk = PowerCutDisk(root)
        disk.operations_left = random.choice([random.randrange(1, 30), random.randrange(1, 600)])
        with stores_on(disk, **ways) as stores:
            known = max(known, live(stores.open("incarnation", 0, durability), work))
        root = path / f"life-{number}"
        root.mkdir()
        disk.cut(root, random)
        found = find(root, work, durability)
        yield known - found
        known = found


@pytest.mark.parametrize("seed", seeds(SEEDS, fast=4), ids=lambda seed: f"seed-{seed}-")
def test_no_power_cut_loses_an_acknowledged_turn(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lost in losses(seed, "full", tmp_path, monkeypatch):
        assert lost in (0, -1)  # the turn that was being written may be there, whole


def test_relaxed_durability_loses_turns_but_tears_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also shows that these cuts would find out a store that does not sync."""
    lost = [max(losses(seed, "relaxed", tmp_path / str(seed), monkeypatch)) for seed in range(5)]
    assert max(lost) > 0


@pytest.mark.parametrize("ways", [{}, {"bulk_bytes_min": 1}, {"turns_before": 0}], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_what_recover_finds_after_a_failed_sync_survives_a_power_cut(
    seed: int, ways: dict[str, int], tmp_path: Path
) -> None:
    random = Random(seed)
    work, root = Work(random), tmp_path / "before"
    root.mkdir()
    disk = PowerCutDisk(root)
    with stores_on(disk, **ways) as stores:
        store = stores.open("incarnation", 0, "full")
        store.recover()
        for _ in range(5):
            store.commit(work.next())
        disk.fail_syncs = 1 + seed % 3  # also those of the clean-up
        with pytest.raises(StoreFailed):
            store.commit(work.next())
        disk.fail_syncs = 0
        known = last_turn(store.recover())
        assert known in (5, 6)
        target = tmp_path / "after"
        target.mkdir()
        disk.cut(target, random, 0.0)
        store.close()
    assert find(target, work, "full") == known


@pytest.mark.parametrize("killed", [False, True])
def test_no_log_counts_on_room_that_may_go(killed: bool, tmp_path: Path) -> None:
    """A file that is shorter after the cut than the log says would be taken for damaged."""
    disk = PowerCutDisk(tmp_path / "before")
    with stores_on(disk) as stores:
        store = stores.open("incarnation", 0, "full")
        store.recover()
        store.commit(Turn(number=1, at=1, events=b"", chunks=[Chunk(1, 1, bytes(1 << 20))]))
        if killed:
            disk.kill(store.close)
        else:
            store.close()
        store.recover()
        store.commit(Turn(number=2, at=2, events=b""))
        (tmp_path / "after").mkdir()
        disk.cut(tmp_path / "after", Random(0), 0.0)
        store.close()
    store = SqliteStores(tmp_path / "after", reserve_bytes=RESERVE_BYTES).open("incarnation", 0, "full")
    assert last_turn(store.recover()) == 2
    store.close()


def cuts(disk: PowerCutDisk, path: Path) -> list[Path]:
    """What may be found if the power is cut now, in some of the very many ways."""
    targets = [path / f"cut-{seed}" for seed in range(CUTS)]
    for seed, target in enumerate(targets):
        target.mkdir()
        disk.cut(target, Random(seed))
    return targets


@pytest.mark.slow
def test_a_turn_that_failed_does_not_come_back_in_the_place_of_its_successor(tmp_path: Path) -> None:
    """SQLite's log had it and was removed, but that has to be durable before the successor is, in the log of turns."""
    work, root = Work(Random(0)), tmp_path / "before"
    disk = PowerCutDisk(root)
    disk.failed_syncs_drop = False
    with stores_on(disk, turns_before=0) as stores:
        store = stores.open("incarnation", 0, "full")
        store.recover()
        for number in (1, 2):  # the second goes into the log of turns
            work.turns.append(Turn(number=number, at=number, events=b"good"))
            store.commit(work.turns[-1])
        disk.fail_syncs = 1
        with pytest.raises(StoreFailed):
            store.commit(Turn(number=3, at=3, events=b"failed", snapshot=b"for the tables"))
        disk.fail_syncs = 0
        assert last_turn(store.recover()) == 2
        work.turns.append(Turn(number=3, at=3, events=b"its successor"))
        store.commit(work.turns[-1])
        targets = cuts(disk, tmp_path)
        store.close()
    for target in targets:
        assert find(target, work, "full") == 3


def with_turns(stores: Stores, work: Work) -> Store:
    """One with eight turns that are in its file, and durable."""
    store = stores.open("incarnation", 0, "full")
    store.recover()
    for _ in range(8):
        store.commit(work.next())
    store.close()
    return store


def found_in(targets: Iterable[Path], work: Work) -> set[int]:
    """The last turns that are found after the cuts."""
    known, found = work.turns[:], set[int]()
    for target in targets:
        work.turns = known[:]
        found.add(find(target, work, "full"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("operations", range(22, 28))
def test_what_an_opening_failed_to_make_durable_is_not_moved_into_the_file(operations: int, tmp_path: Path) -> None:
    """A close would move SQLite's log there, of which failed syncs have left a part in memory only."""
    work, root = Work(Random(operations)), tmp_path / "before"
    root.mkdir()
    disk = PowerCutDisk(root)
    with stores_on(disk) as stores:
        store = with_turns(stores, work)
        store.recover()
        for _ in range(3):
            store.commit(work.next())
        disk.fail_syncs = 3  # the commit's, that of the clean-up, and that of the opening
        with pytest.raises(StoreFailed):
            store.commit(work.next())
        disk.operations_left = operations
        with pytest.raises(StoreFailed):
            store.recover()
        targets = cuts(disk, tmp_path)
        disk.operations_left = 0
        store.close()
    assert found_in(targets, work) <= {11, 12}


@pytest.mark.slow
@pytest.mark.parametrize("operations", range(26, 34))
def test_what_a_checkpoint_failed_to_make_durable_is_not_moved_into_the_file(
    operations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a relaxed turn is synced before. Else a power cut would damage also what had long been durable."""
    monkeypatch.setattr(sqlite, "CHECKPOINT_PAGES", 10)
    work, root = Work(Random(operations - 20)), tmp_path / "before"
    root.mkdir()
    disk = PowerCutDisk(root)
    with stores_on(disk) as stores:
        store = with_turns(stores, work)
        store = stores.open("incarnation", 0, "relaxed")
        store.recover()
        store.commit(work.next())
        disk.fail_syncs = 1  # a checkpoint's
        with suppress(StoreFailed):
            while disk.fail_syncs:
                store.commit(work.next())
            disk.operations_left = operations
            while True:
                store.commit(work.next())
        targets = cuts(disk, tmp_path)
        disk.operations_left = 0
        store.close()
    assert min(found_in(targets, work)) >= 8


def test_what_an_opening_had_no_room_to_make_durable_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where to write over a file takes room too, as with copy on write."""

    def full(*_: object) -> None:
        raise apsw.FullError("database or disk is full")

    disk = PowerCutDisk(tmp_path / "before")
    with stores_on(disk) as stores:
        store = stores.open("incarnation", 0, "full")
        store.recover()
        store.commit(Turn(number=1, at=1, events=b"", chunks=[Chunk(1, 1, bytes(400_000))]))
        store.commit(Turn(number=2, at=2, events=b"", chunk_drops=[1], snapshot=b"state"))
        store.close()
        store.recover()  # what is free in the file is room enough: none is allocated at its end
        store.commit(Turn(number=3, at=3, events=b""))
        disk.fail_syncs = 2  # the commit's and that of the clean-up
        with pytest.raises(StoreFailed):
            store.commit(Turn(number=4, at=4, events=b""))
        disk.fail_syncs = 0
        known = 0
        with monkeypatch.context() as patch, suppress(StoreFull):
            patch.setattr(sqlite_connections, "write_again", full)
            known = last_turn(store.recover())
        targets = cuts(disk, tmp_path)
        assert last_turn(store.recover()) == 4
        store.close()
    for target in targets:
        store = SqliteStores(target, reserve_bytes=RESERVE_BYTES).open("incarnation", 0, "full")
        assert last_turn(store.recover()) >= max(known, 3)
        store.close()


def test_a_log_that_counts_on_room_is_gone_before_the_room_is(tmp_path: Path) -> None:
    """As a crash may leave one, if room was there when the file was brought up to date."""
    work, root = Work(Random(0)), tmp_path / "before"
    store = SqliteStores(tmp_path / "made", reserve_bytes=RESERVE_BYTES).open("incarnation", 0, "full")
    store.recover()
    store.commit(work.next())
    store.close()
    [path] = (tmp_path / "made").rglob("0.db")
    os.truncate(path, 1 << 20)
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA user_version = 3")
    shutil.copytree(tmp_path / "made", root)
    connection.close()
    disk = PowerCutDisk(root)
    with stores_on(disk) as stores:
        store = stores.open("incarnation", 0, "full")
        store.recover()
        targets = cuts(disk, tmp_path)
        store.close()
    for target in targets:
        assert find(target, work, "full") == 1


# ---- the model itself -------------------------------------------------------------------------------------


def after_cut(disk: PowerCutDisk, target: Path, share: float, seed: int = 0) -> dict[str, bytes]:
    target.mkdir()
    disk.cut(target, Random(seed), share)
    return {path.name: path.read_bytes() for path in target.iterdir()}


def test_the_model_keeps_what_was_synced_under_a_synced_name(tmp_path: Path) -> None:
    disk = PowerCutDisk(tmp_path)
    named, unnamed = disk.create(str(tmp_path / "named")), disk.create(str(tmp_path / "unnamed"))
    disk.live.pop(str(tmp_path / "unnamed"))
    disk.sync_directory(tmp_path)
    disk.live[str(tmp_path / "unnamed")] = unnamed
    for contents in (named, unnamed):
        disk.change(contents, Write(0, b"old"))
        disk.sync(contents)
    disk.change(named, Write(2, b"new"))
    disk.change(named, Truncate(4))
    assert after_cut(disk, tmp_path / "nothing", 0.0) == {"named": b"old"}
    assert after_cut(disk, tmp_path / "everything", 1.0) == {"named": b"olne", "unnamed": b"old"}


def test_the_model_brings_back_a_file_whose_removal_was_not_synced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    disk = PowerCutDisk(tmp_path)
    disk.delete(str(tmp_path / "file"))
    assert after_cut(disk, tmp_path / "nothing", 0.0) == {"file": b"data"}
    disk.sync_directory(tmp_path)
    assert after_cut(disk, tmp_path / "again", 0.0) == {}


def test_the_model_tears_writes_at_sectors(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    disk = PowerCutDisk(tmp_path)
    disk.change(disk.live[str(tmp_path / "file")], Write(100, b"x" * 3000))
    images = [after_cut(disk, tmp_path / str(seed), 0.5, seed)["file"] for seed in range(20)]
    kept = {tuple(image[at : at + 512].count(b"x") for at in range(0, 4096, 512)) for image in images}
    assert len(kept) > 5
    assert all(
        count in (0, whole) for each in kept for count, whole in zip(each, [412, *[512] * 5, 28, 0], strict=True)
    )
