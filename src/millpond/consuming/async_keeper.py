"""Keeps leases alive in the background of the event loop, and hands back what loops left: one task each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

from millpond.consuming.held import Held, Keeps
from millpond.consuming.keeper import log
from millpond.consuming.watch import Watch, half_of
from millpond.errors import Forbidden, MillpondError
from millpond.model import LeaseLike, Retry


class AsyncKeeper:
    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._loop = asyncio.get_running_loop()
        self._watch = Watch()
        self._wake = asyncio.Event()
        self._wakes_at = math.inf
        self._task: asyncio.Task[None] | None = None
        self._chores: set[asyncio.Task[None]] = set()
        self.closed = False

    def keep(self, item: Held, every: float | None = None) -> None:
        due = self._watch.add(item, every, self._loop.time())
        if self._task is None and not self.closed:
            self._task = self._loop.create_task(self._run())
        elif due < self._wakes_at:
            self._wake.set()

    def drop(self, item: Held) -> None:
        self._watch.remove(item)

    def forget(self, keeper: Keeps) -> None:
        self._watch.forget(keeper)

    def give_back(self, queue: str, items: list[Retry | LeaseLike]) -> None:
        """From a finalizer too, wherever that runs; if the loop has ended by then, the leases run out."""
        try:
            self._loop.call_soon_threadsafe(self._begin, queue, items)
        except RuntimeError:
            pass

    def give_back_late(self, queue: str, items: Coroutine[Any, Any, list[Retry | LeaseLike]]) -> None:
        """What a call brings whose caller has left."""
        self._spawn(self._give_back_late(queue, items))

    def _begin(self, queue: str, items: list[Retry | LeaseLike]) -> None:
        self._spawn(self._give_back(queue, items))

    def _spawn(self, chore: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def close(self, grace: float) -> None:
        """After what was given back is back, or the time for that is over."""
        self.closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await asyncio.sleep(0)  # what was given back a moment ago is begun
        await self.join(grace)
        self._watch.clear()

    async def join(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if self._chores:
            await asyncio.wait(self._chores, timeout=timeout)

    # ---- in the background --------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._wakes_at = due = self._watch.next_due()
            try:
                async with asyncio.timeout_at(None if due == math.inf else due):
                    await self._wake.wait()
            except TimeoutError:
                await self._measure()
                await self._extend()

    async def _measure(self) -> None:
        for queue, lot in self._watch.unmeasured(self._loop.time()):
            try:
                self._watch.measured(lot, half_of((await self._holder.queue_info(queue)).lease_timeout))
            except Forbidden:
                self._watch.measured(lot, None)
            except MillpondError as error:
                log.warning("how long the leases of %s are is not known: %s", queue, error)
                self._watch.failed(lot, error, self._loop.time())

    async def _extend(self) -> None:
        for queue, lease_timeout, lot in self._watch.due(self._loop.time()):
            items = [kept.item for kept in lot]
            try:
                results = await self._holder.extend(items, queue=queue, lease_timeout=lease_timeout)
            except MillpondError as error:
                log.warning("%d leases of %s were not extended: %s", len(lot), queue, error)
                self._watch.failed(lot, error, self._loop.time())
            else:
                self._watch.extended(lot, results, self._loop.time())

    async def _give_back(self, queue: str, items: list[Retry | LeaseLike]) -> None:
        try:
            await self._holder.retry(items, queue=queue)
        except MillpondError as error:  # they come back when their leases run out
            log.warning("%d items of %s were not given back: %s", len(items), queue, error)

    async def _give_back_late(self, queue: str, items: Coroutine[Any, Any, list[Retry | LeaseLike]]) -> None:
        try:
            back = await items
        except MillpondError as error:
            log.warning("what was leased from %s cannot be given back: %s", queue, error)
            return
        if back:
            await self._give_back(queue, back)
