"""The queues that exist, and which of them are awake.

A queue is loaded with its first request or when its persisted next wake comes, and unloaded when it has been idle for
a while: ten thousand queues of which ten are busy cost ten. While a queue is loaded its registry row says `dirty`, so
that after a crash those that were awake are woken at once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, TypeVar

from msgspec.structs import replace

from millpond.clock import Clock
from millpond.errors import (
    Closed,
    Conflict,
    InternalError,
    InvalidRequest,
    MillpondError,
    NotFound,
    QueueExists,
    QueueInUse,
)
from millpond.model import PartitionDefinition, QueueDefinition, QueueSettings, QueueStats, State
from millpond.queue.bodies import Bodies, Budget
from millpond.queue.lane import Lane
from millpond.queue.logical import LogicalQueue
from millpond.queue.requests import Arrive, Forget, GetStats
from millpond.queue.runner import Runner
from millpond.store.base import Registry, StoreFailed, Stores

IDLE_MS = 30_000  # unused for so long, a queue is unloaded
SWEEP_S = 10.0  # how often idle queues are looked for; only while some are loaded
_INCARNATION_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_INCARNATION_LENGTH = 8  # 40 bits: tells the incarnations of a name apart, and names the queue in its tokens
_KEEPS_QUEUE = (State.READY, State.SCHEDULED, State.RETRYING, State.LEASED, State.CLAIMED, State.DEAD)

T = TypeVar("T")


class QueuesManager:
    def __init__(self, registry: Registry, stores: Mapping[str, Stores], clock: Clock, rng: Random) -> None:
        self._registry = registry
        self._stores = stores
        self._clock = clock
        self._rng = rng
        self._budget = Budget()
        self._definitions: dict[str, QueueDefinition] = {}
        self._names: dict[str, str] = {}  # incarnation -> name
        self._runners: dict[str, Runner] = {}
        self._settling: dict[str, asyncio.Task[Any]] = {}  # queues that are being loaded or unloaded
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changes = asyncio.Lock()  # one change to the registry at a time
        self._registry_thread = ThreadPoolExecutor(1, "millpond-registry")
        self._sweeper: asyncio.TimerHandle | None = None
        self._closing = False

    # ---- opening and closing ------------------------------------------------------------------------------

    async def open(self) -> None:
        for definition in await self._in_registry(self._registry.load):
            self._definitions[definition.name] = definition
            self._names[definition.incarnation] = definition.name
        for stores in self._stores.values():
            for incarnation in stores.incarnations():
                if incarnation not in self._names:  # a delete that was cut short
                    stores.destroy(incarnation)
        for definition in list(self._definitions.values()):
            if definition.dirty:
                self._spawn(self.runner(definition.name))
            elif definition.next_wake:
                self._set_alarm(definition.name, definition.next_wake)

    async def close(self) -> None:
        self._closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for alarm in self._alarms.values():
            alarm.cancel()
        while self._settling:
            await asyncio.wait(list(self._settling.values()))
        await self._unload(list(self._runners))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._in_registry(self._registry.close)
        self._registry_thread.shutdown()

    # ---- looking ------------------------------------------------------------------------------------------

    def definition(self, name: str) -> QueueDefinition:
        definition = self._definitions.get(name)
        if definition is None:
            raise NotFound(f"there is no queue {name!r}; create it first", queue=name)
        return definition

    def name_of(self, incarnation: str) -> str | None:
        return self._names.get(incarnation)

    def definitions(self, prefix: str, after: str, limit: int) -> tuple[list[QueueDefinition], str | None]:
        names = sorted(name for name in self._definitions if name.startswith(prefix) and name > after)
        page = [self._definitions[name] for name in names[:limit]]
        return page, page[-1].name if len(names) > limit else None

    def is_dead_queue(self, name: str) -> bool:
        return any(one.settings.dead_queue == name for one in self._definitions.values())

    def is_loaded(self, name: str) -> bool:
        return name in self._runners

    async def stats(self, name: str) -> QueueStats:
        runner = await self.runner(name)
        stats = await runner.ask(GetStats())
        assert isinstance(stats, QueueStats)
        return stats

    def awake(self, name: str) -> Runner | None:
        """The queue if it is awake: the way of nearly every request."""
        return None if name in self._settling else self._runners.get(name)

    async def runner(self, name: str) -> Runner:
        """The queue, woken if need be."""
        while True:
            self.definition(name)
            if self._closing:
                raise Closed("the engine is being closed; open it again and retry")
            if name not in self._settling:
                if name in self._runners:
                    return self._runners[name]
                self._settle(name, self._load(name))
            await asyncio.shield(self._settling[name])

    # ---- changing -----------------------------------------------------------------------------------------

    async def create(self, name: str, settings: QueueSettings, partitions: int) -> QueueDefinition:
        async with self._changes:
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

    async def update(self, name: str, changes: Mapping[str, Any], paused: bool | None = None) -> QueueDefinition:
        async with self._changes:
            definition = self.definition(name)
            settings = replace(definition.settings, **changes)
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

    async def delete(self, name: str, *, force: bool) -> None:
        stats = await self.stats(name)
        async with self._changes:
            definition = self.definition(name)
            if users := sorted(n for n, one in self._definitions.items() if one.settings.dead_queue == name):
                raise QueueInUse(f"queue {name!r} is the dead queue of {', '.join(users[:3])}; give them another first")
            items = sum(stats.counts.get(state, 0) for state in _KEEPS_QUEUE)
            if items and not force:
                raise QueueInUse(f"queue {name!r} has {items} items; complete or clear them, or delete it with force")
            await self._unload([name], deleting=True)
            await self._in_registry(self._registry.remove, name)
            del self._definitions[name]
            del self._names[definition.incarnation]
            self._drop_alarm(name)
            for store in {partition.store for partition in definition.partitions}:
                await self._in_registry(self._stores[store].destroy, definition.incarnation)

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
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._registry_thread, call, *arguments)
        except StoreFailed as error:
            raise InternalError(f"the registry of queues fails ({error}); check the disk") from error

    # ---- loading and unloading ----------------------------------------------------------------------------

    def _settle(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._settling[name] = self._spawn(coroutine)
        task.add_done_callback(lambda _: self._settling.pop(name, None))

    async def _load(self, name: str) -> None:
        async with self._changes:
            definition = self.definition(name)
            if not definition.dirty:
                definition = replace(definition, dirty=True)
                await self._put(definition)
        self._drop_alarm(name)
        lanes = []
        for one in definition.partitions:
            store = self._stores[one.store].open(definition.incarnation, one.partition, definition.settings.durability)
            lanes.append(Lane(one, store, Bodies(self._budget)))
        rng = Random(self._rng.random())
        queue = LogicalQueue(definition, lanes, rng, self._definitions.__contains__, self._clock.now())
        self._runners[name] = Runner(queue, self._clock, self._send)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    async def _unload(self, names: list[str], *, deleting: bool = False) -> None:
        """Close these queues, and note in one registry commit when each must be awake again."""
        asleep = []
        for name in names:
            runner = self._runners.get(name)
            if runner is None:
                continue
            clean = runner.queue.idle
            wake = runner.queue.sleeping_until() if clean else None
            await runner.close()
            del self._runners[name]
            if clean and not deleting:
                asleep.append(replace(self._definitions[name], dirty=False, next_wake=wake or 0))
        if asleep:
            await self._in_registry(self._registry.put, asleep)
            for definition in asleep:
                self._definitions[definition.name] = definition
                if definition.next_wake and not self._closing:
                    self._set_alarm(definition.name, definition.next_wake)

    async def _unload_idle(self, name: str) -> None:
        async with self._changes:
            await self._unload([name])

    def _sweep(self) -> None:
        self._sweeper = None
        now = self._clock.now()
        for name, runner in self._runners.items():
            if name not in self._settling and runner.queue.idle and now - runner.last_used > IDLE_MS:
                until = runner.queue.sleeping_until()
                if until is None or until - now > IDLE_MS:
                    self._settle(name, self._unload_idle(name))
        if self._runners and not self._closing:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

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
            self._spawn(self.runner(name))

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- between queues -----------------------------------------------------------------------------------

    def _send(self, sender: Runner, request: Arrive | Forget) -> None:
        request.done = sender.settle
        self._spawn(self._forward(request))

    async def _forward(self, request: Arrive | Forget) -> None:
        try:
            runner = await self.runner(request.target)
        except MillpondError as error:
            request.fail(error)
        else:
            runner.submit(request)
