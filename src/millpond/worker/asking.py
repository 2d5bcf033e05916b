"""The lease loop of one queue: parked while the queue is empty, asleep while there is no room for more.

An ask that is thought to find items takes the room for them; one that waits at an empty queue takes none, and where
there are several queues asks for a single item, so that no queue keeps the others from their slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from random import Random

from millpond.api import Api
from millpond.consuming.pauses import Pauses
from millpond.errors import Forbidden, InvalidRequest, MillpondError, NotFound, Unauthorized
from millpond.jobs.queues import ensure_queue
from millpond.model import LEASE_BATCH_MAX, LeasedItem
from millpond.worker.dispatch import Dispatch
from millpond.worker.executors import Running
from millpond.worker.keeping import Keeper
from millpond.worker.queues import Source

log = logging.getLogger("millpond.worker")
ANSWER_S = 0.5  # an ask that finds items is answered long before
REFUSALS = (Unauthorized, Forbidden, InvalidRequest)  # that no waiting mends


class Asker:
    def __init__(
        self, api: Api, source: Source, dispatch: Dispatch, keeper: Keeper, client_id: str, wants: Callable[[], bool]
    ) -> None:
        """`wants`: whether anything may be leased at all just now."""
        self._api = api
        self._source = source
        self._dispatch = dispatch
        self._keeper = keeper
        self._client_id = client_id
        self._wants = wants
        self._pauses = Pauses(Random())
        self._room = asyncio.Event()
        self._ask: asyncio.Task[Sequence[LeasedItem]] | None = None
        self._worked = False
        self._stopped = False

    def look(self) -> None:
        """There may be room."""
        self._room.set()

    def withdraw(self) -> None:
        """What is asked for is not wanted any more."""
        if self._ask is not None:
            self._ask.cancel()

    def stop(self) -> None:
        """What is about to be answered is waited for, and goes back: an answer that nobody reads is leased for long."""
        self._stopped = True
        if self._source.hot and self._ask is not None:
            asyncio.get_running_loop().call_later(ANSWER_S, self.withdraw)
        else:
            self.withdraw()
        self._room.set()

    async def run(self) -> None:
        while not self._stopped:
            wanted = self._wanted()
            if not wanted:
                self._room.clear()
                await self._room.wait()
                continue
            try:
                await self._take(wanted)
            except MillpondError as error:
                await self._failed(error)

    def _wanted(self) -> int:
        if not self._wants():
            return 0
        slots = self._dispatch.slots
        slots.fade(asyncio.get_running_loop().time())
        places = int(min(slots.places, self._dispatch.left))  # what is given back goes to the tail
        wanted = self._dispatch.sources.wanted(self._source, places)
        return min(LEASE_BATCH_MAX, slots.batch_max(self._source.hot), wanted)

    async def _take(self, wanted: int) -> None:
        source, leases = self._source, self._dispatch.leases
        parked = not (source.hot and self._dispatch.sources.several)
        source.asked = wanted
        asked_at = asyncio.get_running_loop().time()
        try:
            items = await self._lease(wanted, leases.wait if parked else 0.0)
        finally:
            source.asked = 0
        self._worked = True
        self._pauses.reset()
        jobs = self._dispatch.judge(source.name, items, asked_at + leases.timeout)
        if jobs and not leases.is_fresh(jobs[0].deadline, asyncio.get_running_loop().time()):
            jobs = await self._renewed(jobs)
        if jobs:
            self._dispatch.take_in(source, jobs)
        source.hot = len(items) >= wanted

    async def _lease(self, batch: int, wait: float) -> Sequence[LeasedItem]:
        """Nothing if it is withdrawn."""
        timeout = self._dispatch.leases.timeout
        self._ask = task = asyncio.ensure_future(
            self._api.lease(self._source.name, batch=batch, wait=wait, lease_timeout=timeout, client_id=self._client_id)
        )
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            return ()
        finally:
            self._ask = None

    async def _renewed(self, jobs: list[Running]) -> list[Running]:
        """The answer was long on its way: only what is still ours is begun."""
        await self._keeper.extend(self._source.name, jobs)
        now = asyncio.get_running_loop().time()
        left = [job for job in jobs if job.ending is None]
        fresh = [job for job in left if self._dispatch.leases.is_fresh(job.deadline, now)]
        self._dispatch.leases.drop_all(set(left) - set(fresh))
        return fresh

    async def _failed(self, error: MillpondError) -> None:
        self._source.hot = False
        if isinstance(error, REFUSALS) and not self._worked:
            raise error
        if isinstance(error, NotFound) and await self._made():
            return
        log.warning("leasing from %s failed, and is tried again: %s", self._source.name, error)
        pause = self._pauses.next()
        try:
            async with asyncio.timeout(pause):
                while not self._stopped:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            pass

    async def _made(self) -> bool:
        """A queue that does not exist is made, if that is allowed: jobs may come."""
        try:
            await ensure_queue(self._api, self._source.name)
        except MillpondError as error:
            log.warning("the queue %s does not exist, and cannot be made: %s", self._source.name, error)
            return False
        return True
