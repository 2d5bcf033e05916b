"""tests/crash/doomed_rebalance.py with items in PostgreSQL: `python -m tests.postgres.doomed_rebalance DIRECTORY LIFE`.

The url is in the environment. The first word of a life's name says where its rebalances put items.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import millpond
from millpond import Pond, StoreSettings
from tests.crash.doomed import say
from tests.crash.doomed_rebalance import work
from tests.postgres.doomed_pond import URL


def open_pond(directory: str | Path, url: str, where: str) -> Pond:
    """New partitions go to this store: `default` or `pg`."""
    stores = [
        StoreSettings(name="default", affinity=float(where == "default")),
        StoreSettings(name="pg", driver="postgres", url=url, affinity=float(where == "pg")),
    ]
    return millpond.open(directory, stores=stores)


def main(directory: str, life: str) -> None:
    say("start")
    work(open_pond(directory, os.environ[URL], life.split("-")[0]), life)


if __name__ == "__main__":
    main(*sys.argv[1:])
