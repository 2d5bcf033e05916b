"""Procrastinate on PostgreSQL: one worker with so many at a time."""

from __future__ import annotations

import asyncio
import logging
import sys

import procrastinate
from counting import WARM_UP, tick

dsn, wanted, concurrency = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
logging.disable()
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))


@app.task(name="noop")
async def noop(count: int) -> None:
    tick(count)


async def main() -> None:
    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        for first in range(0, WARM_UP + wanted, 500):
            size = min(500, WARM_UP + wanted - first)
            await noop.batch_defer_async(*[{"count": wanted}] * size)
        await app.run_worker_async(concurrency=concurrency, wait=False, install_signal_handlers=False)


asyncio.run(main())
