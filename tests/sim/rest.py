"""What must be so whenever a queue is at rest: after a tick there is nothing left that it could have done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.queue.requests import GetItem, Lease, Produce, Tokens
from tests.sim.nouns import CANCELLED, COMPLETED, DEAD, GONE, Violation

if TYPE_CHECKING:
    from tests.sim.model import Queue
    from tests.sim.world import Live


def check_rest(live: Live, known: Queue, now: int, busy: bool) -> None:
    """Nothing due is left in a lane that could do it, and nobody sleeps beside a leasable item. `busy`: it has jobs."""
    if live.closing or live.dirty:
        return
    asleep = None
    if not live.queue.state.definition.paused:
        asleep = next((a for a in live.leases.values() if not a.gone and not a.request.parts), None)  # type: ignore[attr-defined]  # fmt: skip
    for index, lane in live.queue.state.lanes.items():
        if lane.free:
            known.partitions[index].overdue(now)
            if asleep is not None and known.partitions[index].ready_count():
                raise Violation(f"{asleep} waits beside {known.partitions[index].ready_count()} items of {live.name}")
    _check_readers(live, now)
    _check_watches(live, known, now)
    quiet = live.wake is None or live.wake > now
    if quiet and not busy:
        lanes = live.queue.state.everyone
        if all(lane.free and not lane.partition.carried for lane in lanes):  # a name on its way holds up a publish
            for left in known.decisions.left():
                raise Violation(f"{live.name} is at rest, but {left}")
        for index, lane in live.queue.state.lanes.items():
            if lane.free:
                known.partitions[index].check_wake(live.wake)
        for request, ask in live.flying.items():
            if isinstance(request, Lease) and request.until <= now and not request.parts:
                raise Violation(f"{live.name}, {ask} was to be answered at {request.until}; it is {now}")
            if request.deadline < now and isinstance(request, Produce | Tokens):  # others wait anew at each step
                raise Violation(f"{live.name}, {ask} was to be answered at {request.deadline}; it is {now}")


def _check_readers(live: Live, now: int) -> None:
    """Nobody waits to claim what is there, or beyond the time."""
    state = live.queue.state
    for reader in state.readers:
        if reader.until <= now:
            raise Violation(f"{live.name}, {live.flying[reader.request]} was to be answered at {reader.until}")
        for lane in state.lanes.values():
            if lane.free and lane.partition.ready.count and not state.definition.paused:
                raise Violation(f"{live.name}, {live.flying[reader.request]} waits beside items in {lane.index}")


def _check_watches(live: Live, known: Queue, now: int) -> None:
    """Nobody waits for an item that has ended, or beyond the time."""
    waiting = [ask for ask in live.flying.values() if isinstance(ask.request, GetItem) and ask.request.watch]
    for ask in waiting:
        if ask.request.until <= now:  # type: ignore[attr-defined]
            raise Violation(f"{live.name}, {ask} was to be answered at {ask.request.until}; it is {now}")  # type: ignore[attr-defined]
        last = known.by_id[ask.ids[0]][-1]
        lane = live.queue.state.lanes.get(last.partition.index)
        if (lane is None or lane.free) and last.state in (GONE, DEAD, COMPLETED, CANCELLED):
            raise Violation(f"{live.name}, {ask} waits for {last}, which has ended")
