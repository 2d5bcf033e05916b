"""`async for item in pond.consume(queue)`: as consume.py has it, on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Self

from millpond.consuming.async_keeper import AsyncKeeper
from millpond.consuming.consume import Consuming
from millpond.consuming.held import AsyncHeldItem, Holding, handed_back, held, left_by, left_without_a_word
from millpond.consuming.keeper import log
from millpond.consuming.pauses import Pauses
from millpond.consuming.polls import Poll
from millpond.errors import LeaseLost, MillpondError, Unavailable
from millpond.model import LeasedItem, LeaseLike, Retry

Lease = Callable[[int, float], Coroutine[Any, Any, Sequence[LeasedItem]]]
Every = Callable[[], Awaitable[float | None]]


class AsyncSource:
    """Where a loop's items come from. `every` is awaited with the first of them: a constructor cannot."""

    def __init__(self, lease: Lease, holding: Holding, every: Every, keeper: AsyncKeeper) -> None:
        self._lease = lease
        self._holding = holding
        self._ask_every = every
        self._every: float | None = None
        self._keeper = keeper
        self._pauses = Pauses(Random())
        self._poll = Poll(self._unwanted)
        self._begun = False
        self._worked = False
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        self._poll.end()

    def _unwanted(self, leased: Sequence[LeasedItem]) -> None:
        back: list[Retry | LeaseLike] = [Retry(lease=item, intent="defer") for item in leased]
        if back:
            self._keeper.give_back(self._holding.queue, back)

    async def more(self, batch: int, wait: float) -> Sequence[AsyncHeldItem]:
        """Once it has worked it outlives the queue's absence, but not the end of the client or pond itself."""
        if not self._begun:
            self._every, self._begun = await self._ask_every(), True
        try:
            leased = await self._poll.wait(partial(self._lease, batch, wait))
        except MillpondError as error:
            if not self._worked or not error.retryable or self._keeper.closed:
                raise
            log.warning("leasing from %s failed, and is tried again: %s", self._holding.queue, error)
            await asyncio.sleep(self._pauses.next())
            return ()
        self._worked = True
        self._pauses.reset()
        items = held(leased, AsyncHeldItem, self._holding)
        for item in items:
            self._holding.keeper.keep(item, self._every)
        return items


class AsyncConsumer:
    def __init__(self, consuming: Consuming, source: AsyncSource, keeper: AsyncKeeper) -> None:
        self._consuming = consuming
        self._source = source
        self._keeper = keeper
        self._waiting: deque[AsyncHeldItem] = deque()
        self._current: AsyncHeldItem | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncHeldItem:
        await self._complete_current()
        if not self._waiting and not self._source.stopped:
            self._waiting.extend(await self._more())
        if self._source.stopped or not self._waiting:
            await self.aclose()
            raise StopAsyncIteration
        self._current = item = self._waiting.popleft()
        return item

    async def run(self, handler: Callable[[AsyncHeldItem], Awaitable[Any]]) -> None:
        """Every item to the handler. What it raises is the item's failure; the next one is another matter."""
        async with self:
            async for item in self:
                try:
                    await handler(item)
                except Exception as error:
                    log.warning("item %s of %s failed: %s", item.id, item.queue, error, exc_info=error)
                    await self._fail(item, error)

    def stop(self) -> None:
        """The loop ends at its next step; the item in hand is completed as ever."""
        self._source.stop()

    async def aclose(self) -> None:
        """Gives back what is unfinished, the attempts too."""
        self._leave(left_by(self._current, None))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(left_by(self._current, error))

    def __del__(self) -> None:
        if self._current is not None or self._waiting:
            self._leave(left_without_a_word(self._current))

    def _leave(self, how: Retry | None) -> None:
        """Waits for nothing: the keeper does the call."""
        self._source.stopped = True
        current, rest = self._current, list(self._waiting)
        self._current = None
        self._waiting.clear()
        for item in rest if current is None else [current, *rest]:
            self._keeper.drop(item)
        back = handed_back(current, how, rest)
        if back:
            self._keeper.give_back(self._consuming.queue, back)

    async def _more(self) -> Sequence[AsyncHeldItem]:
        wait, idle = self._consuming.wait, self._consuming.idle
        clock = asyncio.get_running_loop().time
        begun = clock()
        while not self._source.stopped:
            left = None if idle is None else max(0.0, idle - (clock() - begun))
            items = await self._source.more(self._consuming.batch, wait if left is None else min(left, wait))
            if items:
                return items
            if left == 0.0:
                break
        return ()

    # ---- the item in hand ---------------------------------------------------------------------------------

    async def _complete_current(self) -> None:
        """It stays the loop's until that is over: whatever else ends the call leaves it to be handed back."""
        item = self._current
        if item is not None and not item.finished:
            try:
                await item.complete()
            except (LeaseLost, Unavailable) as error:  # it comes back, and is done again
                log.warning("item %s of %s was done, but not completed: %s", item.id, item.queue, error)
            finally:
                self._keeper.drop(item)
        self._current = None

    async def _fail(self, item: AsyncHeldItem, error: Exception) -> None:
        if item.finished:
            return
        try:
            await item.retry(error, delay=item.retry_delay)
        except (LeaseLost, Unavailable) as failure:  # it comes back when its lease runs out
            log.warning("item %s of %s was not handed back: %s", item.id, item.queue, failure)
        finally:
            self._keeper.drop(item)
        self._current = None  # lest asking for the next one completes it
