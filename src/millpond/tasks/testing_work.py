"""What a worker's services and its runner do, a step at a time, for tests: on the pond's loop, and never waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from random import Random
from typing import Any, Final

from millpond.api import Api
from millpond.clock import ManualClock
from millpond.errors import NotFound
from millpond.jobs import firing, links
from millpond.jobs.names import HELD, LINKS_QUEUE, SCHEDULES_QUEUE
from millpond.jobs.queues import is_job_queue
from millpond.model import LIST_LIMIT_MAX, TOKEN_BATCH_MAX, Item, LeasedItem, Retry, State, to_datetime, to_ms
from millpond.tasks.calling import Found, found_for, spec_of
from millpond.worker.delays import retry_delay
from millpond.worker.executors import Outcome, Running
from millpond.worker.reports import retry_of

LEASE_TIMEOUT: Final = "3600d"  # a test's clock stands still while a task runs, unless the task itself moves it


class Parked(Exception):
    """A link waits for a job that has not ended: nothing to do now."""


class NeverWaits:
    """An `Api` on which to wait for an item's end is to give up."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def get_item(self, queue: str, id: str, *, wait: float = 0) -> Item:
        if wait:
            raise Parked
        return await self._api.get_item(queue, id)


class TestingWork:
    __test__ = False  # for pytest

    def __init__(self, app: Found, clock: ManualClock) -> None:
        self._app = app
        self._clock = clock
        self._rng = Random(0)  # a test is the same every time

    def is_async(self, job: Running) -> bool:
        found = found_for(self._app, job)
        return found is not None and bool(found.is_async)

    # ---- the next job, and its end ----------------------------------------------------------------------------

    async def next(self, api: Api) -> Running | None:
        """Links and schedules first, as long as they move something."""
        while True:
            for queue in await self._queues(api):
                for item in await api.lease(queue, lease_timeout=LEASE_TIMEOUT):
                    return Running(item, queue, spec_of(item), float("inf"))
            if not await self._follow_links(api) and not await self._fire_schedules(api):
                return None

    async def end(self, api: Api, job: Running, outcome: Outcome) -> None:
        if found_for(self._app, job) is None and not outcome.dead:
            outcome = Outcome(ok=False, error=f"the app has nothing for {job.item.reference or job.item.kind!r}")
        if outcome.ok:
            await api.complete([job.item], queue=job.queue, result=outcome.result)
        else:
            delay = retry_delay(job.spec, job.item.attempts, self._rng)
            await api.retry([retry_of(job, outcome, delay)], queue=job.queue)

    async def _queues(self, api: Api) -> list[str]:
        """Those of the app, and those that were made for jobs."""
        known = {task.policy.queue for task in self._app.tasks.values()} | set(self._app.consumers)
        page = await api.list_queues(limit=LIST_LIMIT_MAX)
        return [info.name for info in page.queues if info.name in known or is_job_queue(info)]

    # ---- links and schedules ----------------------------------------------------------------------------------

    async def _follow_links(self, api: Api) -> int:
        quick: Any = NeverWaits(api)
        return await self._each(api, LINKS_QUEUE, links.LINK_LEASE, lambda item, now: links.follow(quick, item, now))

    async def _fire_schedules(self, api: Api) -> int:
        return await self._each(
            api, SCHEDULES_QUEUE, firing.SCHEDULE_LEASE, lambda item, now: firing.fire(api, item, now)
        )

    async def _each(self, api: Api, queue: str, lease: float, work: Callable[[LeasedItem, datetime], Any]) -> int:
        """How many of those that are due were moved by it. The others are kept until all were looked at."""
        moved = 0
        parked: list[LeasedItem] = []
        while items := await self._due(api, queue, lease):
            for item in items:
                try:
                    await work(item, to_datetime(self._clock.now()))
                    moved += 1
                except Parked:
                    parked.append(item)
        for start in range(0, len(parked), TOKEN_BATCH_MAX):
            back = [Retry(lease=item, intent="defer") for item in parked[start : start + TOKEN_BATCH_MAX]]
            await api.retry(back, queue=queue)
        return moved

    async def _due(self, api: Api, queue: str, lease: float) -> Sequence[LeasedItem]:
        try:
            return await api.lease(queue, batch=LIST_LIMIT_MAX, lease_timeout=lease)
        except NotFound:
            return []

    # ---- looking ----------------------------------------------------------------------------------------------

    async def next_due(self, api: Api) -> int | None:
        """The next instant at which something becomes due by itself."""
        found: list[int] = []
        for queue in [*await self._queues(api), LINKS_QUEUE, SCHEDULES_QUEUE]:
            for state in (State.SCHEDULED, State.RETRYING):
                found += [to_ms(item.enqueue_at) for item in await self.items(api, queue, state) if item.enqueue_at]
        later = [due for due in found if due > self._clock.now() and due < to_ms(HELD)]
        return min(later, default=None)

    async def items(self, api: Api, queue: str, state: State | None = None) -> list[Item]:
        found: list[Item] = []
        after: str | None = None
        try:
            while True:
                page = await api.list_items(queue, state=state, after=after, limit=LIST_LIMIT_MAX)
                found += page.items
                if page.next is None:
                    return found
                after = page.next
        except NotFound:
            return found
