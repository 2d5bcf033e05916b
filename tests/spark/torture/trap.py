"""One kill at a time: armed, it goes off when its point comes. And what the driver's queries are to do meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from tests.spark.cluster import members
from tests.spark.torture import victims
from tests.spark.torture.gate import Event
from tests.spark.torture.points import Given, Kill, Query, Victim, Where

STARVED = "Python worker failed to connect back"  # within 10 s, which Spark does not let one change

Order = Callable[[Query, int], dict[str, Any]]
"""What the n-th run of a query is told."""


class Trap:
    """Watches for the gate, whose threads call it."""

    def __init__(self, queues: dict[str, Query], kill_server: Callable[[], int], order: Order, random: Random) -> None:
        self._queues = queues
        self._kill_server = kill_server
        self._order = order
        self._random = random
        self._changed = threading.Condition()
        self._armed: Kill | None = None
        self._orders: Counter[Query] = Counter()
        self._waves = 0
        self._over = False
        self._may_fail: Counter[Query] = Counter()
        self.session = 0  # of the driver that runs
        self.is_up = False  # that driver has come so far that it is heard of
        self.wrong: list[str] = []

    # ---- the harness ------------------------------------------------------------------------------------------

    def watch(self, session: int) -> None:
        with self._changed:
            self.session, self.is_up = session, False

    def arm(self, kill: Kill) -> None:
        with self._changed:
            self._armed = kill

    @property
    def went_off(self) -> bool:
        with self._changed:
            return self._armed is None

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait(timeout_s)

    def go_on(self) -> None:
        """There is something new to do."""
        with self._changed:
            self._waves += 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def spring(self) -> None:
        """Now: what is waited for is not seen by the gate."""
        with self._changed:
            if self._armed is not None:
                self._kill(self._armed, None)

    # ---- the gate ---------------------------------------------------------------------------------------------

    def happened(self, event: Event) -> bool:
        with self._changed:
            kill, query = self._armed, self._queues[event.queue]
            if not self.is_up and (event.process is None or victims.is_of(self.session, event.process)):
                self.is_up = True
                self._changed.notify_all()
            if kill is None or query != kill.query or not _is_it(kill, event):
                return True
            process = event.of(self.session)
            if process is None or not victims.is_of(self.session, process):
                return True  # one that has outlived its driver
            return not self._kill(kill, process) or _is_unhurt(kill)

    def order(self, query: str, seen: int, error: str) -> dict[str, Any]:
        name = Query(query)
        with self._changed:
            if error:
                self._failed(name, error)
            self._changed.wait_for(lambda: self._over or self._waves > seen)
            if self._over:
                return {"end": True}
            self._orders[name] += 1
            return {"end": False, "wave": self._waves} | self._order(name, self._orders[name])

    def broke(self, trace: str) -> None:
        with self._changed:
            self.wrong.append(trace)
            self._changed.notify_all()

    def _failed(self, query: Query, error: str) -> None:
        """A query fails only if its own Python process was killed, or was not given the time to start."""
        if self._may_fail[query]:
            self._may_fail[query] -= 1
        elif STARVED not in error:
            self.wrong.append(f"the query to {query} failed: {error}")
        self._changed.notify_all()

    # ---- the kill ---------------------------------------------------------------------------------------------

    def _kill(self, kill: Kill, process: int | None) -> bool:
        """Whether there was one to kill. If not, the trap waits for the next time."""
        if kill.victim == Victim.SERVER:
            killed = [self._kill_server()]
        else:
            killed = victims.kill(self._chosen(kill, process))
        if not killed:
            return False
        if kill.victim == Victim.PYTHON and kill.point.where != Where.TASK:
            for query in (kill.query,) if process is not None else Query:
                self._may_fail[query] += 1
        self._armed = None
        self._changed.notify_all()
        return True

    def _chosen(self, kill: Kill, process: int | None) -> list[int]:
        if kill.victim == Victim.DRIVER:
            return victims.driver_of(self.session)
        if kill.victim == Victim.MACHINE:
            return members(self.session)
        if kill.victim == Victim.PYTHON:
            return [process] if process is not None else self._one_of(victims.pythons_of(self.session))
        if process is not None and kill.point.where == Where.TASK:
            return victims.executor_above(process)
        return self._one_of(victims.executors_of(self.session))

    def _one_of(self, processes: list[int]) -> list[int]:
        return [self._random.choice(processes)] if processes else []


def _is_it(kill: Kill, event: Event) -> bool:
    point = kill.point
    if (event.at, event.side) != (point.at, point.side):
        return False
    if point.given == Given.MADE:
        return event.made is True
    return point.given != Given.IDLE or event.made is False


def _is_unhurt(kill: Kill) -> bool:
    """Whether who has called has nothing to do with who was killed, and gets an answer."""
    return kill.victim == Victim.EXECUTOR and kill.point.where != Where.TASK
