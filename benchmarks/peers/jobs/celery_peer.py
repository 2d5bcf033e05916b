"""Celery on Redis: one process, its solo pool, prefetching as much as it likes."""

from __future__ import annotations

import sys

from celery import Celery
from counting import WARM_UP, tick

broker, wanted = sys.argv[1], int(sys.argv[2])
app = Celery("peer", broker=broker)
app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=0, worker_hijack_root_logger=False)


@app.task(name="noop")
def noop(count: int) -> None:
    tick(count)


with app.producer_pool.acquire(block=True) as producer:
    for _ in range(WARM_UP + wanted):
        noop.apply_async((wanted,), producer=producer)
app.worker_main(["worker", "--pool", "solo", "--loglevel", "ERROR", "--without-gossip", "--without-mingle"])
