"""Names that must not come twice: live, ended within the window, given up."""

from __future__ import annotations

from random import Random

import pytest

from millpond.queue.dedup import Dedup, Ended, Request, Window, id_digest, key_digest, request_digest, transfer_digest


def request_at(at: int) -> Request:
    return Request(at, at, 1, None)


@pytest.mark.parametrize("seed", range(5))
def test_a_window_remembers_exactly_as_long_as_it_says(seed: int) -> None:
    rng, window, plain, now = Random(seed), Window[Request](), dict[bytes, int](), 1_000_000
    for _ in range(2_000):
        now += rng.choice([0, 1, 7, 40])
        name = b"%d" % rng.randint(0, 60)
        if rng.random() < 0.4:
            window.put(name, request_at(now), 100)
            plain[name] = now
        elif rng.random() < 0.05:
            window.discard(name)
            plain.pop(name, None)
        elif rng.random() < 0.02:
            restored = Window[Request]()
            restored.load(window.dump(now, 100), now)
            window = restored
        found = window.get(name, now, 100)
        at = plain.get(name)
        assert (found.at if found else None) == (at if at is not None and now - at < 100 else None)
        assert window.dump(now, 100).keys() == {one for one, at in plain.items() if now - at < 100}


def test_a_window_forgets_what_is_two_windows_old() -> None:
    window = Window[Request]()
    for at in range(0, 10_000, 10):
        window.put(b"%d" % at, request_at(at), 100)
    assert len(window._young) + len(window._old) < 40


def test_names_of_different_kinds_do_not_meet() -> None:
    names = [key_digest("x"), id_digest("x"), request_digest("x"), transfer_digest("x", 0, 1, 2)]
    assert len({*names, transfer_digest("x", 0, 1, 3), transfer_digest("x", 1, 1, 2)}) == 6


def test_an_ended_item_guards_its_names_for_the_window() -> None:
    dedup = Dedup()
    dedup.add(7, "own", "k", "c")
    assert dedup.live == {id_digest("own"): 7, key_digest("k"): 7}
    dedup.end(7, 1_000, 500, 100)
    assert (dedup.live, len(dedup.digests), len(dedup.names)) == ({}, 0, 0)
    assert dedup.ended.get(key_digest("k"), 1_099, 100) == Ended(1_000, 7, 500, "own\nc")
    assert dedup.ended.get(key_digest("k"), 1_100, 100) is None
    assert dedup.uncommitted == {id_digest("own"), key_digest("k")}


def test_a_released_name_is_free_at_once() -> None:
    dedup = Dedup()
    dedup.add(7, None, "k", None)
    dedup.release(7)
    assert key_digest("k") not in dedup.live
    assert dedup.ended.get(key_digest("k"), 0, 100) is None
    dedup.add(8, None, "k", None)
    dedup.end(7, 0, 0, 100)
    assert dedup.live == {key_digest("k"): 8}


def test_a_retired_item_is_found_by_its_id_and_guards_its_names_like_an_ended_one() -> None:
    dedup = Dedup()
    dedup.add(7, "own", "k", None)
    dedup.retire(7, 1_000, 500, 100)
    assert dedup.live[id_digest("own")] == 7
    assert dedup.ended.get(key_digest("k"), 1_099, 100) == Ended(1_000, 7, 500, "own\n")
    dedup.add(8, None, "k", None)
    dedup.release(7)
    assert dedup.live == {key_digest("k"): 8}
