"""How commit threads tell the event loop that a job has ended.

`call_soon_threadsafe` does the same, by a socket that asyncio writes to and reads twice: 30 to 40 us of each turn. An
event descriptor of our own is written once and read once. Where there is none, it is `call_soon_threadsafe` after all.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Doorbell:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()  # no descriptor is written to that is closed, and may be another's by then
        self._descriptor = _event_descriptor()
        if self._descriptor is not None:
            loop.add_reader(self._descriptor, self._answer)

    def ring(self, call: Callable[..., None], *arguments: Any) -> None:
        """From any thread: have this called on the event loop."""
        with self._lock:
            if self._descriptor is None:
                self._loop.call_soon_threadsafe(call, *arguments)
            else:
                self._calls.append((call, arguments))
                os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Who rings from now on finds an event loop that is closed, or about to be."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                self._loop.remove_reader(descriptor)
                os.close(descriptor)

    def _answer(self) -> None:
        if self._descriptor is not None:
            os.eventfd_read(self._descriptor)
        while self._calls:
            call, arguments = self._calls.popleft()
            try:
                call(*arguments)
            except Exception as error:  # the others are called all the same
                self._loop.call_exception_handler({"message": "a job could not be finished", "exception": error})


def _event_descriptor() -> int | None:
    """Linux has them; a process may have no descriptor left."""
    try:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except (AttributeError, OSError):
        return None
