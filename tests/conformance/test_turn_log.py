"""What is particular to the log in which the turns of a busy partition gather before its tables have them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NoReturn
from unittest import mock
from zlib import crc32

import apsw
import msgspec
import pytest

from millpond.store import sqlite, turnlog
from millpond.store.base import Recovered, Store, StoreFailed, StoreFull
from millpond.store.disk import write_all
from millpond.store.memory import MemoryStores
from millpond.store.sqlite import SqliteStores
from tests.conformance.stores import RESERVE_BYTES, chunk, turn
from tests.crash.fulldisk import FullDisk, full_disk

GOLDEN = Path(__file__).parents[1] / "golden" / "turns-v1.hex"


def open_store(path: Path, durability: str = "full", turns_before: int = 0) -> Store:
    """Its first turn goes into the tables, by default, and the others into the log."""
    stores = SqliteStores(path, reserve_bytes=RESERVE_BYTES, turns_before=turns_before)
    return stores.open("incarnation", 3, durability)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = open_store(tmp_path)
    made.recover()
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queues" / "incarnation"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def numbers(recovered: Recovered) -> list[int]:
    return [row.turn for row in recovered.rows]


def crashed(path: Path) -> Path:
    """The directory as a killed process would leave it now."""
    copy = path.with_name(f"{path.name}-crashed")
    shutil.copytree(path, copy)
    return copy


def stored(folder: Path, statement: str) -> list[object]:
    connection = apsw.Connection(str(folder / "3.db"))
    found = [value for (value,) in connection.execute(statement)]
    connection.close()
    return found


def fail(*_: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def no_room(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_partition_that_does_much_has_a_log_until_it_is_closed(tmp_path: Path, folder: Path) -> None:
    store = open_store(tmp_path, turns_before=3)
    store.recover()
    for number in range(1, 4):
        store.commit(turn(number))
    assert files(folder) == ["3.db", "3.db-wal"]
    store.commit(turn(4))
    assert files(folder) == ["3.db", "3.db-turns", "3.db-wal"]
    assert (folder / "3.db-turns").stat().st_mode & 0o077 == 0
    assert store.size() > turnlog.FILE_BYTES
    store.commit(turn(5))
    store.close()
    assert files(folder) == ["3.db"]
    assert numbers(store.recover()) == [1, 2, 3, 4, 5]
    store.close()


def test_what_is_stored_and_dropped_in_between_never_reaches_the_tables(store: Store, folder: Path) -> None:
    store.commit(turn(1))
    store.commit(turn(2, chunks=[chunk(1), chunk(2)], docs={7: b"a", 8: b"b"}))
    store.commit(turn(3, chunk_drops=[1], doc_drops=[7], ended=(1, 1)))
    assert store.read([1, 2], [7, 8]) == ({2: b"chunk 2"}, {8: b"b"})
    store.close()
    assert stored(folder, "SELECT first FROM chunk") == [2]
    assert stored(folder, "SELECT number FROM doc") == [8]
    assert stored(folder, "SELECT turn FROM journal") == [1, 2, 3]


def test_what_the_log_dropped_is_gone_though_the_tables_have_it(store: Store) -> None:
    store.commit(turn(1, chunks=[chunk(1)], docs={1: b"doc"}))
    store.commit(turn(2, chunk_drops=[1], doc_drops=[1]))
    assert store.read([1], [1]) == ({}, {})
    store.commit(turn(3, chunks=[chunk(1, body=b"again")]))
    assert store.read([1], [1]) == ({1: b"again"}, {})
    store.close()
    store.recover()
    assert store.read([1], [1]) == ({1: b"again"}, {})


def test_the_journal_reads_on_from_the_tables_into_the_log(store: Store) -> None:
    for number in range(1, 6):
        store.commit(turn(number, snapshot=b"state" if number == 3 else None, ended=(number, number + 1)))
    assert [row.turn for row in store.journal(0, 10)] == [1, 2, 3, 4, 5]
    assert [row.turn for row in store.journal(1, 3)] == [2, 3, 4]
    assert [row.turn for row in store.journal(4, 3)] == [5]
    assert store.journal(4, 3)[0].events == b"events of turn 5"
    assert [row.turn for row in store.ended(3, 5, 0)] == [5, 4, 3, 2]
    assert [row.turn for row in store.ended(3, 5, 4000)] == [5, 4]


def test_a_process_that_is_killed_leaves_all_its_turns(store: Store, tmp_path: Path) -> None:
    store.commit(turn(1, chunks=[chunk(1)]))
    store.commit(turn(2, chunks=[chunk(20)], docs={1: b"doc"}, ended=(5, 9)))
    store.commit(turn(3, chunk_drops=[1]))
    again = open_store(crashed(tmp_path))
    assert numbers(again.recover()) == [1, 2, 3]
    assert again.read([1, 20], [1]) == ({20: b"chunk 20"}, {1: b"doc"})
    assert [row.turn for row in again.ended(9, 9, 0)] == [2]
    again.commit(turn(4))
    assert numbers(again.recover()) == [1, 2, 3, 4]
    assert again.check() == []
    again.close()


def test_a_record_that_is_not_whole_is_not_there(store: Store, folder: Path, tmp_path: Path) -> None:
    for number in range(1, 5):
        store.commit(turn(number))
    copy = crashed(tmp_path)
    log = copy / "queues" / "incarnation" / "3.db-turns"
    log.write_bytes(log.read_bytes().replace(b"events of turn 4", b"events of turn X"))
    again = open_store(copy)
    assert numbers(again.recover()) == [1, 2, 3]
    again.commit(turn(4, events=b"another"))
    assert [row.events for row in again.recover().rows][-1] == b"another"
    again.close()


def test_turns_that_the_tables_have_count_for_nothing_in_the_log(store: Store, folder: Path, tmp_path: Path) -> None:
    """As after a crash between the tables' commit and what comes next."""
    store.commit(turn(1))
    store.commit(turn(2, chunks=[chunk(1)]))
    log = (folder / "3.db-turns").read_bytes()
    store.commit(turn(3, chunk_drops=[1], snapshot=b"state"))
    store.close()
    (folder / "3.db-turns").write_bytes(log)
    assert store.recover() == Recovered(snapshot_turn=3, snapshot=b"state", rows=[])
    assert store.read([1], []) == ({}, {})
    assert files(folder) == ["3.db", "3.db-wal"]


