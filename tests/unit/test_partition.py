"""Transitions that the engine reaches only through a race, and what ended items leave behind."""

from __future__ import annotations

from millpond.history.format import Event, Record, run_of
from millpond.model import State
from millpond.queue.partition import Partition
from millpond.store.memory import MemoryStores
from tests.drive import Pond, definition


def test_a_letter_whose_way_back_vanished_on_the_way_is_ready_again() -> None:
    partition = Partition("incarnation", 0)
    partition.begin(1)
    partition.change(Event.PRODUCED, 1, 1, 10_000, None, [], [])
    partition.change(Event.MOVING, str(State.READY), [run_of(1, 1)], "gone")
    assert partition.states([1]) == {1: State.DEAD}
    partition.change(Event.KEPT, [1])
    assert partition.states([1]) == {1: State.READY}
    assert partition.ready.count == 1


def test_ended_items_do_not_leave_their_timers_behind() -> None:
    pond = Pond(MemoryStores(), definition())
    partition = pond.queues["q"].state.lanes[0].partition
    for _ in range(6):
        deadline = pond.clock.now() + 86_400_000
        pond.produce(*(Record(b"a", expire_deadline=deadline) for _ in range(1_000)))
        pond.complete(pond.lease(1_000))
    pond.run()
    assert partition.ready.count == 0
    assert partition.expiry_timers.count <= 5_000


def test_only_the_timers_that_are_stale_are_set_again() -> None:
    """Of the others there may be a million."""
    partition = Partition("incarnation", 0)
    partition.waiting[1] = 500 << 1
    for _ in range(2):
        partition.due_timers.push(500, run_of(1, 1))
    for number in range(1, 6_000):
        partition.lease_timers.push(500, run_of(number, 1))
    partition.shed_stale_timers()
    assert [timers.count for timers in partition.timers] == [0, 2, 0, 0]
    partition.set_timers()
    assert [timers.count for timers in partition.timers] == [0, 1, 0, 0]
