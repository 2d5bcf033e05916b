"""Calls of many threads on their way as one. There is no thread for it: a caller leads, and takes others along.

While a request is under way, calls of the same key gather; when its reply is there, the first of them leads the next
one. A caller on its own waits for nobody. A leader whose time is up hands the very same request (with its request
id) to the next of its company that still has time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from millpond.client.asks import Ask
from millpond.client.faults import twin
from millpond.client.merging import Part, is_somebodys, merged, split, take
from millpond.errors import MillpondError, OutcomeUnknown, Unavailable

Call = Callable[[Ask[Any], float], Any]


class Flight:
    """One request and those who are in it."""

    def __init__(self, callers: list[Caller]) -> None:
        self.callers = callers
        self.ask = merged([caller.part for caller in callers])


class Caller:
    """`flight` is set on the one that is to lead it, `alone` on those who are to send their own."""

    __slots__ = ("alone", "answered", "deadline", "error", "flight", "part", "reply", "woken")

    def __init__(self, part: Part, deadline: float) -> None:
        self.part = part
        self.deadline = deadline
        self.woken = threading.Lock()
        self.flight: Flight | None = None
        self.reply: Sequence[Any] = ()
        self.error: MillpondError | None = None
        self.alone = False
        self.answered = False

    def wake(self) -> None:
        if self.woken.locked():
            self.woken.release()


class Gather:
    def __init__(self, linger: float) -> None:
        self._linger = linger
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Caller]] = {}  # an entry for each key that has a request under way

    def submit(self, part: Part, deadline: float, call: Call) -> Sequence[Any]:
        caller = Caller(part, deadline)
        with self._lock:
            waiting = self._waiting.get(part.key)
            if waiting is None:
                waiting = self._waiting[part.key] = deque()
                leads = True
            else:
                caller.woken.acquire()
                waiting.append(caller)
                leads = False
        try:
            if leads:
                self._board(caller)
            else:
                self._wait(caller)
            if caller.flight is not None:
                self._lead(caller, caller.flight, call)
        except BaseException:  # an interrupt: nobody may wait for a leader that has left
            with self._lock:
                self._abandon(caller)
            raise
        return self._answer(caller, call)

    def _board(self, caller: Caller) -> None:
        caller.flight = Flight([caller])
        if self._linger:
            time.sleep(self._linger)
            with self._lock:
                self._waiting[caller.part.key].appendleft(caller)
                caller.flight = Flight(take(self._waiting[caller.part.key]))

    def _wait(self, caller: Caller) -> None:
        in_time = caller.woken.acquire(timeout=max(0.0, caller.deadline - time.monotonic()))
        if in_time:
            return
        with self._lock:
            if caller.answered or caller.alone or caller.flight is not None:
                return
            caller.answered = True  # with an error, whatever comes
            waiting = self._waiting.get(caller.part.key, ())
            if caller in waiting:
                self._waiting[caller.part.key].remove(caller)
                caller.error = Unavailable("the call was not sent in time: those before it took too long; try again")
            else:
                caller.error = OutcomeUnknown("no answer came in time; raise timeout=, or look whether it took effect")

    def _lead(self, leader: Caller, flight: Flight, call: Call) -> None:
        try:
            self._fly(leader, flight, call)
        finally:
            with self._lock:
                if leader.alone:
                    self._next(leader.part.key)
                else:
                    leader.answered = True
                    self._hand_over(flight)

    def _abandon(self, caller: Caller) -> None:
        if caller.answered or caller.alone:
            return
        caller.answered = True
        waiting = self._waiting.get(caller.part.key, ())
        if caller in waiting:
            self._waiting[caller.part.key].remove(caller)
        elif caller.flight is not None:
            self._hand_over(caller.flight)

    def _fly(self, leader: Caller, flight: Flight, call: Call) -> None:
        try:
            replies = call(flight.ask, leader.deadline)
            shares = split([caller.part for caller in flight.callers], replies)
        except MillpondError as error:
            with self._lock:
                self._refused(leader, flight, error)
            return
        with self._lock:
            for caller, share in zip(flight.callers, shares, strict=True):
                if not caller.answered:
                    caller.reply, caller.answered = share, True
                    caller.wake()

    def _refused(self, leader: Caller, flight: Flight, error: MillpondError) -> None:
        alone = len(flight.callers) > 1 and is_somebodys(error)
        for caller in flight.callers:
            if caller.answered or (error.retryable and caller is not leader):  # others may have more time
                continue
            caller.alone = alone
            if not alone:
                caller.error, caller.answered = twin(error), True
            caller.wake()

    def _hand_over(self, flight: Flight) -> None:
        """To the first that has no answer yet, if the leader ran out of time or was interrupted."""
        for caller in flight.callers:
            if not caller.answered and not caller.alone:
                caller.flight = flight
                caller.wake()
                return
        self._next(flight.callers[0].part.key)

    def _next(self, key: Hashable) -> None:
        callers = take(self._waiting[key])
        if callers:
            callers[0].flight = Flight(callers)
            callers[0].wake()
        else:
            del self._waiting[key]

    def _answer(self, caller: Caller, call: Call) -> Sequence[Any]:
        if caller.alone:
            reply: Sequence[Any] = call(caller.part.ask(), caller.deadline)
            return reply
        if caller.error is not None:
            raise caller.error
        return caller.reply
