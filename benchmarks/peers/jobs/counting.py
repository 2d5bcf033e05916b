"""The no-op that every peer runs: it counts itself, and the last one tells how long they all took.

From the beginning of the first to that of the last: what a worker needs to start is not counted.
"""

from __future__ import annotations

import itertools
import json
import os
import time

OUT = os.dup(1)  # before a peer takes standard output for its log
WARM_UP = 200  # not counted: connections, caches, threads

_numbers = itertools.count(1)  # threads may count at a time
_started = 0.0


def tick(wanted: int) -> None:
    global _started
    number = next(_numbers)
    if number == WARM_UP:
        _started = time.perf_counter()
    elif number == WARM_UP + wanted:
        os.write(OUT, json.dumps({"rate": wanted / (time.perf_counter() - _started)}).encode() + b"\n")
        os._exit(0)  # without the peer's farewell, which may take seconds
