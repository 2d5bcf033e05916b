"""The exporter: every turn of every partition is in the lake once, whatever comes in between."""

from __future__ import annotations

import asyncio
import logging
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from millpond import AsyncClient, AsyncPond, NewItem
from millpond.clock import ManualClock
from millpond.errors import DirectoryInUse, DiskFull, InvalidRequest, NotFound, Unavailable
from millpond.history import exporter, progress
from millpond.history.exporter import RESTING_S, Exporter, SyncReport, sync
from millpond.history.known import PIECES_MAX
from millpond.history.lake import EXPORT_LOCK, ITEM_EVENT_SCHEMA, UPKEEP_LOCK, Gap, Lake, read_about
from millpond.history.lookup import totals
from millpond.model import JournalPage, QueuePage
from millpond.queue import lane
from millpond.queue.state import QueueState
from tests.client.served import serve
from tests.history.ponds import do_some, export, journal, told_by
from tests.history.told import lake_rows, tell

MIDNIGHT = 1_999_987_200_000  # 2033-05-18


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def clock() -> ManualClock:
    """It stands still: nothing falls due between an export and the look at what it should have."""
    return ManualClock()


def names(lake: Lake) -> list[str]:
    return [str(file.path.relative_to(lake.events)) for file in lake.files()]


def litter(lake: Lake) -> list[str]:
    """Files that a finished export should not leave."""
    return [path.name for path in lake.path.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"]


# ---- all of it, once ----------------------------------------------------------------------------------------


def test_a_first_export_has_all_that_the_journals_tell(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("mail/out", partitions=3)
            await pond.create_queue("q")
            await do_some(pond, "mail/out", 60)
            await do_some(pond, "q", 60)
            report = await sync(pond, lake.path)
            rows = lake_rows(lake)
            assert rows == await told_by(pond, "mail/out", "q")
            assert report.events == len(rows) == sum(one.events for one in report.queues.values())
            assert report.files == len(names(lake))
            assert report.bytes == sum(file.size for file in lake.files())
            assert (report.gaps, report.problems, litter(lake)) == ([], [], [])

    asyncio.run(main())


@pytest.mark.parametrize("whole_items", [0, 1_000])
def test_later_exports_go_on_where_the_last_one_ended(
    lake: Lake, data: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, whole_items: int
) -> None:
    """With bookmarks that hold all that is known, and with such that build on each other."""
    monkeypatch.setattr(progress, "WHOLE_ITEMS", whole_items)

    async def main() -> None:
        for seed in range(6):
            async with AsyncPond(data, clock=clock) as pond:
                if seed == 0:
                    await pond.create_queue("q", partitions=2, completed_retention="1h")
                if seed == 3:
                    await pond.create_queue("later")
                clock.advance(60_000)
                for queue in ["q"] if seed < 3 else ["q", "later"]:
                    await do_some(pond, queue, 20, seed)
                    await export(pond, lake, file_events=10)
                again = await export(pond, lake)
                assert (again.events, again.files) == (0, 0)
                assert lake_rows(lake) == await told_by(pond, *(["q"] if seed < 3 else ["q", "later"]))

    asyncio.run(main())


def test_one_exporter_that_goes_on_writes_what_many_write(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            going = Exporter(pond, lake)
            for seed in range(5):
                clock.advance(60_000)
                await do_some(pond, seed=seed)
                await going.run_once(float(seed))
                assert lake_rows(lake) == await told_by(pond, "q")

    asyncio.run(main())


def test_the_lakes_counts_are_the_engines_own(lake: Lake, data: Path, clock: ManualClock) -> None:
    """Busy queues, exported while they work: once they rest, every total is the same."""

    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("letters")
            await pond.create_queue("q", partitions=3, dead_queue="letters", max_attempts=2, backoff={"base": 0})
            stop = asyncio.Event()
            following = asyncio.create_task(sync(pond, lake.path, follow=True, interval=0.001, stop=stop))
            await asyncio.gather(*(do_some(pond, items=150, seed=seed) for seed in range(4)), claim_some(pond))
            stop.set()
            await following
            await sync(pond, lake.path)
            for queue in ("q", "letters"):
                mine, own = totals(lake, queue), (await pond.stats(queue)).totals
                assert {name: count for name, count in mine.items() if count} == own
            assert lake_rows(lake) == await told_by(pond, "q", "letters")

    asyncio.run(main())


async def claim_some(pond: AsyncPond) -> None:
    for number in range(20):
        await pond.stage("q", f"t{number}", "0", [b"staged"] * 5)
        await pond.publish_stage("q", f"t{number}", ["0"])
        claim = await pond.claim("q", f"c{number}", max_items=7, wait="1s", owner="spark")
        if claim.items:
            await (pond.complete_claim if number % 3 else pond.release_claim)("q", f"c{number}")


def test_files_are_cut_at_their_size_and_named_by_their_turns(
    lake: Lake, data: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.history.lane_export.ROW_GROUP_ROWS", 100)

    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            for _ in range(20):
                await pond.produce("q", [b"x"] * 50)
            report = await export(pond, lake, file_events=200)
            assert report.files == 5
            spans = [file.span for file in lake.files()]
            assert [(span.from_turn, span.to_turn) for span in spans] == [(1, 4), (5, 8), (9, 12), (13, 16), (17, 20)]
            for file in lake.files():
                about = read_about(pq.read_metadata(file.path))
                assert (about.queue, about.from_turn, about.to_turn) == ("q", file.span.from_turn, file.span.to_turn)
                assert about.counts == {"produced": 200}
                assert pq.read_schema(file.path).equals(ITEM_EVENT_SCHEMA)
            assert lake_rows(lake) == await told_by(pond, "q")

    asyncio.run(main())


def test_a_file_holds_one_date(lake: Lake, data: Path, clock: ManualClock) -> None:
    clock.advance(MIDNIGHT - 1_500 - clock.now())

    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            for _ in range(6):
                await pond.produce("q", [b"x"])
                clock.advance(500)
            await export(pond, lake)
            assert [(file.date, file.span.from_turn, file.span.to_turn) for file in lake.files()] == [
                ("2033-05-17", 1, 3),
                ("2033-05-18", 4, 6),
            ]
            assert lake_rows(lake) == await told_by(pond, "q")

    asyncio.run(main())


def test_turns_that_change_no_state_are_not_read_again_and_not_missed(
    lake: Lake, data: Path, clock: ManualClock
) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"x"])
            [item] = await pond.lease("q")
            await export(pond, lake)
            for _ in range(5):
                await pond.extend([item], lease_timeout="1m")
            report = await export(pond, lake)
            assert (report.events, report.files) == (0, 0)
            [bookmark] = lake.state.glob("*.known")
            assert int(bookmark.stem.rpartition("-")[2]) == (await journal(pond, "q"))[-1].turn
            await pond.complete([item])
            await export(pond, lake)
            assert lake_rows(lake) == await told_by(pond, "q")
            assert names(lake)[-1].endswith("-000000000008-000000000008.parquet")

    asyncio.run(main())


def test_chosen_queues_alone_are_exported(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            for name in ("a", "b"):
                await pond.create_queue(name)
                await do_some(pond, name)
            await sync(pond, lake.path, queues=["b"])
            assert lake_rows(lake) == await told_by(pond, "b")
            with pytest.raises(NotFound):
                await sync(pond, lake.path, queues=["c"])

    asyncio.run(main())


def test_an_export_through_a_server_is_the_same(lake: Lake) -> None:
    async def main(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.create_queue("q", partitions=2)
            for turn in range(5):
                await client.produce("q", [NewItem(payload=b"x", id=f"own-{turn}-{number}") for number in range(3)])
                await client.complete(await client.lease("q", batch=2), queue="q")
            report = await sync(client, lake.path)
            assert report.events == len(lake_rows(lake))
            assert lake_rows(lake) == await told_by(client, "q")

    with serve() as server:
        asyncio.run(main(server.url))


# ---- queues that come and go ----------------------------------------------------------------------------------


def test_a_queue_that_was_made_anew_is_another_one(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            await do_some(pond)
            going = Exporter(pond, lake)
            await going.run_once(0.0)
            before = lake_rows(lake)
            assert before == await told_by(pond, "q")
            await pond.delete_queue("q", force=True)
            await going.run_once(1.0)
            await pond.create_queue("q")
            await do_some(pond, seed=1)
            await going.run_once(2.0)
            after = await told_by(pond, "q")
            rows = lake_rows(lake)
            assert len(rows) == len(before) + len(after)
            assert [row for row in rows if row in before] == before
            assert [row for row in rows if row in after] == after

    asyncio.run(main())


def test_a_queue_that_was_deleted_is_told_once(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            for name in ("q", "other", "never-exported"):
                await pond.create_queue(name)
            await pond.produce("q", [b"x"])
            assert (await sync(pond, lake.path)).deleted == []
            await pond.produce("q", [b"lost"])
            await pond.delete_queue("q", force=True)
            await pond.delete_queue("never-exported", force=True)
            assert (await sync(pond, lake.path)).deleted == ["q"]
            assert (await sync(pond, lake.path)).deleted == []
            assert (await sync(pond, lake.path, queues=["other"])).deleted == []

    asyncio.run(main())


def test_one_that_follows_tells_of_a_deleted_queue_too(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            going = Exporter(pond, lake)
            await going.run_once(0.0)
            await pond.produce("q", [b"x"])
            await going.run_once(20.0)
            await pond.delete_queue("q", force=True)
            assert (await going.run_once(40.0)).deleted == ["q"]
            assert (await going.run_once(60.0)).deleted == []

    asyncio.run(main())


class ShyPond(AsyncPond):
    """Shows a queue, or not."""

    shown = True

    async def list_queues(self, *, prefix: str = "", after: str = "", limit: int = 100) -> QueuePage:
        return await super().list_queues(prefix=prefix, after=after, limit=limit) if self.shown else QueuePage([])


def test_a_queue_that_was_out_of_sight_goes_on_where_it_was(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with ShyPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            going = Exporter(pond, lake)
            for seed, shown in enumerate((True, True, False, True, False, True)):
                await do_some(pond, seed=seed)
                pond.shown = shown
                await going.run_once(float(seed))
            assert lake_rows(lake) == await told_by(pond, "q")
            assert len(names(lake)) == 4

    asyncio.run(main())


def test_a_queue_that_rests_is_left_asleep(lake: Lake, data: Path, clock: ManualClock) -> None:
    """Asking a queue for its journal wakes it, so one that seems unchanged is asked ever more seldom."""

    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"x"])
            going, now, asked = Exporter(pond, lake), 0.0, 0
            while now < 4 * RESTING_S:
                asked += bool((await going.run_once(now)).queues)
                now += 5.0
            assert 5 < asked < 20
            await pond.produce("q", [b"y"])
            assert (await going.run_once(now)).events == 1

    asyncio.run(main())


# ---- what goes wrong ------------------------------------------------------------------------------------------


def test_rows_that_were_trimmed_first_are_a_gap_that_is_told(
    lake: Lake, data: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lane, "SNAPSHOT_ROWS", 20)
    monkeypatch.setattr(lane, "TRIM_INTERVAL_TURNS", 10)
    monkeypatch.setattr(QueueState, "journal_bytes", 6_000)
    monkeypatch.setattr(progress, "WHOLE_ITEMS", 0)

    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            info = await pond.create_queue("q")
            await pond.produce("q", [b"x"] * 3)
            old = await pond.lease("q", batch=3)
            await export(pond, lake)
            before = lake_rows(lake)
            for _ in range(600):
                await pond.produce("q", [b"x"])
            left = await journal(pond, "q")
            assert left[0].turn > 100
            assert len(left) > PIECES_MAX, "so that the next bookmark could build on the last"
            report = await export(pond, lake)
            [gap] = report.gaps
            assert (gap.queue, gap.incarnation, gap.partition) == ("q", info.incarnation, 0)
            assert (gap.from_turn, gap.to_turn) == (3, left[0].turn - 1)
            assert report.queues["q"].gaps == lake.gaps() == [gap]
            assert "history has a gap" in caplog.text
            assert lake_rows(lake) == [*before, *tell(left, info.incarnation)]
            again = await export(pond, lake)
            assert (again.events, again.gaps) == (0, [])
            await pond.complete(old)  # what was known of them before the gap is not believed any more
            await export(pond, lake)
            assert lake_rows(lake)[-3:] == tell(await journal(pond, "q", after=gap.to_turn), info.incarnation)[-3:]
            assert lake.gaps() == [gap]

    asyncio.run(main())


def test_a_gap_within_another_is_told_once(lake: Lake) -> None:
    folder = lake.path / "gaps"
    folder.mkdir(parents=True)
    for to_turn in (300, 500):
        gap = Gap(queue="q", incarnation="i", partition=0, from_turn=2, to_turn=to_turn, found_at=datetime.now(UTC))
        (folder / gap.span.name("json")).write_bytes(msgspec.json.encode(gap))
    assert [gap.to_turn for gap in lake.gaps()] == [500]


def test_a_second_exporter_is_told_of_the_first(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            with (
                lake.locked(EXPORT_LOCK, "exports to"),
                pytest.raises(DirectoryInUse, match="exports to the history lake"),
            ):
                await sync(pond, lake.path)
            await sync(pond, lake.path)

    asyncio.run(main())


def test_a_lake_that_cannot_be_made_is_told(data: Path, tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "file").write_text("")

    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            with pytest.raises(InvalidRequest, match="choose another"):
                await sync(pond, tmp_path / "file")

    asyncio.run(main())


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write more into any file, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 5_000, 20_000])
def test_a_full_disk_is_told_and_loses_nothing(lake: Lake, clock: ManualClock, size: int) -> None:
    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            await pond.create_queue("q")
            await do_some(pond, items=20)
            await export(pond, lake)
            before = lake_rows(lake)
            for seed in range(40):
                clock.advance(60_000)
                await do_some(pond, seed=seed)
            going = Exporter(pond, lake, file_events=1_000)
            with files_of_at_most(size), pytest.raises(DiskFull, match="no room left for the history lake"):
                await going.run_once(0.0)
            assert litter(lake) == []
            assert lake_rows(lake)[: len(before)] == before
            await going.run_once(1.0)
            assert lake_rows(lake) == await told_by(pond, "q")

    asyncio.run(main())


def test_a_journal_that_was_restored_from_an_older_copy_is_refused(
    lake: Lake, data: Path, clock: ManualClock, tmp_path: Path
) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            await do_some(pond)
        shutil.copytree(data, tmp_path / "copy")
        async with AsyncPond(data, clock=clock) as pond:
            await do_some(pond, seed=1)
            await export(pond, lake)
            exported = lake_rows(lake)
        shutil.rmtree(data)
        shutil.copytree(tmp_path / "copy", data)
        async with AsyncPond(data, clock=clock) as pond:
            [problem] = (await export(pond, lake)).problems
            assert "restored from an older copy" in problem
            await do_some(pond, items=90, seed=2)  # beyond the turn that was exported
            [problem] = (await export(pond, lake)).problems
            assert "is not what the lake has" in problem
            assert "out of" in problem
        assert lake_rows(lake) == exported

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["lost", "cut", "of another kind"])
def test_without_its_bookmark_an_export_goes_on_and_says_what_is_lost(
    lake: Lake, data: Path, clock: ManualClock, damage: str
) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            info = await pond.create_queue("q")
            await do_some(pond)
            await export(pond, lake)
            before = lake_rows(lake)
            reached = (await journal(pond, "q"))[-1].turn
            [bookmark] = lake.state.glob("*.known")
            if damage == "lost":
                bookmark.unlink()
            elif damage == "cut":
                bookmark.write_bytes(bookmark.read_bytes()[:100])
            else:
                bookmark.write_bytes(b"{}")
            await do_some(pond, seed=1)
            report = await export(pond, lake)
            [problem] = report.problems
            assert "is lost" in problem
            later = tell(await journal(pond, "q", after=reached), info.incarnation)
            assert lake_rows(lake) == [*before, *later]
            assert (await export(pond, lake)).problems == []

    asyncio.run(main())


class AwayPond(AsyncPond):
    """The store of one queue does not answer."""

    async def read_journal(self, queue: str, *, partition: int = 0, after: int = 0, limit: int = 500) -> JournalPage:
        if queue == "a":
            raise Unavailable("partition 0 is away; try again later")
        return await super().read_journal(queue, partition=partition, after=after, limit=limit)


def test_a_partition_that_is_away_does_not_stop_the_others(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with AwayPond(data, clock=clock) as pond:
            for name in ("a", "b"):
                await pond.create_queue(name)
                await do_some(pond, name)
            report = await export(pond, lake)
            assert report.problems == ["a partition 0: partition 0 is away; try again later"]
            assert report.queues["b"].problems == []
            assert lake_rows(lake) == await told_by(pond, "b")

    asyncio.run(main())


# ---- following ------------------------------------------------------------------------------------------------


def test_following_exports_what_comes_until_it_is_told_to_stop(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            passes: asyncio.Queue[SyncReport] = asyncio.Queue()
            stop = asyncio.Event()
            following = asyncio.create_task(
                sync(pond, lake.path, follow=True, interval=0.001, stop=stop, on_pass=passes.put_nowait)
            )
            assert (await passes.get()).events == 0
            for count in range(1, 4):
                await pond.produce("q", [b"x"] * count)
                assert (await passes.get()).events == count
            stop.set()
            report = await following
            assert (report.events, report.files) == (6, 3)
            assert lake_rows(lake) == await told_by(pond, "q")

    asyncio.run(main())


def test_following_that_is_cancelled_leaves_a_lake_to_go_on_with(lake: Lake, data: Path, clock: ManualClock) -> None:
    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            for seed in range(10):
                following = asyncio.create_task(sync(pond, lake.path, follow=True, interval=0.0))
                clock.advance(60_000)
                await do_some(pond, seed=seed)
                following.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await following
            await sync(pond, lake.path)
            assert lake_rows(lake) == await told_by(pond, "q")
            assert litter(lake) == []

    asyncio.run(main())


def test_following_keeps_the_lake_in_few_files(
    lake: Lake, data: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "UPKEEP_INTERVAL_S", 0.0)

    async def main() -> None:
        async with AsyncPond(data, clock=clock) as pond:
            await pond.create_queue("q")
            passes: asyncio.Queue[SyncReport] = asyncio.Queue()
            stop = asyncio.Event()
            following = asyncio.create_task(
                sync(pond, lake.path, follow=True, interval=0.001, stop=stop, on_pass=passes.put_nowait)
            )
            await passes.get()
            for _ in range(10):
                await pond.produce("q", [b"x"])
                await passes.get()
            stop.set()
            await following
            assert len(lake.files()) <= 2
            assert lake_rows(lake) == await told_by(pond, "q")

    asyncio.run(main())


def test_upkeep_that_somebody_else_does_is_left_to_them(lake: Lake, caplog: pytest.LogCaptureFixture) -> None:
    with lake.locked(UPKEEP_LOCK, "looks after"), caplog.at_level(logging.WARNING):
        exporter._keep_up(lake, None)
    assert "history upkeep was left out" in caplog.text
