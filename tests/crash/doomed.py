"""A process that works on a directory until it is killed, and says what it is about to do and what is done.

`python -m tests.crash.doomed DIRECTORY LIFE`. Each line on stdout is `word subject ...`: first what will be done, then,
once it was acknowledged, that it is. Subjects are payloads; those of one produce are `request.0`, `request.1`, ...
"""

from __future__ import annotations

import os
import sys
import threading
from zlib import crc32

import millpond
from millpond import LeasedItem, Pond, Retry
from millpond.errors import QueueExists

PRODUCERS, CONSUMERS = 2, 2
BATCH = 3  # items a produce
ENOUGH = 200  # ready items, beyond which producers wait for consumers


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # in one piece, or not at all


def payloads_of(request: str) -> list[str]:
    return [f"{request}.{number}" for number in range(BATCH)]


def fate_of(item: LeasedItem) -> str:
    """One in ten is rejected, two in ten fail once."""
    draw = crc32(item.payload) % 10
    if draw == 0:
        return "reject"
    return "retry" if draw < 3 and item.attempts == 1 else "complete"


def prepare(pond: Pond) -> None:
    try:
        pond.create_queue("letters")
    except QueueExists:
        pass
    try:
        pond.create_queue(
            "work", partitions=2, dead_queue="letters", max_attempts=0, lease_timeout="1s", backoff={"base": 0}
        )
    except QueueExists:
        pass


def produce(pond: Pond, name: str) -> None:
    number = 0
    while True:
        if pond.stats("work").counts["ready"] > ENOUGH:
            continue
        request = f"{name}-{number}"
        say("produce", request)
        pond.produce("work", payloads_of(request), request_id=request)
        say("produced", request)
        number += 1


def consume(pond: Pond) -> None:
    while True:
        fates: dict[str, list[LeasedItem]] = {"complete": [], "retry": [], "reject": []}
        for item in pond.lease("work", batch=5, wait="1s"):
            fates[fate_of(item)].append(item)
        if fates["complete"]:
            say("complete", *(item.text for item in fates["complete"]))
            done = zip(fates["complete"], pond.complete(fates["complete"]), strict=True)
            say("completed", *(item.text for item, result in done if result.ok))
        if fates["retry"]:
            results = pond.retry([Retry(lease=item, error=item.text) for item in fates["retry"]])
            done = zip(fates["retry"], results, strict=True)
            say("retried", *(item.text for item, result in done if result.ok))
        if fates["reject"]:
            say("reject", *(item.text for item in fates["reject"]))
            results = pond.retry([Retry(lease=item, error=item.text, dead=True) for item in fates["reject"]])
            done = zip(fates["reject"], results, strict=True)
            say("rejected", *(item.text for item, result in done if result.ok))


def main(directory: str, life: str) -> None:
    say("start")
    pond = millpond.open(directory)
    prepare(pond)
    workers = [threading.Thread(target=produce, args=(pond, f"{life}-{number}")) for number in range(PRODUCERS)]
    workers += [threading.Thread(target=consume, args=(pond,)) for _ in range(CONSUMERS)]
    for worker in workers:
        worker.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
