"""One simulated world from one seed: two queues, their stores, a clock, callers, and all that can go wrong.

The production queue code runs unchanged, driven as its runner drives it: `submit`, `tick` when something came in or
the instant that the last tick named has come, jobs run and finished later, in any order between the lanes. Nothing here
reads a clock or depends on the order of hashes: a seed always gives the same run.

An operation is a request that was submitted or a fault that was applied.
"""

from __future__ import annotations

import traceback
from collections import deque
from functools import partial
from random import Random

from msgspec.structs import replace

from millpond.clock import ManualClock
from millpond.model import Backoff, PartitionDefinition, QueueDefinition, QueueSettings, Rebalancing
from millpond.queue.bodies import BODY_BYTES_MAX, Bodies, Budget
from millpond.queue.lane import PROBE_MS, Job, Lane, LoadJob, Status, meta_lane
from millpond.queue.logical import LogicalQueue
from millpond.queue.requests import Arrive, Forget, Lease, Request
from millpond.store.base import META_PARTITION, Turn
from millpond.store.memory import MemoryStores
from tests.sim import asks, faults
from tests.sim.asks import Ask
from tests.sim.bounds import Bounds
from tests.sim.consumers import Consumers
from tests.sim.faults import FaultyStore, Pairs
from tests.sim.model import Model
from tests.sim.nouns import CANCELLED, COMPLETED, DEAD, Violation
from tests.sim.replies import judge
from tests.sim.rest import check_rest
from tests.sim.rules import Partition

TICKS_MAX = 200  # at one instant: more is a loop that would burn a core
DRAIN_ROUNDS = 3_000  # after the faults; far more than the slowest backoff needs
START = 1_700_000_000_000


class Live:
    """A loaded queue. `epoch` tells it from the one before a crash."""

    def __init__(self, queue: LogicalQueue, name: str) -> None:
        self.queue = queue
        self.name = name
        self.wake: int | None = None
        self.dirty = True
        self.closing = False
        self.flying: dict[Request, Ask] = {}
        self.leases: dict[Request, Ask] = {}
        self.answered: deque[Ask] = deque(maxlen=4)  # leases whose answer may not have been delivered


class Pending:
    """A job on its way: run in one round, finished in that or a later one."""

    __slots__ = ("definition", "finish_round", "job", "live", "ran", "run_round", "slow")

    def __init__(self, live: Live, job: Job, definition: QueueDefinition) -> None:
        self.live = live
        self.job = job
        self.definition = definition  # what was in force when the job was made
        self.ran = False
        self.slow = False
        self.run_round = 0
        self.finish_round = 0


