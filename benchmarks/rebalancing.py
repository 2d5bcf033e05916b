"""A queue that is rebalanced under full load: more partitions, then off their store.

Clients go round produce, lease, complete all the time. Every item has a number, and all that were produced must have
been handed out exactly once in the end, those too that the rebalance has carried: scheduled, retrying and dead ones.

What is measured is the drain. Partitions that are empty are kept for some minutes, in case a completion is sent again;
then nothing happens that would cost anything.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from benchmarks.engine import LEASE_TIMEOUT, QUEUE, WAIT
from benchmarks.meter import PAYLOAD_BYTES
from millpond.clock import Clock
from millpond.embedded import AsyncPond
from millpond.model import LeasedItem, NewItem, Retry, StoreSettings

FEW, MANY = 2, 4  # partitions
NUMBER_BYTES = 8
FILL = b"." * (PAYLOAD_BYTES - NUMBER_BYTES)
FILL_BATCH = 1_000
LATER_S = 7 * 86_400  # when what is scheduled or retrying comes back
LOOK_S = 0.2  # how often a rebalance is looked at, which costs some milliseconds


class LeapingClock(Clock):
    """Ahead of the wall clock. It may leap when no commit is under way, which would seem to hang."""

    def __init__(self) -> None:
        self._ahead = 0
        super().__init__(lambda: time.time_ns() + self._ahead * 1_000_000)

    def leap(self, ms: int) -> None:
        self._ahead += ms


class Ledger:
    """Which items were produced, and how often each was handed out."""

    def __init__(self) -> None:
        self.produced = 0
        self.completed = 0
        self._handed_out = bytearray()

    def payloads(self, count: int) -> list[bytes]:
        first, self.produced = self.produced, self.produced + count
        self._handed_out.extend(bytes(count))
        return [number.to_bytes(NUMBER_BYTES) + FILL for number in range(first, self.produced)]

    def hand_out(self, items: Iterable[LeasedItem]) -> None:
        for item in items:
            self._handed_out[int.from_bytes(item.payload[:NUMBER_BYTES])] += 1

    def lost_and_doubled(self) -> tuple[int, int]:
        counts = Counter(self._handed_out)
        return counts[0], sum(count for times, count in counts.items() if times > 1)


class Load:
    """Clients that do not stop until they are told to."""

    def __init__(self, pond: AsyncPond, clock: LeapingClock, batch: int, clients: int) -> None:
        self.ledger = Ledger()
        self._pond = pond
        self._clock = clock
        self._batch = batch
        self._clients = clients
        self._is_over = False

    async def prepare(self, ready: int, carried: int) -> None:
        """A backlog, and items of each kind that consumers do not take; those are handed out at the end."""
        await self._leave(carried, lambda item: Retry(lease=item.lease, delay=LATER_S))
        await self._leave(carried, lambda item: Retry(lease=item.lease, dead=True))
        for first in range(0, carried, FILL_BATCH):
            bodies = self.ledger.payloads(min(FILL_BATCH, carried - first))
            await self._pond.produce(QUEUE, [NewItem(payload=body, delay=LATER_S) for body in bodies])
        await self._produce(ready)

    async def _leave(self, count: int, verdict: Callable[[LeasedItem], Retry]) -> None:
        await self._produce(count)
        while items := await self._pond.lease(QUEUE, batch=FILL_BATCH):
            await self._pond.retry([verdict(item) for item in items], queue=QUEUE)

    async def _produce(self, count: int) -> None:
        for first in range(0, count, FILL_BATCH):
            await self._pond.produce(QUEUE, self.ledger.payloads(min(FILL_BATCH, count - first)))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clients at work until the end of the block."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client())
            yield
            self._is_over = True

    async def _client(self) -> None:
        while not self._is_over:
            await self._pond.produce(QUEUE, self.ledger.payloads(self._batch))
            await self._consume()

    async def _consume(self) -> int:
        items = await self._pond.lease(QUEUE, batch=self._batch, wait=WAIT)
        if items:
            self.ledger.hand_out(items)
            await self._pond.complete(items, queue=QUEUE)
            self.ledger.completed += len(items)
        return len(items)

    async def finish(self) -> None:
        """Nothing is produced any more, and everything handed out, whatever it waited for."""
        self._clock.leap(LATER_S * 1000)
        await self._pond.redrive(QUEUE)
        while await self._consume():
            pass

    async def rate(self, phase: Awaitable[None]) -> dict[str, float]:
        """Items a second, completed while it lasts."""
        start, before = time.perf_counter(), self.ledger.completed
        await phase
        seconds = time.perf_counter() - start
        return {"rate": (self.ledger.completed - before) / seconds, "seconds": seconds}


async def rebalanced(
    path: str,
    stores: Sequence[Mapping[str, Any]],
    batch: int,
    clients: int,
    seconds: float,
    ready: int,
    carried: int,
) -> dict[str, Any]:
    """From the first store to the second. The old partitions take as long as they take to drain."""
    clock = LeapingClock()
    here, there = (StoreSettings(**one) for one in stores)
    async with AsyncPond(path, clock=clock, stores=only(here, there)) as pond:
        await pond.create_queue(QUEUE, lease_timeout=LEASE_TIMEOUT, partitions=FEW)
        load = Load(pond, clock, batch, clients)
        await load.prepare(ready, carried)
        async with load.running():
            before = await load.rate(asyncio.sleep(seconds))
            await pond.rebalance(QUEUE, partitions=MANY)
            more = await load.rate(asyncio.sleep(seconds))
            await pond.change_stores(only(there, here))
            off = await load.rate(drained(pond))
        await load.finish()
        lost, doubled = load.ledger.lost_and_doubled()
        stats = await pond.stats(QUEUE)
        assert stats.totals["completed"] == load.ledger.completed, "completions were refused"
        phases = {"before": before, "more": more, "off": off}
        return {"phases": phases, "items": load.ledger.produced, "lost": lost, "doubled": doubled}


def only(here: StoreSettings, there: StoreSettings) -> list[StoreSettings]:
    """All partitions go to the first of them."""
    shares = {"default": 0.0, here.name: 1.0, there.name: 0.0}
    named = {one.name: one for one in (StoreSettings(name="default"), here, there)}
    return [replace(named[name], affinity=share) for name, share in shares.items()]


async def drained(pond: AsyncPond) -> None:
    """From its beginning until nothing is left in the partitions that go."""
    told = await pond.rebalance(QUEUE)
    assert told.status == "running", told
    while told.removable_at is None:
        await asyncio.sleep(LOOK_S)
        looked = (await pond.queue_info(QUEUE)).rebalance
        assert looked is not None
        told = looked
