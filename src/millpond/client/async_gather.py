"""Calls of many tasks on their way as one: what is asked for while a request is under way goes with the next.

A call on its own is sent in the loop's next pass, with all that were made in this one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

from millpond.client.asks import Ask
from millpond.client.faults import twin
from millpond.client.merging import Part, is_somebodys, merged, split, take
from millpond.errors import MillpondError, OutcomeUnknown, Unavailable

Call = Callable[[Ask[Any], float], Awaitable[Any]]


class AsyncCaller:
    __slots__ = ("deadline", "part", "reply", "sent")

    def __init__(self, part: Part, deadline: float, reply: asyncio.Future[Sequence[Any] | None]) -> None:
        self.part = part
        self.deadline = deadline
        self.reply = reply  # None: send your own
        self.sent = False


class AsyncGather:
    def __init__(self, linger: float) -> None:
        self._linger = linger
        self._waiting: dict[Hashable, deque[AsyncCaller]] = {}  # an entry for each key that has a request under way
        self._flights: set[asyncio.Task[None]] = set()

    async def submit(self, part: Part, deadline: float, call: Call) -> Sequence[Any]:
        loop = asyncio.get_running_loop()
        caller = AsyncCaller(part, deadline, loop.create_future())
        waiting = self._waiting.get(part.key)
        if waiting is None:
            waiting = self._waiting[part.key] = deque()
            flights = loop.create_task(self._fly(part.key, waiting, call))
            self._flights.add(flights)
            flights.add_done_callback(self._flights.discard)
        waiting.append(caller)
        try:
            async with asyncio.timeout_at(deadline):
                share = await caller.reply
        except TimeoutError:
            raise _late(caller) from None
        if share is None:
            share = await call(part.ask(), deadline)
        return share

    async def _fly(self, key: Hashable, waiting: deque[AsyncCaller], call: Call) -> None:
        try:
            if self._linger:
                await asyncio.sleep(self._linger)
            while waiting:
                callers = [caller for caller in take(waiting) if not caller.reply.done()]
                if callers:
                    await self._one(callers, call)
        finally:
            del self._waiting[key]
            for caller in waiting:
                caller.reply.cancel()

    async def _one(self, callers: list[AsyncCaller], call: Call) -> None:
        parts = [caller.part for caller in callers]
        for caller in callers:
            caller.sent = True
        try:
            shares = split(parts, await call(merged(parts), max(caller.deadline for caller in callers)))
        except MillpondError as error:
            alone = len(callers) > 1 and is_somebodys(error)
            for caller in _unanswered(callers):
                caller.reply.set_result(None) if alone else caller.reply.set_exception(twin(error))
        except Exception as bug:
            for caller in _unanswered(callers):
                caller.reply.set_exception(bug)
        else:
            for caller, share in zip(callers, shares, strict=True):
                if not caller.reply.done():
                    caller.reply.set_result(share)
        finally:
            for caller in _unanswered(callers):
                caller.reply.cancel()

    async def close(self) -> None:
        if self._flights:
            await asyncio.wait(self._flights)


def _unanswered(callers: list[AsyncCaller]) -> list[AsyncCaller]:
    return [caller for caller in callers if not caller.reply.done()]


def _late(caller: AsyncCaller) -> Unavailable:
    if not caller.sent:
        return Unavailable("the call was not sent in time: those before it took too long; try again")
    return OutcomeUnknown("no answer came in time; raise timeout=, or look whether it took effect")