def test_an_earlier_round_counts_for_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last turn of this round ends where one of the round before begins."""
    monkeypatch.setattr(turnlog, "TURNS_MAX", 3)
    for number in range(1, 7):
        store.commit(turn(number))  # 2, 3 and 4 gather, 5 takes them along, 6 is written over 2
    again = open_store(crashed(tmp_path))
    assert numbers(again.recover()) == [1, 2, 3, 4, 5, 6]
    again.close()


def test_a_log_of_which_the_tables_have_the_beginning_is_read_from_there(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    for number in range(1, 4):
        store.commit(turn(number))
    copy = crashed(tmp_path)
    again = open_store(copy)
    again.recover()
    again.close()  # the tables have turns 2 and 3 now
    for number in range(4, 6):
        store.commit(turn(number))
    shutil.copy(folder / "3.db-turns", copy / "queues" / "incarnation")
    assert numbers(again.recover()) == [1, 2, 3, 4, 5]
    again.close()


@pytest.mark.parametrize("is_turn", [False, True])
def test_what_was_a_payload_is_no_turn(store: Store, tmp_path: Path, is_turn: bool) -> None:
    """It lies where the last turn ends, and has the number of the next: only the mark tells it from one."""
    for number in range(1, 4):
        store.commit(turn(number))
    copy = crashed(tmp_path)
    log = copy / "queues" / "incarnation" / "3.db-turns"
    data = log.read_bytes()
    its_mark = data[turnlog.HEADER.size :][: turnlog.MARK_BYTES] if is_turn else bytes(turnlog.MARK_BYTES)
    forged = msgspec.msgpack.encode(turn(4))
    end = len(data.rstrip(b"\0"))
    log.write_bytes(data[:end] + turnlog.RECORD.pack(its_mark, crc32(forged), len(forged)) + forged + bytes(len(data)))
    again = open_store(copy)
    assert numbers(again.recover()) == ([1, 2, 3, 4] if is_turn else [1, 2, 3])
    again.close()


def test_the_names_of_files_are_durable_before_a_log_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else SQLite's log of a commit that failed could come back, with a turn that was made anew since."""
    synced: list[Path] = []
    monkeypatch.setattr(sqlite, "sync_directory", synced.append)
    store.recover()
    assert len(synced) == 1


