"""`make demo`: the main job in a minute. Produce, lease, complete; a few fail, one dies; nothing is lost."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import millpond

ITEMS = 10_000
BATCH = 500
UNLUCKY = 997  # every so manieth item fails on its first attempt
HOPELESS = 4_242  # this one fails always


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="millpond-demo-") as directory:
        started = time.perf_counter()
        produce(directory)
        print(f"produced   {ITEMS:>6} items, durable on disk, in {Path(directory)}")
        print("closed and opened again: what follows is what was on disk")
        counts = consume(directory)
        took = time.perf_counter() - started
        for name, count in counts.items():
            print(f"{name:<10} {count:>6}")
        print(f"{ITEMS} items in and out in {took:.2f} s, every step synced to disk")
    lost = ITEMS - counts["completed"] - counts["dead"]
    print("nothing lost, nothing twice" if not lost else f"{lost} items are missing")
    return 0 if not lost else 1


def produce(directory: str) -> None:
    with millpond.open(directory) as pond:
        pond.create_queue("letters")
        pond.create_queue("orders", partitions=2, max_attempts=3, dead_queue="letters", backoff={"base": 0})
        for first in range(0, ITEMS, BATCH):
            pond.produce("orders", [f"order {number}" for number in range(first, first + BATCH)])


def consume(directory: str) -> Counter[str]:
    """Work everything off, and count what happened."""
    counts: Counter[str] = Counter()
    with millpond.open(directory) as pond:
        while items := pond.lease("orders", batch=BATCH, wait="1s", client_id="demo"):
            counts["leased"] += len(items)
            failed = [millpond.Retry(lease=item, error="out of stock") for item in items if fails(item)]
            done = [item for item in items if not fails(item)]
            if failed:
                counts["failed"] += sum(result.ok for result in pond.retry(failed))
            if done:
                counts["completed"] += sum(result.ok for result in pond.complete(done))
        for letter in pond.lease("letters", batch=BATCH, wait="5s"):
            print(f"dead       {letter.text!r} after {letter.source_attempts} attempts: {letter.last_error}")
            counts["dead"] += 1
            pond.complete([letter])
    return counts


def fails(item: millpond.LeasedItem) -> bool:
    number = int(item.text.split()[1])
    return number == HOPELESS or (number % UNLUCKY == 0 and item.attempts == 1)


if __name__ == "__main__":
    sys.exit(main())
