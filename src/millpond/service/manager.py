"""The queues that exist, and which of them are awake.

A queue is loaded with its first request or when its persisted next wake comes, and unloaded when it has been idle for
a while, or at once when another needs its place: ten thousand queues of which ten are busy cost ten. While a queue is
loaded its registry row says `dirty`, so that after a crash those that were awake are woken by the next open.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any, TypeVar

from msgspec import to_builtins
from msgspec.structs import replace

from millpond.api import caller
from millpond.clock import Clock
from millpond.doorbell import Doorbell
from millpond.errors import (
    Closed,
    Conflict,
    DiskFull,
    InvalidRequest,
    MillpondError,
    NotFound,
    QueueExists,
    QueueInUse,
    Unavailable,
)
from millpond.meters import EngineMeter, EngineReading
from millpond.model import (
    AuditEntry,
    Health,
    PartitionDefinition,
    PartitionStats,
    QueueDefinition,
    QueueSettings,
    QueueStats,
    Rebalance,
    State,
    StoreSettings,
    to_datetime,
)
from millpond.queue.bodies import Bodies, Budget
from millpond.queue.lane import Lane, Status, meta_lane
from millpond.queue.logical import LogicalQueue
from millpond.queue.operations import partition_stats
from millpond.queue.pace import Pace
from millpond.queue.requests import Arrive, Forget, GetStats
from millpond.queue.runner import Runner
from millpond.service.health import liveness, readiness
from millpond.service.places import Places, let_go
from millpond.service.readings import EngineReader
from millpond.service.rebalance import Plan, Rebalances, plan, progress, without
from millpond.service.registry import RegistryDesk
from millpond.store.base import DEFAULT, META_PARTITION, Registry, StoreFailed, Stores

log = logging.getLogger("millpond.service")
IDLE_MS = 30_000  # unused for so long, a queue is unloaded
SWEEP_S = 10.0  # how often idle queues are looked for; only while some are loaded
SWEEP_CROWDED_S = 0.5  # the same while more are loaded than should be: requests may be waiting for files
WAKES_MAX = 8  # queues that are woken at a time: a crash may have left thousands to wake
ROOM_S = 1.0  # how long one is waited for that has to make room: its store may not answer
WAKE_AGAIN_MS = 5_000  # after a queue that had to be woken could not be
_INCARNATION_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_INCARNATION_LENGTH = 8  # 40 bits: tells the incarnations of a name apart, and names the queue in its tokens
_INCARNATION = re.compile(f"[{_INCARNATION_ALPHABET}]{{{_INCARNATION_LENGTH}}}")
_KEEPS_QUEUE = (State.READY, State.SCHEDULED, State.RETRYING, State.LEASED, State.CLAIMED, State.DEAD)

T = TypeVar("T")


class QueuesManager:
    def __init__(
        self,
        registry: Registry,
        stores: Mapping[str, Stores] | Places,
        clock: Clock,
        rng: Random,
        partitions_max: float = math.inf,
    ) -> None:
        """With `partitions_max` loaded, idle queues make room for others; only if all are busy there are more."""
        self._places = stores if isinstance(stores, Places) else Places(stores)
        self._clock = clock
        self._rng = rng
        self._partitions_max = partitions_max
        self._budget = Budget()
        self._pace = Pace()
        self._definitions: dict[str, QueueDefinition] = {}
        self._names: dict[str, str] = {}  # incarnation -> name
        self._runners: dict[str, Runner] = {}
        self._settling: dict[str, asyncio.Task[Any]] = {}  # queues that are being loaded or unloaded
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lines: dict[tuple[str, str], asyncio.Task[None]] = {}  # the last message from one queue to another
        self._changes = asyncio.Lock()  # one change to the registry at a time
        self._waking = asyncio.Semaphore(WAKES_MAX)
        self._sweeper: asyncio.TimerHandle | None = None
        self._open = False
        self._bell: Doorbell  # on the event loop that has opened it
        self._meter = EngineMeter(self._places.names)
        self._registry = RegistryDesk(registry, clock, self._meter)
        self._reader = EngineReader(self._runners, self._meter)
        self._rebalances = Rebalances(self._spawn, self._remove_drained, lambda: self._open)

    # ---- opening and closing ------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._registry.is_open:
            raise Conflict("the engine is open already; close it first")
        self._registry.open()
        self._bell = Doorbell(asyncio.get_running_loop())
        try:
            definitions = await self._registry.load()
            self._definitions = {one.name: one for one in definitions}
            self._names = {one.incarnation: one.name for one in definitions}
            await self._registry.run(self._remove_orphans)
        except BaseException:
            await self._let_go()
            raise
        self._open = True
        for name in self._places.names:
            if name != DEFAULT:
                self._spawn(self._remove_gone(name))
        for definition in definitions:
            if definition.dirty:
                self._spawn(self._wake(definition.name))
            elif definition.next_wake:
                self._set_alarm(definition.name, definition.next_wake)

    def _remove_orphans(self) -> None:
        """What a delete that was cut short has left. Anything that is not named like a queue of ours stays."""
        stores = self._places[DEFAULT]
        for incarnation in stores.incarnations():
            if incarnation not in self._names and _INCARNATION.fullmatch(incarnation):
                _destroy(stores, incarnation)

    async def _remove_gone(self, name: str) -> None:
        """The same in a store that others may use too: there, only what the registry knows to have been deleted.

        One that is away is no reason not to open; its partitions say so when they are asked for.
        """
        stores = self._places[name]
        try:
            found = await self._places.call(name, stores.incarnations)
            gone = await self._registry.gone([one for one in found if one not in self._names])
        except (StoreFailed, OSError, MillpondError) as error:
            if name in self._used_stores():
                log.warning("store %s is away; its partitions are tried again all the time: %s", name, error)
            else:  # most likely it is new, and made with the first queue that is placed there
                log.info("store %s is not there: %s", name, error)
            return
        for incarnation in gone:
            await self._places.call(name, _destroy, stores, incarnation)

    async def close(self) -> None:
        """All that is under way is carried through; twice is once."""
        self._open = False
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for name in list(self._alarms):
            self._drop_alarm(name)
        await self._end_tasks()
        async with self._changes:
            if self._registry.is_open:
                await self._unload(self._shut(list(self._runners)))
                await self._end_tasks()
                await self._let_go()

    async def _end_tasks(self) -> None:
        """They end by themselves: whatever asks for a queue is refused now."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _let_go(self) -> None:
        await self._registry.close()
        self._places.close()
        self._bell.close()

    def _check_open(self) -> None:
        if not self._open:
            raise Closed("the engine is not open; open it again and retry")

    # ---- looking ------------------------------------------------------------------------------------------

    def definition(self, name: str) -> QueueDefinition:
        definition = self._definitions.get(name)
        if definition is None:
            raise NotFound(f"there is no queue {name!r}; create it first", queue=name)
        return definition

    def name_of(self, incarnation: str) -> str | None:
        self._check_open()
        return self._names.get(incarnation)

    def definitions(self, prefix: str, after: str, limit: int) -> tuple[list[QueueDefinition], str | None]:
        self._check_open()
        names = sorted(name for name in self._definitions if name.startswith(prefix) and name > after)
        page = [self._definitions[name] for name in names[:limit]]
        return page, page[-1].name if len(names) > limit else None

    def is_dead_queue(self, name: str) -> bool:
        return any(one.settings.dead_queue == name for one in self._definitions.values())

    def is_loaded(self, name: str) -> bool:
        return name in self._runners

    def leased_count(self) -> int:
        """Items in consumers' hands, in the queues that are awake."""
        lanes = (lane for runner in self._runners.values() for lane in runner.queue.state.lanes.values())
        return sum(len(lane.partition.leased) for lane in lanes if lane.known)

    def partitions(self, name: str) -> list[PartitionStats]:
        """As they are in memory; of a queue that sleeps only where they are."""
        runner = self._runners.get(name)
        if runner is not None:
            state = runner.queue.state
            lanes = sorted((lane for lane in state.everyone if lane is not state.meta), key=lambda lane: lane.index)
            now = self._clock.now()
            return [partition_stats(state, lane, now) for lane in lanes]  # those that are new and not read yet too
        return [
            PartitionStats(partition=one.partition, store=one.store, status="closed", counts={})
            for one in self.definition(name).partitions
        ]

    async def known(self, name: str) -> Runner:
        """The queue, once each of its partitions was read, or could not be: before that its counts say nothing."""
        while True:
            runner = await self.runner(name)
            await runner.tried.wait()
            if self.awake(name) is runner:  # it may have had to make room meanwhile
                return runner

    async def stats(self, name: str) -> QueueStats:
        runner = await self.known(name)
        stats = await runner.ask(GetStats())
        assert isinstance(stats, QueueStats)
        return stats

    def awake(self, name: str) -> Runner | None:
        """The queue if it is awake: the way of nearly every request."""
        return None if name in self._settling else self._runners.get(name)

    async def runner(self, name: str) -> Runner:
        """The queue, woken if need be."""
        while True:
            self._check_open()
            self.definition(name)
            if name not in self._settling:
                if name in self._runners:
                    return self._runners[name]
                self._settle(name, self._load(name))
            await asyncio.shield(self._settling[name])

    # ---- changing -----------------------------------------------------------------------------------------

    async def create(self, name: str, changes: Mapping[str, Any], partitions: int) -> QueueDefinition:
        """`changes` to the default settings, as `validate.settings` has checked them."""
        return await self._whole(self._create(name, _changed(QueueSettings(), changes), partitions))

    async def update(self, name: str, changes: Mapping[str, Any], paused: bool | None = None) -> QueueDefinition:
        return await self._whole(self._update(name, changes, paused))

    async def delete(self, name: str, *, force: bool) -> None:
        await self._whole(self._delete(name, force))

    async def rebalance(self, name: str, partitions: int | None, *, dry_run: bool) -> Rebalance:
        """To so many partitions (None: as many as there are), in the stores that their affinities say."""
        self._check_open()
        await self._see_how_far(name)
        chosen = plan(self.definition(name), partitions, self._places, self.rebalance_of(name))
        if dry_run or chosen.is_empty:
            return chosen.told("planned")
        for store in dict.fromkeys(chosen.stores):
            await self._places.prepare(store, self._places[store], unused=store not in self._used_stores())
        await self._whole(self._rebalance(name, partitions, chosen))
        await self._see_how_far(name)
        told = self.rebalance_of(name)
        assert told is not None, "it was just begun"
        return told

    async def _see_how_far(self, name: str) -> None:
        """What is left in partitions is known of queues that are awake, but for those that are away."""
        running = self.definition(name).rebalance
        if running is not None and not running.finished_at:
            with suppress(MillpondError):
                await self.known(name)

    def rebalance_of(self, name: str) -> Rebalance | None:
        """How far the queue's last rebalance is."""
        runner = self._runners.get(name)
        return progress(self.definition(name), None if runner is None else runner.queue)

    async def _rebalance(self, name: str, partitions: int | None, chosen: Plan) -> None:
        async with self._changing(name):
            self._check_open()
            if plan(self.definition(name), partitions, self._places, self.rebalance_of(name)) != chosen:
                raise Unavailable("the stores or the queue have changed meanwhile; try again")
            await self._make_room(len(chosen.stores), name)
            definition = chosen.begun(self.definition(name), self._clock.now())
            await self._put(definition, [self._entry("rebalance", name, chosen.detail())])
            runner = self._runners.get(name)
            if runner is not None:
                runner.configure(definition)
                runner.add([self._lane(definition, one) for one in chosen.new(definition)])
            elif chosen.removing:
                self._spawn(self._wake(name))

    async def _remove_drained(self, runner: Runner) -> None:
        """What the partitions stored goes first: should this be cut short, they are empty, and are removed again."""
        name, failed = runner.queue.state.definition.name, None
        for index in runner.queue.drained:
            definition = self._definitions.get(name)
            if definition is None or not self._open or self._runners.get(name) is not runner:
                return
            try:
                if await runner.remove(index):
                    await self._remove_stored(definition, index)
                    await self._whole(self._forget_partition(definition, index, runner.queue.removing[index]))
            except MillpondError as error:  # of one store: partitions in others can go
                failed = error
        if failed is not None:
            raise failed

    async def _remove_stored(self, definition: QueueDefinition, index: int) -> None:
        [place] = [one for one in definition.partitions if one.partition == index]
        stores, partitions = self._places[place.store], [index]
        try:
            if place.store == DEFAULT:
                await self._registry.run(stores.destroy, definition.incarnation, partitions)
            else:
                await self._places.call(place.store, stores.destroy, definition.incarnation, partitions)
        except (OSError, StoreFailed, MillpondError) as error:
            detail = {"removing": index, "store": place.store, "attempt": self._rebalances.attempt(definition, index)}
            await self._note([self._own_entry("rebalance", definition.name, detail, str(error))])
            raise Unavailable(f"partition {index} could not be removed from store {place.store!r}: {error}") from error

    async def _forget_partition(self, before: QueueDefinition, index: int, totals: Mapping[str, int]) -> None:
        async with self._changing(before.name):
            definition = self._definitions.get(before.name)
            if definition is None or definition.incarnation != before.incarnation:
                return
            definition, detail = without(definition, index, totals, self._clock.now())
            is_over = definition.rebalance is not None and definition.rebalance.finished_at
            action = "rebalance done" if is_over else "rebalance"
            await self._put(definition, [self._own_entry(action, before.name, detail)])
            if before.name in self._runners:
                self._runners[before.name].configure(definition)

    @asynccontextmanager
    async def _changing(self, name: str) -> AsyncIterator[None]:
        """One change at a time, and none to a queue that is being loaded or closed.

        That is waited for without keeping others from their changes: its store may take long.
        """
        while True:
            async with self._changes:
                if name not in self._settling:
                    yield
                    return
            await asyncio.wait([self._settling[name]])

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """A change that was begun is carried through, also when its caller has gone."""
        return await asyncio.shield(self._spawn(change))

    async def _create(self, name: str, settings: QueueSettings, partitions: int) -> QueueDefinition:
        """A store that takes long to say that it is there holds up nobody else."""
        self._check_open()
        stores = self._places.place(partitions)
        for store in dict.fromkeys(stores):
            await self._places.prepare(store, self._places[store], unused=store not in self._used_stores())
        async with self._changing(name):
            self._check_open()
            if name in self._definitions:
                raise QueueExists(f"queue {name!r} exists already; update it or choose another name", queue=name)
            self._check_dead_queue(name, settings.dead_queue)
            if not set(stores) <= set(self._places.names):
                raise Unavailable("the stores have changed meanwhile; try again")
            now = self._clock.now()
            definition = QueueDefinition(
                name=name,
                incarnation=self._new_incarnation(),
                settings=settings,
                partitions=tuple(PartitionDefinition(partition=no, store=store) for no, store in enumerate(stores)),
                created_at=now,
                updated_at=now,
            )
            detail = {"incarnation": definition.incarnation, "partitions": dict(Counter(stores))}
            detail |= _differences(QueueSettings(), settings)
            await self._put(definition, [self._entry("create", name, detail)])
            return definition

    async def _update(self, name: str, changes: Mapping[str, Any], paused: bool | None) -> QueueDefinition:
        async with self._changing(name):
            self._check_open()
            definition = self.definition(name)
            settings = _changed(definition.settings, changes)
            if "dead_queue" in changes:
                self._check_dead_queue(name, settings.dead_queue)
            action = "update" if paused is None else "pause" if paused else "resume"
            await self._put(
                replace(
                    definition,
                    settings=settings,
                    paused=definition.paused if paused is None else paused,
                    updated_at=self._clock.now(),
                ),
                [self._entry(action, name, _differences(definition.settings, settings))],
            )
            if name in self._runners:
                self._runners[name].configure(self._definitions[name])
            return self._definitions[name]

    async def _delete(self, name: str, force: bool) -> None:
        while True:
            if not force:
                await self.known(name)
            async with self._changing(name):
                if force or name in self._runners:  # else it had to make room while this waited for its turn
                    definition, closing = await self._remove(name, force)
                else:
                    continue
            if closing is not None:
                await closing
            self._reader.deleted(definition.incarnation)
            return await self._destroy_stored(definition)

    async def _destroy_stored(self, definition: QueueDefinition) -> None:
        """What cannot be reached now goes with the next open: the registry knows that the queue has gone."""
        await self._registry.run(_destroy, self._places[DEFAULT], definition.incarnation)
        for store in {one.store for one in definition.partitions} - {DEFAULT}:
            await self._places.call(store, _destroy, self._places[store], definition.incarnation)

    async def _remove(self, name: str, force: bool) -> tuple[QueueDefinition, asyncio.Task[None] | None]:
        """From the registry; and the task that closes it, if it is awake."""
        self._check_open()
        definition = self.definition(name)
        if users := sorted(n for n, one in self._definitions.items() if one.settings.dead_queue == name):
            raise QueueInUse(f"queue {name!r} is the dead queue of {', '.join(users[:3])}; give them another first")
        if not force:
            self._check_empty(name)
        closing = self._close_for_good(name)
        detail = {"incarnation": definition.incarnation, "force": force}
        entries = [self._entry("delete", name, detail)]
        await self._registry.remove(name, definition.incarnation, entries)
        del self._definitions[name]
        del self._names[definition.incarnation]
        self._drop_alarm(name)
        return definition, closing

    def _close_for_good(self, name: str) -> asyncio.Task[None] | None:
        """Nothing comes in from here on."""
        runner = self._runners.get(name)
        if runner is None:
            return None
        runner.queue.deleting = True
        runner.shut()
        return self._settle(name, self._close_runner(name))

    def _check_empty(self, name: str) -> None:
        """Looks at memory: what comes in from here on finds the queue closed."""
        items = 0
        for lane in self._runners[name].queue.state.lanes.values():
            if lane.status != Status.OPEN:
                raise Unavailable(
                    f"partition {lane.index} of queue {name!r} is away and may hold items; try again later, or delete"
                    " it with force"
                )
            counts = lane.partition.counts()
            items += sum(counts.get(state, 0) for state in _KEEPS_QUEUE)
        if items:
            raise QueueInUse(f"queue {name!r} has {items} items; complete or clear them, or delete it with force")

    def _check_dead_queue(self, name: str, dead_queue: str | None) -> None:
        if dead_queue is None:
            return
        if dead_queue == name:
            raise InvalidRequest(f"queue {name!r} cannot be its own dead queue; name another")
        target = self._definitions.get(dead_queue)
        if target is None:
            raise InvalidRequest(f"dead queue {dead_queue!r} does not exist; create it first", queue=dead_queue)
        if target.settings.dead_queue is not None:
            raise Conflict(f"queue {dead_queue!r} has a dead queue itself and cannot be one; choose another")
        if self.is_dead_queue(name):
            raise Conflict(f"queue {name!r} is a dead queue and cannot have one; leave dead_queue out")

    def _new_incarnation(self) -> str:
        while True:
            incarnation = "".join(secrets.choice(_INCARNATION_ALPHABET) for _ in range(_INCARNATION_LENGTH))
            if incarnation not in self._names:
                return incarnation

    async def _put(self, definition: QueueDefinition, entries: Sequence[AuditEntry] = ()) -> None:
        """Written, then believed."""
        await self._registry.put([definition], entries)
        self._definitions[definition.name] = definition
        self._names[definition.incarnation] = definition.name

    # ---- stores and the audit log ---------------------------------------------------------------------------

    async def change_stores(self, settings: Sequence[StoreSettings]) -> list[str]:
        """To these, as checked; tells what has changed. Refused as a whole if a part of it cannot be.

        So is a new one that cannot be reached: whoever has just written it down wants to know.
        """
        return await self._whole(self._change_stores(settings))

    async def _change_stores(self, settings: Sequence[StoreSettings]) -> list[str]:
        self._check_open()
        self._check_stores(settings)
        made = self._places.make(settings)
        try:
            for name, stores in made.items():
                await self._places.prepare(name, stores, unused=name not in self._used_stores())
            return await self._use_stores(settings, made)
        except BaseException:
            for stores in made.values():
                let_go(stores)
            raise

    async def _use_stores(self, settings: Sequence[StoreSettings], made: Mapping[str, Stores]) -> list[str]:
        async with self._changes:
            self._check_open()
            self._check_stores(settings)
            used = self._used_stores()
            before = {name: self._places.affinity(name) for name in self._places.names}
            told = self._places.change(settings, made)
            for name in self._places.names:
                self._meter.know(name)
            entries = [
                self._entry("store", queue, {"store": name, "affinity": self._places.affinity(name)})
                for name in self._places.names
                if before.get(name) != self._places.affinity(name)
                for queue in used.get(name, ())
            ]
            if entries:
                await self._note(entries)
            return told

    def _check_stores(self, settings: Sequence[StoreSettings]) -> None:
        if refused := self._places.refusals(settings, self._used_stores()):
            raise Conflict("; ".join(refused), problems=refused)

    def _used_stores(self) -> dict[str, list[str]]:
        """The queues that have partitions in each store."""
        used: dict[str, list[str]] = {}
        for name, definition in self._definitions.items():
            for store in {one.store for one in definition.partitions}:
                used.setdefault(store, []).append(name)
        return used

    async def audit(self, name: str, before: int | None, limit: int) -> tuple[list[AuditEntry], str | None]:
        """The newest first, also of a queue that was deleted."""
        return await self._whole(self._audit(name, before, limit))

    async def _audit(self, name: str, before: int | None, limit: int) -> tuple[list[AuditEntry], str | None]:
        self._check_open()
        rows = await self._registry.audit(name, before, limit + 1)
        if not rows and (before is None or not await self._registry.audit(name, None, 1)):
            self.definition(name)
        return [entry for _, entry in rows[:limit]], str(rows[limit - 1][0]) if len(rows) > limit else None

    async def note(self, name: str, action: str, detail: dict[str, Any], error: str | None = None) -> None:
        """Into the audit log, whatever becomes of the caller. For what does not change the registry itself.

        Not while the engine closes: what was begun is in the log, and the end of it is not known.
        """
        if self._open:
            await self._whole(self._note([self._entry(action, name, detail, error)]))

    async def _note(self, entries: list[AuditEntry]) -> None:
        """A registry that fails is no reason to refuse: on a full disk, clearing makes room."""
        try:
            await self._registry.put([], entries)
        except MillpondError as error:
            log.warning("%s of %s is not in the audit log: %s", entries[0].action, entries[0].queue, error)

    def _entry(self, action: str, name: str, detail: dict[str, Any], error: str | None = None) -> AuditEntry:
        at = to_datetime(self._clock.now())
        return AuditEntry(at=at, who=caller.get(), action=action, queue=name, detail=detail, error=error)

    def _own_entry(self, action: str, name: str, detail: dict[str, Any], error: str | None = None) -> AuditEntry:
        """Of a step that nobody asked for by itself."""
        return replace(self._entry(action, name, detail, error), who="millpond")

    # ---- watching -----------------------------------------------------------------------------------------

    def reading(self) -> EngineReading:
        """For metrics."""
        return self._reader.read(self._clock.now(), len(self._definitions))

    def live(self) -> Health:
        """Whether the process is of use, or would be after a restart."""
        return liveness(self._runners.values(), self._registry.alive)

    def ready(self, *, draining: bool = False) -> Health:
        """Whether requests should come here."""
        now = self._clock.now()
        if self._open and self._registry.is_to_be_tried(now) and not self._changes.locked():  # else a call is under way
            self._spawn(self._write_again())
        return readiness(
            is_open=self._open,
            draining=draining,
            registry=self._registry.check(now),
            runners=self._runners.values(),
            now=now,
        )

    async def _write_again(self) -> None:
        """Nobody may ask for a queue that sleeps, and then only this finds out that the registry is well again.

        A row as it is: what failed was most likely a write.
        """
        async with self._changes:
            some = next(iter(self._definitions.values()), None)
            try:
                if some is None:
                    await self._registry.load()
                else:
                    await self._registry.put([some])
            except MillpondError as error:
                log.warning("%s", error)

    # ---- loading and unloading ----------------------------------------------------------------------------

    def _settle(self, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._settling[name] = self._spawn(self._settled(name, coroutine))
        return task

    async def _settled(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Whoever finds a task in `_settling` can wait for it: it is not done yet."""
        try:
            await coroutine
        finally:
            del self._settling[name]

    async def _load(self, name: str) -> None:
        async with self._changes:
            definition = self.definition(name)
            await self._make_room(len(definition.partitions), name)
            if not definition.dirty:
                definition = await self._marked(definition)
            self._start(definition)

    async def _marked(self, definition: QueueDefinition) -> QueueDefinition:
        """As dirty, if there is room to write it down; else the sweeper tries again.

        A full disk must not keep anybody from a queue: room is made by completing and cancelling. If the process dies
        before the mark is written, the queue sleeps until it is asked for, or until its last known wake.
        """
        marked = replace(definition, dirty=True)
        try:
            await self._put(marked)
        except DiskFull as error:
            log.debug("queue %s is awake without a mark: %s", definition.name, error)
            return definition
        return marked

    async def _mark_again(self, name: str) -> None:
        async with self._changing(name):
            if name in self._runners and not self._definitions[name].dirty:
                try:
                    await self._marked(self._definitions[name])
                except MillpondError as error:
                    log.warning("%s", error)

    def _start(self, definition: QueueDefinition) -> None:
        self._drop_alarm(definition.name)
        durability = definition.settings.durability
        lanes = [self._lane(definition, one) for one in definition.partitions]
        stored = self._places[DEFAULT].open(definition.incarnation, META_PARTITION, durability)
        meta = meta_lane(stored, self._budget)
        rng = Random(self._rng.random())
        exists, now = self._definitions.__contains__, self._clock.now()
        queue = LogicalQueue(definition, lanes, meta, rng, exists, now, self._pace)
        seen = self._reader.totals_seen(definition.incarnation)
        drained = self._rebalances.drained
        self._runners[definition.name] = Runner(queue, self._clock, self._bell, self._send, self._meter, seen, drained)
        self._meter.loads += 1
        if self._sweeper is None or self._excess() > 0:
            self._set_sweeper()

    def _lane(self, definition: QueueDefinition, place: PartitionDefinition) -> Lane:
        self._meter.know(place.store)
        stores, durability = self._places[place.store], definition.settings.durability
        store = stores.open(definition.incarnation, place.partition, durability)
        return Lane(place, store, Bodies(self._budget))

    def _excess(self) -> float:
        """Partitions that are loaded beyond the limit."""
        return sum(len(runner.queue.state.lanes) for runner in self._runners.values()) - self._partitions_max

    async def _make_room(self, partitions: int, spared: str) -> None:
        """For so many more of this queue, as far as other idle ones can. `_changes` is held."""
        names = [name for name in self._dispensable(self._excess() + partitions) if name != spared]
        if names:
            await asyncio.wait([self._settle(name, self._unload_if_idle(name)) for name in names], timeout=ROOM_S)

    def _dispensable(self, partitions: float) -> list[str]:
        """Idle queues that have so many partitions together, the least recently used first."""
        if partitions <= 0:
            return []
        now, chosen = self._clock.now(), []
        for name, runner in sorted(self._runners.items(), key=lambda one: one[1].last_used):
            if partitions > 0 and name not in self._settling and runner.queue.idle:
                until = runner.queue.sleeping_until()
                if until is None or until > now:  # else it was just loaded, and has yet to act
                    chosen.append(name)
                    partitions -= len(runner.queue.state.lanes)
        return chosen

    def _shut(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """These take no more requests; what to note of each once it is closed."""
        notes: dict[str, dict[str, Any]] = {}
        for name in names:
            runner = self._runners[name]
            notes[name] = {"dirty": True}
            if runner.queue.idle:
                runner.queue.shed_stale_timers()
                notes[name] = {"dirty": False, "next_wake": runner.queue.sleeping_until() or 0}
            runner.shut()
        return notes

    async def _unload(self, notes: Mapping[str, dict[str, Any]]) -> None:
        """Close the queues that were shut, and note in one registry commit when each must be awake again.

        Those that cannot be noted stay `dirty`, and so are woken by the next open.
        """
        await asyncio.gather(*(self._close_runner(name) for name in notes))
        asleep = [replace(self._definitions[name], **note) for name, note in notes.items()]
        changed = [one for one in asleep if one != self._definitions[one.name]]
        try:
            if changed:
                await self._registry.put(changed)
                self._definitions.update((definition.name, definition) for definition in changed)
        except MillpondError as error:
            log.warning("%s", error)
        for definition in asleep:
            if definition.next_wake and self._open and not definition.dirty:
                self._set_alarm(definition.name, definition.next_wake)

    async def _close_runner(self, name: str) -> None:
        runner = self._runners[name]
        await runner.close()
        del self._runners[name]
        self._reader.unloaded(name, runner)

    async def _unload_idle(self, name: str) -> None:
        async with self._changes:  # whoever is changing it comes first; then its store may take as long as it likes
            notes = self._shut(self._idle(name))
        await self._unload(notes)

    async def _unload_if_idle(self, name: str) -> None:
        await self._unload(self._shut(self._idle(name)))

    def _idle(self, name: str) -> list[str]:
        return [name] if name in self._runners and self._runners[name].queue.idle else []

    def _set_sweeper(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        wait = SWEEP_CROWDED_S if self._excess() > 0 else SWEEP_S
        self._sweeper = asyncio.get_running_loop().call_later(wait, self._sweep_again)

    def _sweep_again(self) -> None:
        self.sweep()
        self._sweeper = None
        if self._runners and self._open:
            self._set_sweeper()

    def sweep(self) -> None:
        """Begin to unload the queues that have been idle for long enough and will be for a while, or are too many."""
        for name in self._dispensable(self._excess()):
            self._settle(name, self._unload_idle(name))
        now = self._clock.now()
        for name, runner in self._runners.items():
            if name in self._settling:
                continue
            if not self._definitions[name].dirty:
                self._spawn(self._mark_again(name))
            if runner.queue.idle and now - runner.last_used > IDLE_MS:
                until = runner.queue.sleeping_until()
                if until is None or until - now > IDLE_MS:
                    self._settle(name, self._unload_idle(name))

    def _set_alarm(self, name: str, wake: int) -> None:
        self._drop_alarm(name)
        wait = min(max(0, wake - self._clock.now()) / 1000, 86_400.0)
        self._alarms[name] = asyncio.get_running_loop().call_later(wait, self._ring, name, wake)

    def _drop_alarm(self, name: str) -> None:
        alarm = self._alarms.pop(name, None)
        if alarm is not None:
            alarm.cancel()

    def _ring(self, name: str, wake: int) -> None:
        if self._clock.now() < wake:
            self._set_alarm(name, wake)
        else:
            self._spawn(self._wake(name))

    async def _wake(self, name: str) -> None:
        """A few at a time, each until it has been read: from then on it is busy as long as it has something to do."""
        try:
            async with self._waking:
                await self.known(name)
        except MillpondError as error:
            if self._open and name in self._definitions:
                log.warning("queue %s could not be woken: %s", name, error)
                self._set_alarm(name, self._clock.now() + WAKE_AGAIN_MS)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- between queues -----------------------------------------------------------------------------------

    def _send(self, sender: Runner, request: Arrive | Forget) -> None:
        """In order from one queue to another: what is to be forgotten must not overtake a copy of it."""
        line = (sender.queue.state.definition.name, request.target)
        task = self._lines[line] = self._spawn(self._forward(sender, request, self._lines.get(line)))
        task.add_done_callback(lambda done: self._lines.pop(line) if self._lines.get(line) is done else None)

    async def _forward(self, sender: Runner, request: Arrive | Forget, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            runner = await self.runner(request.target)
        except MillpondError as error:
            request.fail(error)
            sender.settle(request)
        else:
            if runner is sender or request.target != sender.queue.state.definition.name:
                runner.accept(request, sender.settle)  # else it was carried within a queue that is gone


def _destroy(stores: Stores, incarnation: str) -> None:
    try:
        stores.destroy(incarnation)
    except (OSError, StoreFailed) as error:
        log.warning("what the deleted queue %s has stored stays until the next open: %s", incarnation, error)


def _differences(old: QueueSettings, new: QueueSettings) -> dict[str, Any]:
    """What has changed, as it is now."""
    before, after = to_builtins(old), to_builtins(new)
    return {field: value for field, value in after.items() if value != before[field]}


def _changed(settings: QueueSettings, changes: Mapping[str, Any]) -> QueueSettings:
    """What is left out stays, within `backoff` too."""
    if "backoff" in changes:
        changes = {**changes, "backoff": replace(settings.backoff, **changes["backoff"])}
    return replace(settings, **changes)
