"""What a worker does beside its jobs: it tells that it lives, hears when it is to stop, fires schedules, follows links.

What each does is in `millpond.jobs`; here are the shells, which wait, try again and log. None of them keeps a job from
running: a queue that is away is asked again after a pause, and what the token does not allow is left to others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timedelta
from importlib import metadata
from random import Random

from millpond.api import Api
from millpond.consuming.pauses import Pauses
from millpond.errors import Forbidden, MillpondError, NotFound, Unauthorized
from millpond.jobs import firing, links, processes, workers
from millpond.jobs.names import LINKS_QUEUE, SCHEDULES_QUEUE
from millpond.jobs.queues import ensure_queue
from millpond.jobs.workers import RunningJob, WorkerInfo
from millpond.model import LeasedItem, Retry, to_datetime
from millpond.worker.boss import Boss
from millpond.worker.executors import Running

log = logging.getLogger("millpond.worker")
PARKED_S = 60.0  # a lease at an empty queue; it is asked for again then
SCHEDULES_AT_ONCE = 16  # each takes some milliseconds
SCHEDULES_GRACE_S = 1.0  # what is being fired is fired
LOOK_S = 1.0  # between looks at whether what the last heartbeat told is still so
REFUSED_S = 300.0  # until what the token did not allow is tried again: somebody may have changed that
REGISTER_S = 1.0  # for the first heartbeat, before the first job: who stops workers must see those that run one
LINKS = "links"  # the shell that follows them
GOODBYE_S = 3.0  # to say that the worker has gone, and give back what its services hold


class Services:
    def __init__(self, worker: Boss) -> None:
        self._worker = worker
        self._api = worker.api
        self._tasks: list[asyncio.Task[None]] = []
        self._schedules = Fed(
            worker, SCHEDULES_QUEUE, SCHEDULES_AT_ONCE, firing.SCHEDULE_LEASE, firing.fire, hands_back=False
        )
        self._links = Fed(worker, LINKS_QUEUE, links.LINKS_AT_ONCE, links.LINK_LEASE, links.follow, hands_back=True)
        self._beat = asyncio.Event()
        self._registered = asyncio.Event()
        self._told = 0  # running jobs, in the last heartbeat
        self._telling: asyncio.Task[None] | None = None  # a heartbeat on its way
        self._started_at = to_datetime(worker.clock.now())

    def start(self) -> None:
        shells = {
            "heartbeat": self._heartbeat,
            "leash": self._leash,
            "schedules": self._schedules.step,
            LINKS: self._links.step,
        }
        self._tasks = [asyncio.create_task(again_and_again(name, step), name=name) for name, step in shells.items()]

    async def registered(self) -> None:
        """Until others can see the worker, or that failed for once, or takes too long."""
        try:
            async with asyncio.timeout(REGISTER_S):
                await self._registered.wait()
        except TimeoutError:
            pass

    def beat(self) -> None:
        """At once: there is news."""
        self._beat.set()

    def drain(self) -> None:
        """Schedules are left to workers that stay. Links are not: jobs may wait for what still runs here, and there may
        be no other worker until that is forgotten.
        """
        self.beat()
        for task in self._tasks[1:]:
            if task.get_name() != LINKS:
                task.cancel()

    async def stop(self, *, farewell: bool = True) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(GOODBYE_S):
                await asyncio.gather(self._schedules.stop(grace=SCHEDULES_GRACE_S), self._links.stop(grace=0))
                if self._telling is not None:  # one that came after the farewell would take it back
                    await asyncio.gather(self._telling, return_exceptions=True)
                if farewell:
                    await workers.farewell(self._api, self._worker.incarnation)
        except (MillpondError, TimeoutError) as error:
            log.warning("the worker could not say that it has gone: %s", str(error) or f"no answer in {GOODBYE_S:g} s")

    async def _heartbeat(self) -> None:
        self._beat.clear()
        info = self.info()
        self._telling = asyncio.create_task(workers.heartbeat(self._api, info))
        try:
            await asyncio.shield(self._telling)
        finally:
            self._registered.set()
        self._told = info.running_count
        await self._news()

    async def _news(self) -> None:
        """Until the next heartbeat is due: at once if it is asked for, soon if other jobs run than were told.

        Looked at now and then, so that a worker with many short jobs does not tell of each.
        """
        until = asyncio.get_running_loop().time() + workers.HEARTBEAT
        before = self._told
        while (left := until - asyncio.get_running_loop().time()) > 0:
            try:
                async with asyncio.timeout(min(left, LOOK_S)):
                    await self._beat.wait()
                return
            except TimeoutError:
                now = self._worker.running
            if now != self._told and (now == before or not now or not self._told):  # idle or busy, or it stays so
                return
            before = now

    async def _leash(self) -> None:
        if await self._succeeded() or await workers.stop_asked(self._api, self._worker.incarnation):
            self._worker.drain("asked")
            await asyncio.Event().wait()  # one word is enough

    async def _succeeded(self) -> bool:
        """The one that this one replaces goes off the list, when this one is on it. Whether that was asked to stop."""
        if not self._worker.replaces:
            return False
        await self._registered.wait()
        asked = await workers.succeed(self._api, self._worker.replaces)
        self._worker.replaces = ""
        return asked

    def info(self) -> WorkerInfo:
        worker = self._worker
        now, instant = to_datetime(worker.clock.now()), asyncio.get_running_loop().time()
        return WorkerInfo(
            incarnation=worker.incarnation,
            host=worker.host,
            pid=worker.pid,
            name=worker.name,
            started_at=self._started_at,
            heartbeat_at=now,
            queues={name: max(1, round(weight)) for name, weight in worker.queues.items()},
            slots=worker.slots,
            running=_named(worker.jobs(), now, instant),
            running_count=worker.running,
            done=worker.finished,
            failed=worker.failed,
            status="draining" if worker.draining else "running",
            pool=worker.pool,
            version=_version(),
            process=processes.name_of(worker.pid),
        )


def _named(jobs: Iterable[Running], now: datetime, instant: float) -> list[RunningJob]:
    oldest = sorted(jobs, key=lambda job: job.started_at)[: workers.RUNNING_MAX]
    return [
        RunningJob(id=job.item.id, queue=job.queue, since=now - timedelta(seconds=max(0.0, instant - job.started_at)))
        for job in oldest
    ]


def _version() -> str:
    try:
        return metadata.version("millpond")
    except metadata.PackageNotFoundError:
        return ""


class Fed:
    """Works on the items of one of our own queues, as many at a time as it may, each by a call that ends its lease."""

    def __init__(
        self,
        worker: Boss,
        queue: str,
        at_once: int,
        lease_timeout: float,
        work: Callable[[Api, LeasedItem, datetime], Awaitable[object]],
        *,
        hands_back: bool,
    ) -> None:
        """`hands_back`: what is broken off is deferred here; else `work` sees to it."""
        self._worker = worker
        self._api = worker.api
        self._queue = queue
        self._free = at_once
        self._lease_timeout = lease_timeout
        self._work = work
        self._hands_back = hands_back
        self._in_hand: set[asyncio.Task[None]] = set()

    async def step(self) -> None:
        if not self._free:
            await asyncio.wait(self._in_hand, return_when=asyncio.FIRST_COMPLETED)
            return
        try:
            items = await self._api.lease(
                self._queue,
                batch=self._free,
                wait=PARKED_S,
                lease_timeout=self._lease_timeout,
                client_id=self._worker.incarnation,
            )
        except NotFound:
            await self._make_queue()
            return
        for item in items:
            self._free -= 1
            task = asyncio.create_task(self._one(item))
            self._in_hand.add(task)
            task.add_done_callback(self._ended)

    async def _make_queue(self) -> None:
        try:
            await ensure_queue(self._api, self._queue)
        except NotFound as error:  # this one may not make it
            raise Forbidden(error.message) from None

    async def _one(self, item: LeasedItem) -> None:
        try:
            await self._work(self._api, item, to_datetime(self._worker.clock.now()))
        except asyncio.CancelledError:
            if self._hands_back:
                await self._api.retry([Retry(lease=item, intent="defer")], queue=self._queue)
            raise
        except MillpondError as error:  # its lease runs out, and another worker has it
            log.warning("an item of %s could not be worked on: %s", self._queue, error, extra={"id": item.id})
        except Exception as error:
            log.error("an item of %s could not be worked on: %r", self._queue, error, exc_info=error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._free += 1
        self._in_hand.discard(task)

    async def stop(self, grace: float) -> None:
        """What is in hand and not done soon goes to another worker."""
        if grace and self._in_hand:
            await asyncio.wait(self._in_hand, timeout=grace)
        for task in self._in_hand:
            task.cancel()
        await asyncio.gather(*self._in_hand, return_exceptions=True)


async def again_and_again(name: str, step: Callable[[], Awaitable[None]]) -> None:
    """Until it is cancelled. What the token does not allow is said once, and then only looked at now and then."""
    pauses = Pauses(Random())
    refused = False
    while True:
        try:
            await step()
            pauses.reset()
            refused = False
            continue
        except (Forbidden, Unauthorized) as error:
            if not refused:
                log.info("%s: left to other workers, for this one's token does not allow it: %s", name, error)
            refused = True
            await asyncio.sleep(REFUSED_S)
            continue
        except MillpondError as error:
            log.warning("%s: failed, and is tried again: %s", name, error)
        except Exception as error:
            log.error("%s: failed, and is tried again: %r", name, error, exc_info=error)
        await asyncio.sleep(pauses.next())
