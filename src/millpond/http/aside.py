"""Work that would hold up the event loop, which answers everybody: in threads, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

THREADS_MAX = 2  # they share one interpreter: more would wait for each other, and hold more memory
ON_LOOP_ITEMS = 200  # a reply of so many is encoded in less time than a thread's turn takes
ON_LOOP_BYTES = 256 << 10  # and so is one of so many bytes of payload


class Aside:
    def __init__(self) -> None:
        self._places = asyncio.Semaphore(THREADS_MAX)

    async def run(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        async with self._places:
            return await asyncio.to_thread(work, *args, **options)
