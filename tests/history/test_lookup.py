"""Small questions, answered from the lake without Spark."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from millpond import AsyncPond, NewItem, Retry
from millpond.clock import ManualClock
from millpond.errors import InvalidRequest
from millpond.history import lookup
from millpond.history.lake import About, Lake, LakeFile
from millpond.history.lookup import COUNTED, TOTALS, counts, timeline, totals
from millpond.history.reader import Why
from millpond.history.upkeep import compact
from millpond.model import RedriveFilter
from tests.history.ponds import do_some, export
from tests.history.told import Row, lake_rows


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


def of(rows: list[Row], item_id: str) -> list[tuple[int, str]]:
    return [(row["turn"], row["why"]) for row in rows if row["item_id"] == item_id]


def seen(lake: Lake, item_id: str) -> list[tuple[int, str]]:
    return [(event.turn, event.why) for event in timeline(lake, item_id)]


# ---- one item -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compacted", [False, True])
def test_a_timeline_has_all_that_happened_to_an_item(lake: Lake, compacted: bool) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            await pond.create_queue("q", partitions=2)
            for seed in range(4):
                clock.advance(60_000)
                await do_some(pond, seed=seed)
                await export(pond, lake)
            if compacted:
                compact(lake)
            rows = lake_rows(lake)
            for item_id in {row["item_id"] for row in rows}:
                assert seen(lake, item_id) == of(rows, item_id)

    asyncio.run(main())


def test_a_timeline_goes_on_when_a_dead_letter_comes_back_under_its_old_id(lake: Lake) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            await pond.create_queue("letters")
            await pond.create_queue("q", dead_queue="letters")
            [produced] = await pond.produce("q", [b"x"])
            [item] = await pond.lease("q")
            await pond.retry([Retry(lease=item, error="bad", dead=True)])
            while not (await pond.stats("letters")).counts["ready"]:
                clock.advance(1_000)
            while not (await pond.redrive("letters")).moved:
                clock.advance(1_000)
            while not (await pond.stats("q")).counts["ready"]:
                clock.advance(1_000)
            await pond.complete(await pond.lease("q"))
            await export(pond, lake)
            events = timeline(lake, produced.id)
            assert [event.why for event in events if event.queue == "q"] == [
                "produced", "leased", "rejected", "moved", "arrived", "leased", "completed",
            ]  # fmt: skip
            assert [event.why for event in events if event.queue == "letters"] == ["arrived", "redriven", "moved"]
            letter = next(event.item_id for event in events if event.queue == "letters")
            assert timeline(lake, letter) == events, "also by the id of the letter"
            assert {event.queue for event in timeline(lake, produced.id, queues=["q"])} == {"q"}
            assert {event.correlation_id for event in events} == {events[0].correlation_id}
            assert events[2].error == "bad"

    asyncio.run(main())


def test_an_item_that_comes_back_and_finds_its_id_taken_is_followed(lake: Lake) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            await pond.create_queue("letters")
            for name in ("q", "other"):
                await pond.create_queue(name, dead_queue="letters")
                await pond.produce(name, [NewItem(payload=b"x", id="own")])
                [item] = await pond.lease(name)
                await pond.retry([Retry(lease=item, error="bad", dead=True)])
            while (await pond.stats("letters")).counts["ready"] < 2:
                clock.advance(1_000)
            clock.advance(600_000)  # its id is not remembered any more
            await pond.produce("q", [NewItem(payload=b"y", id="own")])
            await pond.redrive("letters", filter=RedriveFilter(source_queue="q"))
            while (await pond.stats("q")).counts["ready"] < 2:
                clock.advance(1_000)
            await export(pond, lake)
            [back] = [item for item in (await pond.list_items("q")).items if item.id != "own"]
            whys = [event.why for event in timeline(lake, back.id) if event.item_id == back.id]
            assert whys == ["arrived"]
            events = timeline(lake, "own", queues=["q", "letters"])
            assert {event.queue for event in events} == {"q", "letters"}
            assert back.id in {event.item_id for event in events}
            assert len({event.item_id for event in events if event.queue == "letters"}) == 1, "not the other queue's"

    asyncio.run(main())


@pytest.mark.parametrize("compacted", [False, True])
def test_totals_tell_letters_from_what_came_back(lake: Lake, compacted: bool) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            await pond.create_queue("letters")
            await pond.create_queue("q", dead_queue="letters")
            for _ in range(2):
                await pond.produce("q", [b"x"] * 3)
                for item in await pond.lease("q", batch=3):
                    await pond.retry([Retry(lease=item, error="bad", dead=True)])
                while (await pond.stats("letters")).counts["ready"] < 3:
                    clock.advance(1_000)
                await pond.redrive("letters")
                while (await pond.stats("q")).counts["ready"] < 3:
                    clock.advance(1_000)
                await pond.complete(await pond.lease("q", batch=3))
                await export(pond, lake)
            if compacted:
                compact(lake, grace=0)
            for name in ("q", "letters"):
                wanted = (await pond.stats(name)).totals
                assert {key: n for key, n in totals(lake, name).items() if n} == {k: n for k, n in wanted.items() if n}
            assert totals(lake, "letters")["letters"] == 6

    asyncio.run(main())


def test_files_that_do_not_tell_their_letters_are_counted(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            await pond.create_queue("letters")
            await pond.create_queue("q", dead_queue="letters")
            await pond.produce("q", [b"x"])
            [item] = await pond.lease("q")
            await pond.retry([Retry(lease=item, error="bad", dead=True)])
            while not (await pond.stats("letters")).counts["ready"]:
                clock.advance(1_000)
            await export(pond, lake)
            inner = lookup._footer
            monkeypatch.setattr(lookup, "_footer", lambda file: msgspec.structs.replace(inner(file), letters=None))
            assert totals(lake, "letters")["letters"] == 1

    asyncio.run(main())


def test_an_unknown_item_has_no_timeline(lake: Lake) -> None:
    async def main() -> None:
        async with AsyncPond(":memory:", clock=ManualClock()) as pond:
            info = await pond.create_queue("q")
            await do_some(pond)
            await export(pond, lake)
            for unknown in (f"{info.incarnation}-0-999", f"{info.incarnation}-7-1", "nobody", "zz-0-1", ""):
                assert timeline(lake, unknown) == []

    asyncio.run(main())


def test_a_derived_id_is_looked_for_in_few_row_groups(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.history.lane_export.ROW_GROUP_ROWS", 100)

    async def main() -> None:
        async with AsyncPond(":memory:", clock=ManualClock()) as pond:
            info = await pond.create_queue("q")
            for _ in range(30):
                await pond.produce("q", [b"x"] * 100)
                await pond.complete(await pond.lease("q", batch=100))
            await export(pond, lake)
            read: list[int] = []
            inner = pq.ParquetFile.read_row_group

            def counting(self: object, group: int, **options: object) -> object:
                read.append(group)
                return inner(self, group, **options)

            monkeypatch.setattr(pq.ParquetFile, "read_row_group", counting)
            assert len(timeline(lake, f"{info.incarnation}-0-1500")) == 3
            assert 3 <= len(read) <= 6, "of 90 row groups those of the item, each for its numbers and for the rest"

    asyncio.run(main())


# ---- counts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "by", [("queue", "why"), ("queue",), ("date", "why"), ("minute", "to_state"), ("queue", "kind", "who"), COUNTED]
)
def test_counts_are_those_of_the_rows(lake: Lake, by: tuple[str, ...]) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(":memory:", clock=clock) as pond:
            for name in ("a", "b"):
                await pond.create_queue(name)
            for seed in range(3):
                clock.advance(40_000_000)
                for name in ("a", "b"):
                    await do_some(pond, name, seed=seed)
                await export(pond, lake)
            wanted: Counter[tuple[object, ...]] = Counter()
            for name in ("a", "b"):
                for row in lake_rows(lake, name):
                    minute = row["at"].replace(second=0, microsecond=0)
                    values = {**row, "queue": name, "date": row["at"].date().isoformat(), "minute": minute}
                    wanted[tuple(values[key] for key in by)] += 1
            found = {tuple(row[key] for key in by): row["events"] for row in counts(lake, by).to_pylist()}
            assert found == wanted

    asyncio.run(main())


def test_counting_by_something_else_is_refused(lake: Lake) -> None:
    with pytest.raises(InvalidRequest, match="cannot count by 'payload'; by any of queue,"):
        counts(lake, ["payload"])


def test_an_empty_lake_counts_nothing(lake: Lake) -> None:
    assert counts(lake).num_rows == 0
    assert totals(lake, "q") == dict.fromkeys([*TOTALS, "letters"], 0)


def test_totals_are_of_one_incarnation_or_of_all(lake: Lake) -> None:
    async def main() -> None:
        async with AsyncPond(":memory:", clock=ManualClock()) as pond:
            incarnations = {}
            for number in (3, 4):
                incarnations[number] = (await pond.create_queue("q")).incarnation
                await pond.produce("q", [NewItem(payload=b"x")] * number)
                await export(pond, lake)
                await pond.delete_queue("q", force=True)
            assert totals(lake, "q")["produced"] == 7
            assert totals(lake, "q", incarnation=incarnations[4])["produced"] == 4

    asyncio.run(main())


def test_every_change_of_state_that_the_engine_counts_is_in_the_totals() -> None:
    counted = {why for whys in TOTALS.values() for why in whys}
    assert set(Why) - counted == {
        Why.LEASE_EXPIRED, Why.RELEASED, Why.DUE, Why.CLEARED, Why.REPLACED, Why.REDRIVEN, Why.RETENTION, Why.MOVED,
        Why.KEPT, Why.CLAIM_RELEASED, Why.ADOPTED,
    }  # fmt: skip


def test_a_question_is_asked_again_when_files_were_merged_meanwhile(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with AsyncPond(":memory:", clock=ManualClock()) as pond:
            await pond.create_queue("q")
            for _ in range(3):
                await pond.produce("q", [b"x"])
                await export(pond, lake)
            inner = lookup._footer
            asked: list[LakeFile] = []

            def merging(file: LakeFile) -> About:
                if not asked:
                    compact(lake, grace=0)
                asked.append(file)
                return inner(file)

            monkeypatch.setattr(lookup, "_footer", merging)
            assert totals(lake, "q")["produced"] == 3
            assert len(asked) == 2

    asyncio.run(main())
