"""Dramatiq on Redis: one process with this many threads."""

from __future__ import annotations

import sys
import threading

import dramatiq
from counting import WARM_UP, tick
from dramatiq.brokers.redis import RedisBroker

url, wanted, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
broker = RedisBroker(url=url)
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=0)
def noop(count: int) -> None:
    tick(count)


for _ in range(WARM_UP + wanted):
    noop.send(wanted)
worker = dramatiq.Worker(broker, worker_threads=threads)
worker.start()
threading.Event().wait()  # the last no-op ends the process
