"""A pond on which a worker dies, or is late, at a certain call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from millpond import AsyncPond


class Trouble:
    """A pond of which some calls fail, before or after they were carried out."""

    def __init__(self, pond: AsyncPond, call: str, *, done: bool, queue: str = "") -> None:
        self._pond = pond
        self._call = call
        self._done = done
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._pond, name)

        async def fails(*given: Any, **more: Any) -> Any:
            if self._queue and given[0] != self._queue:
                return await real(*given, **more)
            if self._done:
                await real(*given, **more)
            raise Killed

        return fails if name == self._call else real


class Late:
    """A pond on which something else happens before a certain call."""

    def __init__(self, pond: AsyncPond, call: str, first: Callable[[], Awaitable[object]], *, queue: str) -> None:
        self._pond = pond
        self._call = call
        self._queue = queue
        self._first = first

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._pond, name)

        async def late(*given: Any, **more: Any) -> Any:
            if given[0] == self._queue:
                await self._first()
            return await real(*given, **more)

        return late if name == self._call else real


class Killed(Exception):
    """The worker died there."""
