"""Requests that wait: for items, or for one to end. Bounded in number, and ended by a drain or their client's going."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from millpond.errors import Closed, TooManyRequests

T = TypeVar("T")
U = TypeVar("U")

RETRY_AFTER_S = 5  # places free up as polls end, and many clients would come back at once


def is_zero(duration: str | float | None) -> bool:
    """Whether it is no time at all, in whatever way that is written. Nothing and wrong ones are not."""
    if not isinstance(duration, str):
        return duration == 0
    return duration != "" and not any(map("123456789".__contains__, duration))


class Waiting(Protocol):
    def cancel(self) -> Any: ...


class Parked:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: set[Waiting] = set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._waiting)

    def check_room(self) -> None:
        if len(self._waiting) >= self.limit:
            raise TooManyRequests(
                f"{self.limit} requests wait here already, the limit; come back later, or ask without `wait`",
                retry_after=RETRY_AFTER_S,
            )

    def check_open(self) -> None:
        """An empty reply would have every consumer ask again at once."""
        if self.draining:
            raise Closed("the server is shutting down and leases nothing more; complete what you hold, and try another")

    def enter(self, waiting: Waiting) -> None:
        if self.draining or len(self._waiting) >= self.limit:
            self.check_open()
            self.check_room()
        self._waiting.add(waiting)

    def leave(self, waiting: Waiting) -> None:
        self._waiting.discard(waiting)

    async def wait(self, ask: Callable[[], Coroutine[Any, Any, T]], gone: asyncio.Future[None], otherwise: U) -> T | U:
        """What is asked for; `otherwise` if a drain ended it, or the client's going: the engine takes leases back."""
        task = asyncio.ensure_future(ask())
        self._waiting.add(task)
        either: set[asyncio.Future[Any]] = {task, gone}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            self._waiting.discard(task)
        return otherwise if task.cancelled() else task.result()

    def drain(self) -> None:
        self.draining = True
        for waiting in list(self._waiting):
            waiting.cancel()