def test_turns_may_have_nothing_to_tell(store: Store) -> None:
    for number in range(1, 4):
        store.commit(turn(number, events=b""))
    store.commit(turn(4, events=b"", docs={1: b""}, snapshot=b"state"))
    assert store.read([], [1]) == ({}, {1: b""})
    assert [row.events for row in store.journal(0, 10)] == [b""] * 4


def test_a_log_that_goes_on_where_the_tables_do_not_end_is_refused(store: Store, folder: Path) -> None:
    store.commit(turn(1))
    store.close()
    early = (folder / "3.db").read_bytes()
    store.recover()
    for number in range(2, 5):
        store.commit(turn(number))
    log = (folder / "3.db-turns").read_bytes()
    store.close()
    (folder / "3.db").write_bytes(early)
    (folder / "3.db-turns").write_bytes(log)
    with pytest.raises(StoreFailed, match=r"3\.db-turns goes on at turn 3, but 3\.db ends at turn 1; restore it and"):
        store.recover()
    assert "3.db-turns" in files(folder)


def test_relaxed_turns_go_into_no_log_but_one_that_is_there_is_read(store: Store, tmp_path: Path) -> None:
    store.commit(turn(1))
    store.commit(turn(2, chunks=[chunk(1)]))
    copy = crashed(tmp_path)
    folder = copy / "queues" / "incarnation"
    relaxed = open_store(copy, "relaxed")
    assert numbers(relaxed.recover()) == [1, 2]
    relaxed.commit(turn(3))
    relaxed.close()
    assert "3.db-turns" in files(folder)  # a power cut may still undo what the tables have
    assert numbers(relaxed.recover()) == [1, 2, 3]
    assert "3.db-turns" not in files(folder)
    for number in range(4, 10):
        relaxed.commit(turn(number))
    assert "3.db-turns" not in files(folder)
    assert relaxed.read([1], []) == ({1: b"chunk 1"}, {})
    relaxed.close()


def test_a_large_turn_takes_the_others_along(store: Store, folder: Path) -> None:
    store.commit(turn(1))
    store.commit(turn(2, chunks=[chunk(1)]))
    store.commit(turn(3, chunks=[chunk(20, body=bytes(turnlog.TURN_BYTES_MAX))]))
    copy = crashed(folder.parents[1])
    assert stored(copy / "queues" / "incarnation", "SELECT turn FROM journal") == [1, 2, 3]
    assert set(store.read([1, 20], [])[0]) == {1, 20}


def test_what_gathers_in_bulk_is_written_to_a_file_of_bulk(store: Store, folder: Path) -> None:
    store.commit(turn(1))
    for number in range(2, 7):
        store.commit(turn(number, chunks=[chunk(10 * number, body=bytes([number]) * 200_000)]))
    store.close()
    assert files(folder) == ["3.db", "3.db-bulk-1"]
    store.recover()
    assert store.read([20, 60], [])[0] == {20: bytes([2]) * 200_000, 60: bytes([6]) * 200_000}
    assert store.check() == []


