"""A worker that is a guest of another process's pond: over a socket, and when the owner goes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import millpond
from millpond.jobs.queues import ensure_queue
from millpond.worker.executors import DONE
from millpond.worker.runner import Worker
from tests.worker.fakes import FakeExecutor, at_work, count_of, ended, put, task, until, until_state

pytestmark = pytest.mark.slow


def test_a_guest_runs_jobs_and_goes_on_when_the_owner_has_gone(tmp_path: Path) -> None:
    async def go() -> None:
        owner = millpond.open_async(tmp_path)
        await owner.open()
        ids = await put(owner, *[task() for _ in range(20)])
        await ensure_queue(owner, "idle")
        async with millpond.open_async(tmp_path) as guest:
            executor = FakeExecutor()
            worker = Worker(guest, [executor], slots=2, queues={"jobs": 1, "idle": 1})
            async with at_work(worker) as run:
                for _ in range(10):
                    executor.finish(await executor.next())
                job = await executor.next()
                await owner.close()
                executor.finish(job)
                for _ in range(9):
                    executor.finish(await executor.next())
                for item_id in ids:
                    await until_state(guest, item_id, "completed")
                worker.drain()
                assert (await ended(run)).finished == 20

    asyncio.run(go())


def test_what_a_draining_guest_has_leased_is_free_at_once(tmp_path: Path) -> None:
    async def go() -> None:
        async with millpond.open_async(tmp_path) as owner, millpond.open_async(tmp_path) as guest:
            await put(owner, *[task() for _ in range(50)])
            executor = FakeExecutor()
            worker = Worker(guest, [executor], slots=4)
            async with at_work(worker) as run:
                for _ in range(20):
                    executor.finish(await executor.next())
                worker.drain()
                executor.then = lambda job: DONE
                await asyncio.sleep(0)
                while executor.running:
                    executor.finish(next(iter(executor.running)))
                    await asyncio.sleep(0)
                over = await ended(run)
            await until(lambda: count_of(owner, "jobs", "leased"), lambda count: count == 0)
            assert await count_of(owner, "jobs", "completed") == over.finished

    asyncio.run(go())
