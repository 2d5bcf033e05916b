"""What store/base.py promises, on every backend."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from millpond.store.base import JournalRow, Recovered, Store, StoreFailed, Stores, Trim
from tests.conformance.stores import Backend, chunk, only, turn, turns

EVERYTHING = 1 << 60  # an instant, a turn or a size that is past all of a test's

# ---- recover and commit -----------------------------------------------------------------------------------


def test_a_new_store_recovers_empty(store: Store) -> None:
    assert store.recover() == Recovered(snapshot_turn=0, snapshot=None, rows=[])
    assert store.journal(0, 10) == []
    assert store.read([1], [1]) == ({}, {})


def test_committed_turns_are_recovered_in_order(store: Store) -> None:
    for each in turns([1, 2, 3]):
        store.commit(each)
    rows = [JournalRow(n, 1000 * n, b"events of turn %d" % n) for n in (1, 2, 3)]
    assert store.recover() == Recovered(snapshot_turn=0, snapshot=None, rows=rows)


def test_a_closed_store_is_found_again_by_the_next_of_its_partition(stores: Stores, store: Store) -> None:
    store.commit(turn(1, chunks=[chunk(10)], docs={11: b"doc"}))
    store.close()
    again = stores.open("incarnation", 0, "full")
    assert [row.turn for row in again.recover().rows] == [1]
    assert again.read([10], [11]) == ({10: b"chunk 10"}, {11: b"doc"})
    again.close()


@only(lambda backend: backend.survives_restart)
def test_a_restart_finds_everything(backend: Backend, tmp_path: Path, store: Store) -> None:
    store.commit(turn(1, chunks=[chunk(10)], snapshot=b"state", ended=(3, 4)))
    store.commit(turn(2))
    store.close()
    again = backend.stores(tmp_path).open("incarnation", 0, "full")
    recovered = again.recover()
    assert (recovered.snapshot_turn, recovered.snapshot, [row.turn for row in recovered.rows]) == (1, b"state", [2])
    assert again.read([10], []) == ({10: b"chunk 10"}, {})
    assert [row.turn for row in again.ended(3, 3, 0)] == [1]
    again.commit(turn(3))
    again.close()


def test_turns_go_on_after_a_recover(store: Store) -> None:
    store.commit(turn(1))
    store.recover()
    store.commit(turn(2))
    assert [row.turn for row in store.recover().rows] == [1, 2]


def test_partitions_and_incarnations_do_not_see_each_other(stores: Stores) -> None:
    places = [("one", 0), ("one", 1), ("two", 0)]
    opened = [stores.open(incarnation, partition, "full") for incarnation, partition in places]
    for number, each in enumerate(opened):
        each.recover()
        each.commit(turn(1, events=b"%d" % number, chunks=[chunk(1, body=b"%d" % number)]))
    for number, each in enumerate(opened):
        assert [row.events for row in each.recover().rows] == [b"%d" % number]
        assert each.read([1], []) == ({1: b"%d" % number}, {})
        each.close()


def test_relaxed_durability_keeps_what_a_clean_close_leaves(stores: Stores) -> None:
    store = stores.open("incarnation", 7, "relaxed")
    store.recover()
    store.commit(turn(1))
    store.close()
    assert [row.turn for row in store.recover().rows] == [1]
    store.close()


def test_a_store_is_not_open_before_it_is_recovered_nor_after_it_is_closed(stores: Stores) -> None:
    store = stores.open("incarnation", 0, "full")
    with pytest.raises(StoreFailed):
        store.commit(turn(1))
    store.recover()
    store.close()
    store.close()
    with pytest.raises(StoreFailed):
        store.read([1], [])


@only(lambda backend: backend.exclusive)
def test_what_is_open_cannot_be_opened_again(stores: Stores, store: Store) -> None:
    store.commit(turn(1))
    with pytest.raises(StoreFailed, match="open in another"):
        stores.open("incarnation", 0, "full").recover()
    store.commit(turn(2))


# ---- turn numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_a_turn_that_is_not_the_next_is_refused(store: Store, number: int) -> None:
    store.commit(turn(1))
    with pytest.raises(StoreFailed):
        store.commit(turn(number, chunks=[chunk(5)]))
    assert [row.turn for row in store.recover().rows] == [1]
    assert store.read([5], []) == ({}, {})
    store.commit(turn(2))


def test_a_failed_commit_closes_the_store_until_it_is_recovered(store: Store) -> None:
    store.commit(turn(1, ended=(1, 1)))
    with pytest.raises(StoreFailed):
        store.commit(turn(5))
    for call in (
        lambda: store.commit(turn(2)),
        lambda: store.read([1], [1]),
        lambda: store.journal(0, 1),
        lambda: list(store.ended(1, 1, 0)),
        lambda: store.check(),
    ):
        with pytest.raises(StoreFailed):
            call()
    store.recover()
    store.commit(turn(2))


def test_the_number_of_the_last_turn_survives_a_journal_trimmed_to_nothing(store: Store) -> None:
    store.commit(turn(1))
    store.commit(turn(2, snapshot=b"state", trim=Trim(EVERYTHING, 0, EVERYTHING)))
    assert store.journal(0, 10) == []
    assert store.recover() == Recovered(snapshot_turn=2, snapshot=b"state", rows=[])
    with pytest.raises(StoreFailed):
        store.commit(turn(1))
    store.recover()
    store.commit(turn(3))
    assert [row.turn for row in store.recover().rows] == [3]
    assert store.check() == []


# ---- snapshots --------------------------------------------------------------------------------------------


def test_recovery_starts_after_the_snapshot(store: Store) -> None:
    for each in [turn(1), turn(2, snapshot=b"after two"), turn(3), turn(4)]:
        store.commit(each)
    recovered = store.recover()
    assert (recovered.snapshot_turn, recovered.snapshot) == (2, b"after two")
    assert [row.turn for row in recovered.rows] == [3, 4]


def test_a_later_snapshot_replaces_the_earlier(store: Store) -> None:
    for number in (1, 2, 3):
        store.commit(turn(number, snapshot=b"after %d" % number))
    assert store.recover() == Recovered(snapshot_turn=3, snapshot=b"after 3", rows=[])


def test_an_empty_snapshot_is_a_snapshot(store: Store) -> None:
    store.commit(turn(1, snapshot=b""))
    assert store.recover() == Recovered(snapshot_turn=1, snapshot=b"", rows=[])


@pytest.mark.slow
def test_a_snapshot_may_be_huge(store: Store) -> None:
    huge = bytes(100 << 20)
    store.commit(turn(1, snapshot=huge))
    store.commit(turn(2, snapshot=huge + b"!"))
    recovered = store.recover()
    assert recovered.snapshot_turn == 2
    assert recovered.snapshot == huge + b"!"
    store.commit(turn(3, snapshot=b"small again"))


# ---- chunks and documents ---------------------------------------------------------------------------------


def test_chunks_are_read_by_their_first_number(store: Store) -> None:
    store.commit(turn(1, chunks=[chunk(10), chunk(20), chunk(30)]))
    assert store.read([30, 10, 11, 99], []) == ({10: b"chunk 10", 30: b"chunk 30"}, {})


def test_a_chunk_replaces_the_one_of_the_same_first(store: Store) -> None:
    store.commit(turn(1, chunks=[chunk(10, 10, b"old"), chunk(20)]))
    store.commit(turn(2, chunks=[chunk(10, 10, b"new")]))
    assert store.read([10, 20], []) == ({10: b"new", 20: b"chunk 20"}, {})
    assert store.check() == []


def test_only_the_named_chunks_are_dropped(store: Store) -> None:
    """Also those in between: drops are no range, in whatever order they come."""
    firsts = list(range(0, 1000, 10))
    store.commit(turn(1, chunks=[chunk(first) for first in firsts]))
    drops = [990, 0, 500, 480, 20]
    store.commit(turn(2, chunk_drops=drops))
    found, _ = store.read(firsts, [])
    assert sorted(found) == [first for first in firsts if first not in drops]


def test_thousands_of_chunks_and_documents_go_in_one_turn(store: Store) -> None:
    numbers = list(range(1, 5001))
    store.commit(turn(1, chunks=[chunk(n, 1) for n in numbers], docs={n: b"doc %d" % n for n in numbers}))
    chunks, docs = store.read(numbers, numbers)
    assert chunks == {n: b"chunk %d" % n for n in numbers}
    assert docs == {n: b"doc %d" % n for n in numbers}
    store.commit(turn(2, chunk_drops=numbers[:-1], doc_drops=numbers[1:]))
    assert store.read(numbers, numbers) == ({5000: b"chunk 5000"}, {1: b"doc 1"})


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 18, 40])
def test_each_chunk_of_a_turn_has_its_own_body(store: Store, count: int) -> None:
    bodies = {n: bytes([n]) * (n * n % 7 * 100) for n in range(count)}  # some of them empty
    store.commit(turn(1, chunks=[chunk(n, 1, body) for n, body in bodies.items()]))
    assert store.read(list(bodies), [])[0] == bodies


def test_dropping_what_is_not_there_is_fine(store: Store) -> None:
    store.commit(turn(1, chunk_drops=[1, 2], doc_drops=[3]))
    assert [row.turn for row in store.recover().rows] == [1]


def test_what_a_turn_both_writes_and_drops_is_gone(store: Store) -> None:
    store.commit(turn(1, chunks=[chunk(1), chunk(2)], chunk_drops=[1], docs={1: b"a", 2: b"b"}, doc_drops=[1]))
    assert store.read([1, 2], [1, 2]) == ({2: b"chunk 2"}, {2: b"b"})


@pytest.mark.parametrize("dropped", [1, 2, 3])
def test_a_turn_of_one_chunk_and_one_drop_does_both(store: Store, dropped: int) -> None:
    """Most turns are such, and a store may have a way of its own for them."""
    store.commit(turn(1, chunks=[chunk(1, 1)]))
    store.commit(turn(2, chunks=[chunk(2, 1)], chunk_drops=[dropped], ended=(1, 1)))
    assert sorted(store.read([1, 2, 3], [])[0]) == [first for first in (1, 2) if first != dropped]
    assert [(row.turn, row.events) for row in store.recover().rows] == [(n, b"events of turn %d" % n) for n in (1, 2)]
    assert [row.turn for row in store.ended(1, 1, 0)] == [2]
    assert store.check() == []


def test_any_sequence_of_numbers_will_do(store: Store) -> None:
    store.commit(turn(1, chunks=(chunk(1), chunk(2)), docs={1: b"a", 2: b"b"}))
    assert store.read(range(5), array("q", [1])) == ({1: b"chunk 1", 2: b"chunk 2"}, {1: b"a"})
    store.commit(turn(2, chunk_drops=array("q", [1]), doc_drops=range(2)))
    assert store.read((1, 2), (1, 2)) == ({2: b"chunk 2"}, {2: b"b"})


def test_documents_are_written_replaced_and_dropped(store: Store) -> None:
    store.commit(turn(1, docs={1: b"one", 2: b"two", 3: b""}))
    store.commit(turn(2, docs={2: b"two again"}, doc_drops=[1]))
    store.recover()
    assert store.read([], [1, 2, 3]) == ({}, {2: b"two again", 3: b""})


def test_numbers_of_63_bits_are_kept_exactly(store: Store) -> None:
    most = (1 << 63) - 1
    store.commit(turn(1, at=most, chunks=[chunk(most - 1, 1)], docs={most: b"doc"}, ended=(most - 1, most)))
    assert store.read([most - 1, most], [most - 1, most]) == ({most - 1: b"chunk %d" % (most - 1)}, {most: b"doc"})
    assert [row.at for row in store.ended(most, most, most)] == [most]


def test_bodies_are_bytes_of_any_value(store: Store) -> None:
    every = bytes(range(256)) * 100
    store.commit(turn(1, events=every, chunks=[chunk(1, 1, every), chunk(2, 1, b"")], docs={1: every}))
    assert store.read([1, 2], [1]) == ({1: every, 2: b""}, {1: every})
    assert store.journal(0, 1)[0].events == every


# ---- the journal ------------------------------------------------------------------------------------------


def test_the_journal_is_read_in_pages(store: Store) -> None:
    for each in turns(range(1, 8)):
        store.commit(each)
    pages, after = [], 0
    while page := store.journal(after, 3):
        pages.append([row.turn for row in page])
        after = page[-1].turn
    assert pages == [[1, 2, 3], [4, 5, 6], [7]]


def test_the_journal_keeps_what_is_before_the_snapshot(store: Store) -> None:
    for each in [turn(1), turn(2, snapshot=b"state"), turn(3)]:
        store.commit(each)
    store.recover()
    assert [row.turn for row in store.journal(0, 10)] == [1, 2, 3]


def test_a_turn_that_ended_an_item_is_found_by_the_items_number(store: Store) -> None:
    spans = {1: (10, 20), 2: None, 3: (15, 15), 4: (21, 30), 5: (1, 100)}
    for number, span in spans.items():
        store.commit(turn(number, ended=span))
    assert [row.turn for row in store.ended(15, 15, 0)] == [5, 3, 1]
    assert [row.turn for row in store.ended(20, 20, 0)] == [5, 1]
    assert [row.turn for row in store.ended(21, 21, 0)] == [5, 4]
    assert [row.turn for row in store.ended(15, 15, 3000)] == [5, 3]
    assert [row.turn for row in store.ended(15, 15, 3001)] == [5]
    assert list(store.ended(101, 101, 0)) == []
    assert [row.turn for row in store.ended(21, 101, 0)] == [5, 4]
    assert [row.turn for row in store.ended(0, 1_000, 3001)] == [5, 4]


def test_commits_may_go_on_while_ended_turns_are_looked_through(store: Store) -> None:
    for number in (1, 2, 3):
        store.commit(turn(number, ended=(1, 9)))
    found = store.ended(5, 5, 0)
    assert next(found).turn == 3
    store.commit(turn(4, ended=(1, 9), snapshot=b"state", trim=Trim(2000, EVERYTHING, EVERYTHING)))
    assert [row.turn for row in found] == [2]


# ---- trim -------------------------------------------------------------------------------------------------


def fill(store: Store, count: int, event_bytes: int = 10) -> None:
    """Turns 1 to `count`, at 1000 ms each, the last one with a snapshot."""
    for number in range(1, count):
        store.commit(turn(number, events=bytes(event_bytes)))
    store.commit(turn(count, events=bytes(event_bytes), snapshot=b"state"))


def left(store: Store) -> list[int]:
    return [row.turn for row in store.journal(0, 1 << 30)]


def test_trim_drops_rows_that_are_too_old(store: Store) -> None:
    fill(store, 9)
    store.commit(turn(10, trim=Trim(before_at=4000, keep_bytes=EVERYTHING, keep_from=EVERYTHING)))
    assert left(store) == [4, 5, 6, 7, 8, 9, 10]


def test_trim_keeps_the_newest_bytes(store: Store) -> None:
    fill(store, 9)
    store.commit(turn(10, events=bytes(10), trim=Trim(before_at=0, keep_bytes=35, keep_from=EVERYTHING)))
    assert left(store) == [8, 9, 10]


def test_trim_counts_the_bytes_that_are_there_after_an_earlier_trim_and_a_recover(store: Store) -> None:
    fill(store, 9)
    store.commit(turn(10, events=bytes(10), trim=Trim(0, 50, EVERYTHING)))
    store.recover()
    store.commit(turn(11, events=bytes(10), trim=Trim(0, 50, EVERYTHING)))
    assert left(store) == [7, 8, 9, 10, 11]


def test_trim_keeps_all_after_keep_from(store: Store) -> None:
    fill(store, 9)
    store.commit(turn(10, trim=Trim(before_at=EVERYTHING, keep_bytes=0, keep_from=6)))
    assert left(store) == [7, 8, 9, 10]


def test_trim_keeps_what_recovery_needs(store: Store) -> None:
    fill(store, 5)
    store.commit(turn(6))
    store.commit(turn(7, trim=Trim(before_at=EVERYTHING, keep_bytes=0, keep_from=EVERYTHING)))
    assert left(store) == [6, 7]
    assert [row.turn for row in store.recover().rows] == [6, 7]


def test_trim_before_any_snapshot_drops_nothing(store: Store) -> None:
    store.commit(turn(1))
    store.commit(turn(2, trim=Trim(before_at=EVERYTHING, keep_bytes=0, keep_from=EVERYTHING)))
    assert left(store) == [1, 2]


def test_trim_with_nothing_to_do_drops_nothing(store: Store) -> None:
    fill(store, 5)
    store.commit(turn(6, trim=Trim(before_at=0, keep_bytes=EVERYTHING, keep_from=EVERYTHING)))
    assert left(store) == [1, 2, 3, 4, 5, 6]


def test_a_row_that_is_to_stay_keeps_those_after_it(store: Store) -> None:
    """Instants do not go back, but if they did, a trim would still take only a run from the oldest."""
    for number, at in enumerate([10, 90, 20, 30], 1):
        store.commit(turn(number, at=at, snapshot=b"state"))
    store.commit(turn(5, at=100, trim=Trim(before_at=50, keep_bytes=EVERYTHING, keep_from=EVERYTHING)))
    assert left(store) == [2, 3, 4, 5]


def test_a_large_trim_takes_several_turns(stores: Stores) -> None:
    store = stores.open("incarnation", 0, "relaxed")
    store.recover()
    fill(store, 3000)
    trim = Trim(before_at=EVERYTHING, keep_bytes=0, keep_from=2990)
    store.commit(turn(3001, trim=trim))
    first_pass = left(store)
    assert 500 <= len(first_pass) < 3000
    assert first_pass[-1] == 3001
    store.commit(turn(3002, trim=trim))
    assert left(store) == list(range(2991, 3003))
    assert store.check() == []
    store.close()


def test_trimmed_turns_are_not_found_as_ended(store: Store) -> None:
    for number in (1, 2, 3):
        store.commit(turn(number, ended=(1, 9), snapshot=b"state"))
    store.commit(turn(4, trim=Trim(before_at=3000, keep_bytes=EVERYTHING, keep_from=EVERYTHING)))
    assert [row.turn for row in store.ended(5, 5, 0)] == [3]


# ---- room, checks, destruction ----------------------------------------------------------------------------


def test_the_reserve_is_given_up_and_taken_back(store: Store) -> None:
    assert store.relieve(full=False) is True
    store.relieve(full=True)
    store.relieve(full=True)
    store.commit(turn(1))
    assert store.relieve(full=False) is True
    store.commit(turn(2))


def test_the_reserve_can_be_given_up_by_a_store_that_failed(store: Store) -> None:
    with pytest.raises(StoreFailed):
        store.commit(turn(9))
    store.relieve(full=True)
    store.recover()
    store.commit(turn(1))


def test_size_grows_with_what_is_stored(store: Store) -> None:
    before = store.size()
    store.commit(turn(1, chunks=[chunk(1, 100, bytes(200_000))]))
    assert store.size() >= before + 200_000


def test_size_of_a_store_that_was_never_opened_is_nothing(stores: Stores) -> None:
    assert stores.open("never", 0, "full").size() == 0


def test_check_is_content_with_what_a_busy_partition_leaves(store: Store) -> None:
    fill(store, 5)
    for number in range(6, 30):
        drops = [(number - 3) * 10]
        store.commit(turn(number, chunks=[chunk(number * 10)], chunk_drops=drops, ended=(number, number + 5)))
    store.commit(turn(30, snapshot=b"state", trim=Trim(9000, EVERYTHING, 20)))
    assert store.check() == []


def test_check_finds_chunks_that_lie_over_each_other(store: Store) -> None:
    store.commit(turn(1, chunks=[chunk(10, 10), chunk(19, 5), chunk(24, 1)]))
    [problem] = store.check()
    assert "chunk 19" in problem


def test_destroyed_partitions_are_gone_and_the_others_stay(stores: Stores) -> None:
    opened = [stores.open("incarnation", partition, "full") for partition in range(3)]
    for each in opened:
        each.recover()
        each.commit(turn(1, chunks=[chunk(1)]))
        each.close()
    stores.destroy("incarnation", [0, 2])
    assert [each.size() > 0 for each in opened] == [False, True, False]
    assert [len(each.recover().rows) for each in opened] == [0, 1, 0]
    for each in opened:
        each.close()


def test_destroying_what_is_not_there_is_fine(stores: Stores) -> None:
    stores.destroy("never", [0, 1])
    store = stores.open("incarnation", 0, "full")
    store.recover()
    store.close()
    stores.destroy("incarnation", [0, 1])
    stores.destroy("incarnation", [0, 1])
    assert store.size() == 0


def test_thousands_of_stores_are_made_without_touching_anything(stores: Stores, tmp_path: Path) -> None:
    made = [stores.open(f"incarnation-{number}", 0, "full") for number in range(10_000)]
    assert sum(store.size() for store in made) == 0
    assert list(tmp_path.iterdir()) == []
