"""Exports that are killed at every step: `python -m tests.history.doomed work|gaps DIRECTORY SEED`.

Each life is a fork: it works on the pond, then exports, or compacts, and kills itself when it comes to a step for the
n-th time. After each death the lake must be a beginning of what the journal tells, to the row; in the end it must be
all of it. Says `killed STEP` for each death.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

from millpond import AsyncPond
from millpond.clock import ManualClock
from millpond.history import lane_export, progress
from millpond.history.exporter import Exporter
from millpond.history.lake import Lake
from millpond.history.upkeep import compact
from millpond.queue import lane
from millpond.queue.state import QueueState
from tests.history.ponds import do_some, export, journal, told_by
from tests.history.told import Row, lake_rows, tell

EXPORT_STEPS = ("data written", "bookmark written", "bookmark named", "data named", "bookmarks settled")
MERGE_STEPS = ("merged file written", "merged file named", "small files removed")
GAP_STEP = "gap noted"
ROUNDS = 3  # deaths at each step, at least
KILLED = -signal.SIGKILL

Life = Callable[[], Coroutine[Any, Any, None]]


def live(life: Life) -> int:
    """In a process of its own; its exit code."""
    process = os.fork()
    if process == 0:
        try:
            asyncio.run(life())
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def survive(life: Life) -> None:
    assert live(life) == 0


def killer(step: str, times: int) -> Callable[[str], None]:
    """Kills the process when it comes to this step for the n-th time."""
    left = times

    def watch(reached: str) -> None:
        nonlocal left
        left -= reached == step
        if not left and reached == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return watch


class Doomed:
    def __init__(self, directory: Path, seed: int) -> None:
        self.lake = Lake(directory / "lake")
        self.data = directory / "data"
        self.counted = directory / "rows"  # how many there were after the last death
        self.rng = Random(seed)
        self.clock = ManualClock()
        self.lives = 0

    def pond(self) -> AsyncPond:
        """Each life is a minute later; within it time stands still."""
        self.clock.advance(60_000)
        return AsyncPond(self.data, clock=self.clock)

    async def create(self) -> None:
        async with self.pond() as pond:
            await pond.create_queue("letters")
            await pond.create_queue("q", partitions=2, dead_queue="letters", completed_retention="5m")

    async def work_and_export(self, step: str, times: int) -> None:
        async with self.pond() as pond:
            await do_some(pond, "q", 40, self.lives)
            await Exporter(pond, self.lake, file_events=1, watch=killer(step, times)).run_once(0.0)

    async def merge(self, step: str, times: int) -> None:
        compact(self.lake, grace=0, watch=killer(step, times))

    async def is_a_beginning(self) -> None:
        """Of each partition, what the lake has is what the journal tells first; and no less than it had."""
        async with self.pond() as pond:
            wanted = await told_by(pond, "q", "letters")
        found = lake_rows(self.lake)
        for lane_name in {place(row) for row in found}:
            mine = [row for row in found if place(row) == lane_name]
            assert mine == [row for row in wanted if place(row) == lane_name][: len(mine)], lane_name
        had = int(self.counted.read_text()) if self.counted.exists() else 0
        assert len(found) >= had, "rows that were there are gone"
        self.counted.write_text(str(len(found)))

    async def is_all(self) -> None:
        async with self.pond() as pond:
            await pond.stats("q")
            await pond.stats("letters")
            await export(pond, self.lake)
            assert lake_rows(self.lake) == await told_by(pond, "q", "letters")
            compact(self.lake, grace=0)
            assert lake_rows(self.lake) == await told_by(pond, "q", "letters")
            assert len(self.lake.files()) == len({place(row) for row in lake_rows(self.lake)})
        assert not list(self.lake.path.rglob(".*"))

    def die(self, step: str, times: int) -> None:
        self.lives += 1
        self.clock.advance(60_000 * self.rng.randint(0, 3))
        act = self.merge if step in MERGE_STEPS else self.work_and_export
        code = live(lambda: act(step, times))
        assert code in (0, KILLED)
        if code == KILLED:
            print("killed", step, flush=True)
        survive(self.is_a_beginning)

    # ---- gaps -------------------------------------------------------------------------------------------------

    async def flood_and_export(self, times: int) -> None:
        """So much that the oldest rows are trimmed before they are exported."""
        async with self.pond() as pond:
            for _ in range(150):
                await pond.produce("q", [b"x"])
            watch = killer(GAP_STEP, times) if times else lambda _: None
            await Exporter(pond, self.lake, watch=watch).run_once(0.0)
            left = await journal(pond, "q")
        [gap] = self.lake.gaps()
        assert (gap.from_turn, gap.to_turn) == (2, left[0].turn - 1)
        assert lake_rows(self.lake)[1:] == tell(left, gap.incarnation)

    async def produce_and_export(self) -> None:
        async with self.pond() as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"x"])
            await export(pond, self.lake)


def place(row: Row) -> tuple[str, int]:
    return row["incarnation"], row["partition"]


def work(doomed: Doomed) -> None:
    lane_export.ROW_GROUP_ROWS = 20  # type: ignore[attr-defined]  # so that a pass writes many files
    progress.WHOLE_ITEMS = 0  # and bookmarks build on each other
    survive(doomed.create)
    steps = [*EXPORT_STEPS, *MERGE_STEPS] * ROUNDS
    doomed.rng.shuffle(steps)
    for step in steps:
        doomed.die(step, 1 if step in MERGE_STEPS else doomed.rng.randint(1, 4))
    survive(doomed.is_all)


def gaps(doomed: Doomed) -> None:
    lane.SNAPSHOT_ROWS, lane.TRIM_INTERVAL_TURNS = 20, 10
    QueueState.journal_bytes = 2_000  # type: ignore[assignment, method-assign]
    survive(doomed.produce_and_export)
    for _ in range(2):
        assert live(lambda: doomed.flood_and_export(1)) == KILLED
        print("killed", GAP_STEP, flush=True)
    survive(lambda: doomed.flood_and_export(0))


if __name__ == "__main__":
    story, folder, seed = sys.argv[1:]
    {"work": work, "gaps": gaps}[story](Doomed(Path(folder), int(seed)))
