"""Compaction and retention: fewer files, fewer days, and not a row more or less than that."""

from __future__ import annotations

import asyncio
import math
import os
from datetime import date
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millpond import AsyncPond
from millpond.clock import ManualClock
from millpond.errors import DirectoryInUse, InvalidRequest
from millpond.history import upkeep
from millpond.history.lake import ROW_GROUP_ROWS, UPKEEP_LOCK, Lake, LakeFile, Span, read_about
from millpond.history.lookup import totals
from millpond.history.upkeep import compact, retain
from tests.history.ponds import do_some, export, told_by
from tests.history.told import Row, lake_rows

DAY_MS = 86_400_000


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


async def small_files(pond: AsyncPond, lake: Lake, clock: ManualClock, count: int = 8) -> list[Row]:
    """A lake of many small files over some days, and all its rows."""
    await pond.create_queue("a")
    await pond.create_queue("b", partitions=2)
    for seed in range(count):
        clock.advance(DAY_MS // 4)
        for queue in ("a", "b"):
            await do_some(pond, queue, seed=seed)
        await export(pond, lake)
    return lake_rows(lake)


def listed(lake: Lake) -> set[str]:
    return {str(file.path) for file in lake.files()}


def test_compaction_leaves_one_file_for_each_date_queue_and_partition(lake: Lake) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            rows = await small_files(pond, lake, clock)
            before = {queue: totals(lake, queue) for queue in ("a", "b")}
            done = compact(lake, grace=0)
            assert done.merged == done.removed > done.written
            places = [(file.date, file.queue, file.lane) for file in lake.files()]
            assert len(places) == len(set(places))
            assert lake_rows(lake) == rows == await told_by(pond, "a", "b")
            assert {queue: totals(lake, queue) for queue in ("a", "b")} == before
            for file in lake.files():
                about = read_about(pq.read_metadata(file.path))
                assert (about.from_turn, about.to_turn) == (file.span.from_turn, file.span.to_turn)
            again = compact(lake, grace=0)
            assert (again.merged, again.written, again.removed) == (0, 0, 0)
            await do_some(pond, "a", seed=99)
            await export(pond, lake)
            compact(lake, grace=0)
            assert lake_rows(lake) == await told_by(pond, "a", "b")

    asyncio.run(main())


def test_merged_files_stay_for_those_who_had_listed_them(lake: Lake) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            rows = await small_files(pond, lake, clock)
            early = listed(lake)
            compact(lake, grace=600)
            assert all(map(os.path.exists, early))
            assert lake_rows(lake) == rows
            assert compact(lake, grace=600).removed == 0
            merged = listed(lake) - early
            for path in merged:
                os.utime(path, (0, 0))  # as if it had been written long ago
            assert compact(lake, grace=600).removed == len(early - listed(lake))
            assert not any(map(os.path.exists, early - listed(lake)))
            assert lake_rows(lake) == rows

    asyncio.run(main())


def test_a_large_file_is_not_written_anew_for_each_small_one() -> None:
    """A file of 1 MiB a thousand times, compacted each time: what is written grows by the logarithm, not the square."""
    target, mib, rounds = 1 << 40, 1 << 20, 1_000
    files: list[LakeFile] = []
    written = 0
    for turn in range(1, rounds + 1):
        files.append(LakeFile("2031-05-07", "q", Span("i", 0, turn, turn), Path("f"), mib))
        for group in list(upkeep._groups(files, target)):
            merged = sum(file.size for file in group)
            written += merged
            span = Span("i", 0, group[0].span.from_turn, group[-1].span.to_turn)
            rest = [file for file in files if file not in group]
            files = sorted([*rest, LakeFile("2031-05-07", "q", span, Path("f"), merged)])
    assert len(files) <= math.log2(rounds) + upkeep.SMALL_BYTES / mib
    assert written <= rounds * mib * (math.log2(rounds) + upkeep.SMALL_BYTES / mib)


def test_files_grow_to_their_target_and_no_further(lake: Lake) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            rows = await small_files(pond, lake, clock)
            largest = max(file.size for file in lake.files())
            compact(lake, target_bytes=largest, grace=0)
            assert lake_rows(lake) == rows
            assert compact(lake, target_bytes=largest, grace=0).written == 0

    asyncio.run(main())


@pytest.mark.slow
def test_row_groups_stay_of_a_size_to_be_read_at_once(lake: Lake) -> None:
    async def main() -> None:
        async with AsyncPond(":memory:", clock=ManualClock()) as pond:
            await pond.create_queue("a")
            for _ in range(4):
                for _ in range(60):
                    await pond.produce("a", [b"x"] * 1_000)
                await export(pond, lake)
            compact(lake)
            [file] = lake.files()
            metadata = pq.read_metadata(file.path)
            assert metadata.num_rows == 240_000
            assert all(
                metadata.row_group(group).num_rows < 2 * ROW_GROUP_ROWS for group in range(metadata.num_row_groups)
            )

    asyncio.run(main())


def test_one_process_at_a_time_looks_after_a_lake(lake: Lake) -> None:
    with lake.locked(UPKEEP_LOCK, "looks after"):
        with pytest.raises(DirectoryInUse, match="looks after the history lake"):
            compact(lake)
        with pytest.raises(DirectoryInUse, match="looks after the history lake"):
            retain(lake, 7)


# ---- retention ------------------------------------------------------------------------------------------------


def test_retention_drops_whole_dates(lake: Lake) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            rows = await small_files(pond, lake, clock, 12)
            *old, last = lake.dates()
            done = retain(lake, 2, today=date.fromisoformat(last))
            assert done.dates == old[:-1]
            assert lake.dates() == [old[-1], last]
            assert lake_rows(lake) == [row for row in rows if row["at"].date().isoformat() >= old[-1]]
            assert retain(lake, 2, today=date.fromisoformat(last)).removed == 0
            assert not (lake.events / f"date={old[0]}").exists()

    asyncio.run(main())


@pytest.mark.parametrize("step", [None, "floor raised", "files dropped"])
def test_what_retention_dropped_is_not_exported_again(lake: Lake, step: str | None) -> None:
    """Also of a queue of which nothing is left, and when retention was cut short."""
    clock = ManualClock()

    class CutShort(Exception):
        pass

    def cut_short(reached: str) -> None:
        if reached == step:
            raise CutShort

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            await small_files(pond, lake, clock)
            today = date.fromisoformat("2099-01-01")
            if step is not None:
                with pytest.raises(CutShort):
                    retain(lake, 1, today=today, watch=cut_short)
                report = await export(pond, lake)
                assert (report.events, report.gaps, report.problems) == (0, [], [])
            retain(lake, 1, today=today)
            assert lake.files() == []
            report = await export(pond, lake)
            assert (report.events, report.gaps, report.problems) == (0, [], [])
            told = await told_by(pond, "a", "b")
            clock.advance(60_000)
            for queue in ("a", "b"):
                await do_some(pond, queue, seed=50)
            await export(pond, lake)
            assert lake_rows(lake) == [row for row in await told_by(pond, "a", "b") if row not in told]

    asyncio.run(main())


def test_what_is_not_the_lakes_is_left_alone(lake: Lake) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            await small_files(pond, lake, clock)
            notes = lake.events / f"date={lake.dates()[0]}" / "notes.txt"
            notes.write_text("mine")
            retain(lake, 1, today=date.fromisoformat("2099-01-01"))
            assert notes.read_text() == "mine"
            assert lake.files() == []

    asyncio.run(main())


@pytest.mark.parametrize("days", [0, -1, 10**6])
def test_a_number_of_days_that_makes_no_sense_is_refused(lake: Lake, days: int) -> None:
    with pytest.raises(InvalidRequest, match="days must be from 1"):
        retain(lake, days)
