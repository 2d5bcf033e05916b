"""The engine under load, through the embedded API. Each function is one measurement, in a process of its own.

A cycle has one producer and two consumers, so that a turn in the steady state holds one produce, one lease and one
complete of N items: what `raw.py` writes in a commit. Consumers look at every payload, for the engine makes items when
they are looked at, and hand the items back; with `tokens` they hand back the lease tokens instead, as a server must.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import millpond
from benchmarks.meter import PAYLOAD_BYTES, Meter, payloads, percentile
from millpond.embedded import AsyncPond
from millpond.model import Items, LeasedItem, NewItem, Retry

QUEUE = "bench"
FILL_BATCH = 1_000  # the largest that is allowed: a backlog builds fastest
LEASE_TIMEOUT = "6h"  # no lease runs out while it is measured
LATER = "1d"  # when what is scheduled or retrying comes back: not today
WAIT = 0.2  # seconds; how long a consumer is parked when a run is over
WARM_LEASES = 20  # calls before a lease is timed: the first one reads the head's chunk
MIX = 97  # in so many items that are not retrying, 4 have a priority and 3 are scheduled
MIX_PRIORITIES = {0: -1, 25: 1, 50: 2, 75: 3}  # place in the mix -> priority; only the first is ahead of the rest
MIX_SCHEDULED = (10, 40, 70)
MIX_RETRYING = 0.03


@asynccontextmanager
async def opened(path: str, durability: str = "full") -> AsyncIterator[AsyncPond]:
    async with millpond.open_async(path) as pond:
        if not (await pond.list_queues()).queues:
            await pond.create_queue(QUEUE, lease_timeout=LEASE_TIMEOUT, durability=durability)
        yield pond


def work(items: Sequence[LeasedItem]) -> int:
    """What the consumer does with its items: the least that makes the engine hand them over."""
    return sum([len(item.payload) for item in items])


# ---- rates ------------------------------------------------------------------------------------------------


async def cycle(
    path: str,
    batch: int,
    seconds: float,
    items_max: int | None = None,
    producers: int = 1,
    tokens: bool = False,
    crash: bool = False,
) -> dict[str, Any]:
    """produce -> lease -> complete of `batch` items, finished items a second. `crash`: die in the middle of it.

    There are two consumers a producer: while one completes, the other leases. With one producer a turn holds one
    batch of each kind, as raw's does, and the loop, the commit and the callers wait for each other; with more, turns
    gather several batches while a commit is under way, as they do on a busy queue.
    """
    async with opened(path) as pond:
        meter = Meter(seconds, items_max)
        bodies = payloads(batch)

        async def producer() -> None:
            while not meter.is_done():
                await pond.produce(QUEUE, bodies)

        async def consumer() -> None:
            while not meter.is_done():
                if items := await pond.lease(QUEUE, batch=batch, wait=WAIT):
                    work(items)
                    await pond.complete([item.lease for item in items] if tokens else items, queue=QUEUE)
                    meter.add(len(items))
                if crash and meter.is_done():
                    os.kill(os.getpid(), signal.SIGKILL)

        await asyncio.gather(*(producer() for _ in range(producers)), *(consumer() for _ in range(2 * producers)))
        return meter.result()


async def callers(path: str, callers: int, seconds: float) -> dict[str, Any]:
    """Each caller produces one item, leases one and completes it, on its own: what group commit is for."""
    async with opened(path) as pond:
        meter = Meter(seconds)
        [body] = payloads(1)

        async def caller() -> None:
            while not meter.is_done():
                await pond.produce(QUEUE, [body])
                if items := await pond.lease(QUEUE, wait=WAIT):
                    work(items)
                    await pond.complete(items, queue=QUEUE)
                    meter.add(1)

        await asyncio.gather(*(caller() for _ in range(callers)))
        return meter.result()


# ---- leases -----------------------------------------------------------------------------------------------


async def latency(path: str, callers: int, seconds: float, prefill: int) -> dict[str, Any]:
    """How long a lease of one item takes when `callers` lease and complete at a time."""
    async with opened(path) as pond:
        await produce_all(pond, payloads(FILL_BATCH), prefill)
        spent: list[float] = []
        end = time.perf_counter() + seconds

        async def caller() -> None:
            start = 0.0
            while start < end:  # each of them once, however slow the machine is
                start = time.perf_counter()
                items = await pond.lease(QUEUE)
                if not items:
                    return
                work(items)
                spent.append(time.perf_counter() - start)
                await pond.complete(items, queue=QUEUE)

        await asyncio.gather(*(caller() for _ in range(callers)))
        return {
            "leases": len(spent),
            "p50_ms": percentile(spent, 0.5) * 1e3,
            "p99_ms": percentile(spent, 0.99) * 1e3,
        }


async def lease_cost(path: str, batch: int, calls: int, plain: bool) -> dict[str, Any]:
    """The mean time of a lease by one caller; the mean, so that a chunk read now and then counts.

    What was leased is completed and as much produced again, untimed: the backlog keeps its size. `plain` first takes
    away the items whose priority puts them in front; they lie one in a hundred, each lease reads on in the chunks.
    """
    async with opened(path) as pond:
        bodies = payloads(batch)
        if plain:
            await drain_urgent(pond)
        spent = 0.0
        urgent = 0
        for call in range(-WARM_LEASES // batch, calls):
            start = time.perf_counter()
            items = await pond.lease(QUEUE, batch=batch)
            work(items)
            if call >= 0:
                spent += time.perf_counter() - start
                urgent += sum(item.priority < 0 for item in items)
            assert len(items) == batch, "the queue is too short to be measured"
            await asyncio.gather(pond.complete(items, queue=QUEUE), pond.produce(QUEUE, bodies))
        assert plain or urgent == calls * batch, "no urgent items are left to be measured"
        return {"mean_us": spent / calls * 1e6}


async def drain_urgent(pond: AsyncPond) -> None:
    while True:
        items = await pond.lease(QUEUE, batch=100)
        await pond.complete(items, queue=QUEUE)
        await pond.produce(QUEUE, [item.payload for item in items])
        if items[-1].priority >= 0:
            return


# ---- opening and memory -----------------------------------------------------------------------------------


async def open_and_lease(path: str) -> dict[str, Any]:
    start = time.perf_counter()
    async with millpond.open_async(path) as pond:
        items = await pond.lease(QUEUE)
        work(items)
        spent = time.perf_counter() - start
        await pond.complete(items, queue=QUEUE)
        return {"ms": spent * 1e3}


async def memory_reopened(path: str) -> dict[str, Any]:
    """Resident bytes after opening. No bodies are cached then: what is left is what the engine knows of its items."""
    async with opened(path) as pond:
        stats = await pond.stats(QUEUE)
        return {"rss": resident_bytes(), "items": sum(stats.counts.values())}


async def memory_live(path: str, before: int, more: int) -> dict[str, Any]:
    """Growth while items come in. `before` of them fill the cache of bodies, which has a fixed budget."""
    async with opened(path) as pond:
        bodies = payloads(FILL_BATCH)
        await produce_all(pond, bodies, before)
        start = resident_bytes()
        await produce_all(pond, bodies, more)
        return {"bytes_per_item": (resident_bytes() - start) / more}


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- backlogs ---------------------------------------------------------------------------------------------


async def fill(path: str, items: int, kind: str) -> dict[str, Any]:
    """A queue with so many items of one kind, closed cleanly."""
    async with opened(path, "relaxed" if kind == "single" else "full") as pond:
        bodies = payloads(FILL_BATCH)
        if kind == "mixed":
            await fill_mixed(pond, bodies, items)
        elif kind == "leased":
            await produce_all(pond, bodies, items)
            while await pond.lease(QUEUE, batch=FILL_BATCH):
                pass
        elif kind == "retrying":
            await fill_retrying(pond, bodies, items)
        elif kind == "single":
            for index in range(items):
                await pond.produce(QUEUE, [bodies[index % FILL_BATCH]])
        else:
            for first in range(0, items, FILL_BATCH):
                last = min(items, first + FILL_BATCH)
                await pond.produce(QUEUE, [item_of(kind, n, bodies[n % FILL_BATCH]) for n in range(first, last)])
        return (await pond.stats(QUEUE)).counts


async def produce_all(pond: AsyncPond, bodies: list[bytes], items: int) -> None:
    for first in range(0, items, len(bodies)):
        await pond.produce(QUEUE, bodies[: items - first])


async def fill_retrying(pond: AsyncPond, bodies: list[bytes], items: int) -> None:
    await produce_all(pond, bodies, items)
    while leased := await pond.lease(QUEUE, batch=FILL_BATCH):
        await pond.retry([Retry(lease=item.lease, delay=LATER) for item in leased], queue=QUEUE)


async def fill_mixed(pond: AsyncPond, bodies: list[bytes], items: int) -> None:
    """Of 100 items 4 have a priority, 3 are scheduled and 3 retrying; the first two lie among the plain ones."""
    retrying = round(items * MIX_RETRYING)
    await fill_retrying(pond, bodies, retrying)
    for first in range(retrying, items, FILL_BATCH):
        last = min(items, first + FILL_BATCH)
        batch: Items = [mixed_item((n - retrying) % MIX, bodies[n % FILL_BATCH]) for n in range(first, last)]
        await pond.produce(QUEUE, batch)


def mixed_item(place: int, body: bytes) -> NewItem | bytes:
    if place in MIX_PRIORITIES:
        return NewItem(payload=body, priority=MIX_PRIORITIES[place])
    return NewItem(payload=body, delay=LATER) if place in MIX_SCHEDULED else body


def item_of(kind: str, number: int, body: bytes) -> NewItem | bytes:
    assert len(body) == PAYLOAD_BYTES
    if kind == "priority":
        return NewItem(payload=body, priority=1 + number % 10)
    if kind == "scheduled":
        return NewItem(payload=body, delay=LATER)
    if kind == "keyed":
        return NewItem(payload=body, key=f"order-{number:08}")
    assert kind == "ready", kind
    return body
