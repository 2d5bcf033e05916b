"""The engine in the callers' own process: what the same callers get without a server between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from benchmarks.engine import QUEUE, WAIT, opened, work
from benchmarks.machine import busy_seconds
from benchmarks.meter import Meter, payloads, percentile

T = TypeVar("T")


async def callers(path: str, callers: int, batch: int, seconds: float) -> dict[str, Any]:
    """Each caller goes round produce, lease, complete of `batch` items, and hands back tokens, as a server must."""
    async with opened(path) as pond:
        meter = Meter(seconds)
        bodies = payloads(batch)
        spent: list[float] = []

        async def timed(call: Awaitable[T]) -> T:
            start = time.perf_counter()
            result = await call
            spent.append(time.perf_counter() - start)
            return result

        async def caller() -> None:
            while not meter.is_done():
                await timed(pond.produce(QUEUE, bodies))
                if items := await timed(pond.lease(QUEUE, batch=batch, wait=WAIT)):
                    work(items)
                    await timed(pond.complete([item.lease for item in items], queue=QUEUE))
                    meter.add(len(items))

        wall, others = time.perf_counter(), busy_seconds() - time.process_time()
        await asyncio.gather(*(caller() for _ in range(callers)))
        wall, others = time.perf_counter() - wall, busy_seconds() - time.process_time() - others
        found = meter.result()
        return {
            "items": found["rate"],
            "p50_ms": percentile(spent, 0.5) * 1e3,
            "p99_ms": percentile(spent, 0.99) * 1e3,
            "item_us": found["cpu_us"],
            "server_share": found["cpu_us"] * found["rate"] / 1e6,
            "load_share": 0.0,
            "others_share": max(0.0, others) / wall,
        }
