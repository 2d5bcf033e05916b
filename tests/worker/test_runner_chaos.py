"""Everything at once, by chance: jobs that fail and are cancelled, a pond that comes and goes, workers that do."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import cast

import pytest
import uvloop

from millpond.api import Api
from millpond.embedded import AsyncPond
from millpond.model import State
from millpond.worker.executors import DEFERRED, DONE, Done, Outcome, Running, Why
from millpond.worker.runner import Worker
from tests.worker.fakes import Away, BacklogExecutor, FakeExecutor, put, task

pytestmark = pytest.mark.slow
JOBS = 400
SLOTS = 3


class Chaotic(FakeExecutor):
    def __init__(self, rng: Random, at_work: Counter[str]) -> None:
        super().__init__()
        self.rng = rng
        self.at_work = at_work
        self.loop = asyncio.get_running_loop()
        self.wrong: list[Running] = []  # that another worker has too, or may have

    def run(self, job: Running, done: Done) -> None:
        self.at_work[job.item.id] += 1
        if self.at_work[job.item.id] > 1 or job.deadline <= self.loop.time():
            self.wrong.append(job)
        self.running[job] = done
        self.most = max(self.most, len(self.running))
        pause = self.rng.choice([0.0, 0.0, 0.0, 0.001, 0.01, 0.5])
        self.loop.call_later(pause, self.over, job) if pause else self.over(job)

    def over(self, job: Running, outcome: Outcome | None = None) -> None:
        if job in self.running:
            self.at_work[job.item.id] -= 1
            kind = self.rng.random()
            chosen = DONE if kind < 0.6 else Outcome(ok=True, result=kind) if kind < 0.8 else None
            self.finish(job, outcome or chosen or Outcome(ok=False, error="\\udcff bad", delay=self.rng.random() / 20))

    def end(self, job: Running, why: Why) -> None:
        self.loop.call_soon(self.over, job, Outcome(ok=False, error=why))

    async def stop(self, *, force: bool) -> None:
        for job in list(self.running):
            self.over(job, DEFERRED)
        self.stops.append(force)


class ChaoticBacklog(Chaotic, BacklogExecutor):
    def take_back(self) -> list[Running]:
        kept = list(super().take_back())
        for job in kept:
            self.at_work[job.item.id] -= 1
        return kept


@pytest.mark.parametrize("seed", range(3))
def test_every_job_ends_once_whatever_happens(seed: int) -> None:
    """Replay a failure with: pytest tests/worker/test_runner_chaos.py -k '[SEED]'"""

    async def go() -> None:
        rng = Random(seed)
        async with AsyncPond(":memory:") as pond:
            ids = []
            for queue in ("jobs", "more"):
                ids += [(queue, item_id) for item_id in await put(pond, *[task() for _ in range(JOBS)], queue=queue)]
                await pond.update_queue(queue, max_attempts=0)
            trouble = asyncio.create_task(make_trouble(pond, away := Away(pond), ids, rng))
            at_work: Counter[str] = Counter()
            crews = [keep_working(away, rng, at_work, trouble) for _ in range(2)]
            async with asyncio.timeout(60):
                await asyncio.gather(*crews)
            for queue in ("jobs", "more"):
                counts = (await pond.stats(queue)).counts
                assert counts[State.COMPLETED] + counts[State.CANCELLED] == JOBS
                assert counts[State.CANCELLED] > 0
            assert set(at_work.values()) <= {0}

    uvloop.run(go())  # as workers do; time stands still in a turn of it, so what is looked at twice is the same instant


async def keep_working(away: Away, rng: Random, at_work: Counter[str], trouble: asyncio.Task[None]) -> None:
    """One worker after another, until there is nothing left to do."""
    while not trouble.done():
        executor = rng.choice([Chaotic, ChaoticBacklog])(rng, at_work)
        worker = Worker(
            cast(Api, away),
            [executor],
            queues={"jobs": 2, "more": 1},
            slots=SLOTS,
            lease_timeout=0.5,
            max_jobs=rng.choice([None, 50, 200]),
            services=False,
        )
        run = asyncio.create_task(worker.run(signals=False))
        await asyncio.wait([run, trouble], timeout=rng.uniform(0.1, 2), return_when=asyncio.FIRST_COMPLETED)
        rng.choice([worker.drain, worker.force])()
        over = await run
        assert over.left == 0
        assert not executor.running
        assert not executor.wrong
        assert executor.starts == 1
        assert isinstance(executor, BacklogExecutor) or executor.most <= SLOTS


async def make_trouble(pond: AsyncPond, away: Away, ids: list[tuple[str, str]], rng: Random) -> None:
    """Until all jobs have ended."""
    while True:
        away.away = rng.choice([set(), set(), {"lease"}, {"complete", "retry"}, {"extend"}, None])
        for queue, item_id in rng.sample(ids, 3):
            await pond.cancel(queue, [item_id])
        await asyncio.sleep(rng.choice([0.01, 0.1, 0.2, 0.7]))
        away.away = set()
        await asyncio.sleep(0.02)
        counts = [(await pond.stats(queue)).counts for queue in ("jobs", "more")]
        if sum(count[State.COMPLETED] + count[State.CANCELLED] for count in counts) == 2 * JOBS:
            return
