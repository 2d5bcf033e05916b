"""The engine in this process: from a directory to a service. The composition root.

    with millpond.open("./data") as pond:                    # blocking
    async with millpond.open_async("./data") as pond:        # on the running event loop

Both have the methods of `millpond.api.Api`. ":memory:" keeps everything in memory.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random, SystemRandom
from types import TracebackType
from typing import Any, Self, TypeVar

from msgspec import UNSET, UnsetType

from millpond.clock import Clock
from millpond.errors import Closed, Conflict, InvalidRequest
from millpond.model import (
    CLEAR_STATES,
    Duration,
    Item,
    ItemPage,
    Items,
    LeasedItem,
    LeaseLike,
    OnConflict,
    Produced,
    QueueInfo,
    QueuePage,
    QueueStats,
    RedriveFilter,
    Redriven,
    Result,
    Retry,
    StateWritten,
)
from millpond.service.manager import QueuesManager
from millpond.service.service import Service
from millpond.store.base import Registry, Stores
from millpond.store.disk import partitions_max
from millpond.store.memory import MemoryRegistry, MemoryStores
from millpond.store.sqlite import SqliteRegistry, SqliteStores

T = TypeVar("T")


class DirectoryLock:
    """One owner a data directory: two would write over each other."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise InvalidRequest(f"cannot use {directory} as data directory ({error}); choose another") from error
        try:
            self._take(directory)
        except BaseException:
            os.close(self._file)
            raise

    def _take(self, directory: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(self._file, 20).decode(errors="replace").strip()
            raise Conflict(
                f"data directory {directory} is in use by process {owner or 'unknown'}; close it there first"
            ) from None
        try:
            os.truncate(self._file, 0)
            os.write(self._file, f"{os.getpid()}\n".encode())
        except OSError:  # a full disk: the lock counts, the number in it is for people
            pass

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)  # closing would leave it with the children that were forked meanwhile
        os.close(self._file)


class AsyncPond(Service):
    """The engine on the running event loop."""

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        given: Any = path
        if not isinstance(given, str | Path) or not given:
            raise InvalidRequest(f"{given!r:.60} is no data directory; give the path of one, or ':memory:'")
        self._directory: Path | None = None
        self._lock: DirectoryLock | None = None
        clock = clock or Clock()
        registry: Registry
        stores: Stores
        if str(path) == ":memory:":
            registry, stores, loaded_max = MemoryRegistry(), MemoryStores(), math.inf
        else:
            self._directory = directory = Path(path).absolute()
            registry, stores, loaded_max = SqliteRegistry(directory), SqliteStores(directory), partitions_max()
        rng = Random(SystemRandom().random())
        super().__init__(QueuesManager(registry, {"default": stores}, clock, rng, loaded_max), clock)

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

    async def close(self) -> None:
        """Commits under way are finished, parked leases return empty, files are closed. Twice is once."""
        await self._manager.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def open_async(path: str | Path, *, clock: Clock | None = None) -> AsyncPond:
    """The engine on `path`, for `async with`."""
    return AsyncPond(path, clock=clock)


def open(path: str | Path, *, clock: Clock | None = None) -> Pond:
    """The engine on `path`, for any number of threads. It is open on return; `close` it, or use `with`."""
    return Pond(path, clock=clock)


