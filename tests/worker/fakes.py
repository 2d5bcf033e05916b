"""An executor whose jobs end when the test says so, and a pond that can be away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from millpond.api import Api
from millpond.embedded import AsyncPond
from millpond.errors import Unavailable
from millpond.jobs.queues import ensure_queue
from millpond.jobs.spec import JobSpec, encode
from millpond.model import NewItem, Retry
from millpond.worker.executors import DEFERRED, DONE, Done, Outcome, Running, Why
from millpond.worker.runner import Ended, Worker

T = TypeVar("T")
PATIENCE_S = 5.0  # for what should come at once


class FakeExecutor:
    """Accepts tasks. With `then`, each job ends at once with what that says; else when `finish` is called."""

    def __init__(self, then: Callable[[Running], Outcome] | None = None) -> None:
        self.then = then
        self.begun: asyncio.Queue[Running] = asyncio.Queue()
        self.ended: asyncio.Queue[tuple[Running, Why]] = asyncio.Queue()
        self.extensions: asyncio.Queue[Running] = asyncio.Queue()
        self.running: dict[Running, Done] = {}
        self.most = 0
        self.starts = 0
        self.stops: list[bool] = []
        self.stubborn = False  # does not end when it is told to

    def accepts(self, job: Running) -> bool:
        return job.spec is not None and job.spec.task is not None and job.spec.task != "unknown"

    async def start(self) -> None:
        self.starts += 1

    async def stop(self, *, force: bool) -> None:
        self.stops.append(force)
        if force and not self.stubborn:
            for job in list(self.running):
                self.finish(job, DEFERRED)

    def run(self, job: Running, done: Done) -> None:
        self.running[job] = done
        self.most = max(self.most, len(self.running))
        self.begun.put_nowait(job)
        if self.then is not None:
            self.finish(job, self.then(job))

    def finish(self, job: Running, outcome: Outcome = DONE) -> None:
        self.running.pop(job)(job, outcome)

    def extended(self, job: Running) -> None:
        self.extensions.put_nowait(job)

    def end(self, job: Running, why: Why) -> None:
        self.ended.put_nowait((job, why))
        if not self.stubborn:
            self.finish(job, Outcome(ok=False, error="ended"))

    async def next(self) -> Running:
        return await asyncio.wait_for(self.begun.get(), PATIENCE_S)

    async def next_ended(self) -> tuple[Running, Why]:
        return await asyncio.wait_for(self.ended.get(), PATIENCE_S)


class BacklogExecutor(FakeExecutor):
    begins = 1  # of those that it has; the others are its backlog

    def take_back(self) -> Sequence[Running]:
        kept = list(self.running)[self.begins :]
        for job in kept:
            del self.running[job]
        return kept


class Away:
    """A pond whose calls fail while it is `away`, all or those named."""

    def __init__(self, pond: Api) -> None:
        self._pond = pond
        self.away: set[str] | None = set()
        self.refused: asyncio.Queue[str] = asyncio.Queue()

    def __getattr__(self, name: str) -> Any:
        call: Callable[..., Awaitable[Any]] = getattr(self._pond, name)

        async def made(*args: Any, **named: Any) -> Any:
            if self.away is None or name in self.away:
                self.refused.put_nowait(name)
                raise Unavailable("the pond is away; try again")
            return await call(*args, **named)

        return made


def task(name: str = "noop", **spec: Any) -> NewItem:
    return NewItem(payload=encode(JobSpec(task=name, **spec)), kind="task", reference=name)


async def put(pond: AsyncPond, *items: NewItem, queue: str = "jobs") -> list[str]:
    await ensure_queue(pond, queue)
    return [one.id for one in await pond.produce(queue, list(items))]


@asynccontextmanager
async def at_work(worker: Worker) -> AsyncIterator[asyncio.Task[Ended]]:
    """The worker runs beside the test, and is ended with it."""
    run = asyncio.create_task(worker.run(signals=False))
    try:
        yield run
    finally:
        worker.force()
        await asyncio.gather(run, return_exceptions=True)


async def ended(run: asyncio.Task[Ended]) -> Ended:
    return await asyncio.wait_for(asyncio.shield(run), PATIENCE_S)


async def until(look: Callable[[], Awaitable[T]], wanted: Callable[[T], bool]) -> T:
    """No call tells of it, so it is looked at with every turn of the loop."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await look()
            if wanted(found):
                return found
            await asyncio.sleep(0)


async def until_state(pond: AsyncPond, item_id: str, state: str, queue: str = "jobs") -> Any:
    return await until(lambda: pond.get_item(queue, item_id), lambda item: item.state == state)


async def count_of(pond: AsyncPond, queue: str, state: str) -> int:
    return (await pond.stats(queue)).counts[state]


async def lease_given_back(pond: AsyncPond, count: int, queue: str = "jobs") -> int:
    """How many can be leased once some are there; they are given back again."""
    found = await pond.lease(queue, batch=count, wait=PATIENCE_S)
    await pond.retry([Retry(lease=item, intent="defer") for item in found], queue=queue)
    return len(found)
