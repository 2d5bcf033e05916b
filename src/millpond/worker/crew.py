"""All that works for a worker while it runs: executors, lease loops, the keeper of leases, the reports."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any

from millpond.worker.asking import Asker
from millpond.worker.boss import Boss
from millpond.worker.dispatch import Dispatch
from millpond.worker.executors import Executor
from millpond.worker.keeping import Keeper
from millpond.worker.leases import Leases
from millpond.worker.queues import Sources
from millpond.worker.reports import Reports
from millpond.worker.restarts import pause, remembered
from millpond.worker.slots import Place, Slots

log = logging.getLogger("millpond.worker")
HOARD_S = 1.0  # items wait so long for a slot while no job ends; then another worker is to have them
SETTLE_S = 3.0  # to tell of what was ended by force
STOP_S = 15.0  # for an executor to stop by force


class Crew:
    def __init__(
        self,
        worker: Boss,
        executors: Sequence[Executor],
        slots: Slots,
        sources: Sources,
        leases: Leases,
        max_jobs: int | None,
    ) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._places = [Place(executor) for executor in executors]
        self.slots = slots
        self.sources = sources
        self.leases = leases
        self.reports = Reports(worker.api, self.leases, Random())
        self.dispatch = Dispatch(self._places, self.sources, self.slots, self.leases, self.reports, worker.hooks)
        self.dispatch.begun_max = math.inf if max_jobs is None else max_jobs
        self.dispatch.moved = self._moved
        self.dispatch.enough = lambda: worker.drain("max_jobs")
        self.dispatch.crashed = self._crashed
        self.reports.settled = worker.stir
        self._keeper = Keeper(worker.api, self.leases, self.dispatch)
        self._keeper.looked = self._look
        self._askers = [
            Asker(worker.api, source, self.dispatch, self._keeper, worker.incarnation, self._wants)
            for source in self.sources
        ]
        self._started: list[Place] = []
        self._stalled = False
        self._force_at: float | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self._chores: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    @property
    def running(self) -> int:
        return self.slots.taken

    @property
    def idle(self) -> bool:
        return not self._asking and self.dispatch.idle

    # ---- life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        for place in self._places:
            await place.executor.start()
            self._started.append(place)

    def begin(self) -> None:
        for asker in self._askers:
            self._spawn(asker.run(), self._asking)
        self._spawn(self._keeper.run(), self._chores)

    def drain(self, *, backlogs: bool = True) -> None:
        """What waits goes back; what executors keep in their backlogs only if it is not wanted to be run first."""
        self.dispatch.open = False
        for asker in self._askers:
            asker.stop()
        self.dispatch.give_back_waiting()
        if backlogs:
            self.dispatch.give_back_backlogs()

    def end_all(self) -> None:
        self._force_at = self._loop.time()
        self.dispatch.end_all()

    def ended_in_vain(self, grace: float) -> bool:
        """What was ended by force is still there after so long."""
        return self._force_at is not None and self._loop.time() - self._force_at > grace

    async def stop(self, *, force: bool) -> None:
        self.drain()
        for place in self._started:
            try:
                async with asyncio.timeout(STOP_S if force else None):
                    await place.executor.stop(force=force)
            except Exception as error:
                log.error("an executor did not stop: %r", error, exc_info=error)
        await asyncio.sleep(0)  # for what they told last
        await self.reports.settle(SETTLE_S if force else None)
        for task in [*self._asking, *self._chores]:
            task.cancel()
        await asyncio.gather(*self._asking, *self._chores, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = self._loop.create_task(work)
        tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self._failure = task.exception()
            self._worker.stir()

        task.add_done_callback(ended)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- room ---------------------------------------------------------------------------------------------------

    def _wants(self) -> bool:
        if not self.dispatch.open or all(place.down for place in self._places):
            return False
        return not (self._stalled and self.slots.full)

    def _moved(self) -> None:
        self._stalled = False
        for asker in self._askers:
            asker.look()
        if not self.dispatch.open:
            self._worker.stir()

    def _look(self) -> None:
        """All slots are taken, and no end in sight: what only waits here goes to who has time for it."""
        if self._stalled or not self.slots.full or self._loop.time() - self.slots.moved_at < HOARD_S:
            return
        self._stalled = True
        for asker in self._askers:
            asker.withdraw()
        self.dispatch.give_back_waiting()
        self.dispatch.give_back_backlogs()
        if self.slots.running < self.slots.count:  # an executor had begun less than it could: it may be about to
            self._moved()

    # ---- executors that crash -----------------------------------------------------------------------------------

    def _crashed(self, place: Place, error: Exception) -> None:
        if place.down:
            return
        place.down = True
        now = self._loop.time()
        place.crashes = [*remembered(place.crashes, now), now]
        self._spawn(self._restart(place), self._chores)

    async def _restart(self, place: Place) -> None:
        while place.down:
            wait = pause(place.crashes, self._loop.time())
            try:
                async with asyncio.timeout(STOP_S):
                    await place.executor.stop(force=True)
                log.warning("an executor is started again in %g s", wait)
                await asyncio.sleep(wait)
                await place.executor.start()
                place.down = False
            except Exception as error:
                log.error("an executor could not be started again: %r", error, exc_info=error)
                place.crashes.append(self._loop.time())
                await asyncio.sleep(wait)  # it may have failed at once
        self.dispatch.fill()
        self._moved()
