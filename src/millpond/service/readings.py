"""All that metrics show of the engine, read from memory in one go: nothing is waited for and no queue is woken.

Queues are shown by name up to a limit, the rest as one sum. A queue keeps its name's place as long as it is awake, so
that series do not come and go with the load.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from millpond.meters import OTHER_QUEUES, STATES, EngineMeter, EngineReading, QueueReading, added
from millpond.queue.readings import Totals, lane_status
from millpond.queue.runner import Runner

NAMED_MAX = 500  # queues shown by name: some 10,000 lines a scrape


class EngineReader:
    def __init__(self, runners: Mapping[str, Runner], meter: EngineMeter, named_max: int = NAMED_MAX) -> None:
        self._runners = runners
        self._meter = meter
        self._named_max = named_max
        self._named: dict[str, None] = {}
        self._summed: set[str] = set()  # of those awake: were part of the rest in the last reading
        self._summed_transitions: list[int] | None = None  # None while there never was a rest
        self._unsaved: dict[str, Totals] = {}  # by incarnation, of queues that sleep

    # ---- what the manager tells ---------------------------------------------------------------------------

    def totals_seen(self, incarnation: str) -> Totals:
        """Of a queue that is about to be loaded: what its counters must not fall behind."""
        return self._unsaved.pop(incarnation, {})

    def unloaded(self, name: str, runner: Runner) -> None:
        if name not in self._named and (name in self._summed or len(self._named) >= self._named_max):
            self._sum(runner)
        self._named.pop(name, None)
        self._summed.discard(name)
        if unsaved := runner.look.unsaved():
            self._unsaved[runner.queue.state.incarnation] = unsaved

    def deleted(self, incarnation: str) -> None:
        self._unsaved.pop(incarnation, None)

    # ---- reading ------------------------------------------------------------------------------------------

    def read(self, now: int, known: int) -> EngineReading:
        """`known` is how many queues there are."""
        self._give_places()
        queues: list[QueueReading] = []
        rest: list[QueueReading] = []
        for name, runner in self._runners.items():
            (queues if name in self._named else rest).append(runner.look.read(now))
        for reading in rest:
            self._summed.add(reading.queue)
            self._sum(self._runners[reading.queue])
        if self._summed_transitions is not None:
            queues.append(_summed(rest, self._summed_transitions))
        partitions: dict[tuple[str, str], int] = {}
        job_ages = dict.fromkeys(self._meter.stores, 0)
        for runner in self._runners.values():
            for lane in runner.queue.state.lanes.values():
                store = lane.definition.store
                key = store, lane_status(lane, now)
                partitions[key] = partitions.get(key, 0) + 1
                job_ages[store] = max(job_ages[store], lane.job_age(now))
        return EngineReading(
            queues=queues,
            awake=len(self._runners),
            known=known,
            partitions=partitions,
            job_age_s={store: age / 1000 for store, age in job_ages.items()},
            meter=self._meter,
        )

    def _give_places(self) -> None:
        if len(self._named) == min(self._named_max, len(self._runners)):
            return
        waiting = (name for name in self._runners if name not in self._named)
        for name in list(islice(waiting, self._named_max - len(self._named))):
            if name in self._summed:  # what it did until now is part of the rest
                self._summed.discard(name)
                self._sum(self._runners[name])
            self._named[name] = None

    def _sum(self, runner: Runner) -> None:
        rise = runner.look.take_rise()
        self._summed_transitions = rise if self._summed_transitions is None else added(self._summed_transitions, rise)


def _summed(queues: list[QueueReading], transitions: list[int]) -> QueueReading:
    counts = [0] * len(STATES)
    for one in queues:
        counts = added(counts, one.counts)
    return QueueReading(
        queue=OTHER_QUEUES,
        counts=counts,
        transitions=transitions,
        oldest_ready_s=max((one.oldest_ready_s for one in queues), default=0.0),
        waiters=sum(one.waiters for one in queues),
        away=sum(one.away for one in queues),
        paused=sum(one.paused for one in queues),
    )
