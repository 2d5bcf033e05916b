"""An attempt's state document, written through the worker's own connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any, Final

from millpond.api import Api
from millpond.errors import Forbidden, LeaseLost, MillpondError, NotFound
from millpond.model import LeasedItem
from millpond.tasks.context import PROGRESS
from millpond.tasks.portal import Portal

LAST_S: Final = 1.0  # for the last progress of an attempt that failed: its report waits for it
PROGRESS_EVERY_S: Final = 0.5  # a person looks at it: more writes than that only cost commits


class ItemNotes:
    """Of one delivery. What is written is written on the portal's loop, one write at a time."""

    def __init__(self, item: LeasedItem, queue: str, portal: Portal) -> None:
        self.cancelled = False
        self._item = item
        self._queue = queue
        self._portal = portal
        self._writes: Writes | None = None

    @property
    def doc(self) -> Any:
        return self._item.state_doc if self._writes is None else self._writes.doc

    def progress(self, progress: dict[str, Any]) -> None:
        writes = self._started()
        if self._portal.inline:
            self._portal.call(lambda api: writes.write_progress(api, progress))
            return
        writes.latest.append(progress)
        if not writes.progress_asked:
            writes.progress_asked = True
            self._portal.soon(writes.begin)

    def write(self, state: Mapping[str, Any]) -> None:
        writes = self._started()
        self._portal.call(lambda api: writes.write_state(api, state))
        self.cancelled = self.cancelled or writes.cancelled

    async def write_async(self, state: Mapping[str, Any]) -> None:
        writes = self._started()
        await self._portal.call_async(lambda api: writes.write_state(api, state))
        self.cancelled = self.cancelled or writes.cancelled

    def max_attempts(self) -> int | None:
        return self._portal.call(self._max_attempts)

    async def max_attempts_async(self) -> int | None:
        return await self._portal.call_async(self._max_attempts)

    async def _max_attempts(self, api: Api) -> int | None:
        try:
            return (await api.get_item(self._queue, self._item.id)).max_attempts
        except (Forbidden, NotFound):
            return None

    def ended(self) -> None:
        """On the portal's loop: what was not written yet is of no interest any more, unless `last` asks for it."""
        if self._writes is not None:
            self._writes.end()

    def last(self) -> Coroutine[Any, Any, None] | None:
        """On the portal's loop, once it has ended: writes the progress that was not written yet, if there is any."""
        writes = self._writes
        return writes.write_last(self._portal.api) if writes is not None and writes.unwritten else None

    def _started(self) -> Writes:
        if self._writes is None:
            self._writes = Writes(self._item, self._queue)
        return self._writes


class Writes:
    """Begun with the first write: most attempts write nothing."""

    def __init__(self, item: LeasedItem, queue: str) -> None:
        self.doc: Any = item.state_doc
        self.cancelled = False
        self.latest: deque[dict[str, Any]] = deque(maxlen=1)  # progress that is not written yet
        self.progress_asked = False
        self._version = item.state_version
        self._lease = item.lease
        self._queue = queue
        self._one = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = False

    async def write_state(self, api: Api, state: Mapping[str, Any]) -> None:
        async with self._one:
            kept = {PROGRESS: self.doc[PROGRESS]} if isinstance(self.doc, dict) and PROGRESS in self.doc else {}
            await self._write(api, {**state, **kept})

    async def write_progress(self, api: Api, progress: dict[str, Any]) -> None:
        """A document that is no dict is somebody else's, and left as it is."""
        async with self._one:
            if self.doc is None or isinstance(self.doc, dict):
                await self._write(api, {**(self.doc or {}), PROGRESS: progress})

    async def _write(self, api: Api, doc: Any) -> None:
        written = await api.write_state(self._lease, doc, version=self._version, queue=self._queue)
        self.doc, self._version = doc, written.version
        self.cancelled = self.cancelled or written.cancelled

    # ---- progress, on the loop: the latest, now and then ------------------------------------------------------

    def begin(self, api: Api) -> None:
        """Tasks add to `latest` meanwhile: who finds `progress_asked` unset asks again."""
        self._timer = None
        if self._over:
            return
        if not self.latest:
            self.progress_asked = False
            if not self.latest:
                return
            self.progress_asked = True
        self._task = asyncio.ensure_future(self._progress(api, self.latest.pop()))

    async def _progress(self, api: Api, progress: dict[str, Any]) -> None:
        try:
            await self.write_progress(api, progress)
        except LeaseLost:
            self._over = True
        except MillpondError:
            pass  # the next one tells more
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_EVERY_S, self.begin, api)

    @property
    def unwritten(self) -> bool:
        return bool(self.latest) or (self._task is not None and not self._task.done())

    async def write_last(self, api: Api) -> None:
        try:
            async with asyncio.timeout(LAST_S):
                if self._task is not None:
                    await asyncio.wait([self._task])
                if self.latest:
                    await self.write_progress(api, self.latest.pop())
        except (MillpondError, TimeoutError):
            pass  # the error is what counts

    def end(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
