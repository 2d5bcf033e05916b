"""Which items are leased, against a plain dict."""

from __future__ import annotations

from random import Random

import pytest

from millpond.queue.leases import Lease, Leases


def lease(grant: int) -> Lease:
    return Lease(client="", grant=grant, deadline=1_000, fence=0)


def all_of(leases: Leases) -> dict[int, Lease]:
    return {number: held for first, count, held in leases.spans() for number in range(first, first + count)}


@pytest.mark.parametrize("seed", range(20))
def test_leases_are_a_dict_of_items(seed: int) -> None:
    rng, leases, plain, following = Random(seed), Leases(), dict[int, Lease](), 1
    for grant in range(400):
        act = rng.random()
        if act < 0.3:
            following += rng.choice([0, 0, 1, 5])  # what lies between went elsewhere
            count = rng.choice([1, 2, 15, 16, 17, 40, 100])
            held = lease(grant)
            leases.add(following, count, held)
            plain.update(dict.fromkeys(range(following, following + count), held))
            following += count
        elif plain:
            first = rng.choice(list(plain))
            count = 1
            while count < rng.choice([1, 1, 16, 30, 200]) and first + count in plain:
                count += 1
            same = {plain[number] for number in range(first, first + count)}
            whole = leases.whole(first, count)
            assert whole is None or same == {whole}
            leases.remove(first, count)
            for number in range(first, first + count):
                del plain[number]
            if act > 0.9:  # they come back, as after an extend
                leases.add(first, count, held := lease(grant))
                plain.update(dict.fromkeys(range(first, first + count), held))
        assert all_of(leases) == plain
        assert len(leases) == len(plain)
        assert sorted(leases) == sorted(plain)
        for number in rng.sample(range(following + 2), min(following, 20)):
            assert leases.get(number) is plain.get(number)
            assert (number in leases) == (number in plain)


@pytest.mark.parametrize("count", [1, 15, 16, 1_000])
def test_what_was_leased_together_is_known_by_one_lease(count: int) -> None:
    leases, held = Leases(), lease(1)
    leases.add(10, count, held)
    assert leases.whole(10, count) is held
    assert leases.whole(10, count + 1) is None
    assert leases.whole(9, count) is None


def test_neighbours_of_different_grants_have_no_lease_in_common() -> None:
    leases = Leases()
    leases.add(1, 20, lease(1))
    leases.add(21, 3, lease(2))
    leases.add(24, 3, lease(3))
    assert leases.whole(1, 21) is None
    assert leases.whole(21, 4) is None


def test_a_missing_item_has_no_lease() -> None:
    leases = Leases()
    leases.add(1, 20, lease(1))
    leases.remove(5, 1)
    with pytest.raises(KeyError):
        leases[5]
    with pytest.raises(KeyError):
        leases.remove(5, 1)
