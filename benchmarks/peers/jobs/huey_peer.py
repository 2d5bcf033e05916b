"""Huey on SQLite or Redis: its consumer with this many threads."""

from __future__ import annotations

import logging
import sys
from typing import Any

from counting import WARM_UP, tick
from huey import RedisHuey, SqliteHuey

where, wanted, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
logging.disable()
huey: Any
if "redis" in where:
    huey = RedisHuey("peer", url=where, results=False)
else:
    huey = SqliteHuey("peer", filename=where, results=False, fsync=True)


@huey.task()
def noop(count: int) -> None:
    tick(count)


for _ in range(WARM_UP + wanted):
    noop(wanted)
huey.create_consumer(workers=threads, worker_type="thread", periodic=False, initial_delay=0.01).run()
