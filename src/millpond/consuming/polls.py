"""A wait for items on the event loop that others can end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from millpond.model import LeasedItem

Back = Callable[[Sequence[LeasedItem]], None]


class Poll:
    """`back` is given what was leased for a caller that was cancelled in that moment."""

    def __init__(self, back: Back | None = None) -> None:
        self._back = back
        self._lease: asyncio.Task[Sequence[LeasedItem]] | None = None
        self._ended = False

    async def wait(self, lease: Callable[[], Coroutine[Any, Any, Sequence[LeasedItem]]]) -> Sequence[LeasedItem]:
        """Nothing once it was ended; what was leased just then comes nevertheless, or goes back."""
        if self._ended:
            return ()
        self._lease = task = asyncio.ensure_future(lease())
        try:
            return await task
        except asyncio.CancelledError:
            if self._was_ended():
                return ()
            if self._back is not None and task.done() and not task.cancelled() and task.exception() is None:
                self._back(task.result())
            raise
        finally:
            self._lease = None

    def end(self) -> None:
        """For ever."""
        self._ended = True
        if self._lease is not None:
            self._lease.cancel()

    def _was_ended(self) -> bool:
        """Rather than the caller cancelled."""
        caller = asyncio.current_task()
        return self._ended and not (caller is not None and caller.cancelling())
