"""One measurement in a fresh process: `python -m benchmarks.child raw.cycle '{"path": …}'` prints its result as JSON.

A process each keeps the memory, the collector's work and the caches of one measurement out of the next.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any

import msgspec

from benchmarks import embedded, engine, on_postgres, raw, rebalancing

SIDES = {"raw": raw, "engine": engine, "embedded": embedded, "postgres": on_postgres, "rebalancing": rebalancing}


def main() -> None:
    side, name = sys.argv[1].split(".")
    measurement: Any = getattr(SIDES[side], name)
    result = measurement(**msgspec.json.decode(sys.argv[2]))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main()
