"""The engine in this process: from a directory to a service. The composition root."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Self, TypeVar

from millpond.clock import Clock
from millpond.consuming.async_calls import AsyncConsumes
from millpond.consuming.async_keeper import AsyncKeeper
from millpond.consuming.held import AsyncHeldItem, Holding, held
from millpond.directory import DirectoryLock
from millpond.errors import Closed, InvalidRequest
from millpond.meters import EngineReading
from millpond.model import Duration, Health, StoreSettings
from millpond.queue.tokens import lease_incarnation
from millpond.service import validate_stores
from millpond.service.health import without_directory
from millpond.service.lean import LeanService
from millpond.service.manager import QueuesManager
from millpond.service.places import Places
from millpond.service.service import Service, lease_request
from millpond.store.base import DEFAULT, Registry, Stores
from millpond.store.disk import partitions_max
from millpond.store.memory import MemoryRegistry, MemoryStores
from millpond.store.sqlite import SqliteStores
from millpond.store.sqlite_registry import SqliteRegistry

T = TypeVar("T")

CLOSE_GRACE_S = 5.0  # for what loops left to be handed back; what is not comes back when its lease runs out


class AsyncPond(Service, AsyncConsumes):
    """The engine on the running event loop."""

    def __init__(self, path: str | Path, *, clock: Clock | None = None, stores: Sequence[StoreSettings] = ()) -> None:
        """`stores` are for partitions, beside the directory itself, which is the store named `default`."""
        given: Any = path
        if not isinstance(given, str | Path) or not given:
            raise InvalidRequest(f"{given!r:.60} is no data directory; give the path of one, or ':memory:'")
        self._directory: Path | None = None
        self._lock: DirectoryLock | None = None
        self._keeper: AsyncKeeper | None = None
        clock = clock or Clock()
        registry: Registry
        default: Stores
        if str(path) == ":memory:":
            registry, default, loaded_max = MemoryRegistry(), MemoryStores(), math.inf
        else:
            self._directory = directory = Path(path).absolute()
            registry, default, loaded_max = SqliteRegistry(directory), SqliteStores(directory), partitions_max()
        places = Places({DEFAULT: default}, validate_stores.stores(stores, self._directory))
        rng = Random(SystemRandom().random())
        super().__init__(QueuesManager(registry, places, clock, rng, loaded_max), clock)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        if self._directory is not None:
            self._lock = DirectoryLock(self._directory)
        try:
            await self._manager.open()
        except BaseException:
            self._release()
            raise
        self._keeper = AsyncKeeper(self)

    async def close(self) -> None:
        """What loops left is handed back, commits under way are finished, parked leases return empty. Twice is once."""
        if self._keeper is not None:
            await self._keeper.close(CLOSE_GRACE_S)
        await self._manager.close()
        self._release()

    async def lease(
        self,
        queue: str,
        *,
        batch: int = 1,
        wait: Duration = 0,
        lease_timeout: Duration | None = None,
        client_id: str = "",
    ) -> Sequence[AsyncHeldItem]:
        leased = await self._ask(queue, lease_request(batch, wait, lease_timeout, client_id))
        return held(leased, AsyncHeldItem, Holding(self, queue, lease_timeout, self._keeper_of_leases()))

    def _keeper_of_leases(self) -> AsyncKeeper:
        if self._keeper is None:
            raise Closed("the engine is not open; open it and retry")
        return self._keeper

    async def change_stores(self, stores: Sequence[StoreSettings]) -> list[str]:
        """To these, while it is open: other affinities, new stores, without those that have no partitions left.

        What has changed, in words. Raises Conflict, with `problems` in its details, if any of it cannot be.
        """
        return await self._manager.change_stores(validate_stores.stores(stores, self._directory))

    @property
    def lean(self) -> LeanService:
        """The hot calls without coroutines, for a server in this process."""
        return LeanService(self._manager, self._clock)

    def leased_count(self) -> int:
        """Items in consumers' hands, in the queues that are awake."""
        return self._manager.leased_count()

    def reading(self) -> EngineReading:
        """For metrics: all that is counted, and a look at the queues that are awake."""
        return self._manager.reading()

    def live(self) -> Health:
        """Whether a restart would not help."""
        return self._manager.live()

    def ready(self, *, draining: bool = False) -> Health:
        """Whether requests should come here."""
        health = self._manager.ready(draining=draining)
        return health if self._lock is None or self.has_directory() else without_directory(health)

    def has_directory(self) -> bool:
        """While it is open: whether its directory is still where it was, and not another one's."""
        return self._lock is not None and self._lock.is_in_place()

    def queue_of(self, lease: str) -> str | None:
        """The queue whose lease token this is, if it is here."""
        return self._manager.name_of(lease_incarnation(lease))

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
