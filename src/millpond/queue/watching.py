"""Requests that wait for an item to end. Each stands by its item, so a turn costs what ends in it, however many wait.

What ends in a turn is noted as it changes and told once that is durable, in the same turn's replies: of an item that is
kept, as it is then; of one of which nothing is kept, as it was last, with how it ended and its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from millpond.errors import MillpondError
from millpond.history.format import RUN_BITS, RUN_MAX, Event, decode_state, run_of
from millpond.model import ENDED, Item, State
from millpond.queue.drive import Drive, Operation, Park
from millpond.queue.lane import NEVER, Lane, Part, TurnJob
from millpond.queue.looking import Seen, at_rest, locate, look, no_item, show
from millpond.queue.partition import DELETE, HAS_ERROR
from millpond.queue.requests import GetItem
from millpond.queue.state import QueueState

_COUNT_MASK = RUN_MAX - 1

Look = Callable[[int, Lane, int], dict[int, Seen]]

# ---- who waits --------------------------------------------------------------------------------------------


class Watch(Park):
    """One request's. While it looks at the item it is with the lane; while it waits, it is parked as well."""

    def __init__(self, queue: QueueState, request: GetItem) -> None:
        self._queue = queue
        self._request = request
        self._drive: Drive | None = None  # while it is parked
        self._lane: Lane | None = None
        self._number = 0
        self.until = request.until
        self.order = -1

    def look(self, number: int, lane: Lane, now: int) -> dict[int, Seen]:
        """From here on nothing that happens to the item is missed."""
        seen = look(lane, [number])
        self._part()
        if number in seen and seen[number].state not in ENDED:
            self.stand_by(lane, number)
        return seen

    def stand_by(self, lane: Lane, number: int) -> None:
        self._lane, self._number = lane, number
        lane.watched.setdefault(number, {})[self] = None
        lane.partition.watch = partial(_note, lane)

    def park(self, drive: Drive) -> None:
        self._drive = drive
        self._request.watch = self
        drive.be_patient_from(self.until)
        self._queue.watches.park(self)

    @property
    def parked(self) -> bool:
        return self._drive is not None

    def resume(self, item: Item | None) -> None:
        """With the item as it has ended; None: it must look for itself, or its time is over, or its caller gone."""
        drive = self._unpark()
        if drive is not None:
            drive.resume(item)

    def stop(self, error: MillpondError) -> None:
        drive = self._unpark()
        if drive is not None:
            drive.stop(error)

    def leave(self) -> None:
        self._unpark()
        self._part()

    def _unpark(self) -> Drive | None:
        drive, self._drive, self._request.watch = self._drive, None, None
        self._queue.watches.withdraw(self)
        return drive

    def _part(self) -> None:
        """From the lane, which looks for nobody when nobody is left."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        others = lane.watched.get(self._number)
        if others is not None:
            others.pop(self, None)
            if not others:
                del lane.watched[self._number]
        if not lane.watched:
            lane.partition.watch = None


def get(queue: QueueState, request: GetItem) -> Operation:
    if not request.wait:
        return (yield from _look_at(queue, request.id, lambda number, lane, now: look(lane, [number])))
    watch = Watch(queue, request)
    try:
        while True:
            item = yield from _look_at(queue, request.id, watch.look)
            if item.state in ENDED or queue.now >= request.until:
                return item
            del item  # it may be large, and the wait long
            ended = yield watch
            if ended is not None:
                return ended
    finally:
        watch.leave()


def _look_at(queue: QueueState, item_id: str, act: Look) -> Operation:
    before = None
    while True:
        yield from at_rest(queue, [item_id])
        place = locate(queue, item_id)
        if place is None or place == before:
            raise no_item(item_id)
        lane, number = place
        seen, job = yield lane, partial(_unless_carried, act, number)
        if number in seen:
            return show(queue, lane, job, seen[number])
        if number not in lane.partition.carried:
            before = place


def _unless_carried(act: Look, number: int, lane: Lane, now: int) -> dict[int, Seen]:
    return {} if number in lane.partition.carried else act(number, lane, now)


def follow(lane: Lane, number: int, target: Lane, number_there: int) -> None:
    """The item is carried to another lane: who waits for it does so there."""
    for watch in lane.watched.pop(number, ()):
        watch.stand_by(target, number_there)
    if not lane.watched:
        lane.partition.watch = None


# ---- what ends in a turn ----------------------------------------------------------------------------------


class Ending(msgspec.Struct):
    """What is left of an item of which nothing is kept: how it looked, and what it has become."""

    seen: Seen
    error: str | None = None


def _note(lane: Lane, event: Event, arguments: Sequence[Any]) -> None:
    """Before a change: those of the items it ends that somebody waits for."""
    read = _RUNS.get(event)
    if read is None:
        return
    watched, endings = lane.watched, lane.draft.endings
    for run in read(arguments):
        first, count = run >> RUN_BITS, (run & _COUNT_MASK) + 1
        few: Iterable[int] = range(first, first + count) if count <= len(watched) else list(watched)
        for number in few:
            if first <= number < first + count and number in watched:
                endings[number] = _last_look(lane, number, event, arguments)


_RUNS: dict[Event, Callable[[Sequence[Any]], Sequence[int]]] = {
    Event.COMPLETED: lambda arguments: arguments[1][::2],
    Event.CLAIM_COMPLETED: lambda arguments: arguments[2],
    Event.CANCELLED: lambda arguments: arguments[1],
    Event.DIED: lambda arguments: arguments[2],
    Event.CLEARED: lambda arguments: arguments[1],
    Event.MOVING: lambda arguments: arguments[1],
    Event.REPLACED: lambda arguments: [run_of(arguments[1], 1)],
    Event.LEFT: lambda arguments: [run_of(number, 1) for number in arguments[0]],
}  # where each has the items that it ends


def _last_look(lane: Lane, number: int, event: Event, arguments: Sequence[Any]) -> Ending | None:
    """None: it is kept, or it does not end but is removed."""
    if event == Event.DIED:
        state, kept = State.DEAD, arguments[3] != DELETE
    elif event == Event.CANCELLED:
        state, kept = State.CANCELLED, arguments[2] > 0
    elif event in (Event.COMPLETED, Event.CLAIM_COMPLETED):
        state, kept = State.COMPLETED, arguments[3 if event == Event.CLAIM_COMPLETED else 2] > 0
    else:
        return None
    if kept:
        return None
    partition = lane.partition
    seen = look(lane, [number])[number]
    if seen.state == State.CLAIMED:  # a lease counts from its beginning, a claim when it is over
        seen.attempts, seen.deliveries = seen.attempts + 1, seen.deliveries + 1
    seen.state, seen.lease, seen.due, seen.cancel_asked = state, None, None, False
    seen.updated = seen.ended = partition.at
    if state == State.COMPLETED:
        seen.documents &= HAS_ERROR  # the state document goes with completion
    if event != Event.DIED:
        return Ending(seen)
    seen.died = partition.at << 8 | arguments[0]
    return Ending(seen, arguments[5])


def tell_endings(queue: QueueState, lane: Lane) -> None:
    """The turn is whole: look at what is kept of its endings, and tell of all of them when it is durable."""
    noted, lane.draft.endings = lane.draft.endings, {}
    endings: dict[int, Ending | None] = {}
    kept = look(lane, [number for number, ending in noted.items() if ending is None])
    for number, ending in noted.items():
        seen = kept.get(number)
        if seen is None or ending is not None:
            endings[number] = ending
        elif seen.state in ENDED:
            endings[number] = Ending(seen)
    if endings:
        lane.draft.parts.append(EndingPart(queue, endings))


class EndingPart(Part):
    """Nobody waits for it by itself: if the turn fails, the load that follows looks after those who watch."""

    __slots__ = ("_endings", "_queue")

    def __init__(self, queue: QueueState, endings: dict[int, Ending | None]) -> None:
        self._queue = queue
        self._endings = endings

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        for number, ending in self._endings.items():
            for watch in lane.watched.pop(number, ()):
                if watch.parked:
                    watch.resume(None if ending is None else _shown(self._queue, lane, job, ending))

    def again(self, lane: Lane) -> None:
        """Noted anew, if it happens again."""

    def deadline(self) -> int:
        return NEVER


def _shown(queue: QueueState, lane: Lane, job: TurnJob, ending: Ending) -> Item:
    item = show(queue, lane, job, ending.seen)
    if (result := job.draft.results.get(ending.seen.number)) is not None:
        item.result = decode_state(result)
    if ending.error is not None:
        item.last_error = ending.error
    return item


def look_after_load(lane: Lane) -> None:
    """The lane was read back from its store: who waits for an item that has ended meanwhile must look for itself."""
    waiting = [(number, watch) for number, watches in lane.watched.items() for watch in watches]
    states = lane.partition.states(lane.watched)
    lane.watched = {}
    for number, watch in waiting:
        if not watch.parked:
            continue  # it is about to look
        if number in states and states[number] not in ENDED:
            lane.watched.setdefault(number, {})[watch] = None
            lane.partition.watch = partial(_note, lane)
        else:
            watch.resume(None)
