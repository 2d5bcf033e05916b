"""A process that commits to a partition until it is killed, and says what is acknowledged.

`python -m tests.postgres.doomed URL INCARNATION`. Each line on stdout is a turn: with a `?` before it is committed,
with a `!` once it is.
"""

from __future__ import annotations

import os
import sys

from millpond.store.base import Chunk, Turn
from millpond.store.postgres import PostgresStores


def work_of(number: int, life: str) -> Turn:
    """A turn that adds a chunk, drops an earlier one, and now and then leaves a snapshot."""
    return Turn(
        number=number,
        at=number,
        events=f"{number} of {life}".encode(),
        chunks=[Chunk(number * 10, 10, f"chunk {number} of {life}".encode() * 500)],
        chunk_drops=[(number - 5) * 10],
        docs={number: b"doc %d" % number},
        doc_drops=[number - 5],
        snapshot=b"after %d" % number if number % 7 == 0 else None,
    )


def main(url: str, incarnation: str) -> None:
    store = PostgresStores(url).open(incarnation, 0, "full")
    recovered = store.recover()
    number = recovered.rows[-1].turn if recovered.rows else recovered.snapshot_turn
    life = f"process {os.getpid()}"
    while True:
        number += 1
        os.write(1, b"%d?\n" % number)
        store.commit(work_of(number, life))
        os.write(1, b"%d!\n" % number)


if __name__ == "__main__":
    main(*sys.argv[1:])
