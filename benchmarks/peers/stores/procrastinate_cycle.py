"""Procrastinate on PostgreSQL: jobs are deferred in batches, then one worker runs them, so many at a time.

`procrastinate_cycle.py URL '{"batch": 100, "jobs": 2000, "concurrency": 64, "connections": 16}'`; the clock runs from
the first defer to the beginning of the last job, for a worker's farewell may take seconds. Jobs that are done stay, as
they do by default: to delete them was slower.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time

import procrastinate

from benchmarks.meter import PAYLOAD_BYTES

PAYLOAD = "x" * PAYLOAD_BYTES


async def cycle(url: str, batch: int, jobs: int, concurrency: int, connections: int) -> None:
    connector = procrastinate.PsycopgConnector(conninfo=url, min_size=connections, max_size=connections)
    app = procrastinate.App(connector=connector)
    ran = 0
    started = 0.0

    @app.task(name="noop")
    async def noop(payload: str) -> None:
        nonlocal ran
        ran += 1
        if ran == jobs:
            print(json.dumps({"rate": jobs / (time.perf_counter() - started)}), flush=True)
            os._exit(0)

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        started = time.perf_counter()
        counts = [min(batch, jobs - first) for first in range(0, jobs, batch)]
        await asyncio.gather(*(noop.batch_defer_async(*[{"payload": PAYLOAD}] * count) for count in counts))
        await app.run_worker_async(concurrency=concurrency, wait=False, install_signal_handlers=False)


logging.disable()
asyncio.run(cycle(sys.argv[1], **json.loads(sys.argv[2])))
