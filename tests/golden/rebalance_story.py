"""Makes the golden file of what a rebalance stores: `python -m tests.golden.rebalance_story`, once.

It is an addition to version 1: the files without it stay as they are.
"""

from __future__ import annotations

import json

from millpond.history.format import JOURNAL_VERSION, Record
from millpond.store.memory import MemoryStores
from tests.conformance.engine import SteppedPond, keyed
from tests.drive import definition
from tests.golden.story import FOLDER

REBALANCE_FILE = f"journal-v{JOURNAL_VERSION}-rebalance.json"


def tell(pond: SteppedPond) -> None:
    """Items are carried to a new partition, and names entrusted to it."""
    pond.produce(keyed("k", b"ended"), b"plain")
    pond.complete(pond.lease(2))
    pond.produce(Record(b"later", enqueue_at=pond.clock.now() + 9_000, priority=2), b"ready")
    pond.rebalance(1, (0,))
    pond.complete(pond.lease())
    pond.run()


def write() -> None:
    pond = SteppedPond(MemoryStores(), definition())
    tell(pond)
    lanes = pond.queues["q"].state.everyone
    places = {
        f"q/{lane.index}": [(row.turn, row.at, row.events.hex()) for row in lane.store.journal(0, 10_000)]
        for lane in lanes
    }
    (FOLDER / REBALANCE_FILE).write_text(json.dumps({"places": places}, indent=1) + "\n")


if __name__ == "__main__":
    write()
