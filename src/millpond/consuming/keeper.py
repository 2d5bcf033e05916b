"""Keeps leases alive in the background of blocking callers, and hands back what they left: one thread each."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from millpond.consuming.held import Held, Keeps
from millpond.consuming.watch import Watch, half_of
from millpond.errors import Forbidden, MillpondError
from millpond.model import LeaseLike, Retry

Chore = Callable[[], None]

log = logging.getLogger("millpond.consuming")


class Keeper:
    """`give_back` may be called from a finalizer, wherever that runs: it takes no lock."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._watch = Watch()
        self._inbox: SimpleQueue[Chore | None] = SimpleQueue()
        self._wakes_at = -math.inf  # nobody sleeps yet
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self.closed = False

    def keep(self, item: Held, every: float | None = None) -> None:
        due = self._watch.add(item, every, time.monotonic())
        if self._thread is None:
            self._start()
        elif due < self._wakes_at:
            self._inbox.put(_nothing)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self.closed:
                self._thread = threading.Thread(target=self._run, name="millpond-leases", daemon=True)
                self._thread.start()

    def drop(self, item: Held) -> None:
        self._watch.remove(item)

    def forget(self, keeper: Keeps) -> None:
        self._watch.forget(keeper)

    def give_back(self, queue: str, items: list[Retry | LeaseLike]) -> None:
        self._inbox.put(partial(self._give_back, queue, items))

    def close(self, grace: float) -> None:
        """After what was given back is back, or the time for that is over."""
        with self._starting:
            self.closed = True
        self._inbox.put(None)
        self.join(grace)
        self._watch.clear()

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    # ---- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wakes_at = math.inf  # so that what is added from here on leaves a note
            self._wakes_at = due = self._watch.next_due()
            try:
                chore = self._inbox.get(timeout=None if due == math.inf else max(0.0, due - time.monotonic()))
            except Empty:
                chore = _nothing
            if chore is None:
                return
            chore()
            self._measure()
            self._extend()

    def _measure(self) -> None:
        for queue, lot in self._watch.unmeasured(time.monotonic()):
            try:
                self._watch.measured(lot, half_of(self._holder.queue_info(queue).lease_timeout))
            except Forbidden:
                self._watch.measured(lot, None)
            except MillpondError as error:
                log.warning("how long the leases of %s are is not known: %s", queue, error)
                self._watch.failed(lot, error, time.monotonic())

    def _extend(self) -> None:
        for queue, lease_timeout, lot in self._watch.due(time.monotonic()):
            items = [kept.item for kept in lot]
            try:
                results = self._holder.extend(items, queue=queue, lease_timeout=lease_timeout)
            except MillpondError as error:
                log.warning("%d leases of %s were not extended: %s", len(lot), queue, error)
                self._watch.failed(lot, error, time.monotonic())
            else:
                self._watch.extended(lot, results, time.monotonic())

    def _give_back(self, queue: str, items: list[Retry | LeaseLike]) -> None:
        try:
            self._holder.retry(items, queue=queue)
        except MillpondError as error:  # they come back when their leases run out
            log.warning("%d items of %s were not given back: %s", len(items), queue, error)


def _nothing() -> None:
    return None
