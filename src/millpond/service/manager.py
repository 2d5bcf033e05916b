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
import threading
from collections.abc import Callable, Coroutine, Mapping
from queue import SimpleQueue
from random import Random
from typing import Any, TypeVar

from msgspec.structs import replace

from millpond.clock import Clock
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
    Health,
    PartitionDefinition,
    PartitionStats,
    QueueDefinition,
    QueueSettings,
    QueueStats,
    State,
)
from millpond.queue.bodies import Bodies, Budget
from millpond.queue.lane import Lane, Status, meta_lane
from millpond.queue.logical import LogicalQueue
from millpond.queue.operations import partition_stats
from millpond.queue.readings import STALL_MS
from millpond.queue.requests import Arrive, Forget, GetStats
from millpond.queue.runner import Runner
from millpond.service.health import liveness, readiness, registry_check
from millpond.service.readings import EngineReader
from millpond.store.base import META_PARTITION, Registry, StoreFailed, StoreFull, Stores

log = logging.getLogger("millpond.service")
IDLE_MS = 30_000  # unused for so long, a queue is unloaded
SWEEP_S = 10.0  # how often idle queues are looked for; only while some are loaded
SWEEP_CROWDED_S = 0.5  # the same while more are loaded than should be: requests may be waiting for files
WAKES_MAX = 8  # queues that are woken at a time: a crash may have left thousands to wake
REGISTRY_AGAIN_MS = 1_000  # after the registry failed: at most so often is it tried for the sake of readiness
WAKE_AGAIN_MS = 5_000  # after a queue that had to be woken could not be
_INCARNATION_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_INCARNATION_LENGTH = 8  # 40 bits: tells the incarnations of a name apart, and names the queue in its tokens
_INCARNATION = re.compile(f"[{_INCARNATION_ALPHABET}]{{{_INCARNATION_LENGTH}}}")
_KEEPS_QUEUE = (State.READY, State.SCHEDULED, State.RETRYING, State.LEASED, State.CLAIMED, State.DEAD)

T = TypeVar("T")


