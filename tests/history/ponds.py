"""Ponds with some history, and what their journals say of it."""

from __future__ import annotations

from random import Random

from millpond import AsyncPond, NewItem, Retry
from millpond.history.exporter import Exporter, Journals, SyncReport
from millpond.history.lake import Lake
from millpond.model import JournalTurn
from tests.history.told import Row, Teller, ordered

PAGE = 1_000


async def export(pond: AsyncPond, lake: Lake, file_events: int = 100_000) -> SyncReport:
    """A pass as a process of its own would make it: with nothing but what is in the lake."""
    return await Exporter(pond, lake, file_events=file_events).run_once(0.0)


async def do_some(pond: AsyncPond, queue: str = "q", items: int = 30, seed: int = 0) -> None:
    """Items of several kinds, of which some are completed, some fail, some die, some stay."""
    rng = Random(seed)
    for _ in range(0, items, 10):
        await pond.produce(
            queue,
            [
                *(NewItem(payload=b"n", kind=rng.choice(["", "mail"]), priority=rng.randint(-1, 1)) for _ in range(4)),
                NewItem(payload=b"own", id=f"own-{rng.randint(0, 10**9)}", correlation_id="c-1"),
                NewItem(payload=b"later", delay=rng.choice(["1h", "10ms"])),
                *([b"plain"] * 4),
            ],
        )
        leased = await pond.lease(queue, batch=8, client_id=rng.choice(["a", "b"]))
        failed, done = leased[:3], leased[3:7]
        if failed:
            await pond.retry([Retry(lease=one, error="boom", dead=rng.random() < 0.3) for one in failed])
        if done:
            await pond.complete(done)


async def journal(pond: Journals, queue: str, partition: int = 0, after: int = 0) -> list[JournalTurn]:
    rows: list[JournalTurn] = []
    while True:
        page = await pond.read_journal(queue, partition=partition, after=after, limit=PAGE)
        if not page.rows:
            return rows
        rows += page.rows
        after = page.rows[-1].turn


async def told_by(pond: Journals, *queues: str, after: int = 0) -> list[Row]:
    """What the lake should have of these queues, from their journals."""
    rows: list[Row] = []
    for queue in queues:
        info = await pond.queue_info(queue)
        for stats in info.partitions:
            teller = Teller(info.incarnation, stats.partition)
            for row in await journal(pond, queue, stats.partition, after):
                rows += teller.tell(row)
    return ordered(rows)
