"""A process of batch readers and writers that works on a directory until it is killed, and says what it does.

`python -m tests.crash.doomed_batches DIRECTORY LIFE`. Each line on stdout is `word subject ...`, as of `doomed`: first
what will be done, then that it is. The writer publishes transactions of known payloads; the reader's claims go by
number, and what it reads of one it says before it completes it.
"""

from __future__ import annotations

import sys
import threading
from zlib import crc32

import millpond
from millpond import Pond
from millpond.errors import ClaimFinished, QueueExists, Unavailable
from millpond.model import Verdict
from tests.crash.doomed import say

QUEUE, WRITER, READER = "batches", "writer", "reader"
PARTITIONS = 3
CHUNKS = 4  # of a transaction
ITEMS = 5  # of a chunk
CLAIM_ITEMS = 30
ENOUGH = 400  # ready items, beyond which the writer waits for the reader


def payloads_of(number: int, chunk: int) -> list[str]:
    return [f"{number}.{chunk}.{place}" for place in range(ITEMS)]


def all_payloads(number: int) -> list[str]:
    return [payload for chunk in range(CHUNKS) for payload in payloads_of(number, chunk)]


def verdict_of(item_id: str, payload: str, attempts: int) -> Verdict | None:
    """One in ten dies, one in ten is tried again."""
    draw = crc32(payload.encode()) % 10
    if draw == 0:
        return Verdict(id=item_id, verdict="dead", error=payload)
    if draw == 1 and not attempts:
        return Verdict(id=item_id, verdict="retry", error=payload, delay=0)
    return None


def prepare(pond: Pond) -> None:
    try:
        pond.create_queue(QUEUE, partitions=PARTITIONS, max_attempts=0)
    except QueueExists:
        pass


def write(pond: Pond, first: int) -> None:
    """Transactions from `first` on; it was not answered, or it is the next."""
    number = first
    while True:
        if pond.stats(QUEUE).counts["ready"] > ENOUGH:
            continue
        say("publish", number)
        publish(pond, number)
        say("published", number)
        number += 1


def publish(pond: Pond, number: int) -> None:
    """As a sink does, again and again from the start until it is answered."""
    txn = f"{WRITER}:{number}"
    names = [f"chunk-{chunk}" for chunk in range(CHUNKS)]
    for chunk, name in enumerate(names):
        pond.stage(QUEUE, txn, name, payloads_of(number, chunk))
    pond.publish_stage(QUEUE, txn, names)


def read(pond: Pond) -> None:
    opened = pond.open_consumer(QUEUE, READER)
    number = opened.last_completed + 1
    while True:
        name = f"{READER}:{number}"
        if not pond.claim(QUEUE, name, max_items=CLAIM_ITEMS, parts=2, wait="1s", epoch=opened.epoch).items:
            continue
        read_and_complete(pond, name, opened.epoch)
        number += 1


def read_and_complete(pond: Pond, name: str, epoch: int) -> None:
    """Says what was read, what will become of it, and that it has."""
    [claim] = [claim for claim in pond.list_claims(QUEUE) if claim.claim_id == name]
    items = [item for part in claim.parts for item in pond.read_claim(QUEUE, name, part=part.part, epoch=epoch).items]
    say("read", name, *(item.payload.decode() for item in items))
    found = [verdict_of(item.id, item.payload.decode(), item.attempts) for item in items]
    verdicts = [verdict for verdict in found if verdict is not None]
    if verdicts:
        assert all(result.ok for result in pond.give_verdicts(QUEUE, name, verdicts, epoch=epoch))
    while True:
        try:
            pond.complete_claim(QUEUE, name, epoch=epoch)
        except Unavailable:
            continue
        except ClaimFinished:
            break
        break
    say("completed", name)


def main(directory: str, first: str) -> None:
    say("start")
    pond = millpond.open(directory)
    prepare(pond)
    workers = [threading.Thread(target=write, args=(pond, int(first))), threading.Thread(target=read, args=(pond,))]
    for worker in workers:
        worker.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
