"""Looks at a queue from outside its loop: at memory only, so it waits for nothing and costs microseconds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice, repeat
from operator import sub

from millpond.meters import STATES, TRANSITIONS, QueueReading, added
from millpond.queue.columns import IntColumn
from millpond.queue.lane import Lane, Status
from millpond.queue.logical import LogicalQueue
from millpond.queue.partition import Partition

COUNT_MAX = 10_000  # entries that are counted one by one: half a millisecond
PRIORITIES_MAX = 50  # of which the oldest item is looked for: the least urgent, where items wait longest
AWAY = ("failed", "stalled")
_EMPTY = [0] * len(STATES)
_NONE = [0] * len(TRANSITIONS)

Totals = dict[int, list[int]]  # by partition


def lane_status(lane: Lane, now: int) -> str:
    """`stalled`: its store does not answer. `full`: it takes no items, but ends those that it has."""
    if lane.stalled(now):
        return "stalled"
    return "full" if lane.full and lane.status is Status.OPEN else lane.status.value


class LaneLook:
    """What was last seen of a partition. `high` are the highest totals seen: a counter must not go down."""

    __slots__ = ("base", "counts", "high", "oldest", "turn")

    def __init__(self, partition: Partition, high: list[int]) -> None:
        self.turn = -1
        self.counts: list[int] = []
        self.oldest: int | None = None
        self.high = high
        self.look(partition)
        self.base = self.high

    def look(self, partition: Partition) -> None:
        """Nothing has changed without a turn."""
        if partition.turn != self.turn:
            self.turn = partition.turn
            self.counts = _counts(partition)
            self.oldest = _oldest(partition)
            self.high = list(map(max, map(partition.totals.get, TRANSITIONS, repeat(0)), self.high))


class QueueLook:
    """`seen` are totals from before the queue last slept."""

    def __init__(self, queue: LogicalQueue, seen: Totals) -> None:
        self._queue = queue
        self._seen = seen
        self._lanes: dict[int, LaneLook] = {}
        past = queue.state.definition.past_totals
        self._past = [past.get(name, 0) for name in TRANSITIONS]  # those that go from here on stay in `_lanes`

    def loaded(self, index: int, partition: Partition) -> None:
        """It was read back from its store, where a turn that memory had may be missing."""
        known = self._lanes.get(index)
        if known is None:
            self._lanes[index] = LaneLook(partition, self._seen.get(index, _NONE))
        else:
            known.turn = -1

    def read(self, now: int) -> QueueReading:
        state = self._queue.state
        counts = _EMPTY
        oldest: int | None = None
        away = 0
        for lane in state.lanes.values():
            away += lane_status(lane, now) in AWAY
            look = self._lanes.get(lane.index)
            if look is not None:
                look.look(lane.partition)
                counts = added(counts, look.counts) if counts is not _EMPTY else look.counts
                if look.oldest is not None and (oldest is None or look.oldest < oldest):
                    oldest = look.oldest
        return QueueReading(
            queue=state.definition.name,
            counts=counts,
            transitions=self._transitions() if self._lanes.keys() >= state.lanes.keys() else None,
            oldest_ready_s=0.0 if oldest is None else max(0, now - oldest) / 1000,
            waiters=len(state.waiters),
            away=away,
            paused=int(state.definition.paused),
        )

    def _transitions(self) -> list[int]:
        """Those of partitions that are gone included."""
        transitions = self._past
        for look in self._lanes.values():
            transitions = added(transitions, look.high)
        return transitions

    def take_rise(self) -> list[int]:
        """What the totals have risen by since this was last asked, or since the load."""
        rise = _NONE
        for index, look in self._lanes.items():
            if index in self._queue.state.lanes:
                look.look(self._queue.state.lanes[index].partition)
            if look.high is not look.base:
                rise = added(rise, map(sub, look.high, look.base))
                look.base = look.high
        return rise

    def unsaved(self) -> Totals:
        """Totals that were shown and then lost with a failed commit: the next load must not fall behind them."""
        lanes = self._queue.state.lanes
        return {
            index: look.high
            for index, look in self._lanes.items()
            if index in lanes and _behind(lanes[index].partition.totals, look.high)
        }


def _behind(totals: Mapping[str, int], high: list[int]) -> bool:
    return any(totals.get(name, 0) < seen for name, seen in zip(TRANSITIONS, high, strict=True))


def _oldest(partition: Partition) -> int | None:
    created_of = partition.chunks.created_of
    return min([created_of(head) for head in partition.ready.heads(PRIORITIES_MAX)], default=None)


def _counts(partition: Partition) -> list[int]:
    """As the partition's own `counts`, in the order of STATES, and never slow.

    All sums are exact. How a large column divides is told from some of its entries.
    """
    waiting, finished, moving = partition.waiting, partition.finished, partition.moving
    retrying = _odd(waiting) if waiting else 0
    cancelled = _odd(finished) if finished else 0
    redriving = _not_dead(partition) if moving else 0
    return [
        len(waiting) - retrying,
        partition.ready.count + partition.carried_letters(),
        len(partition.leased),
        retrying,
        len(finished) - cancelled,
        len(partition.claimed),
        len(partition.dead) + redriving,
        cancelled,
    ]


def _odd(column: IntColumn) -> int:
    return column.guess_odd(COUNT_MAX) if len(column) > COUNT_MAX else column.count_odd()


def _not_dead(partition: Partition) -> int:
    some = list(islice(partition.moving, COUNT_MAX))
    return sum([number not in partition.dead for number in some]) * len(partition.moving) // len(some)