class RegistryThread:
    """Calls the registry, one call after the other. No executor: those take no work once the main thread has ended."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="millpond-registry", daemon=True)
        self._thread.start()

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                value = call(*arguments)
            except Exception as error:
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_fulfil, future, value)

        self._calls.put(work)
        return await future

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


def _fulfil(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class QueuesManager:
    def __init__(
        self,
        registry: Registry,
        stores: Mapping[str, Stores],
        clock: Clock,
        rng: Random,
        partitions_max: float = math.inf,
    ) -> None:
        """With `partitions_max` loaded, idle queues make room for others; only if all are busy there are more."""
        self._registry = registry
        self._stores = stores
        self._clock = clock
        self._rng = rng
        self._partitions_max = partitions_max
        self._budget = Budget()
        self._definitions: dict[str, QueueDefinition] = {}
        self._names: dict[str, str] = {}  # incarnation -> name
        self._runners: dict[str, Runner] = {}
        self._settling: dict[str, asyncio.Task[Any]] = {}  # queues that are being loaded or unloaded
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lines: dict[tuple[str, str], asyncio.Task[None]] = {}  # the last message from one queue to another
        self._changes = asyncio.Lock()  # one change to the registry at a time
        self._waking = asyncio.Semaphore(WAKES_MAX)
        self._registry_thread: RegistryThread | None = None
        self._registry_asked: dict[object, int] = {}  # when each call that is under way was made
        self._registry_error: MillpondError | None = None  # of the last call
        self._registry_tried_at = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._open = False
        self._meter = EngineMeter(stores)
        self._reader = EngineReader(self._runners, self._meter)

    # ---- opening and closing ------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._registry_thread is not None:
            raise Conflict("the engine is open already; close it first")
        self._registry_thread = RegistryThread()
        try:
            definitions = await self._in_registry(self._registry.load)
            self._definitions = {one.name: one for one in definitions}
            self._names = {one.incarnation: one.name for one in definitions}
            await self._in_registry(self._remove_orphans)
        except BaseException:
            await self._let_go()
            raise
        self._open = True
        for definition in definitions:
            if definition.dirty:
                self._spawn(self._wake(definition.name))
            elif definition.next_wake:
                self._set_alarm(definition.name, definition.next_wake)

    def _remove_orphans(self) -> None:
        """What a delete that was cut short has left. Anything that is not named like a queue of ours stays."""
        for stores in self._stores.values():
            for incarnation in stores.incarnations():
                if incarnation not in self._names and _INCARNATION.fullmatch(incarnation):
                    self._destroy(stores, incarnation)

    def _destroy(self, stores: Stores, incarnation: str) -> None:
        try:
            stores.destroy(incarnation)
        except OSError as error:
            log.warning("files of the deleted queue %s stay until the next open: %s", incarnation, error)

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
            if self._registry_thread is not None:
                await self._unload(list(self._runners))
                await self._end_tasks()
                await self._let_go()

    async def _end_tasks(self) -> None:
        """They end by themselves: whatever asks for a queue is refused now."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _let_go(self) -> None:
        await self._in_registry(self._registry.close)
        assert self._registry_thread is not None
        self._registry_thread.stop()
        self._registry_thread = None

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
            return [partition_stats(lane) for lane in runner.queue.state.lanes.values()]
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

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """A change that was begun is carried through, also when its caller has gone."""
        return await asyncio.shield(self._spawn(change))

    async def _create(self, name: str, settings: QueueSettings, partitions: int) -> QueueDefinition:
        async with self._changes:
            self._check_open()
            if name in self._definitions:
                raise QueueExists(f"queue {name!r} exists already; update it or choose another name", queue=name)
            self._check_dead_queue(name, settings.dead_queue)
            now = self._clock.now()
            definition = QueueDefinition(
                name=name,
                incarnation=self._new_incarnation(),
                settings=settings,
                partitions=tuple(PartitionDefinition(partition=index) for index in range(partitions)),
                created_at=now,
                updated_at=now,
            )
            await self._put(definition)
            return definition

    async def _update(self, name: str, changes: Mapping[str, Any], paused: bool | None) -> QueueDefinition:
        async with self._changes:
            self._check_open()
            definition = self.definition(name)
            settings = _changed(definition.settings, changes)
            if "dead_queue" in changes:
                self._check_dead_queue(name, settings.dead_queue)
            await self._put(
                replace(
                    definition,
                    settings=settings,
                    paused=definition.paused if paused is None else paused,
                    updated_at=self._clock.now(),
                )
            )
            if name in self._runners:
                self._runners[name].configure(self._definitions[name])
            return self._definitions[name]

    async def _delete(self, name: str, force: bool) -> None:
        while True:
            if not force:
                await self.known(name)
            async with self._changes:
                if force or name in self._runners:  # else it had to make room while this waited for its turn
                    return await self._remove(name, force)

    async def _remove(self, name: str, force: bool) -> None:
        self._check_open()
        definition = self.definition(name)
        if users := sorted(n for n, one in self._definitions.items() if one.settings.dead_queue == name):
            raise QueueInUse(f"queue {name!r} is the dead queue of {', '.join(users[:3])}; give them another first")
        if not force:
            self._check_empty(name)
        await self._unload([name], deleting=True)
        await self._in_registry(self._registry.remove, name)
        self._reader.deleted(definition.incarnation)
        del self._definitions[name]
        del self._names[definition.incarnation]
        self._drop_alarm(name)
        for store in {partition.store for partition in definition.partitions}:
            await self._in_registry(self._destroy, self._stores[store], definition.incarnation)

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

    async def _put(self, definition: QueueDefinition) -> None:
        """Written, then believed."""
        await self._in_registry(self._registry.put, [definition])
        self._definitions[definition.name] = definition
        self._names[definition.incarnation] = definition.name

    async def _in_registry(self, call: Callable[..., T], *arguments: Any) -> T:
        assert self._registry_thread is not None, "checked by whoever was asked"
        asked = object()
        self._registry_asked[asked] = self._clock.now()
        try:
            value = await self._registry_thread.run(call, *arguments)
        except StoreFull as error:
            text = f"the disk is full, so no queue can be changed ({error}); make room, then retry"
            raise self._registry_failed(DiskFull(text)) from error
        except (StoreFailed, OSError) as error:
            text = f"the registry of queues fails ({error}); check the disk, then retry"
            raise self._registry_failed(Unavailable(text)) from error
        finally:
            del self._registry_asked[asked]
        self._registry_error = None
        return value

    def _registry_failed(self, error: MillpondError) -> MillpondError:
        self._registry_error = error
        self._meter.registry_failures += 1
        return error

    # ---- watching -----------------------------------------------------------------------------------------

    def reading(self) -> EngineReading:
        """For metrics."""
        return self._reader.read(self._clock.now(), len(self._definitions))

    def live(self) -> Health:
        """Whether the process is of use, or would be after a restart."""
        return liveness(self._runners.values(), self._registry_thread is None or self._registry_thread.alive)

    def ready(self, *, draining: bool = False) -> Health:
        """Whether requests should come here."""
        now = self._clock.now()
        self._try_registry(now)
        return readiness(
            is_open=self._open,
            draining=draining,
            registry=registry_check(
                failed=self._registry_error is not None,
                full=isinstance(self._registry_error, DiskFull),
                stalled=any(now - asked > STALL_MS for asked in self._registry_asked.values()),
            ),
            runners=self._runners.values(),
            now=now,
        )

    def _try_registry(self, now: int) -> None:
        """Nobody may ask for a queue that sleeps, and then only this finds out that the registry is well again."""
        if self._registry_error is None or not self._open or now - self._registry_tried_at < REGISTRY_AGAIN_MS:
            return
        self._registry_tried_at = now
        if not self._changes.locked():  # else a call is under way
            self._spawn(self._write_again())

    async def _write_again(self) -> None:
        """A row as it is: what failed was most likely a write."""
        async with self._changes:
            some = next(iter(self._definitions.values()), None)
            try:
                if some is None:
                    await self._in_registry(self._registry.load)
                else:
                    await self._in_registry(self._registry.put, [some])
            except MillpondError as error:
                log.warning("%s", error)

    # ---- loading and unloading ----------------------------------------------------------------------------

    def _settle(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        self._settling[name] = self._spawn(self._settled(name, coroutine))

    async def _settled(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Whoever finds a task in `_settling` can wait for it: it is not done yet."""
        try:
            await coroutine
        finally:
            del self._settling[name]

    async def _load(self, name: str) -> None:
        async with self._changes:
            definition = self.definition(name)
            await self._make_room(len(definition.partitions))
            if not definition.dirty:
                definition = replace(definition, dirty=True)
                await self._put(definition)
            self._start(definition)

    def _start(self, definition: QueueDefinition) -> None:
        self._drop_alarm(definition.name)
        durability = definition.settings.durability
        lanes = []
        for one in definition.partitions:
            store = self._stores[one.store].open(definition.incarnation, one.partition, durability)
            lanes.append(Lane(one, store, Bodies(self._budget)))
        stores = self._stores[definition.partitions[0].store]
        meta = meta_lane(definition, stores.open(definition.incarnation, META_PARTITION, durability), self._budget)
        rng = Random(self._rng.random())
        queue = LogicalQueue(definition, lanes, meta, rng, self._definitions.__contains__, self._clock.now())
        seen = self._reader.totals_seen(definition.incarnation)
        self._runners[definition.name] = Runner(queue, self._clock, self._send, self._meter, seen)
        self._meter.loads += 1
        if self._sweeper is None or self._excess() > 0:
            self._set_sweeper()

    def _excess(self) -> float:
        """Partitions that are loaded beyond the limit."""
        return sum(len(runner.queue.state.lanes) for runner in self._runners.values()) - self._partitions_max

    async def _make_room(self, partitions: int) -> None:
        """For so many more, as far as idle queues can. `_changes` is held."""
        names = self._dispensable(self._excess() + partitions)
        for name in names:
            self._settle(name, self._unload_if_idle(name))
        await asyncio.gather(*(self._settling[name] for name in names))

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

    async def _unload(self, names: list[str], *, deleting: bool = False) -> None:
        """Close these queues, and note in one registry commit when each must be awake again.

        Those that cannot be noted stay `dirty`, and so are woken by the next open.
        """
        asleep = []
        for name in names:
            runner = self._runners.get(name)
            if runner is None:
                continue
            clean, wake = runner.queue.idle and not deleting, None
            if clean:
                runner.queue.shed_stale_timers()
                wake = runner.queue.sleeping_until()
            await runner.close()
            del self._runners[name]
            self._reader.unloaded(name, runner)
            if clean:
                asleep.append(replace(self._definitions[name], dirty=False, next_wake=wake or 0))
        if not asleep:
            return
        try:
            await self._in_registry(self._registry.put, asleep)
            self._definitions.update((definition.name, definition) for definition in asleep)
        except MillpondError as error:
            log.warning("%s", error)
        for definition in asleep:
            if definition.next_wake and self._open:
                self._set_alarm(definition.name, definition.next_wake)

    async def _unload_idle(self, name: str) -> None:
        async with self._changes:
            await self._unload_if_idle(name)

    async def _unload_if_idle(self, name: str) -> None:
        if name in self._runners and self._runners[name].queue.idle:
            await self._unload([name])

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
            if name not in self._settling and runner.queue.idle and now - runner.last_used > IDLE_MS:
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
            runner.accept(request, sender.settle)


def _changed(settings: QueueSettings, changes: Mapping[str, Any]) -> QueueSettings:
    """What is left out stays, within `backoff` too."""
    if "backoff" in changes:
        changes = {**changes, "backoff": replace(settings.backoff, **changes["backoff"])}
    return replace(settings, **changes)
