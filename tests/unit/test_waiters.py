"""Leases that wait, and how arriving items are dealt to them."""

from __future__ import annotations

from random import Random

from millpond.queue.requests import Lease
from millpond.queue.waiters import Waiters, share


def dealt_one_at_a_time(items: int, batches: list[int]) -> list[int]:
    shares = [0] * len(batches)
    while items and any(have < want for have, want in zip(shares, batches, strict=True)):
        for waiter, want in enumerate(batches):
            if items and shares[waiter] < want:
                shares[waiter] += 1
                items -= 1
    return shares


def test_items_are_dealt_one_at_a_time() -> None:
    assert share(23, [20, 6, 1]) == [16, 6, 1]
    rng = Random(1)
    for _ in range(500):
        batches = [rng.randint(1, 30) for _ in range(rng.randint(0, 8))]
        items = rng.randint(0, 100)
        assert share(items, batches) == dealt_one_at_a_time(items, batches)


def parked(*waits: int) -> tuple[Waiters[Lease], list[Lease]]:
    waiters: Waiters[Lease] = Waiters()
    leases = [Lease(1, wait) for wait in waits]
    for lease in leases:
        waiters.park(lease)
    return waiters, leases


def test_who_came_first_is_served_first() -> None:
    waiters, leases = parked(50, 10, 30)
    assert waiters.first(2) == leases[:2]
    waiters.remove_first(2)
    assert waiters.first(5) == leases[2:]
    assert len(waiters) == 1


def test_a_lease_is_due_when_its_wait_is_over() -> None:
    waiters, leases = parked(50, 10, 30)
    assert waiters.next_at() == 10
    assert waiters.pop_due(9) == []
    assert waiters.pop_due(30) == [leases[1], leases[2]]
    assert waiters.next_at() == 50


def test_one_that_was_served_or_has_gone_is_never_due() -> None:
    waiters, leases = parked(10, 20, 30)
    waiters.remove_first(1)
    assert waiters.withdraw(leases[1])
    assert not waiters.withdraw(leases[1])
    assert not waiters.withdraw(Lease(1))
    assert waiters.next_at() == 30
    assert waiters.pop_due(100) == [leases[2]]
    assert waiters.next_at() is None


def test_leases_whose_items_were_lost_get_their_old_places_back() -> None:
    waiters, leases = parked(10, 20, 30, 40)
    waiters.remove_first(3)
    for lease in leases[:3]:
        waiters.park_again(lease)
    assert waiters.first(4) == leases
    assert waiters.pop_due(25) == leases[:2]


def test_all_can_be_sent_away() -> None:
    waiters, leases = parked(10, 20)
    assert waiters.pop_all() == leases
    assert (len(waiters), waiters.next_at()) == (0, None)