def test_where_no_log_can_be_made_the_tables_take_every_turn(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(turnlog, "write_all", fail)
        for number in range(1, 5):
            store.commit(turn(number))
        assert files(folder) == ["3.db", "3.db-wal"]
    for number in range(5, 5 + turnlog.TURNS_BEFORE + 1):
        store.commit(turn(number))
    assert "3.db-turns" in files(folder)  # it is tried again


def test_a_turn_that_the_log_failed_to_take_is_recovered_or_not_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(turn(1))
    store.commit(turn(2))
    with monkeypatch.context() as patch:
        patch.setattr(turnlog, "write_all", fail)
        with pytest.raises(StoreFailed):
            store.commit(turn(3))
        with pytest.raises(StoreFailed):
            store.commit(turn(4))
    assert numbers(store.recover()) == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(StoreFailed):
            store.commit(turn(3))
    assert numbers(store.recover()) == [1, 2, 3]


def test_a_full_disk_under_the_log_is_full_only_if_the_turn_is_not_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(turn(1))
    store.commit(turn(2))
    with monkeypatch.context() as patch:
        patch.setattr(turnlog, "write_all", lambda *given: no_room() if given[2] else write_all(*given))
        with pytest.raises(StoreFull):
            store.commit(turn(3))
    assert numbers(store.recover()) == [1, 2]


def test_a_full_disk_makes_the_log_give_its_room_back(store: Store, folder: Path) -> None:
    store.commit(turn(1))
    store.commit(turn(2, chunks=[chunk(1)]))
    store.relieve(full=True)
    store.commit(turn(3))
    assert "3.db-turns" not in files(folder)
    store.relieve(full=False)
    store.commit(turn(4))
    assert "3.db-turns" in files(folder)
    assert numbers(store.recover()) == [1, 2, 3, 4]


def two_stores(path: Path) -> list[Store]:
    stores = SqliteStores(path, reserve_bytes=RESERVE_BYTES, turns_before=0)
    return [stores.open("incarnation", partition, "full") for partition in range(2)]


def logs(path: Path) -> list[str]:
    return [name for name in files(path / "queues" / "incarnation") if name.endswith("-turns")]


def test_so_many_partitions_have_a_log_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "LOGS_MAX", 1)
    monkeypatch.setattr(sqlite, "TURNS_BEFORE", 1)
    first, second = both = two_stores(tmp_path)
    for store in both:
        store.recover()
        store.commit(turn(1))
    assert logs(tmp_path) == ["0.db-turns"]
    first.close()
    for number in range(2, 4):
        second.commit(turn(number))
    assert logs(tmp_path) == ["1.db-turns"]
    second.close()


def test_after_a_crash_those_beyond_that_go_when_the_tables_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "before"
    for store in two_stores(before):
        store.recover()
        store.commit(turn(1))
        store.commit(turn(2))
    after = crashed(before)
    monkeypatch.setattr(sqlite, "LOGS_MAX", 1)
    both = two_stores(after)
    for store in both:
        assert numbers(store.recover()) == [1, 2]
        store.commit(turn(3, snapshot=b"for the tables"))
    assert logs(after) == ["0.db-turns"]
    for store in both:
        store.close()


def test_a_log_that_cannot_be_emptied_at_the_end_is_read_at_the_beginning(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(turn(1))
    store.commit(turn(2))
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "pages_of", lambda *_: 10_000)
        patch.setattr(os, "posix_fallocate", no_room)
        store.close()
    assert "3.db-turns" in files(folder)
    assert numbers(store.recover()) == [1, 2]


def test_destroying_a_queue_removes_its_log(store: Store, folder: Path, tmp_path: Path) -> None:
    store.commit(turn(1))
    store.commit(turn(2))
    copy = crashed(tmp_path)
    SqliteStores(copy, reserve_bytes=RESERVE_BYTES).destroy("incarnation", [3])
    assert not (copy / "queues" / "incarnation").exists()


def test_a_log_of_version_1_is_read(store: Store, folder: Path) -> None:
    """What this code wrote when the format was new: the turns 2 and 3 after a first one in the tables."""
    store.commit(turn(1, chunks=[chunk(1)]))
    store.close()
    (folder / "3.db-turns").write_bytes(bytes.fromhex(GOLDEN.read_text()))
    assert numbers(store.recover()) == [1, 2, 3]
    assert store.read([1, 20], [7, 8]) == ({20: b"chunk 20"}, {8: b"b"})
    assert [row.turn for row in store.ended(1, 1, 0)] == [3]


def beginning(data: bytearray) -> None:
    data[0] ^= 1


def version(data: bytearray) -> None:
    data[15] += 1


def middle(data: bytearray) -> None:
    data[data.index(b"events of turn 3")] ^= 1


def length(data: bytearray) -> None:
    """Of the first turn."""
    data[turnlog.HEADER.size + turnlog.RECORD.size - 1] ^= 1


def mark(data: bytearray) -> None:
    data[turnlog.HEADER.size - 5] ^= 1


