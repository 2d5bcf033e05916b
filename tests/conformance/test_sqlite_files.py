"""What is particular to the files of SQLite stores: versions, damage, locks, the reserve, giving room back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from millpond.model import QueueDefinition, QueueSettings
from millpond.store import sqlite, sqlite_connections
from millpond.store.base import Chunk, Store, StoreFailed
from millpond.store.disk import bytes_of
from millpond.store.sqlite import SqliteStores
from millpond.store.sqlite_connections import LOG_BYTES_MAX, PAGE_BYTES, SQL, log_of
from millpond.store.sqlite_registry import SqliteRegistry
from tests.conformance.stores import chunk, turn

RESERVE_BYTES = 1 << 20


@pytest.fixture
def stores(tmp_path: Path) -> SqliteStores:
    return SqliteStores(tmp_path, reserve_bytes=RESERVE_BYTES)


@pytest.fixture
def store(stores: SqliteStores) -> Iterator[Store]:
    made = stores.open("incarnation", 3, "full")
    made.recover()
    yield made
    made.close()


def test_what_is_made_in_an_open_directory_is_private(store: Store, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    SqliteRegistry(tmp_path).load()
    store.commit(turn(1))
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {"meta.db", "queues", "incarnation", "3.db", "3.db-wal"} <= set(modes)
    assert all(mode & 0o077 == 0 for mode in modes.values()), modes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "queues" / "incarnation" / "3.db"


def alter(file: Path, statement: str) -> None:
    connection = apsw.Connection(str(file))
    connection.execute(statement)
    connection.close()


def test_a_partition_is_one_file_when_it_is_closed(store: Store, file: Path) -> None:
    store.commit(turn(1))
    store.close()
    assert [path.name for path in file.parent.iterdir()] == ["3.db"]


def test_a_file_of_a_newer_version_is_refused(store: Store, file: Path) -> None:
    store.close()
    alter(file, "PRAGMA user_version = 99")
    with pytest.raises(StoreFailed, match=r"3\.db is of version 99.*upgrade millpond"):
        store.recover()


def test_a_file_is_brought_up_to_date_step_by_step(store: Store, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit(turn(1))
    store.close()
    steps = {"partition_4": "ALTER TABLE doc ADD COLUMN a", "partition_5": "ALTER TABLE doc ADD COLUMN b"}
    monkeypatch.setattr(sqlite_connections, "SQL", {**SQL, **steps})
    monkeypatch.setattr(sqlite, "PARTITION_UPGRADES", (*sqlite.PARTITION_UPGRADES, *steps))
    assert [row.turn for row in store.recover().rows] == [1]
    store.close()
    connection = apsw.Connection(str(file))
    assert connection.pragma("user_version") == 5
    assert [column[1] for column in connection.execute("PRAGMA table_info(doc)")] == ["number", "body", "a", "b"]
    connection.close()


def test_a_file_that_is_no_database_is_named(store: Store, file: Path) -> None:
    store.close()
    file.write_bytes(b"this is no database, but it is long enough to be looked at" * 1000)
    with pytest.raises(StoreFailed, match=r"3\.db is damaged"):
        store.recover()


def test_a_damaged_page_is_found(store: Store, file: Path) -> None:
    for number in range(1, 50):
        store.commit(turn(number, events=bytes(1000), chunks=[Chunk(number, 1, bytes(20_000))]))
    store.close()
    data = bytearray(file.read_bytes())
    for page in range(1, len(data) // PAGE_BYTES):
        data[page * PAGE_BYTES : page * PAGE_BYTES + 100] = b"\xff" * 100
    file.write_bytes(data)
    with pytest.raises(StoreFailed, match=r"3\.db is damaged"):
        store.recover()


def test_turns_that_are_missing_are_found(store: Store, file: Path) -> None:
    for number in range(1, 6):
        store.commit(turn(number))
    store.close()
    alter(file, "DELETE FROM journal WHERE turn = 3")
    with pytest.raises(StoreFailed, match=r"3\.db lacks turns"):
        store.recover()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("DELETE FROM journal WHERE turn = 3", "turn 4 follows turn 2"),
        ("DELETE FROM journal WHERE turn = 9", "ends at turn 8, before the snapshot of turn 9"),
        ("UPDATE journal SET total = total + 1 WHERE turn = 9", "turn 9 has total"),
    ],
)
def test_check_finds_a_journal_that_does_not_hold_together(store: Store, file: Path, damage: str, problem: str) -> None:
    for number in range(1, 9):
        store.commit(turn(number))
    store.commit(turn(9, snapshot=b"state"))
    store.close()
    alter(file, damage)
    store.recover()
    assert problem in store.check()[0]


def test_a_file_that_another_process_has_open_is_refused(store: Store, tmp_path: Path) -> None:
    store.commit(turn(1))
    program = (
        "import sys, pathlib; from millpond.store.sqlite import SqliteStores\n"
        "SqliteStores(pathlib.Path(sys.argv[1])).open('incarnation', 3, 'full').recover()"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert "3.db is open in another process; stop that one first" in result.stderr
    store.commit(turn(2))


def test_a_registry_that_is_open_keeps_others_out(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path)
    registry.load()
    with pytest.raises(StoreFailed, match=r"meta\.db is open in another process"):
        SqliteRegistry(tmp_path).load()
    registry.close()


def test_a_registry_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path)
    registry.load()
    registry.close()
    alter(tmp_path / "meta.db", "PRAGMA user_version = 99")
    with pytest.raises(StoreFailed, match="upgrade millpond"):
        registry.load()


def test_a_definition_that_cannot_be_read_is_an_error_of_the_store(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path)
    registry.put(
        [
            QueueDefinition(
                name="a", incarnation="i", settings=QueueSettings(), partitions=(), created_at=1, updated_at=1
            )
        ]
    )
    registry.close()
    alter(tmp_path / "meta.db", "UPDATE queue SET definition = x'93'")
    with pytest.raises(StoreFailed, match=r"meta\.db"):
        registry.load()
    registry.close()


def test_the_reserve_is_made_with_the_first_store_and_really_takes_its_room(store: Store, tmp_path: Path) -> None:
    found = (tmp_path / "reserve").stat()
    assert found.st_size == RESERVE_BYTES
    assert found.st_blocks * 512 >= RESERVE_BYTES


def test_a_reserve_that_was_given_up_stays_so_until_it_is_taken_back(stores: SqliteStores, tmp_path: Path) -> None:
    first, second = (stores.open("incarnation", partition, "full") for partition in (0, 1))
    first.recover()
    first.relieve(full=True)
    second.recover()
    assert not (tmp_path / "reserve").exists()
    assert second.relieve(full=False) is True
    assert (tmp_path / "reserve").stat().st_size == RESERVE_BYTES
    first.close()
    second.close()


def test_a_drained_store_gives_its_room_back_when_it_is_opened_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "SHRINK_FREE_BYTES", 1 << 20)
    for number in range(1, 6):
        firsts = range(20 * number, 20 * number + 20)
        store.commit(turn(number, chunks=[chunk(first, 1, bytes(20_000)) for first in firsts], docs={1: b"doc"}))
    store.commit(turn(6, chunk_drops=range(119), ended=(5, 5)))
    store.recover()
    assert store.size() < 500_000
    assert store.read([119], [1]) == ({119: bytes(20_000)}, {1: b"doc"})
    assert [row.turn for row in store.ended(5, 5, 0)] == [6]
    store.commit(turn(7))
    assert store.check() == []


def test_a_log_that_a_large_snapshot_blew_up_is_cut_back(store: Store, file: Path) -> None:
    store.commit(turn(1, snapshot=bytes(2 * LOG_BYTES_MAX)))
    for number in range(2, 5):
        store.commit(turn(number))
    assert bytes_of(log_of(file)) <= LOG_BYTES_MAX


def test_destroying_a_queue_removes_its_directory(store: Store, stores: SqliteStores, file: Path) -> None:
    store.commit(turn(1))
    store.close()
    assert stores.incarnations() == ["incarnation"]
    stores.destroy("incarnation")
    assert not file.parent.exists()
    assert stores.incarnations() == []


def test_every_statement_is_used(tmp_path: Path) -> None:
    source = "".join(path.read_text() for path in Path(sqlite.__file__).parent.glob("sqlite*.py"))
    assert [name for name in SQL if f'"{name}"' not in source] == []


def test_a_turn_that_cannot_be_written_leaves_nothing_of_itself(store: Store) -> None:
    store.commit(turn(1, chunks=[chunk(1)]))
    with pytest.raises(StoreFailed):
        store.commit(turn(2, chunks=[chunk(2)], chunk_drops=[1], snapshot="not bytes", trim="no trim"))
    assert [row.turn for row in store.recover().rows] == [1]
    assert store.read([1, 2], []) == ({1: b"chunk 1"}, {})
