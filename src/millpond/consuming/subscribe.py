"""`for item in pond.subscribe(queue)`: items as they come, at most `prefetch` of them unfinished.

Each is to be finished by itself, in any order and by any thread: `item.complete()`, `item.retry()` or `with item:`.
What is unfinished when the loop is left goes back, the attempt too. A server does this for its clients on a stream;
here a pond does it for its own callers.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Any, Protocol, Self

from millpond.consuming.consume import WAIT_S, Source
from millpond.consuming.held import Held, HeldItem, Keeps
from millpond.consuming.keeper import Keeper
from millpond.errors import InvalidRequest
from millpond.model import LEASE_BATCH_MAX, LeaseLike, Retry

PREFETCH = 10  # enough to keep some threads busy between two leases


class Subscription(Protocol):
    def __iter__(self) -> Self: ...

    def __next__(self) -> HeldItem: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def close(self) -> None:
        """What is unfinished goes back."""
        ...


class Places:
    """Which items are unfinished: they tell it themselves. It knows them by their leases, lest they hold each other."""

    def __init__(self, keeper: Keeps, prefetch: int) -> None:
        self._keeper = keeper
        self._prefetch = prefetch
        self._open: dict[int, str] = {}

    @property
    def free(self) -> int:
        return self._prefetch - len(self._open)

    def keep(self, item: Held, every: float | None = None) -> None:
        self._open[id(item)] = item.lease  # the keeper holds the item: nobody else gets its id
        self._keeper.keep(item, every)

    def drop(self, item: Held) -> None:
        self._keeper.drop(item)
        if self._open.pop(id(item), None) is not None:
            self.changed()

    def give_back(self, queue: str, items: list[Retry | LeaseLike]) -> None:
        self._keeper.give_back(queue, items)

    def changed(self) -> None:
        """A place has become free."""

    def clear(self) -> list[Retry | LeaseLike]:
        leases, self._open = list(self._open.values()), {}
        return [Retry(lease=lease, intent="defer") for lease in leases]


class BlockingPlaces(Places):
    def __init__(self, keeper: Keeps, prefetch: int) -> None:
        super().__init__(keeper, prefetch)
        self._change = threading.Condition()

    def changed(self) -> None:
        with self._change:
            self._change.notify_all()

    def wait(self) -> int:
        """Until there is one."""
        with self._change:
            self._change.wait_for(lambda: self.free)
        return self.free


class Prefetch:
    """The subscription of a pond."""

    def __init__(self, queue: str, source: Source, places: BlockingPlaces, keeper: Keeper) -> None:
        self._queue = queue
        self._source = source
        self._places = places
        self._keeper = keeper
        self._waiting: deque[HeldItem] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> HeldItem:
        while not self._waiting and not self._source.stopped:
            self._waiting.extend(self._source.more(self._places.wait(), WAIT_S))
        if self._source.stopped:
            raise StopIteration
        return self._waiting.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """From any thread: what is unfinished goes back."""
        self._source.stop()
        self._let_go()
        self._places.changed()  # for a loop that waits for one

    def _let_go(self) -> None:
        self._waiting.clear()
        back = self._places.clear()
        if back:
            self._keeper.forget(self._places)
            self._keeper.give_back(self._queue, back)

    def __del__(self) -> None:
        self._let_go()


def checked_prefetch(prefetch: int) -> int:
    given: Any = prefetch
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= LEASE_BATCH_MAX:
        raise InvalidRequest(f"prefetch is {given!r:.60}; use 1 to {LEASE_BATCH_MAX}")
    return prefetch
