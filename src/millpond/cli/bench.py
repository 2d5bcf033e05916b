"""`millpond bench`: how fast this machine is at the three calls of an item's life. See also benchmarks/."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.cli.flags import Arguments, Subparsers, add_command, add_json, whole
from millpond.cli.output import DONE, print_json, print_table, say
from millpond.cli.progress import Progress

if TYPE_CHECKING:
    from millpond.blocking import Pond

ITEMS = 20_000
BATCH = 500
SINGLES = 200  # of calls with one item each: what a commit costs
PAYLOAD = b"x" * 100
QUEUE = "bench"

EXAMPLES = """\
  millpond bench                                   some seconds, in a temporary directory
  millpond bench --dir /srv/disk                   the disk that you mean to use
  millpond bench --items 200000 --json

Everything is synced to disk, as it always is. One process and one queue, calls one after another: many producers and
consumers at a time share commits, and reach more.
"""


def add(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "bench", "measure this machine, in a minute", EXAMPLES)
    verb.add_argument("--items", type=whole(1, 10_000_000), default=ITEMS, metavar="N", help=f"so many ({ITEMS:,})")
    verb.add_argument("--batch", type=whole(1, 1_000), default=BATCH, metavar="N", help=f"so many a call ({BATCH})")
    verb.add_argument("--dir", metavar="DIR", help="make the temporary directory there")
    add_json(verb)
    verb.set_defaults(run=bench)


def bench(asked: Arguments) -> int:
    import millpond

    with tempfile.TemporaryDirectory(prefix="millpond-bench-", dir=asked.dir) as directory:
        with millpond.open(Path(directory), listen=False) as pond, Progress(4 * asked.items, "calls") as progress:
            pond.create_queue(QUEUE, lease_timeout="1h")
            rates = _measure(pond, asked, progress)
        place = str(Path(directory).parent)
    if asked.json:
        print_json({"items": asked.items, "batch": asked.batch, "directory": place, "a_second": rates})
        return DONE
    print_table(["WHAT", "A SECOND"], [[name.replace("_", " "), f"{rate:,.0f}"] for name, rate in rates.items()])
    say(f"{asked.items:,} items of {len(PAYLOAD)} bytes, {asked.batch} a call, synced to disk in {place}")
    return DONE


def _measure(pond: Pond, asked: Arguments, progress: Progress) -> dict[str, float]:
    sizes = [min(asked.batch, asked.items - first) for first in range(0, asked.items, asked.batch)]
    leases: list[list[str]] = []

    def produce(size: int) -> None:
        pond.produce(QUEUE, [PAYLOAD] * size)

    def lease(size: int) -> None:
        leases.append([item.lease for item in pond.lease(QUEUE, batch=size)])

    def complete(_: int) -> None:
        pond.complete(leases.pop())

    base = 0
    rates = {}
    for name, call in (("produce", produce), ("lease", lease), ("complete", complete)):
        rates[name] = _timed(call, sizes, base, progress)
        base += asked.items
    rates["produce_one_at_a_time"] = _timed(produce, [1] * min(SINGLES, asked.items), base, progress)
    return rates


def _timed(call: Callable[[int], None], sizes: list[int], base: int, progress: Progress) -> float:
    """Items a second."""
    done = 0
    begun = time.perf_counter()
    for size in sizes:
        call(size)
        done += size
        progress(base + done)
    return done / (time.perf_counter() - begun)
