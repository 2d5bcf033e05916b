"""An item that is carried to another partition is followed there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from millpond import AsyncPond
from millpond.clock import ManualClock
from millpond.history.exporter import sync
from millpond.history.flatten import Flattener
from millpond.history.format import Record
from millpond.history.lake import Lake
from millpond.history.lookup import totals
from millpond.model import NewItem, Rebalance, Retry
from millpond.store.base import JournalRow
from millpond.store.memory import MemoryStores
from tests.conformance.engine import SteppedPond
from tests.drive import definition
from tests.history.told import rows_of, tell

GRACE_MS = 300_000


def test_a_carried_item_is_moved_there_and_arrives_here_as_it_was() -> None:
    pond = SteppedPond(MemoryStores(), definition(completed_retention_ms=600_000))
    at = pond.clock.now() + 60_000
    made = pond.produce(Record(b"a", enqueue_at=at, kind="k", priority=2), b"b", b"c", b"d")
    items = {item.id: item for item in pond.lease(3)}
    pond.retry(items[made[1].id], due=at)
    pond.kill(items[made[2].id])
    pond.complete([items[made[3].id]])
    pond.advance(5)
    pond.rebalance(1, (0,))
    pond.advance(60_000)
    pond.complete(pond.lease(5))
    stories: dict[str, list[tuple[Any, ...]]] = {}
    for index in (0, 1):
        rows: list[JournalRow] = pond.queues["q"].state.lanes[index].store.journal(0, 1_000)
        flattener = Flattener("incq", index)
        for row in rows:
            flattener.read(row.turn, row.at, row.events)
        flat = rows_of([*flattener.drain()])
        assert flat == tell(rows, "incq", index)
        for one in flat:
            fields = [one[name] for name in ("from_state", "to_state", "why", "attempt")]
            stories.setdefault(one["item_id"], []).append((index, *fields))
    assert stories[made[0].id] == [
        (0, None, "scheduled", "produced", None),
        (0, "scheduled", None, "moved", None),
        (1, None, "scheduled", "adopted", None),
        (1, "scheduled", "ready", "due", None),
        (1, "ready", "leased", "leased", 1),
        (1, "leased", "completed", "completed", 1),
    ]
    assert stories[made[1].id][-4:] == [
        (1, None, "retrying", "adopted", None),
        (1, "retrying", "ready", "due", None),
        (1, "ready", "leased", "leased", 2),
        (1, "leased", "completed", "completed", 2),
    ]
    assert stories[made[2].id][-2:] == [(0, "dead", None, "moved", None), (1, None, "dead", "adopted", None)]
    assert stories[made[3].id][-2:] == [(0, "completed", None, "moved", None), (1, None, "completed", "adopted", None)]


def test_the_lakes_counts_are_the_engines_own_across_a_rebalance(tmp_path: Path) -> None:
    """What is carried is not produced again, and the end of an old partition's journal waits for its export."""

    clock = ManualClock()

    async def main() -> None:
        async with AsyncPond(tmp_path / "data", clock=clock) as pond:
            await pond.create_queue("q", partitions=2)
            for delay in ("0s", "0s", "1d", "1d"):
                await pond.produce("q", [NewItem(payload=b"x", delay=delay)] * 3)
            await pond.retry([Retry(lease=item.lease, dead=True) for item in await pond.lease("q", batch=6)])
            lake = Lake(tmp_path / "lake")
            await sync(pond, lake.path)
            await pond.rebalance("q", partitions=1)
            while (await _rebalance(pond)).removable_at is None:
                clock.advance(1)
            await sync(pond, lake.path)
            clock.advance(GRACE_MS)
            while (await _rebalance(pond)).status != "done":
                pass
            await sync(pond, lake.path)
            stats = await pond.stats("q")
            assert {name: count for name, count in totals(lake, "q").items() if count} == stats.totals
            assert stats.totals["produced"] == 12

    asyncio.run(main())


async def _rebalance(pond: AsyncPond) -> Rebalance:
    await pond.stats("q")  # a turn of the queue's loop
    found = (await pond.queue_info("q")).rebalance
    assert found is not None
    return found
