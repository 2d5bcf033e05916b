"""Makes the golden files of the stored formats: `python -m tests.golden.story`, once for each new version.

The story goes through every kind of event. Files of versions that were released are never made again: they are
what old data look like.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from millpond.history.format import JOURNAL_VERSION, Record, encode_state
from millpond.history.reader import read_history
from millpond.model import QueueDefinition, RedriveFilter, State
from millpond.queue.requests import Cancel, Clear, Complete, Extend, Lease, Redrive, RetryItem, RetryItems, WriteState
from millpond.queue.snapshot import SNAPSHOT_VERSION, take_snapshot
from millpond.store.memory import MemoryStores
from tests.conformance.engine import SteppedPond, keyed, request
from tests.drive import definition

FOLDER = Path(__file__).parent
QUEUES: tuple[QueueDefinition, ...] = (
    definition(dead_queue="dq", completed_retention_ms=60_000, max_attempts=2),
    definition("dq"),
    definition("r", dead_queue="gone"),
)


def tell(pond: SteppedPond) -> None:
    """Every kind of event, some of them several times; ends with items in most states."""
    now = pond.clock.now()
    pond.produce(b"plain 0", b"plain 1", Record(b"urgent", priority=-5, kind="mail", correlation_id="c-1"))
    pond.ask(request(keyed("k", b"keyed"), Record(b"own", id="own", max_attempts=0), name=b"request"))
    pond.ask(request(keyed("k"), name=b"again"))
    pond.produce(Record(b"scheduled", enqueue_at=now + 5_000, encoding="text", reference="ref"))
    pond.produce(keyed("k", b"keyed anew"), on_conflict="replace")
    urgent, plain, other = pond.lease(3, client="worker")
    pond.ask(WriteState(urgent.lease, 0, encode_state({"step": 1})))
    pond.ask(Extend([urgent.lease, plain.lease], 45_000))
    pond.ask(RetryItems([RetryItem(plain.lease, error="boom"), RetryItem(other.lease, deferred=True)]))
    pond.ask(Complete([urgent.lease], encode_state("result")))
    pond.advance(6_000)
    leased = pond.lease(2, lease_timeout=1_000)
    pond.ask(Cancel([leased[0].id]))
    pond.advance(1_000)
    gone = pond.submit(Lease(1))
    pond.run()
    pond.queues["q"].withdraw(gone)
    pond.run()
    pond.produce(Record(b"short", expire_deadline=pond.clock.now() + 500), b"rejected 0", b"rejected 1")
    pond.advance(500)
    for item in pond.lease(10, client="critic"):
        if item.payload.startswith(b"rejected"):
            pond.kill(item, error="no good")
        elif item.id != "own":
            pond.retry(item)
    pond.ask(Redrive(None, RedriveFilter(error_contains="no good")), "dq")
    pond.run()
    pond.produce(Record(b"to clear", enqueue_at=pond.clock.now() + 90_000))
    pond.ask(Clear([State.SCHEDULED]))
    pond.advance(60_000)
    pond.produce(b"stranded 0", b"stranded 1", queue="r")
    for item in pond.lease(2, queue="r"):
        pond.kill(item, "r")
    pond.ask(Redrive(["incr-0-1"], RedriveFilter()), "r")
    pond.produce(b"waiting", Record(b"later", enqueue_at=pond.clock.now() + 1_000, key="k2"))
    pond.lease(1, client="worker")
    pond.cancel(pond.produce(b"cancelled")[0].id)


def write() -> None:
    pond = SteppedPond(MemoryStores(), *QUEUES)
    tell(pond)
    journal: dict[str, Any] = {}
    snapshot: dict[str, Any] = {}
    for name, queue in pond.queues.items():
        lane = queue.state.lanes[0]
        rows = lane.store.journal(0, 10_000)
        chunks, docs = lane.store.read(range(1, 100), range(400))
        journal[name] = {
            "rows": [(row.turn, row.at, row.events.hex()) for row in rows],
            "transitions": msgspec.to_builtins(list(read_history(lane.store, 0, lane.partition.mint))),
        }
        snapshot[name] = {
            "turn": lane.partition.turn,
            "state": take_snapshot(lane.partition).hex(),
            "chunks": {first: body.hex() for first, body in chunks.items()},
            "docs": {number: doc.hex() for number, doc in docs.items()},
            "items": msgspec.to_builtins(pond.list(queue=name)),
        }
    for kind, version, content in (("journal", JOURNAL_VERSION, journal), ("snapshot", SNAPSHOT_VERSION, snapshot)):
        text = json.dumps({"now": pond.clock.now(), "queues": content}, indent=1, sort_keys=True)
        (FOLDER / f"{kind}-v{version}.json").write_text(text + "\n")


if __name__ == "__main__":
    write()
