"""`for item in pond.consume(queue)`: items until somebody stops.

The loop's asking for the next item completes the one before. How the loop is left decides on the item in hand:

    with pond.consume(queue) as items:    # an error is a failure, with its text; break gives the item back
        for item in items: ...

    pond.consume(queue, handler)          # an error is a failure, with its text; on to the next item

    for item in pond.consume(queue): ...  # an error and break look the same from here: a failure without a text

Nothing is ever completed by being left: a break at the head of the body would lose its item.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from millpond.consuming.held import HeldItem, Holding, handed_back, held, left_by, left_without_a_word
from millpond.consuming.keeper import Keeper, log
from millpond.consuming.pauses import Pauses
from millpond.errors import LeaseLost, MillpondError, Unavailable
from millpond.model import LeasedItem, Retry

WAIT_S = 20.0  # a long poll: below the minute after which routers forget a silent connection
Lease = Callable[[int, float], Sequence[LeasedItem]]  # how many, and how long to wait for the first


class Consuming(Struct, frozen=True, kw_only=True):
    """What a loop goes by. `idle` ends it after so long without an item."""

    queue: str
    batch: int
    wait: float
    idle: float | None


class Source:
    """Where a loop's items come from. `wake` ends a wait from another thread; leases are extended `every` so often."""

    def __init__(
        self, lease: Lease, wake: Callable[[], None], holding: Holding, every: float | None, keeper: Keeper
    ) -> None:
        self._lease = lease
        self._wake = wake
        self._holding = holding
        self._every = every
        self._keeper = keeper
        self._pauses = Pauses(Random())
        self._worked = False
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        self._wake()

    def more(self, batch: int, wait: float) -> Sequence[HeldItem]:
        """Once it has worked it outlives the queue's absence, but not the end of the client or pond itself."""
        try:
            leased = self._lease(batch, wait)
        except MillpondError as error:
            if self.stopped:
                return ()
            if not self._worked or not error.retryable or self._keeper.closed:
                raise
            log.warning("leasing from %s failed, and is tried again: %s", self._holding.queue, error)
            time.sleep(self._pauses.next())
            return ()
        self._worked = True
        self._pauses.reset()
        items = held(leased, HeldItem, self._holding)
        for item in items:
            self._holding.keeper.keep(item, self._every)
        return items


class Consumer:
    def __init__(self, consuming: Consuming, source: Source, keeper: Keeper) -> None:
        self._consuming = consuming
        self._source = source
        self._keeper = keeper
        self._waiting: deque[HeldItem] = deque()
        self._current: HeldItem | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> HeldItem:
        self._complete_current()
        if not self._waiting and not self._source.stopped:
            self._waiting.extend(self._more())
        if self._source.stopped or not self._waiting:
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
                    log.warning("item %s of %s failed: %s", item.id, item.queue, error, exc_info=error)
                    self._fail(item, error)

    def stop(self) -> None:
        """From any thread: the loop ends at its next step; the item in hand is completed as ever."""
        self._source.stop()

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
        self._source.stopped = True
        current, rest = self._current, list(self._waiting)
        self._current = None
        self._waiting.clear()
        for item in rest if current is None else [current, *rest]:
            self._keeper.drop(item)
        back = handed_back(current, how, rest)
        if back:
            self._keeper.give_back(self._consuming.queue, back)

    def _more(self) -> Sequence[HeldItem]:
        wait, idle = self._consuming.wait, self._consuming.idle
        begun = time.monotonic()
        while not self._source.stopped:
            left = None if idle is None else max(0.0, idle - (time.monotonic() - begun))
            items = self._source.more(self._consuming.batch, wait if left is None else min(left, wait))
            if items:
                return items
            if left == 0.0:
                break
        return ()

    # ---- the item in hand ---------------------------------------------------------------------------------

    def _complete_current(self) -> None:
        """It stays the loop's until that is over: whatever else ends the call leaves it to be handed back."""
        item = self._current
        if item is not None and not item.finished:
            try:
                item.complete()
            except (LeaseLost, Unavailable) as error:  # it comes back, and is done again
                log.warning("item %s of %s was done, but not completed: %s", item.id, item.queue, error)
            finally:
                self._keeper.drop(item)
        self._current = None

    def _fail(self, item: HeldItem, error: Exception) -> None:
        if item.finished:
            return
        try:
            item.retry(error, delay=item.retry_delay)
        except (LeaseLost, Unavailable) as failure:  # it comes back when its lease runs out
            log.warning("item %s of %s was not handed back: %s", item.id, item.queue, failure)
        finally:
            self._keeper.drop(item)
        self._current = None  # lest asking for the next one completes it
