"""tests/crash/doomed.py with all items in PostgreSQL: `python -m tests.postgres.doomed_pond DIRECTORY LIFE`.

The url is in the environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Thread

import millpond
from millpond import Pond, StoreSettings
from tests.crash.doomed import CONSUMERS, PRODUCERS, consume, prepare, produce, say

URL = "MILLPOND_TEST_POSTGRES"


def open_pond(directory: str | Path, url: str) -> Pond:
    away = StoreSettings(name="default", affinity=0.0)
    return millpond.open(directory, stores=[away, StoreSettings(name="pg", driver="postgres", url=url)])


def main(directory: str, life: str) -> None:
    say("start")
    pond = open_pond(directory, os.environ[URL])
    prepare(pond)
    workers = [Thread(target=produce, args=(pond, f"{life}-{number}")) for number in range(PRODUCERS)]
    workers += [Thread(target=consume, args=(pond,)) for _ in range(CONSUMERS)]
    for worker in workers:
        worker.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
