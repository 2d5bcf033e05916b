"""The no-op of the peers as a task of millpond's, and the program that enqueues it."""

from __future__ import annotations

import importlib
import os
import sys

import millpond

BATCH = 1_000  # in one produce

app = millpond.App(data=os.environ["MILLPOND_DATA"])
counting = importlib.import_module("counting")  # of the peers


@app.task
def noop(count: int) -> None:
    counting.tick(count)


def main(wanted: int) -> None:
    jobs = wanted + counting.WARM_UP
    with app:
        for first in range(0, jobs, BATCH):
            noop.map([wanted] * min(BATCH, jobs - first))


if __name__ == "__main__":
    main(int(sys.argv[1]))
