"""Which partitions a rebalance adds and removes, and how far one is. The manager carries it out, the queues drain."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from millpond.errors import Conflict, InvalidRequest, MillpondError
from millpond.model import (
    PARTITION_NUMBER_MAX,
    PartitionDefinition,
    QueueDefinition,
    Rebalance,
    Rebalancing,
    to_datetime,
)
from millpond.queue.draining import removable_at
from millpond.queue.logical import LogicalQueue
from millpond.queue.runner import Runner
from millpond.queue.transfer import counts_of
from millpond.service.places import Places

log = logging.getLogger("millpond.service")
AGAIN_S = 5.0  # after a partition that has drained could not be removed; each time twice as long
AGAIN_MAX_S = 300.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`stores`: of each partition that is new."""

    queue: str
    partitions: int
    kept: tuple[PartitionDefinition, ...]
    removing: tuple[PartitionDefinition, ...]
    stores: tuple[str, ...]
    first: int  # the number of the first new one

    @property
    def is_empty(self) -> bool:
        return not self.removing and not self.stores

    @property
    def added(self) -> tuple[PartitionDefinition, ...]:
        return tuple(PartitionDefinition(partition=no, store=store) for no, store in enumerate(self.stores, self.first))

    def told(self, status: Literal["planned"]) -> Rebalance:
        return Rebalance(
            queue=self.queue,
            status="unchanged" if self.is_empty else status,
            partitions=self.partitions,
            stores=dict(Counter(one.store for one in (*self.kept, *self.added))),
            added=[one.partition for one in self.added],
            removing=[one.partition for one in self.removing],
        )

    def detail(self) -> dict[str, Any]:
        """For the audit log."""
        return {
            "partitions": self.partitions,
            "added": {str(one.partition): one.store for one in self.added},
            "removing": {str(one.partition): one.store for one in self.removing},
        }

    def begun(self, definition: QueueDefinition, now: int) -> QueueDefinition:
        """With nothing to remove it is over at once."""
        going = {one.partition for one in self.removing}
        places = [replace(one, read_only=one.partition in going) for one in definition.partitions]
        running = Rebalancing(
            partitions=self.partitions,
            added=self.added,
            removing=self.removing,
            started_at=now,
            finished_at=0 if going else now,
        )
        return replace(definition, partitions=(*places, *self.added), rebalance=running, updated_at=now)

    def new(self, definition: QueueDefinition) -> list[PartitionDefinition]:
        return [one for one in definition.partitions if one in self.added]


def plan(definition: QueueDefinition, count: int | None, places: Places, last: Rebalance | None) -> Plan:
    """Partitions stay where as many are wanted; the others are removed, and what is missing is added."""
    if last is not None and last.status == "running":
        raise Conflict(
            f"queue {definition.name!r} is being rebalanced already, with {len(last.removed)} of {len(last.removing)}"
            f" old partitions removed and {sum(last.items.values())} items left in them; wait until it is done",
            rebalance=msgspec.to_builtins(last),
        )
    if count is None:
        count = sum(not one.read_only for one in definition.partitions) or 1
    wanted = Counter(places.place(count))
    kept, removing = [], []
    for one in definition.partitions:
        if wanted[one.store] > 0 and not one.read_only:
            wanted[one.store] -= 1
            kept.append(one)
        else:
            removing.append(one)
    first, stores = definition.next_partition, tuple(wanted.elements())
    if first + len(stores) - 1 > PARTITION_NUMBER_MAX:
        raise InvalidRequest(
            f"queue {definition.name!r} has used up the numbers of its partitions, of which there are"
            f" {PARTITION_NUMBER_MAX + 1}; move its items to a new queue"
        )
    return Plan(
        queue=definition.name, partitions=count, kept=tuple(kept), removing=tuple(removing), stores=stores, first=first
    )


def progress(definition: QueueDefinition, queue: LogicalQueue | None) -> Rebalance | None:
    """Of the queue's last rebalance; what is left in a queue that sleeps is not known."""
    running = definition.rebalance
    if running is None:
        return None
    there = {one.partition for one in definition.partitions}
    left = [one.partition for one in running.removing if one.partition in there]
    items: Counter[str] = Counter()
    goes_at: list[int | None] = []
    lanes = {} if queue is None else queue.state.lanes
    for lane in [lanes[index] for index in left if index in lanes and lanes[index].known]:
        assert queue is not None
        items.update(counts_of(queue.state, lane))
        goes_at.append(removable_at(queue.state, lane))
    empty = [at for at in goes_at if at is not None]
    return Rebalance(
        queue=definition.name,
        status="done" if running.finished_at else "running",
        partitions=running.partitions,
        stores=dict(Counter(one.store for one in definition.partitions if not one.read_only)),
        added=[one.partition for one in running.added],
        removing=[one.partition for one in running.removing],
        removed=[one.partition for one in running.removing if one.partition not in there],
        items={state: count for state, count in items.items() if count},
        removable_at=to_datetime(max(empty)) if empty and len(empty) == len(left) else None,
        started_at=to_datetime(running.started_at),
        finished_at=to_datetime(running.finished_at) if running.finished_at else None,
    )


def without(
    definition: QueueDefinition, index: int, totals: Mapping[str, int], now: int
) -> tuple[QueueDefinition, dict[str, Any]]:
    """The queue without a partition that is gone, and what to say of it. The last one ends the rebalance."""
    left = tuple(one for one in definition.partitions if one.partition != index)
    running, detail = definition.rebalance, {"removed": index}
    if running is not None and not any(one.read_only for one in left):
        running = replace(running, finished_at=now)
        detail["partitions"] = len(left)
    past = Counter(definition.past_totals) + Counter(totals)
    return replace(definition, partitions=left, rebalance=running, past_totals=dict(past), updated_at=now), detail


class Rebalances:
    """Has what has drained removed, once at a time for each queue, and again after a while if that fails."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        remove: Callable[[Runner], Coroutine[Any, Any, None]],
        is_open: Callable[[], bool],
    ) -> None:
        self._spawn = spawn
        self._remove = remove
        self._is_open = is_open
        self._busy: set[Runner] = set()
        self._waits: dict[Runner, float] = {}  # how long after the last failure
        self._attempts: Counter[tuple[str, int]] = Counter()  # that failed, by incarnation and partition

    def attempt(self, definition: QueueDefinition, index: int) -> int:
        """Another one to remove this partition has failed; the how manieth."""
        self._attempts[definition.incarnation, index] += 1
        return self._attempts[definition.incarnation, index]

    def drained(self, runner: Runner) -> None:
        if runner not in self._busy and self._is_open():  # else the next open goes on with it
            self._busy.add(runner)
            self._spawn(self._work(runner))

    async def _work(self, runner: Runner) -> None:
        wait, last = 0.0, self._waits.pop(runner, 0.0)
        try:
            await self._remove(runner)
        except MillpondError as error:
            log.warning("%s; it is tried again", error)
            wait = self._waits[runner] = min(2 * last or AGAIN_S, AGAIN_MAX_S)
        asyncio.get_running_loop().call_later(wait, self._look_again, runner)

    def _look_again(self, runner: Runner) -> None:
        self._busy.discard(runner)
        runner.wake()
