"""Drives logical queues by hand: no event loop, no threads, a clock that the test moves."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Any

from msgspec.structs import replace

from millpond.clock import ManualClock
from millpond.history.format import Payloads, Record, are_plain
from millpond.model import (
    LeasedItem,
    PartitionDefinition,
    PlainItems,
    Produced,
    QueueDefinition,
    QueueSettings,
    Rebalancing,
)
from millpond.queue.bodies import Bodies, Budget
from millpond.queue.lane import Lane, meta_lane
from millpond.queue.logical import LogicalQueue
from millpond.queue.requests import Complete, Lease, Produce, Request
from millpond.store.base import META_PARTITION, Stores


def definition(name: str = "q", partitions: int = 1, **settings: Any) -> QueueDefinition:
    return QueueDefinition(
        name=name,
        incarnation=f"inc{name}",
        settings=QueueSettings(**settings),
        partitions=tuple(PartitionDefinition(partition=index) for index in range(partitions)),
        created_at=0,
        updated_at=0,
    )


def plain_items(payloads: Sequence[bytes]) -> PlainItems:
    """As Arrow would have them, somewhere in a longer buffer."""
    offsets = array("I", accumulate(map(len, payloads), initial=5))
    return PlainItems(memoryview(offsets), memoryview(b"ahead" + b"".join(payloads)), max(map(len, payloads)))


class Pond:
    """Some queues on one kind of store, and the clock they share."""

    def __init__(self, stores: Stores, *definitions: QueueDefinition) -> None:
        self.clock = ManualClock()
        self.stores = stores
        self.definitions = {one.name: one for one in definitions}
        self.queues: dict[str, LogicalQueue] = {}
        self.open()

    def open(self) -> None:
        budget = Budget()
        for name, one in self.definitions.items():
            lanes = [self._lane(one, p, budget) for p in one.partitions]
            meta = meta_lane(self.stores.open(one.incarnation, META_PARTITION, one.settings.durability), budget)
            exists, now = self.definitions.__contains__, self.clock.now()
            self.queues[name] = LogicalQueue(one, lanes, meta, Random(0), exists, now)
        self.run()

    def rebalance(self, add: int, remove: Sequence[int], queue: str = "q") -> None:
        """New partitions come, and these are to go. `sweep` then removes those that have drained."""
        self.begin_rebalance(add, remove, queue)
        self.run()

    def begin_rebalance(self, add: int, remove: Sequence[int], queue: str = "q") -> None:
        """As the manager does."""
        one = self.definitions[queue]
        places = [replace(p, read_only=p.read_only or p.partition in remove) for p in one.partitions]
        new = [PartitionDefinition(partition=one.next_partition + index) for index in range(add)]
        removing = tuple(p for p in places if p.read_only)
        status = Rebalancing(partitions=0, added=tuple(new), removing=removing, started_at=self.clock.now())
        self.definitions[queue] = replace(one, partitions=(*places, *new), rebalance=status)
        self.queues[queue].configure(self.definitions[queue])
        self.queues[queue].add([self._lane(self.definitions[queue], p, Budget()) for p in new])

    def sweep(self, queue: str = "q") -> list[int]:
        """Remove what has drained; returns the partitions that are left."""
        for index in self.queues[queue].drained:
            lane = self.queues[queue].remove(index, self.clock.now())
            assert lane is not None
            self.run()
            one = self.definitions[queue]
            self.stores.destroy(one.incarnation, [index])
            left = tuple(p for p in one.partitions if p.partition != index)
            self.definitions[queue] = replace(one, partitions=left)
            self.queues[queue].configure(self.definitions[queue])
        return [p.partition for p in self.definitions[queue].partitions]

    def _lane(self, one: QueueDefinition, place: PartitionDefinition, budget: Budget) -> Lane:
        store = self.stores.open(one.incarnation, place.partition, one.settings.durability)
        return Lane(place, store, Bodies(budget))

    def reopen(self) -> None:
        """As after a crash: nothing of memory is left."""
        for queue in self.queues.values():
            for lane in queue.state.everyone:
                lane.store.close()
        self.open()

    def close(self) -> None:
        for queue in self.queues.values():
            while not queue.closed:
                queue.close(self.clock.now())
                self._run_jobs(queue)

    def ask(self, request: Request, queue: str = "q") -> Any:
        """Submit, run everything there is to run, and return the reply; raises the error of a refusal."""
        self.queues[queue].submit(request, self.clock.now())
        self.run()
        assert request.answered, "the request waits for something that is not there"
        if request.error is not None:
            raise request.error
        return request.value

    def run(self) -> None:
        """Tick until nothing moves at this instant."""
        moved = True
        while moved:
            moved = False
            for queue in list(self.queues.values()):
                queue.tick(self.clock.now())
                moved = self._run_jobs(queue) or self._deliver(queue) or moved

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        self.run()

    def _run_jobs(self, queue: LogicalQueue) -> bool:
        jobs, queue.jobs = queue.jobs, []
        for job in jobs:
            job.run()
            queue.finish(job, self.clock.now())
        return bool(jobs)

    def _deliver(self, queue: LogicalQueue) -> bool:
        outbox, queue.state.outbox = queue.state.outbox, []
        for request in outbox:
            request.done = queue.settle
            self.queues[request.target].submit(request, self.clock.now())
        return bool(outbox)

    # ---- the common calls ---------------------------------------------------------------------------------

    def produce(self, *payloads: bytes | Record, queue: str = "q", **options: Any) -> list[Produced]:
        named = any(isinstance(p, Record) and (p.id or p.key) for p in payloads)
        records = Payloads(payloads) if are_plain(payloads) else list(payloads)
        replies: list[Produced] = self.ask(Produce(records, 0, named=named, **options), queue)
        return replies

    def lease(self, batch: int = 1, queue: str = "q", **options: Any) -> list[LeasedItem]:
        items: list[LeasedItem] = self.ask(Lease(batch, **options), queue)
        return items

    def complete(self, items: Sequence[LeasedItem], queue: str = "q") -> list[Any]:
        results: list[Any] = self.ask(Complete([item.lease for item in items]), queue)
        return results
