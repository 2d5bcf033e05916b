"""Makes the golden files of what claims and transactions store: `python -m tests.golden.batch_story`, once.

They are additions to version 1: the files without them stay as they are. The story ends in the middle of things, with a
claim and a transaction that are decided on and not yet carried through; who loads it does that.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from millpond.history.format import JOURNAL_VERSION, Record
from millpond.model import QueueDefinition
from millpond.queue.requests import EndClaim, JudgeItem, PublishStage
from millpond.queue.snapshot import SNAPSHOT_VERSION, take_snapshot
from millpond.store.memory import MemoryStores
from tests.conformance.engine import SteppedPond, keyed, numbered
from tests.drive import definition
from tests.golden.story import FOLDER

BATCH_QUEUES: tuple[QueueDefinition, ...] = (definition(dead_queue="dq", max_attempts=3), definition("dq"))
JOURNAL_FILE = f"journal-v{JOURNAL_VERSION}-batch.json"
SNAPSHOT_FILE = f"snapshot-v{SNAPSHOT_VERSION}-batch.json"


def tell(pond: SteppedPond) -> None:
    """Every kind of event of claims and transactions."""
    pond.produce(*numbered(6), Record(b"urgent", priority=-5, kind="mail"))
    epoch = pond.open_consumer().epoch
    pond.claim("s:1", 3, epoch=epoch, owner="job 7")
    items = pond.read("s:1")
    pond.judge(JudgeItem(items[0].id, False, 4_000, "again"), JudgeItem(items[1].id, True, None, "bad"), claim_id="s:1")
    pond.complete_claim("s:1", epoch)
    pond.claim("released", 1)
    pond.release_claim("released")
    pond.claim("cut", 3, max_bytes=2)
    pond.complete_claim("cut")
    now = pond.clock.now()
    pond.stage("x", b"staged", keyed("k", b"keyed"), Record(b"later", enqueue_at=now + 9_000), txn="job:1")
    pond.stage("left out", b"never", txn="job:1")
    pond.produce(b"between")
    pond.publish("x", txn="job:1")
    pond.stage("x", keyed("k", b"taken"), b"free", txn="plain")
    pond.publish("x", txn="plain")
    pond.stage("x", b"waits", Record(b"dated", expire_deadline=now + 60_000), txn="job:2")
    pond.produce(*numbered(3, 100))
    pond.claim("open", 2, parts=2)
    pond.judge(JudgeItem(pond.read("open")[0].id, False), claim_id="open")
    pond.claim("ending", 2)
    pond.stage("y", b"shown at last", txn="job:3")
    pond.submit(EndClaim("ending", True))
    pond.submit(PublishStage("job:3", ["y"]))
    decisions = pond.queues["q"].state.meta.partition.decisions
    while not decisions.deciding:
        pond.do(pond.tick())


def write() -> None:
    pond = SteppedPond(MemoryStores(), *BATCH_QUEUES)
    tell(pond)
    journal: dict[str, Any] = {}
    snapshot: dict[str, Any] = {}
    for name, queue in pond.queues.items():
        for lane in queue.state.everyone:
            chunks, docs = lane.store.read(range(1, 100), range(400))
            place = f"{name}/{lane.index}"
            journal[place] = [(row.turn, row.at, row.events.hex()) for row in lane.store.journal(0, 10_000)]
            snapshot[place] = {
                "turn": lane.partition.turn,
                "state": take_snapshot(lane.partition).hex(),
                "chunks": {first: body.hex() for first, body in chunks.items()},
                "docs": {number: doc.hex() for number, doc in docs.items()},
            }
    pond.reopen()
    outcome = outcome_of(pond)
    for name, content in ((JOURNAL_FILE, journal), (SNAPSHOT_FILE, snapshot)):
        text = json.dumps({"now": pond.clock.now(), "places": content, "outcome": outcome}, indent=1, sort_keys=True)
        (FOLDER / name).write_text(text + "\n")


def outcome_of(pond: SteppedPond) -> dict[str, Any]:
    """What is seen of it all after a load."""
    return {
        "items": {name: msgspec.to_builtins(pond.list(queue=name)) for name in pond.queues},
        "claims": msgspec.to_builtins(pond.claims()),
        "read": msgspec.to_builtins([*pond.read("open")]),
        "staged": pond.stage("x", txn="job:2"),
        "opened": msgspec.to_builtins(pond.open_consumer()),
        "again": msgspec.to_builtins([pond.publish("y", txn="job:3"), pond.publish("x", txn="plain")]),
        "ended": [msgspec.to_builtins(pond.complete_claim(name)) for name in ("ending", "cut", "open")],
    }


if __name__ == "__main__":
    write()
