"""Waits for jobs to end, for many who wait: one parked call a job, and few at a time.

A parked call of a client holds one of its connections, which its worker's leases need as well. Where there are more
jobs to wait for than calls, they take turns: those that stay for hours keep nobody from hearing of the others.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from millpond.api import Api
from millpond.errors import NotFound
from millpond.model import ENDED

PARKS_MAX = 32  # calls at a time, of the hundred connections that a client has
LONG_MAX = PARKS_MAX // 2  # of them that stay as long as they like: the others are there for who comes later
TURN_S = 1.0  # of each other one: the 256 links of a worker are through in 16 s, some dozens in 3 s


class _Park:
    __slots__ = ("task", "waiting")

    def __init__(self, task: asyncio.Task[bool]) -> None:
        self.task = task
        self.waiting = 0


class Parks:
    """The parked calls of one pond or client."""

    def __init__(self) -> None:
        self._parks: dict[tuple[str, str], _Park] = {}
        self._room = asyncio.Semaphore(PARKS_MAX)

    async def ended(self, api: Api, queue: str, item_id: str, wait: float) -> bool:
        """Whether it has ended, or gone, within `wait` seconds. Who has had no turn by then knows nothing."""
        key = queue, item_id
        park = self._parks.get(key)
        if park is None:
            park = self._parks[key] = _Park(asyncio.create_task(self._call(api, queue, item_id, wait)))
            park.task.add_done_callback(lambda _: self._forget(key, park))
        park.waiting += 1
        try:
            return await asyncio.shield(park.task)
        finally:
            park.waiting -= 1
            if not park.waiting:
                self._forget(key, park)
                park.task.cancel()

    def _forget(self, key: tuple[str, str], park: _Park) -> None:
        """Nobody comes to one that has ended, or is about to."""
        if self._parks.get(key) is park:
            del self._parks[key]

    async def _call(self, api: Api, queue: str, item_id: str, wait: float) -> bool:
        clock = asyncio.get_running_loop().time
        while wait > 0:
            came = clock()
            try:
                async with asyncio.timeout(wait):
                    await self._room.acquire()
            except TimeoutError:
                return False
            wait -= clock() - came
            turn = wait if len(self._parks) <= LONG_MAX else min(wait, TURN_S)
            wait -= turn  # by what was asked for: the pond may have another clock
            try:
                if (await api.get_item(queue, item_id, wait=max(0.0, turn))).state in ENDED:
                    return True
            except NotFound:
                return True
            finally:
                self._room.release()
        return False


_of_api: WeakKeyDictionary[Api, Parks] = WeakKeyDictionary()


def parks_of(api: Api) -> Parks:
    parks = _of_api.get(api)
    if parks is None:
        parks = _of_api[api] = Parks()
    return parks
