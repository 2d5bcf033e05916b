"""Many who wait for many jobs, with few calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.jobs import parking
from millpond.jobs.parking import PARKS_MAX, Parks
from millpond.model import State


class Slow:
    """Jobs that do not end, but for `quick`."""

    def __init__(self) -> None:
        self.calls = self.most = 0
        self.waits: list[float] = []
        self.full = asyncio.Event()

    async def get_item(self, queue: str, id: str, *, wait: float) -> Any:
        self.calls += 1
        self.most = max(self.most, self.calls)
        self.waits.append(wait)
        if self.calls == PARKS_MAX:
            self.full.set()
        try:
            if id == "quick":
                return SimpleNamespace(state=State.COMPLETED)
            await asyncio.sleep(wait)
            return SimpleNamespace(state=State.READY)
        finally:
            self.calls -= 1


def test_jobs_that_stay_for_long_keep_nobody_from_hearing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "TURN_S", 0.01)

    async def act() -> None:
        parks = Parks()
        api: Any = Slow()
        standing = [asyncio.create_task(parks.ended(api, "jobs", f"s{n}", 600)) for n in range(3 * PARKS_MAX)]
        await api.full.wait()
        async with asyncio.timeout(30):
            assert await parks.ended(api, "jobs", "quick", 600)
        assert api.most == PARKS_MAX
        for task in standing:
            task.cancel()
        await asyncio.gather(*standing, return_exceptions=True)

    asyncio.run(act())


def test_few_who_wait_ask_once() -> None:
    async def act() -> None:
        parks = Parks()
        api: Any = Slow()
        assert not await parks.ended(api, "jobs", "s", 0.02)
        assert len(api.waits) == 1

    asyncio.run(act())
