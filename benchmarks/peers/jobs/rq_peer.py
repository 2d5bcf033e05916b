"""RQ on Redis: one process that does not fork for each job."""

from __future__ import annotations

import logging
import sys

import noops
from counting import WARM_UP
from redis import Redis
from rq import Queue, SimpleWorker

broker, wanted = sys.argv[1], int(sys.argv[2])
logging.disable()
connection = Redis.from_url(broker)
queue = Queue("peer", connection=connection)
calls = [Queue.prepare_data(noops.noop, (wanted,), result_ttl=0) for _ in range(WARM_UP + wanted)]
for first in range(0, len(calls), 500):
    queue.enqueue_many(calls[first : first + 500])
SimpleWorker([queue], connection=connection).work(burst=True, logging_level="ERROR")
