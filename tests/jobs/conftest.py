"""A pond in memory with a clock that is moved by hand, and what jobs need of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import pytest

from millpond import AsyncPond, NewItem, Retry
from millpond.clock import ManualClock
from millpond.jobs.control import list_jobs
from millpond.jobs.spec import JobSpec
from millpond.model import to_datetime, to_ms

START = "2026-03-02T08:00:00+00:00"  # a Monday


class Mill:
    """The pond, its clock, and a worker of few words."""

    def __init__(self, pond: AsyncPond, clock: ManualClock) -> None:
        self.pond = pond
        self.clock = clock

    @property
    def now(self) -> datetime:
        return to_datetime(self.clock.now())

    def pass_(self, seconds: float) -> None:
        self.clock.advance(round(seconds * 1000))

    def pass_until(self, instant: datetime) -> None:
        self.clock.advance(to_ms(instant) - self.clock.now())

    async def pass_in(self, queue: str, seconds: float) -> None:
        """Time passes, and the queue has noticed."""
        self.pass_(seconds)
        await self.pond.produce(queue, [NewItem(kind="none", delay="1000d")])

    async def work(self, queue: str = "jobs", *, result: Any = None, error: str | None = None, by: str = "w1") -> str:
        """Run the next job: well, or with that error. Returns its id."""
        [item] = await self.pond.lease(queue, client_id=by)
        if error is None:
            await self.pond.complete([item], queue=queue, result=result)
        else:
            await self.pond.retry([Retry(lease=item.lease, error=error)], queue=queue)
        return item.id

    async def commands(self, queue: str = "jobs") -> list[str | None]:
        return [job.command async for job in list_jobs(self.pond, queue)]


Act = Callable[[Mill], Awaitable[Any]]
Run = Callable[[Act], Any]


@pytest.fixture
def run() -> Run:
    """Runs what it is given on a new pond."""

    def begin(act: Act) -> Any:
        async def main() -> Any:
            clock = ManualClock(to_ms(datetime.fromisoformat(START)))
            async with AsyncPond(":memory:", clock=clock) as pond:
                return await act(Mill(pond, clock))

        return asyncio.run(main())

    return begin


def command(text: str = "true", **more: Any) -> JobSpec:
    return JobSpec(command=text, **more)
