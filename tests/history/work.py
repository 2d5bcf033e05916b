"""Random work on a queue with a dead queue: all that the engine can do, claims and transactions among it."""

from __future__ import annotations

from random import Random
from typing import Any

from millpond.model import State
from millpond.queue.requests import AbortStage, ClaimItems, EndClaim, JudgeClaim, JudgeItem, PublishStage, StageItems
from millpond.store.base import JournalRow, Stores
from millpond.store.memory import MemoryStores
from tests.conformance.engine import SteppedPond
from tests.conformance.test_engine_restart import Workload
from tests.drive import definition

STEPS = 300
OWNERS = ("", "spark", "batch")


class AllWork(Workload):
    def __init__(self, pond: SteppedPond, seed: int) -> None:
        super().__init__(pond, seed)
        self.extra = Random(seed)
        self.claim_ids: list[str] = []
        self.txns: list[str] = []

    def step(self) -> None:
        if self.extra.random() < 0.75:
            super().step()
        else:
            self.extra.choice((self.claim, self.judge, self.end_claim, self.stage, self.publish, self.abort))()
            self.pond.run()

    def claim(self) -> None:
        name = f"c{self.extra.randint(0, 10**9)}"
        self.pond.submit(ClaimItems(name, self.extra.randint(1, 30), owner=self.extra.choice(OWNERS)))
        self.claim_ids.append(name)

    def judge(self) -> None:
        for name in self.claim_ids[-1:]:
            verdicts = [
                JudgeItem(item.id, self.extra.random() < 0.4, self.extra.choice([None, 0, 3_000]), "bad row")
                for item in self.pond.list(State.CLAIMED)[:5]
            ]
            if verdicts:
                self.pond.submit(JudgeClaim(name, verdicts))

    def end_claim(self) -> None:
        if self.claim_ids:
            name = self.claim_ids.pop(self.extra.randrange(len(self.claim_ids)))
            self.pond.submit(EndClaim(name, self.extra.random() < 0.6))

    def stage(self) -> None:
        txn = f"t{self.extra.randint(0, 10**9)}"
        for chunk in range(self.extra.randint(1, 3)):
            records = [self.record() for _ in range(self.extra.randint(1, 5))]
            self.pond.submit(StageItems(txn, str(chunk), records, 0))
        self.txns.append(txn)

    def publish(self) -> None:
        if self.txns:
            self.pond.submit(PublishStage(self.txns.pop(0), ["0"]))

    def abort(self) -> None:
        if self.txns:
            self.pond.submit(AbortStage(self.txns.pop()))


def worked_pond(seed: int, steps: int = STEPS, stores: Stores | None = None, **settings: Any) -> SteppedPond:
    work = begun(seed, stores, **settings)
    for _ in range(steps):
        work.step()
    return work.pond


def begun(
    seed: int, stores: Stores | None = None, partitions: int = 2, dead_queue: str | None = "dq", **settings: Any
) -> AllWork:
    """Without a dead queue the dead stay in place, and are redriven there."""
    queues = definition(partitions=partitions, dead_queue=dead_queue, max_attempts=3, **settings), definition("dq")
    return AllWork(SteppedPond(stores or MemoryStores(), *queues), seed)


def journals(pond: SteppedPond) -> dict[tuple[str, int], list[JournalRow]]:
    """All rows, by incarnation and partition."""
    return {
        (queue.definition.incarnation, index): lane.store.journal(0, 1_000_000)
        for queue in (one.state for one in pond.queues.values())
        for index, lane in queue.lanes.items()
    }
