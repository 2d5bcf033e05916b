"""`async for item in pond.subscribe(queue)`: as subscribe.py has it, on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Protocol, Self

from millpond.consuming.async_consume import AsyncSource
from millpond.consuming.async_keeper import AsyncKeeper
from millpond.consuming.consume import WAIT_S
from millpond.consuming.held import AsyncHeldItem, Keeps
from millpond.consuming.subscribe import Places


class AsyncSubscription(Protocol):
    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> AsyncHeldItem: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def aclose(self) -> None:
        """What is unfinished goes back."""
        ...


class AsyncPlaces(Places):
    def __init__(self, keeper: Keeps, prefetch: int) -> None:
        super().__init__(keeper, prefetch)
        self._change = asyncio.Event()

    def changed(self) -> None:
        self._change.set()

    async def wait(self) -> int:
        """Until there is one."""
        while not self.free:
            self._change.clear()
            await self._change.wait()
        return self.free


class AsyncPrefetch:
    """The subscription of a pond. No generator: a loop that leaves it lets go at once, not when garbage is."""

    def __init__(self, queue: str, source: AsyncSource, places: AsyncPlaces, keeper: AsyncKeeper) -> None:
        self._queue = queue
        self._source = source
        self._places = places
        self._keeper = keeper
        self._waiting: deque[AsyncHeldItem] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncHeldItem:
        while not self._waiting and not self._source.stopped:
            self._waiting.extend(await self._source.more(await self._places.wait(), WAIT_S))
        if self._source.stopped:
            raise StopAsyncIteration
        return self._waiting.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """What is unfinished goes back."""
        self._source.stop()
        self._let_go()

    def _let_go(self) -> None:
        self._waiting.clear()
        back = self._places.clear()
        if back:
            self._keeper.forget(self._places)
            self._keeper.give_back(self._queue, back)

    def __del__(self) -> None:
        self._let_go()