class World:
    def __init__(self, seed: int, ops: int, rebalances: bool | None = None) -> None:
        """`rebalances`: whether partitions come and go; None: in one world of four."""
        self.rng = Random(seed)
        self.rebalances = seed % 4 == 0 if rebalances is None else rebalances
        self.dice = Random(f"rebalance {seed}")  # of its own, so that other worlds stay as they are
        self.ops_max = ops
        self.ops = 0
        self.round = 0
        self.pairs = Pairs()
        self.clock = ManualClock(START)
        self.bounds = Bounds(self.rng, self.dice, Random(f"pace {seed}"))
        self.body_bytes = self.rng.choice((0, 300, BODY_BYTES_MAX))
        self.definitions = {"q": self._definition("q", dead_queue="d"), "d": self._definition("d", dead_queue=None)}
        self.model = Model(self.definitions.values())
        self.memory = MemoryStores()
        self.stores: dict[tuple[str, int], FaultyStore] = {}
        for name, one in self.definitions.items():
            queue = self.model.queues[name]
            queue.stage_timeout = self.bounds.stage_timeout
            queue.decisions.memory = self.bounds.claim_memory
            for index in (*(part.partition for part in one.partitions), META_PARTITION):
                self._open_store(name, index)
        self.consumers = {name: Consumers(name, self.model, self.rng) for name in self.definitions}
        self.lives: dict[str, Live] = {}
        self.pendings: list[Pending] = []
        self.mail: list[tuple[int, Live, Arrive | Forget, bool]] = []  # round, sender, letter, whether it is answered
        self.calm = False  # no more faults
        self._replies: list[tuple[Live, Request]] = []
        self._broken: Exception | None = None
        self._current: QueueDefinition | None = None
        self._lane_faults: dict[tuple[str, int], str] = {}  # why a lane is away
        self._slow_next: set[tuple[str, int]] = set()
        self._relief: list[tuple[int, str, int]] = []  # round, queue, partition of a full disk
        self._resume: dict[str, int] = {}
        self._post: dict[tuple[str, str], int] = {}  # the round in which the last letter from here to there arrives
        self._fresh: list[tuple[str, str]] = []  # kind and queue of changes of settings that no tick has seen yet
        self._open_all()

    # ---- what a world is made of --------------------------------------------------------------------------

    def _definition(self, name: str, dead_queue: str | None) -> QueueDefinition:
        rng = self.rng
        partitions = rng.choice((3, 3, 4))
        fate = rng.random()
        settings = QueueSettings(
            lease_timeout_ms=rng.choice((1_000, 5_000, 30_000)),
            expire_timeout_ms=rng.choice((15_000, 120_000, 14 * 86_400_000)),
            max_attempts=rng.choice((0, 1, 2, 3, 5)),
            dead_queue=dead_queue if fate < 0.65 else None,
            dead="delete" if fate > 0.9 else "keep",
            backoff=self._backoff(),
            dedup_window_ms=rng.choice((0, 2_000, 20_000, 300_000)),
            completed_retention_ms=rng.choice((0, 0, 3_000, 30_000)),
            journal_retention_ms=rng.choice((600_000, 7 * 86_400_000)),
            completed_grace_ms=self.dice.choice((0, 2_000, 20_000)) if self.rebalances else 300_000,
        )
        return QueueDefinition(
            name=name,
            incarnation=f"inc{name}",
            settings=settings,
            partitions=tuple(PartitionDefinition(partition=index) for index in range(partitions)),
            created_at=START,
            updated_at=START,
        )

    def _backoff(self) -> Backoff:
        rng = self.rng
        return Backoff(base=rng.choice((1.0, 2.0)), cap_ms=rng.choice((0, 3_000, 8_000)), jitter=rng.choice((0.0, 0.3)))

    def _open_store(self, name: str, index: int) -> None:
        inner = self.memory.open(self.definitions[name].incarnation, index, "full")
        self.stores[name, index] = FaultyStore(inner, partial(self._committed, name, index))

    def _open_all(self) -> None:
        self.budget = Budget(self.body_bytes)
        for name in self.definitions:
            self._open(name)

    def _open(self, name: str) -> None:
        one = self.definitions[name]
        self.model.lost(name)
        settled = one.rebalance is None or one.rebalance.finished_at
        if len(one.partitions) > 3 and self.rng.random() < 0.4 and settled:
            last = one.partitions[-1]  # is to be drained, or back in use
            one = replace(one, partitions=(*one.partitions[:-1], replace(last, read_only=not last.read_only)))
            self.definitions[name] = one
        lanes = []
        for part in one.partitions:
            partition = self.model.queues[name].partitions[part.partition]
            partition.read_only, partition.mark = part.read_only, partition.at
            store = self.stores[name, part.partition]
            store.inner.close()
            store.reserve = True
            lanes.append(Lane(part, store, Bodies(self.budget)))
        rng = Random(self.rng.random())
        decisions = self.stores[name, META_PARTITION]
        decisions.inner.close()
        decisions.reserve = True
        meta = meta_lane(decisions, self.budget)
        queue = LogicalQueue(one, lanes, meta, rng, self.definitions.__contains__, self.clock.now())
        self.lives[name] = Live(queue, name)

    # ---- the run ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Violation."""
        try:
            with self.bounds.in_force():
                while self.ops < self.ops_max:
                    self._round()
                self._drain()
        except Violation:
            raise
        except Exception as error:
            raise Violation("".join(traceback.format_exception(error))) from error

    def _round(self) -> None:
        rng = self.rng
        self._pass_time()
        if self.rebalances:
            for name in self.lives:
                self._rebalance(name)
        for _ in range(rng.choice((1, 2, 3, 4, 6, 9))):
            self._submit("q" if rng.random() < 0.75 else "d")
        while rng.random() < 0.2:
            self._fault()
        self._end_faults()
        self._settle_round()

    def _pass_time(self) -> None:
        rng, dice = self.rng, self.rng.random()
        if dice < 0.5:
            self._advance(rng.randrange(20))
        elif dice < 0.8:
            self._advance(rng.randrange(300))
        elif dice < 0.88:
            self._advance(rng.randrange(3_000))
        elif dice < 0.98:
            self._to_next_alarm()
        else:
            self._advance(rng.randrange(20_000))

    def _advance(self, ms: int) -> None:
        self.clock.advance(ms)
        self._passed(ms)

    def _step(self, ms: int) -> None:
        """Only the wall clock."""
        self.clock.step(ms)
        self._passed(max(0, ms))

    def _passed(self, ms: int) -> None:
        self.model.elapsed += ms
        self.model.now = max(self.model.now, self.clock.now())

    def _to_next_alarm(self) -> None:
        """Just before, at, or just after the next instant at which something is due."""
        now = self.clock.now()
        instants = [
            partition.alarms[0][0]
            for queue in self.model.queues.values()
            for partition in queue.partitions.values()
            if partition.alarms
        ]
        if instants:
            step = min(instants) - now + self.rng.choice((-1, 0, 1))
            self._advance(min(max(step, 0), 10_000))

    # ---- requests -----------------------------------------------------------------------------------------

    def _submit(self, name: str) -> None:
        if self.rng.random() < 0.03:
            self._configure(name)
            return
        self._send(self.consumers[name].next(self.clock.now()))

    def _send(self, ask: Ask) -> None:
        live = self.lives[ask.queue]
        self.ops += 1
        for fault in self._in_force(ask.queue):
            self.pairs.hit(ask.kind, fault)
        live.flying[ask.request] = ask
        if isinstance(ask.request, Lease):
            live.leases[ask.request] = ask
        ask.request.done = partial(self._replied, live)
        live.queue.submit(ask.request, self.clock.now())
        ask.at = ask.request.at
        self.model.asked(ask)
        live.dirty = True
        self._judge_replies()

    def _replied(self, live: Live, request: Request) -> None:
        self._replies.append((live, request))

    def _judge_replies(self, at_rest: frozenset[int] = frozenset()) -> None:
        replies, self._replies = self._replies, []
        for live, request in replies:
            ask = live.flying.pop(request, None)
            if ask is None:
                raise Violation(f"{type(request).__name__} was answered twice")
            live.leases.pop(request, None)
            if ask.kind == asks.STATS:
                ask.at_rest = at_rest
            judge(self.model, ask)
            self.model.over(ask)
            if ask.client is not None:
                self.model.settle(ask.client)
                if ask.handed:
                    self.consumers[ask.queue].took(ask.request.value, ask.handed)
                    live.answered.append(ask)

    def _configure(self, name: str) -> None:
        """New settings, written to the registry before they are used, as the service does."""
        rng, one = self.rng, self.definitions[name]
        self.ops += 1
        for fault in self._in_force(name):
            self.pairs.hit(asks.CONFIGURE, fault)
        self._fresh.append((asks.CONFIGURE, name))
        settings = one.settings
        dice = rng.random()
        if dice < 0.3:
            settings = replace(settings, max_attempts=rng.choice((0, 1, 2, 5)))
        elif dice < 0.5:
            settings = replace(settings, lease_timeout_ms=rng.choice((500, 5_000)))
        elif dice < 0.7:
            settings = replace(settings, backoff=self._backoff())
        elif dice < 0.85:
            settings = replace(settings, completed_retention_ms=rng.choice((0, 2_000)))
        elif name == "q":
            target = None if settings.dead_queue else "d"
            settings = replace(settings, dead_queue=target, dead=rng.choice(("keep", "delete")))
        self._reconfigure(name, replace(one, settings=settings))

    def _rebalance(self, name: str) -> None:
        """Now and then one begins; what has drained is removed."""
        live, one, dice = self.lives[name], self.definitions[name], self.dice
        if live.closing:
            return
        if one.rebalance is not None and not one.rebalance.finished_at:
            self._remove_drained(live)
            return
        if self.calm or dice.random() > 0.05:
            return
        add = dice.choice((0, 1, 1, 2))
        old = [part.partition for part in one.partitions]
        going = set(dice.sample(old, dice.randrange(len(old) + (add > 0))))
        going |= {part.partition for part in one.partitions if part.read_only}
        if not add and going >= set(old):
            return
        self.ops += 1
        places = [replace(part, read_only=part.partition in going) for part in one.partitions]
        new = [PartitionDefinition(partition=one.next_partition + index) for index in range(add)]
        removing, now = tuple(part for part in places if part.read_only), self.clock.now()
        status = Rebalancing(
            partitions=0, added=tuple(new), removing=removing, started_at=now, finished_at=0 if removing else now
        )
        queue = self.model.queues[name]
        for part in new:
            queue.partitions[part.partition] = Partition(queue, part.partition)
            self._open_store(name, part.partition)
        self._reconfigure(name, replace(one, partitions=(*places, *new), rebalance=status))
        lanes = [Lane(part, self.stores[name, part.partition], Bodies(self.budget)) for part in new]
        live.queue.add(lanes)

    def _remove_drained(self, live: Live) -> None:
        for index in live.queue.drained:
            if index in live.queue.state.lanes:
                live.queue.remove(index, self.clock.now())
                self._collect(live)
                return
            if any(pending.live is live and pending.job.lane.index == index for pending in self.pendings):
                continue  # its store is being closed
            self._destroy(live.name, index)
            if self.dice.random() < 0.2:  # the registry still has it
                self._crash()
                return
            self._forget_partition(live.name, index)

    def _destroy(self, name: str, index: int) -> None:
        queue = self.model.queues[name]
        old = queue.partitions[index]
        if old.items or old.leaving or old.holds or old.staged:
            raise Violation(f"{name}/{index} is removed with {list(old.items.values())[:5]}")
        self.memory.destroy(self.definitions[name].incarnation, [index])
        queue.partitions[index] = Partition(queue, index)
        self._open_store(name, index)

    def _forget_partition(self, name: str, index: int) -> None:
        one = self.definitions[name]
        left = tuple(part for part in one.partitions if part.partition != index)
        status = one.rebalance
        assert status is not None
        if not any(part.read_only for part in left):
            status = replace(status, finished_at=self.clock.now())
        del self.model.queues[name].partitions[index], self.stores[name, index]
        self._reconfigure(name, replace(one, partitions=left, rebalance=status))

    def _reconfigure(self, name: str, one: QueueDefinition) -> None:
        self.definitions[name] = one
        self.lives[name].queue.configure(one)
        self.lives[name].dirty = True

    # ---- faults -------------------------------------------------------------------------------------------

    def _in_force(self, name: str) -> list[str]:
        found = set()
        for lane in self.lives[name].queue.state.everyone:
            found.update(self.stores[name, lane.index].in_force)
            if lane.status != Status.OPEN and (name, lane.index) in self._lane_faults:
                found.add(self._lane_faults[name, lane.index])
        if any(pending.slow and pending.live.name == name for pending in self.pendings):
            found.add(faults.COMMIT_SLOW)
        if self.definitions[name].paused:
            found.add(faults.PAUSED)
        if self.lives[name].closing:
            found.add(faults.CLOSE)
        return sorted(found)

    def _happened(self, fault: str, *names: str) -> None:
        """A fault was applied: it is met by all that is in flight in these queues."""
        self.ops += 1
        for name in names:
            for ask in self.lives[name].flying.values():
                self.pairs.hit(ask.kind, fault)
            for kind, queue in self._fresh:
                if queue == name:
                    self.pairs.hit(kind, fault)

    def _fault(self) -> None:
        rng = self.rng
        name = "q" if rng.random() < 0.7 else "d"
        indexes = [part.partition for part in self.definitions[name].partitions] + [META_PARTITION]
        index = rng.choice(indexes)
        store = self.stores[name, index]
        fault = rng.choice(faults.FAULTS)
        if fault in (faults.COMMIT_FAILED, faults.COMMIT_UNREPORTED):
            store.commit_fault = self._lane_faults[name, index] = fault
            self._happened(fault, name)
        elif fault == faults.READ_FAILED:
            store.read_faults = rng.choice((1, 1, 3))
            self._lane_faults[name, index] = fault
            self._happened(fault, name)
        elif fault == faults.RECOVER_FAILED:
            store.recover_faults = rng.choice((1, 2, 6))
            store.commit_fault = self._lane_faults[name, index] = faults.COMMIT_FAILED
            self._happened(fault, name)
        elif fault == faults.DISK_FULL:
            for other in indexes:
                if other == index or rng.random() < 0.5:
                    self.stores[name, other].full = True
                    self.stores[name, other].brimful = rng.random() < 0.25
                    self._relief.append((self.round + rng.choice((3, 20, 80)), name, other))
            self._happened(fault, name)
        elif fault == faults.COMMIT_SLOW:
            self._slow_next.add((name, index))
            self._happened(fault, name)
        elif fault == faults.CRASH:
            if rng.random() < 0.5:
                self._crash()
        elif fault == faults.CLOSE:
            if rng.random() < 0.4 and not self.lives[name].closing:
                self._close(name)
        elif fault == faults.CLOCK_FORWARDS:
            self._happened(fault, *self.lives)
            self._step(rng.choice((1, 1_000, 10_000, 400_000)) if rng.random() < 0.5 else rng.randrange(2_000))
        elif fault == faults.CLOCK_BACK:
            self._happened(fault, *self.lives)
            self._step(-rng.choice((1, 1_000, 60_000, 86_400_000)))
        elif fault == faults.WAITER_GONE:
            self._withdraw(name)
        elif fault == faults.PAUSED:
            self._happened(fault, name)
            self._resume[name] = self.round + rng.choice((2, 10, 40))
            self._reconfigure(name, replace(self.definitions[name], paused=True))

    def _withdraw(self, name: str) -> None:
        live = self.lives[name]
        if not live.flying:
            return
        if live.answered and self.rng.random() < 0.3:
            self._undeliver(live, self.rng.choice(live.answered))
            return
        chosen = live.leases if live.leases and self.rng.random() < 0.7 else live.flying
        ask = self.rng.choice(list(chosen.values()))
        ask.gone = True
        if ask.client is not None:
            ask.client.left = True
        self._happened(faults.WAITER_GONE, name)
        live.queue.withdraw(ask.request)
        live.dirty = True
        self._judge_replies()

    def _undeliver(self, live: Live, ask: Ask) -> None:
        """The caller of a lease has gone after the answer was made and before it was written."""
        live.answered.remove(ask)
        self._happened(faults.WAITER_GONE, live.name)
        for grant in ask.handed:
            grant.given_up = True
            if not grant.over:
                grant.item.partition.orphans[grant] = None
        live.queue.withdraw(ask.request)
        live.dirty = True

    def _end_faults(self) -> None:
        for entry in [entry for entry in self._relief if entry[0] <= self.round]:
            self._relief.remove(entry)
            store = self.stores.get((entry[1], entry[2]))
            if store is not None:
                store.full = store.brimful = False
        for name in [name for name, at in self._resume.items() if at <= self.round]:
            del self._resume[name]
            self._reconfigure(name, replace(self.definitions[name], paused=False))

    def _crash(self) -> None:
        """Memory is gone; each commit under way either happened or not."""
        self._happened(faults.CRASH, *self.lives)
        for pending in self.pendings:
            if not pending.ran and self.rng.random() < 0.5:
                self._run(pending)
        self.pendings.clear()
        self.mail.clear()
        self._replies.clear()
        elapsed = self.clock.now() + self.rng.choice((0, 10, 3_000, -500, -60_000))
        self.clock = ManualClock(elapsed)
        self._open_all()

    def _close(self, name: str) -> None:
        live = self.lives[name]
        self._happened(faults.CLOSE, name)
        live.closing = True
        self._close_on(live)

    def _close_on(self, live: Live) -> None:
        live.queue.close(self.clock.now())
        self._collect(live)
        self._judge_replies()
        if live.queue.closed:
            if live.flying:
                raise Violation(f"{live.name} was closed without an answer to {list(live.flying.values())}")
            self.mail = [entry for entry in self.mail if entry[1] is not live]
            self._open(live.name)

    # ---- the machinery ------------------------------------------------------------------------------------

    def _settle_round(self) -> None:
        """Do all that this round has time for; slower jobs and letters wait for a later one."""
        self.round += 1
        # a partition that drains may have to carry its items, or entrust its names, one at a time
        ticks_max = TICKS_MAX * 10 if self.rebalances and self.bounds.singly else TICKS_MAX
        for _ in range(ticks_max):
            moved = self._deliver()
            for live in list(self.lives.values()):
                moved = self._tick(live) or moved
            moved = self._work() or moved
            if not moved:
                self._fresh.clear()
                for live in self.lives.values():
                    self._check_rest(live)
                return
        raise Violation("the queue never comes to rest at one instant")

    def _tick(self, live: Live) -> bool:
        now = self.clock.now()
        asked = live.dirty and not live.queue.busy  # as the runner: with every lane busy there is nothing to do
        if live.closing or not (asked or (live.wake is not None and live.wake <= now)):
            return False
        lanes = live.queue.state.lanes
        at_rest = frozenset(index for index, lane in lanes.items() if lane.free)
        live.dirty = False
        live.wake = live.queue.tick(now)
        self._collect(live)
        self._judge_replies(at_rest)
        self._check_rest(live)
        return True

    def _check_rest(self, live: Live) -> None:
        busy = any(pending.live is live for pending in self.pendings)
        check_rest(live, self.model.queues[live.name], self.clock.now(), busy)

    def _collect(self, live: Live) -> None:
        """Take the jobs and letters that the queue has left for its owner."""
        rng = self.rng
        jobs, live.queue.jobs = live.queue.jobs, []
        for job in jobs:
            pending = Pending(live, job, live.queue.state.definition)
            place = (live.name, job.lane.index)
            if place in self._slow_next and not isinstance(job, LoadJob):
                self._slow_next.discard(place)
                pending.slow = True
            pending.run_round = self.round + (rng.randrange(5, 40) if pending.slow else self._delay())
            pending.finish_round = pending.run_round + self._delay()
            self.pendings.append(pending)
        outbox, live.queue.state.outbox = live.queue.state.outbox, []
        for letter in outbox:  # one way they stay in order
            way = (live.name, letter.target)
            self._post[way] = max(self._post.get(way, 0), self.round + self._delay())
            self.mail.append((self._post[way], live, letter, False))

    def _delay(self) -> int:
        """In rounds."""
        return 0 if self.calm or self.rng.random() < 0.65 else self.rng.randrange(5)

    def _deliver(self) -> bool:
        due = [entry for entry in self.mail if entry[0] <= self.round]
        if not due:
            return False
        self.mail = [entry for entry in self.mail if entry[0] > self.round]
        for _, sender, letter, answered in due:
            if answered:
                sender.queue.settle(letter)
                sender.dirty = True
            else:
                target = self.lives[letter.target]
                letter.done = partial(self._answered, sender)
                target.queue.submit(letter, self.clock.now())
                target.dirty = True
        return True

    def _answered(self, sender: Live, letter: Arrive | Forget) -> None:
        if self.lives[sender.name] is sender:
            self.mail.append((self.round + self._delay(), sender, letter, True))

    def _work(self) -> bool:
        """Run and finish the jobs whose round has come, in any order."""
        due = [pending for pending in self.pendings if pending.run_round <= self.round]
        if len(due) > 1:
            self.rng.shuffle(due)
        moved = False
        for pending in due:
            if not pending.ran:
                self._run(pending)
            if pending.finish_round <= self.round:
                self._finish(pending)
                moved = True
        return moved

    def _run(self, pending: Pending) -> None:
        self._current = pending.definition
        pending.ran = True
        pending.job.run()
        if self._broken is not None:
            raise self._broken

    def _committed(self, name: str, index: int, turn: Turn, reported: bool) -> None:
        assert self._current is not None
        queue = self.model.queues[name]
        try:
            if index == META_PARTITION:
                queue.decisions.commit(turn)
            else:
                queue.partitions[index].commit(turn, self._current, reported)
        except Exception as error:  # a job takes what its store raises for a failure: keep it for ourselves
            self._broken = error

    def _finish(self, pending: Pending) -> None:
        self.pendings.remove(pending)
        live = pending.live
        live.queue.finish(pending.job, self.clock.now())
        live.dirty = True
        if isinstance(pending.job, LoadJob) and pending.job.partition is not None:
            before = self.clock.now()
            self.clock.at_least(live.queue.now)
            self._passed(self.clock.now() - before)
        self._judge_replies()
        if live.closing and self.lives[live.name] is live:  # else what was closed is a partition that is gone
            self._close_on(live)

    # ---- the end ------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """No more faults: everything must come out, be completed, and be accounted for."""
        self._calm_down()
        for count in range(DRAIN_ROUNDS):
            if not self._unsettled():
                break
            for name in self.lives if self.rebalances else ():
                self._rebalance(name)
            busy = [self._drain_queue(name) for name in self.lives]
            self._settle_round()
            if not any(busy):
                self._pass_until_next()
            elif count % 4 == 3:  # a partition may be away until it is probed
                self._advance(PROBE_MS)
        else:
            raise Violation(f"after all faults had ended these stayed: {self._unsettled()[:5]}")
        self._compare()
        self._crash()
        self._settle_round()
        self._hurry()
        self._compare()

    def _calm_down(self) -> None:
        self.calm = True
        self._relief.clear()
        self._resume.clear()
        self._slow_next.clear()
        for store in self.stores.values():
            store.heal()
        for name, one in self.definitions.items():
            self._reconfigure(name, replace(one, paused=False))
        self._hurry()

    def _hurry(self) -> None:
        """Let everything that is under way end now."""
        while self.pendings or self.mail:
            self.round += 50
            self._settle_round()

    def _drain_queue(self, name: str) -> bool:
        """Complete what is held, lease what is ready; whether there was anything to do."""
        consumers, live = self.consumers[name], self.lives[name]
        held = [grant for grant in consumers.held if not grant.over]
        consumers.held = []
        ready = sum(one.ready_count() for one in self.model.queues[name].partitions.values())
        ends = [] if live.closing or live.flying else consumers.batch_callers.finishing()
        if live.closing or not (held or ready or ends):
            return live.closing
        for ask in ends:
            self._send(ask)
        if held:
            self._send(consumers.completing(held))
        if ready:
            self._send(consumers.leasing(asks.LEASE, 0, 50, None))
        return True

    def _pass_until_next(self) -> None:
        wakes = [live.wake for live in self.lives.values() if live.wake is not None]
        wait = min(wakes, default=self.clock.now() + 1_000) - self.clock.now()
        self._advance(min(max(wait, 1), 60_000))

    def _unsettled(self) -> list[object]:
        """What is not at its end: items on their way, and requests without an answer."""
        found: list[object] = [
            item
            for queue in self.model.queues.values()
            for partition in queue.partitions.values()
            for item in partition.items.values()
            if item.state not in (DEAD, COMPLETED, CANCELLED) or item.moving_to is not None
        ]
        for live in self.lives.values():
            found += live.flying.values()
            found += [lane for lane in live.queue.state.everyone if lane.status != Status.OPEN]
        for queue in self.model.queues.values():
            found += [*queue.decisions.left(), *queue.decisions.open_claims()]
            found += [txn for partition in queue.partitions.values() for txn in partition.staged]
        running = [one.rebalance for one in self.definitions.values() if one.rebalance is not None]
        found += [one for one in running if not one.finished_at]
        return found

    def _compare(self) -> None:
        """All that the queues say of themselves is what the model knows, and their stores hold nothing else."""
        for name, live in self.lives.items():
            for ask in self.consumers[name].review():
                self._send(ask)
                self._settle_round()
                self._hurry()
                if ask.request in live.flying:
                    raise Violation(f"{ask} has no answer")
                if ask.request.error is not None:
                    raise Violation(f"{ask} was refused: {ask.request.error}")
        for (name, index), store in self.stores.items():
            items = {} if index == META_PARTITION else self.model.queues[name].partitions[index].items
            problems = store.check()
            contents = self.memory._room.partitions[self.definitions[name].incarnation, index]
            stray = [key >> 2 for key in contents.docs if key >> 2 not in items]
            if problems or stray:
                raise Violation(f"{name}/{index}: {problems}, documents of items that are gone: {stray}")
            chunks = [(chunk.first, chunk.first + chunk.count) for chunk in contents.chunks.values()]
            empty = [first for first, end in chunks if not any(number in items for number in range(first, end))]
            if empty:
                raise Violation(f"{name}/{index}: chunks without an item: {empty}")
