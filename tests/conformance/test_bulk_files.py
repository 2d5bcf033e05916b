"""What is particular to bodies that come in bulk: files of their own, which go when nothing in them is needed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NoReturn

import apsw
import pytest

from millpond.store import bulk
from millpond.store.base import Store, StoreFailed, Turn
from millpond.store.memory import MemoryStores
from millpond.store.sqlite import SqliteStores
from millpond.store.sqlite_connections import SQL
from tests.conformance.stores import RESERVE_BYTES, chunk, turn

LARGE = bytes(300_000)


def open_store(path: Path, durability: str = "full") -> Store:
    store = SqliteStores(path, reserve_bytes=RESERVE_BYTES).open("incarnation", 3, durability)
    store.recover()
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = open_store(tmp_path)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queues" / "incarnation"


def bulk_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*-bulk-*"))


def fail(*_: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def bringing(number: int, *firsts: int, **fields: object) -> Turn:
    return turn(number, chunks=[chunk(first, 1, LARGE) for first in firsts], **fields)


def test_a_large_turn_lies_in_a_file_beside_the_database(store: Store, folder: Path) -> None:
    store.commit(bringing(1, 1, 2))
    store.commit(turn(2, chunks=[chunk(3)]))
    assert bulk_files(folder) == ["3.db-bulk-1"]
    assert (folder / "3.db-bulk-1").stat().st_mode & 0o077 == 0
    assert store.size() > len(LARGE) * 2
    store.close()
    assert (folder / "3.db").stat().st_size < len(LARGE)
    store.recover()
    assert store.read([1, 2, 3, 4], []) == ({1: LARGE, 2: LARGE, 3: b"chunk 3"}, {})
    assert store.check() == []


def test_a_file_goes_with_the_last_of_its_chunks(store: Store, folder: Path) -> None:
    store.commit(bringing(1, 1, 2))
    store.commit(turn(2, chunk_drops=[1]))
    assert bulk_files(folder) == ["3.db-bulk-1"]
    store.commit(turn(3, chunk_drops=[2]))
    assert bulk_files(folder) == []
    store.commit(bringing(4, 5, 6))
    assert bulk_files(folder) == ["3.db-bulk-2"]
    assert set(store.read(range(10), [])[0]) == {5, 6}


def test_the_next_file_is_begun_when_one_is_full(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "FILE_BYTES_MAX", 1_000_000)
    for number in range(1, 5):
        store.commit(bringing(number, 2 * number, 2 * number + 1))
    assert bulk_files(folder) == ["3.db-bulk-1", "3.db-bulk-2"]
    store.commit(turn(5, chunk_drops=range(6)))
    assert bulk_files(folder) == ["3.db-bulk-2"]
    assert set(store.read(range(10), [])[0]) == {6, 7, 8, 9}


def test_what_is_left_in_a_sparse_file_moves_with_the_next_turn(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "FILE_BYTES_MAX", 1)
    store.commit(bringing(1, *range(10)))
    store.commit(bringing(2, 10, 11))
    store.commit(turn(3, chunk_drops=range(9)))
    store.commit(turn(4))
    assert bulk_files(folder) == ["3.db-bulk-2"]
    assert store.read(range(12), [])[0] == {9: LARGE, 10: LARGE, 11: LARGE}
    store.recover()
    assert set(store.read(range(12), [])[0]) == {9, 10, 11}
    assert store.check() == []


def test_a_file_that_was_sparse_before_the_next_was_begun_is_emptied_too(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "FILE_BYTES_MAX", 1_000_000)
    store.commit(bringing(1, *range(10)))
    store.commit(turn(2, chunk_drops=range(9)))
    store.commit(bringing(3, 10, 11))
    store.commit(turn(4))
    assert bulk_files(folder) == ["3.db-bulk-2"]
    assert set(store.read(range(12), [])[0]) == {9, 10, 11}


def test_a_sparse_file_that_cannot_be_read_does_not_keep_turns_from_being_written(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(bringing(1, *range(10)))
    store.commit(turn(2, chunk_drops=range(9)))
    store.recover()
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", fail)
        store.commit(turn(3))
    assert store.read(range(10), [])[0] == {9: LARGE}
    store.recover()
    store.commit(turn(4))
    assert bulk_files(folder) == []
    assert store.read(range(10), [])[0] == {9: LARGE}


def test_a_turn_is_committed_though_its_files_cannot_be_looked_at(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(bringing(1, 1, 2))
    store.recover()
    with monkeypatch.context() as broken:
        broken.setattr(bulk, "bytes_of", fail)
        store.commit(turn(2, chunk_drops=[1]))
    store.commit(turn(3))
    assert set(store.read([1, 2], [])[0]) == {2}


def test_a_sparse_file_is_found_when_a_store_is_opened(store: Store, folder: Path) -> None:
    store.commit(bringing(1, *range(10)))
    store.commit(turn(2, chunk_drops=range(8)))
    store.recover()
    store.commit(turn(3, chunk_drops=[8]))
    assert bulk_files(folder) == []
    assert store.read(range(10), [])[0] == {9: LARGE}


def test_a_chunk_is_where_it_was_written_last(store: Store, folder: Path) -> None:
    store.commit(bringing(1, 1, 2))
    store.commit(turn(2, chunks=[chunk(1, body=b"little is left")]))
    assert store.read([1, 2], [])[0] == {1: b"little is left", 2: LARGE}
    store.commit(bringing(3, 1, 5))
    assert store.read([1, 2], [])[0] == {1: LARGE, 2: LARGE}
    store.recover()
    assert store.read([1, 2], [])[0] == {1: LARGE, 2: LARGE}
    assert store.check() == []


def test_what_a_large_turn_writes_and_drops_is_gone(store: Store, folder: Path) -> None:
    store.commit(bringing(1, 1, 2, 3, chunk_drops=[2]))
    assert set(store.read(range(5), [])[0]) == {1, 3}
    store.commit(bringing(2, 4, 5, chunk_drops=[1, 3, 4, 5]))
    assert store.read(range(6), [])[0] == {}
    assert bulk_files(folder) == []


def test_files_that_no_row_names_go_when_the_store_is_opened(store: Store, folder: Path) -> None:
    store.commit(bringing(1, 1, 2))
    (folder / "3.db-bulk-7").write_bytes(b"of a turn that was not committed")
    (folder / "33.db-bulk-1").write_bytes(b"of another partition")
    store.recover()
    assert bulk_files(folder) == ["3.db-bulk-1", "33.db-bulk-1"]
    store.commit(bringing(2, 3, 4))
    assert set(store.read(range(5), [])[0]) == {1, 2, 3, 4}


def test_what_a_refused_turn_wrote_after_others_takes_no_room(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(bringing(1, 1, 2))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fail)
        with pytest.raises(StoreFailed):
            store.commit(bringing(2, 3, 4))
    store.recover()
    assert (folder / "3.db-bulk-1").stat().st_size == 2 * len(LARGE)
    store.commit(bringing(2, 3, 4))
    assert set(store.read(range(5), [])[0]) == {1, 2, 3, 4}
    assert store.check() == []


def test_a_file_with_a_name_that_is_not_ours_is_left_alone(store: Store, folder: Path) -> None:
    store.commit(bringing(1, 1, 2))
    (folder / "3.db-bulk-1~").write_bytes(b"of somebody's editor")
    store.recover()
    assert store.size() > 0
    assert bulk_files(folder) == ["3.db-bulk-1", "3.db-bulk-1~"]


def test_a_body_that_is_cut_short_is_missing_and_found_by_check(store: Store, folder: Path) -> None:
    store.commit(bringing(1, 1, 2))
    os.truncate(folder / "3.db-bulk-1", len(LARGE) + 1)
    assert set(store.read([1, 2], [])[0]) == {1}
    assert store.check() == ["chunk 2 is not all in 3.db-bulk-1"]
    (folder / "3.db-bulk-1").unlink()
    assert len(store.check()) == 2
    with pytest.raises(StoreFailed, match=r"3\.db"):
        store.read([1], [])


def test_chunks_that_lie_over_one_another_are_found(store: Store, folder: Path) -> None:
    store.commit(bringing(1, 1, 2))
    store.close()
    connection = apsw.Connection(str(folder / "3.db"))
    connection.execute("UPDATE bulk SET place = 5, count = 3 WHERE first = 1")
    connection.close()
    store.recover()
    problems = store.check()
    assert "chunk 2 begins inside the chunk before it, which reaches to 3" in problems
    assert "chunk 2 lies over another in 3.db-bulk-1" in problems


def test_a_relaxed_store_keeps_bodies_in_its_database(tmp_path: Path, folder: Path) -> None:
    """Its turns may be undone by a power cut, and would name bodies that are not there."""
    store = open_store(tmp_path, "relaxed")
    store.commit(bringing(1, 1, 2))
    assert bulk_files(folder) == []
    store.close()


def test_a_store_that_was_made_relaxed_removes_no_file_that_a_power_cut_may_bring_back(
    store: Store, tmp_path: Path, folder: Path
) -> None:
    store.commit(bringing(1, 1, 2))
    store.close()
    relaxed = open_store(tmp_path, "relaxed")
    relaxed.commit(turn(2, chunk_drops=[1, 2]))
    assert bulk_files(folder) == ["3.db-bulk-1"]
    relaxed.recover()
    assert bulk_files(folder) == []
    relaxed.close()


def test_a_database_from_before_there_was_bulk_is_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "queues" / "incarnation" / "3.db"
    path.parent.mkdir(parents=True)
    connection = apsw.Connection(str(path))
    connection.execute(SQL["partition_1"])
    connection.execute(
        "INSERT INTO chunk VALUES (1, 1, x'01'); INSERT INTO journal VALUES (1, 1, NULL, NULL, 1, x'02')"
    )
    connection.pragma("user_version", 1)
    connection.close()
    store = open_store(tmp_path)
    store.commit(bringing(2, 2, 3))
    assert store.read([1, 2, 3], [])[0] == {1: b"\x01", 2: LARGE, 3: LARGE}
    store.close()


def test_destroying_partitions_removes_their_bulk_alone(tmp_path: Path, folder: Path) -> None:
    stores = SqliteStores(tmp_path, reserve_bytes=RESERVE_BYTES)
    for partition in (3, 33):
        store = stores.open("incarnation", partition, "full")
        store.recover()
        store.commit(bringing(1, 1, 2))
        store.close()
    stores.destroy("incarnation", [3])
    assert bulk_files(folder) == ["33.db-bulk-1"]
    stores.destroy("incarnation")
    assert not folder.exists()


@pytest.mark.parametrize("seed", range(5))
def test_random_turns_read_as_they_would_from_memory(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    monkeypatch.setattr(bulk, "FILE_BYTES_MAX", random.choice([1, 1_000, 20_000]))
    stores = SqliteStores(tmp_path, reserve_bytes=RESERVE_BYTES, bulk_bytes_min=random.choice([500, 3_000]))
    store, expected = stores.open("incarnation", 3, "full"), MemoryStores().open("incarnation", 3, "full")
    store.recover()
    expected.recover()
    for number in range(1, 200):
        firsts = random.sample(range(40), random.choice([0, 1, 1, 5]))
        bodies = [random.randbytes(random.choice([10, 900])) for _ in firsts]
        drops = random.sample(range(40), random.choice([0, 0, 2, 15]))
        chunks = [chunk(10 * first, 10, body) for first, body in zip(firsts, bodies, strict=True)]
        made = turn(number, chunks=chunks, chunk_drops=[10 * first for first in drops])
        store.commit(made)
        expected.commit(made)
        if random.random() < 0.1:
            store.recover()
        assert store.read(range(0, 400, 10), []) == expected.read(range(0, 400, 10), [])
    assert store.check() == []
    named = sum(path.stat().st_size for path in (tmp_path / "queues" / "incarnation").glob("*-bulk-*"))
    assert named < 40 * 900 * (bulk.SPARSE_SHARE + 1)
    store.close()
