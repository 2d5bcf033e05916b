"""Runs an operation that takes several turns: a generator that yields what it needs next and is resumed with it.

- `(lane, act)` runs `act(lane, now)` in that lane's next turn, and brings back its value and the turn's job, with what
  it has read, once the turn is durable.
- A list of those does so in all those lanes at a time, and brings back a list.
- `Late(lane, act)` is the same after the leases of that turn were dealt.
- `Wait(until)` waits for an item to be ready, at most until that instant; it brings back nothing.
- A `Park` waits for something else, and brings back what it likes.
- An int sleeps until that instant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from heapq import heappush
from typing import Any, NamedTuple

import msgspec

from millpond.errors import MillpondError, OutcomeUnknown, Unavailable
from millpond.queue.lane import Lane, Part, TurnJob
from millpond.queue.requests import Request
from millpond.queue.state import QueueState

Act = Callable[[Lane, int], Any]
LANDING_MS = 1_000  # after which who waits for a landing looks again, should it not have been told of it


class Late(NamedTuple):
    lane: Lane
    act: Act


class Wait(msgspec.Struct):
    until: int


class Park:
    def park(self, drive: Drive) -> None:
        """Take note of whom to resume."""
        raise NotImplementedError


class Landing(Park):
    """Waits for something that is carried to another partition to arrive there, or for a while."""

    def __init__(self, queue: QueueState) -> None:
        self._queue = queue
        self._drive: Drive | None = None

    def park(self, drive: Drive) -> None:
        self._drive = drive
        until = self._queue.now + LANDING_MS
        drive.be_patient_from(until)
        self._queue.landings[self] = None
        heappush(self._queue.sleepers, (until, next(_sleepers), self.wake))

    def wake(self) -> None:
        self._queue.landings.pop(self, None)
        drive, self._drive = self._drive, None
        if drive is not None:
            drive.resume(None)

    def stop(self, error: MillpondError) -> None:
        drive, self._drive = self._drive, None
        if drive is not None:
            drive.stop(error)


Turn = tuple[Lane, Act] | Late
Step = Turn | Sequence[Turn] | Wait | Park | int
Operation = Generator[Step, Any, Any]

_sleepers = itertools.count()  # those who wake at the same instant do so in the order in which they went to sleep


class StepPart(Part):
    __slots__ = ("_act", "_drive", "_place", "_value", "late")

    def __init__(self, drive: Drive, act: Act, place: int, *, late: bool) -> None:
        self._drive = drive
        self._act = act
        self._place = place  # among those that go together
        self._value: Any = None
        self.late = late

    def apply(self, lane: Lane, now: int) -> None:
        if not self._drive.request.answered:  # else another lane of the step could not be waited for, and it is over
            self._value = self._act(lane, now)

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        self._drive.be_patient_from(now)
        self._drive.done(self._place, (self._value, job))

    def fail(self, error: MillpondError) -> None:
        self._drive.stop(error)

    def deadline(self) -> int:
        return self._drive.deadline


class Drive:
    """Runs one operation, a step at a time."""

    __slots__ = ("_begun", "_missing", "_operation", "_patience", "_queue", "_values", "deadline", "request", "until")

    def __init__(self, queue: QueueState, request: Request, operation: Operation) -> None:
        self._queue = queue
        self.request = request
        self._operation = operation
        self._begun = False  # a step of it is durable
        self._values: list[Any] | None = None  # of lanes that go together
        self._missing = 0
        self._patience = request.deadline - request.at
        self.deadline = request.deadline
        self.until = 0
        self.resume(None)

    def done(self, place: int, value: Any) -> None:
        if self._values is None:
            self.resume(value)
            return
        self._values[place] = value
        self._missing -= 1
        if not self._missing:
            values, self._values = self._values, None
            self.resume(values)

    def resume(self, value: Any) -> None:
        if self.request.answered:  # another lane of the same step could not be waited for
            return
        if self.request.gone:
            self.stop(Unavailable("the caller has gone"))
            return
        self._begun = value is not None or self._begun
        try:
            step = self._operation.send(value)
        except StopIteration as stop:
            self.request.answer(stop.value)
        except Unavailable as error:
            self.stop(error)
        except MillpondError as error:
            self.request.fail(error)
        else:
            self._schedule(step)

    def stop(self, error: MillpondError) -> None:
        if self.request.answered:
            return
        self._operation.close()
        if self._begun and self.request.changes:
            error = OutcomeUnknown(f"{error.message}; other partitions may be done already: look, then send it again")
        self.request.fail(error)

    def be_patient_from(self, now: int) -> None:
        """Each step may wait for its lane as long as a request may."""
        self.deadline = now + self._patience

    def _schedule(self, step: Step) -> None:
        if isinstance(step, int):
            self.be_patient_from(step)
            heappush(self._queue.sleepers, (step, next(_sleepers), lambda: self.resume(None)))
        elif isinstance(step, Wait):
            self.be_patient_from(step.until)
            self.until = step.until
            self._queue.readers.append(self)
        elif isinstance(step, Park):
            step.park(self)
        elif isinstance(step, list):
            if not step:
                self.resume([])
                return
            self._values, self._missing = [None] * len(step), len(step)
            for place, turn in enumerate(step):
                self._ask(turn, place)
        else:
            self._ask(step, 0)  # type: ignore[arg-type]

    def _ask(self, turn: Turn, place: int) -> None:
        lane, act = turn
        if lane.gone:
            self.stop(Unavailable(f"partition {lane.index} was removed by a rebalance meanwhile; send it again"))
            return
        lane.waiting.append(StepPart(self, act, place, late=isinstance(turn, Late)))
