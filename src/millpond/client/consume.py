"""`for item in client.consume(queue)`: items until somebody stops.

The loop's asking for the next item completes the one before. How the loop is left decides on the item in hand:

    with client.consume(queue) as items:    # an error is a failure, with its text; break gives the item back
        for item in items: ...

    client.consume(queue, handler)          # an error is a failure, with its text; on to the next item

    for item in client.consume(queue): ...  # an error and break look the same from here: a failure without a text

Nothing is ever completed by being left: a break at the head of the body would lose its item.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from millpond.client.durations import seconds
from millpond.client.held import HeldItem, handed_back, left_by, left_without_a_word
from millpond.client.keeper import Keeper, log
from millpond.client.retrying import Pauses
from millpond.client.watch import period
from millpond.errors import LeaseLost, MillpondError, Unavailable
from millpond.model import Duration, Retry

WAIT_S = 20.0  # a long poll: below the minute after which routers forget a silent connection
Lease = Callable[[float], Sequence[HeldItem]]


class Consuming(Struct, frozen=True, kw_only=True):
    """`idle` ends the loop after so long without an item, `lease_timeout` is the queue's where none was given."""

    queue: str
    wait: float
    idle: float | None
    lease_timeout: Duration | None


class Consumer:
    """`lease` leases, waiting up to so many seconds; `wake` ends a wait from another thread."""

    def __init__(
        self, consuming: Consuming, lease: Lease, keeper: Keeper, pauses: Pauses, wake: Callable[[], None]
    ) -> None:
        self._consuming = consuming
        self._lease = lease
        self._keeper = keeper
        self._pauses = pauses
        self._wake = wake
        self._waiting: deque[HeldItem] = deque()
        self._current: HeldItem | None = None
        self._stopped = False
        self._worked = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> HeldItem:
        self._complete_current()
        if not self._waiting and not self._stopped:
            self._waiting.extend(self._more())
        if self._stopped or not self._waiting:
            self.close()
            raise StopIteration
        self._current = item = self._waiting.popleft()
        return item

    def run(self, handler: Callable[[HeldItem], Any]) -> None:
        """Every item to the handler. What it raises is the item's failure; the next one is another matter."""
        with self:
            for item in self:
                try:
                    handler(item)
                except Exception as error:
                    log.warning("item %s of %s failed: %s", item.id, self._consuming.queue, error, exc_info=error)
                    self._fail(item, error)

    def stop(self) -> None:
        """From any thread: the loop ends at its next step; the item in hand is completed as ever."""
        self._stopped = True
        self._wake()

    def close(self) -> None:
        """Gives back what is unfinished, the attempts too."""
        self._leave(left_by(self._current, None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(left_by(self._current, error))

    def __del__(self) -> None:
        if self._current is not None or self._waiting:
            self._leave(left_without_a_word(self._current))

    def _leave(self, how: Retry | None) -> None:
        """Takes no lock and waits for nothing: the keeper does the call."""
        self._stopped = True
        current, rest = self._current, list(self._waiting)
        self._current = None
        self._waiting.clear()
        for item in rest if current is None else [current, *rest]:
            self._keeper.drop(item)
        back = handed_back(current, how, rest)
        if back:
            self._keeper.give_back(self._consuming.queue, back)

    # ---- the item in hand ---------------------------------------------------------------------------------

    def _complete_current(self) -> None:
        item, self._current = self._current, None
        if item is None or item.finished:
            return
        try:
            item.complete()
        except (LeaseLost, Unavailable) as error:  # it comes back, and is done again
            self._keeper.drop(item)
            log.warning("item %s of %s was done, but not completed: %s", item.id, item.queue, error)

    def _fail(self, item: HeldItem, error: Exception) -> None:
        if item.finished:
            return
        try:
            item.retry(error, delay=item.retry_delay)
        except (LeaseLost, Unavailable) as failure:  # it comes back when its lease runs out
            self._keeper.drop(item)
            log.warning("item %s of %s was not handed back: %s", item.id, item.queue, failure)

    # ---- more items ---------------------------------------------------------------------------------------

    def _more(self) -> Sequence[HeldItem]:
        begun = time.monotonic()
        while not self._stopped:
            idle = self._consuming.idle
            left = None if idle is None else max(0.0, idle - (time.monotonic() - begun))
            items = self._leased(self._consuming.wait if left is None else min(left, self._consuming.wait))
            if items:
                self._keep(items)
                return items
            if left == 0.0:
                break
        return ()

    def _leased(self, wait: float) -> Sequence[HeldItem]:
        """A loop that has worked once outlives the server's absence."""
        try:
            items = self._lease(wait)
        except MillpondError as error:
            if self._stopped:
                return ()
            if not self._worked or not error.retryable:
                raise
            log.warning("leasing from %s failed, and is tried again: %s", self._consuming.queue, error)
            time.sleep(self._pauses.next())
            return ()
        self._worked = True
        self._pauses.reset()
        return items

    def _keep(self, items: Sequence[HeldItem]) -> None:
        every = period(items[0], self._consuming.lease_timeout)
        for item in items:
            item.completes_itself = True
            item.keep = None
            item.drop = self._keeper.drop
            self._keeper.keep(item, every)


def idle_seconds(idle_timeout: Duration | None) -> float | None:
    return None if idle_timeout is None else max(0.0, seconds(idle_timeout) or 0.0)
