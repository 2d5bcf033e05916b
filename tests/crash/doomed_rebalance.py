"""As `tests.crash.doomed`, while the queue's partitions come and go.

`python -m tests.crash.doomed_rebalance DIRECTORY LIFE`. A partition that has drained is removed at once, not when
nobody can ask for its completed items any more, so that all steps are met within a second.
"""

from __future__ import annotations

import sys
import threading
from random import Random

import millpond
from millpond import Pond
from millpond.errors import Conflict, QueueExists
from millpond.queue import draining
from millpond.queue.lane import Lane
from millpond.queue.state import QueueState
from tests.crash.doomed import CONSUMERS, PRODUCERS, consume, produce, say

PARTITIONS_MAX = 4


def prepare(pond: Pond) -> None:
    try:
        pond.create_queue("letters", partitions=2)
        pond.create_queue(
            "work",
            partitions=2,
            dead_queue="letters",
            max_attempts=0,
            lease_timeout="1s",
            backoff={"base": 1, "cap": 1},
        )
    except QueueExists:
        pass


def rebalance(pond: Pond, life: str) -> None:
    random = Random(life)
    while True:
        for queue in ("work", "letters"):
            try:
                told = pond.rebalance(queue, partitions=random.randrange(1, PARTITIONS_MAX + 1))
            except Conflict:
                pond.stats(queue)
            else:
                say(told.status, queue)


def at_once(queue: QueueState, lane: Lane) -> int | None:
    return 0 if lane.index in queue.draining and lane.known and lane.partition.is_empty() else None


def main(directory: str, life: str) -> None:
    say("start")
    work(millpond.open(directory), life)


def work(pond: Pond, life: str) -> None:
    draining.removable_at = at_once
    prepare(pond)
    workers = [threading.Thread(target=produce, args=(pond, f"{life}-{number}")) for number in range(PRODUCERS)]
    workers += [threading.Thread(target=consume, args=(pond,)) for _ in range(CONSUMERS)]
    workers += [threading.Thread(target=rebalance, args=(pond, life))]
    for worker in workers:
        worker.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