class Pond:
    """The engine behind blocking calls: an event loop in a thread of its own."""

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self._pond = AsyncPond(path, clock=clock)
        self._gate = threading.Lock()  # no call comes in behind `close`
        self._closing: Future[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="millpond-engine", daemon=True)
        self._thread.start()
        try:
            self._call(self._pond.open())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Commits under way are finished, parked leases return empty, files are closed. Twice is once."""
        with self._gate:
            if self._closing is None:
                self._closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
                self._closing.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._closing.result()
        self._thread.join()

    async def _close(self) -> None:
        """Ends when all calls of other threads have their answers too."""
        await self._pond.close()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        with self._gate:
            if self._closing is not None:
                call.close()
                raise Closed("the engine is closed; open it again and retry")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt: the call must not go on behind the caller's back
            future.cancel()
            raise

    # ---- the operations ------------------------------------------------------------------------------------

    def create_queue(
        self,
        name: str,
        *,
        partitions: int = 1,
        lease_timeout: Duration = "30s",
        expire_timeout: Duration = "14d",
        max_attempts: int = 5,
        dead_queue: str | None = None,
        dead: str = "keep",
        backoff: Mapping[str, Any] | None = None,
        dedup_window: Duration = "5m",
        completed_retention: Duration = "0s",
        durability: str = "full",
        reference: str = "",
    ) -> QueueInfo:
        return self._call(
            self._pond.create_queue(
                name,
                partitions=partitions,
                lease_timeout=lease_timeout,
                expire_timeout=expire_timeout,
                max_attempts=max_attempts,
                dead_queue=dead_queue,
                dead=dead,
                backoff=backoff,
                dedup_window=dedup_window,
                completed_retention=completed_retention,
                durability=durability,
                reference=reference,
            )
        )

    def update_queue(
        self,
        name: str,
        *,
        lease_timeout: Duration | UnsetType = UNSET,
        expire_timeout: Duration | UnsetType = UNSET,
        max_attempts: int | UnsetType = UNSET,
        dead_queue: str | UnsetType | None = UNSET,
        dead: str | UnsetType = UNSET,
        backoff: Mapping[str, Any] | UnsetType = UNSET,
        dedup_window: Duration | UnsetType = UNSET,
        completed_retention: Duration | UnsetType = UNSET,
        reference: str | UnsetType = UNSET,
    ) -> QueueInfo:
        return self._call(
            self._pond.update_queue(
                name,
                lease_timeout=lease_timeout,
                expire_timeout=expire_timeout,
                max_attempts=max_attempts,
                dead_queue=dead_queue,
                dead=dead,
                backoff=backoff,
                dedup_window=dedup_window,
                completed_retention=completed_retention,
                reference=reference,
            )
        )

    def queue_info(self, name: str) -> QueueInfo:
        return self._call(self._pond.queue_info(name))

    def list_queues(self, *, prefix: str = "", after: str = "", limit: int = 100) -> QueuePage:
        return self._call(self._pond.list_queues(prefix=prefix, after=after, limit=limit))

    def delete_queue(self, name: str, *, force: bool = False) -> None:
        return self._call(self._pond.delete_queue(name, force=force))

    def pause(self, queue: str) -> QueueInfo:
        return self._call(self._pond.pause(queue))

    def resume(self, queue: str) -> QueueInfo:
        return self._call(self._pond.resume(queue))

    def stats(self, queue: str) -> QueueStats:
        return self._call(self._pond.stats(queue))

    def produce(
        self, queue: str, items: Items, *, on_conflict: OnConflict = "ignore", request_id: str | None = None
    ) -> Sequence[Produced]:
        return self._call(self._pond.produce(queue, items, on_conflict=on_conflict, request_id=request_id))

    def lease(
        self,
        queue: str,
        *,
        batch: int = 1,
        wait: Duration = 0,
        lease_timeout: Duration | None = None,
        client_id: str = "",
    ) -> Sequence[LeasedItem]:
        return self._call(
            self._pond.lease(queue, batch=batch, wait=wait, lease_timeout=lease_timeout, client_id=client_id)
        )

    def complete(
        self, leases: Sequence[LeaseLike], *, queue: str | None = None, result: Any = None
    ) -> Sequence[Result]:
        return self._call(self._pond.complete(leases, queue=queue, result=result))

    def retry(self, items: Sequence[Retry | LeaseLike], *, queue: str | None = None) -> Sequence[Result]:
        return self._call(self._pond.retry(items, queue=queue))

    def extend(
        self, leases: Sequence[LeaseLike], *, queue: str | None = None, lease_timeout: Duration | None = None
    ) -> Sequence[Result]:
        return self._call(self._pond.extend(leases, queue=queue, lease_timeout=lease_timeout))

    def write_state(self, lease: LeaseLike, state_doc: Any, *, version: int, queue: str | None = None) -> StateWritten:
        return self._call(self._pond.write_state(lease, state_doc, version=version, queue=queue))

    def cancel(self, queue: str, ids: Sequence[str]) -> Sequence[Result]:
        return self._call(self._pond.cancel(queue, ids))

    def clear(self, queue: str, states: Sequence[str] = CLEAR_STATES) -> dict[str, int]:
        return self._call(self._pond.clear(queue, states))

    def redrive(
        self,
        queue: str,
        *,
        ids: Sequence[str] | None = None,
        filter: RedriveFilter | Mapping[str, str] | None = None,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        return self._call(self._pond.redrive(queue, ids=ids, filter=filter, rate=rate, dry_run=dry_run))

    def get_item(self, queue: str, id: str) -> Item:
        return self._call(self._pond.get_item(queue, id))

    def list_items(
        self,
        queue: str,
        *,
        state: str | None = None,
        partition: int | None = None,
        kind: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> ItemPage:
        return self._call(
            self._pond.list_items(queue, state=state, partition=partition, kind=kind, after=after, limit=limit)
        )