def end(data: bytearray) -> None:
    del data[-1:]


def no_turn(data: bytearray) -> None:
    record = b"\x93\x01\x02\x03"
    place = turnlog.HEADER.size
    its_mark = bytes(data[place : place + turnlog.MARK_BYTES])
    data[place : place + turnlog.RECORD.size + 4] = turnlog.RECORD.pack(its_mark, crc32(record), 4) + record


@pytest.mark.parametrize("damage", [beginning, version, mark, length, middle, end, no_turn])
def test_a_damaged_log_is_refused_and_stays(store: Store, tmp_path: Path, damage: Callable[[bytearray], None]) -> None:
    for number in range(1, 6):
        store.commit(turn(number))
    copy = crashed(tmp_path)
    log = copy / "queues" / "incarnation" / "3.db-turns"
    data = bytearray(log.read_bytes())
    damage(data)
    log.write_bytes(data)
    again = open_store(copy)
    for _ in range(2):
        with pytest.raises(StoreFailed, match=r"3\.db-turns .*; restore it and 3\.db from one copy"):
            again.recover()
        again.close()
    assert log.read_bytes() == data


def test_a_log_that_was_not_made_to_the_end_has_no_turns(store: Store, folder: Path) -> None:
    store.commit(turn(1))
    store.close()
    for data in (b"", b"mill", bytes(1000), turnlog.header_of(5000, b"12345678") + bytes(10)):
        (folder / "3.db-turns").write_bytes(data)
        assert numbers(store.recover()) == [1]
        store.close()


def test_completes_go_on_however_many_documents_they_drop(tmp_path: Path) -> None:
    """Each may take a page of the tables' log, when the disk is full."""
    disk = FullDisk(tmp_path, 1 << 40)
    with full_disk(disk), mock.patch.object(os, "posix_fallocate", disk.allocate):
        store = SqliteStores(tmp_path, turns_before=0).open("incarnation", 3, "full")
        store.recover()
        docs = {number: bytes(500) for number in range(40_000)}
        store.commit(turn(1, docs=docs, snapshot=b"state"))
        store.close()
        store.recover()
        store.commit(turn(2))
        for number in range(3, 130):
            if number == 103:
                disk.quota -= disk.free()
                store.relieve(full=True)
            store.commit(turn(number, doc_drops=range(300 * number, 300 * number + 300)))
        store.close()


@pytest.mark.parametrize("seed", range(8))
def test_random_turns_read_as_they_would_from_memory(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    monkeypatch.setattr(turnlog, "FILE_BYTES", random.choice([2_000, 20_000]))
    monkeypatch.setattr(turnlog, "TURNS_MAX", random.choice([2, 10, 100]))
    bulk_bytes_min = random.choice([3_000, 1 << 20])
    stores = SqliteStores(tmp_path, reserve_bytes=RESERVE_BYTES, bulk_bytes_min=bulk_bytes_min, turns_before=0)
    store, expected = stores.open("incarnation", 3, "full"), MemoryStores().open("incarnation", 3, "full")
    store.recover()
    expected.recover()
    for number in range(1, 200):
        chunks = [
            chunk(10 * one, body=random.randbytes(random.choice([10, 900]))) for one in range(random.choice([0, 1, 4]))
        ]
        made = turn(
            number,
            chunks=chunks,
            chunk_drops=[10 * one for one in random.sample(range(40), random.choice([0, 0, 2, 15]))],
            docs={random.randrange(20): random.randbytes(20) for _ in range(random.choice([0, 1, 3]))},
            doc_drops=random.sample(range(20), random.choice([0, 1, 5])),
            ended=random.choice([None, (number, number + 3)]),
            snapshot=b"state" if random.random() < 0.03 else None,
        )
        store.commit(made)
        expected.commit(made)
        if random.random() < 0.1:
            assert store.recover() == expected.recover()
        assert store.read(range(0, 400, 10), range(20)) == expected.read(range(0, 400, 10), range(20))
        assert list(store.ended(number - 5, number, 0)) == list(expected.ended(number - 5, number, 0))
        after = random.randrange(number)
        assert store.journal(after, 7) == expected.journal(after, 7)
    assert store.check() == []
    store.close()
