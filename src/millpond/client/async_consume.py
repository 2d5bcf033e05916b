"""`async for item in client.consume(queue)`: as consume.py has it, on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from millpond.client.async_keeper import AsyncKeeper
from millpond.client.consume import Consuming
from millpond.client.held import AsyncHeldItem, handed_back, left_by, left_without_a_word
from millpond.client.keeper import log
from millpond.client.retrying import Pauses
from millpond.client.watch import period
from millpond.errors import LeaseLost, MillpondError, Unavailable
from millpond.model import Retry

Lease = Callable[[float], Awaitable[Sequence[AsyncHeldItem]]]
Prepare = Callable[[], Awaitable[Consuming]]


class AsyncConsumer:
    """`prepare` is awaited with the first item: a constructor cannot."""

    def __init__(self, prepare: Prepare, lease: Lease, keeper: AsyncKeeper, pauses: Pauses) -> None:
        self._prepare = prepare
        self._lease = lease
        self._keeper = keeper
        self._pauses = pauses
        self._consuming: Consuming | None = None
        self._waiting: deque[AsyncHeldItem] = deque()
        self._current: AsyncHeldItem | None = None
        self._poll: asyncio.Future[Any] | None = None
        self._stopped = False
        self._worked = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncHeldItem:
        await self._complete_current()
        if self._consuming is None:
            self._consuming = await self._prepare()
        if not self._waiting and not self._stopped:
            self._waiting.extend(await self._more(self._consuming))
        if self._stopped or not self._waiting:
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
        self._stopped = True
        if self._poll is not None:
            self._poll.cancel()

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
        self._stopped = True
        current, rest = self._current, list(self._waiting)
        self._current = None
        self._waiting.clear()
        for item in rest if current is None else [current, *rest]:
            self._keeper.drop(item)
        back = handed_back(current, how, rest)
        if back and self._consuming is not None:
            self._keeper.give_back(self._consuming.queue, back)

    # ---- the item in hand ---------------------------------------------------------------------------------

    async def _complete_current(self) -> None:
        item, self._current = self._current, None
        if item is None or item.finished:
            return
        try:
            await item.complete()
        except (LeaseLost, Unavailable) as error:  # it comes back, and is done again
            self._keeper.drop(item)
            log.warning("item %s of %s was done, but not completed: %s", item.id, item.queue, error)

    async def _fail(self, item: AsyncHeldItem, error: Exception) -> None:
        if item.finished:
            return
        try:
            await item.retry(error, delay=item.retry_delay)
        except (LeaseLost, Unavailable) as failure:  # it comes back when its lease runs out
            self._keeper.drop(item)
            log.warning("item %s of %s was not handed back: %s", item.id, item.queue, failure)

    # ---- more items ---------------------------------------------------------------------------------------

    async def _more(self, consuming: Consuming) -> Sequence[AsyncHeldItem]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while not self._stopped:
            left = None if consuming.idle is None else max(0.0, consuming.idle - (loop.time() - begun))
            items = await self._leased(consuming, consuming.wait if left is None else min(left, consuming.wait))
            if items:
                self._keep(items, consuming)
                return items
            if left == 0.0:
                break
        return ()

    async def _leased(self, consuming: Consuming, wait: float) -> Sequence[AsyncHeldItem]:
        """A loop that has worked once outlives the server's absence."""
        try:
            items = await self._stoppable(self._lease(wait))
        except MillpondError as error:
            if not self._worked or not error.retryable:
                raise
            log.warning("leasing from %s failed, and is tried again: %s", consuming.queue, error)
            await asyncio.sleep(self._pauses.next())
            return ()
        self._worked = True
        self._pauses.reset()
        return items

    async def _stoppable(self, lease: Awaitable[Sequence[AsyncHeldItem]]) -> Sequence[AsyncHeldItem]:
        self._poll = poll = asyncio.ensure_future(lease)
        try:
            return await poll
        except asyncio.CancelledError:
            poll.cancel()
            if self._stopped:
                return ()
            raise
        finally:
            self._poll = None

    def _keep(self, items: Sequence[AsyncHeldItem], consuming: Consuming) -> None:
        every = period(items[0], consuming.lease_timeout)
        for item in items:
            item.completes_itself = True
            item.keep = None
            item.drop = self._keeper.drop
            self._keeper.keep(item, every)
