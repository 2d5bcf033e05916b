"""From settings to stores, by the name of their driver. A driver's module is imported only when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Semaphore
from typing import Protocol, runtime_checkable

from millpond.errors import InvalidRequest
from millpond.model import StoreSettings
from millpond.store.base import DRIVERS, JournalRow, Recovered, Store, StoreFailed, Stores, Turn
from millpond.store.disk import Reserve, make_directory, sync_directory
from millpond.store.memory import MemoryStores
from millpond.store.sqlite import SqliteStore, SqliteStores

DIRECTORY_MODE = 0o700  # as the data directory's: whoever can read it can read every payload
MARK = "millpond-store"  # a file in a store's directory: without it, the directory is that of a disk that is away


def open_stores(settings: StoreSettings) -> Stores:
    """Nothing is reached yet: a store that is away is found out by the one who uses it."""
    if settings.driver == "sqlite":
        return PlacedStores(settings.name, Path(settings.path))
    if settings.driver == "memory":
        return MemoryStores()
    if settings.driver == "postgres":
        return _postgres(settings)
    raise InvalidRequest(
        f"store {settings.name!r} has driver {settings.driver!r:.60}, which there is not; use {' or '.join(DRIVERS)}"
    )


def _postgres(settings: StoreSettings) -> Stores:
    try:
        from millpond.store.postgres import PostgresStores
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("millpond"):
            raise
        raise InvalidRequest(
            f"store {settings.name!r} needs {error.name}, which is not here; install it with:"
            " pip install 'millpond[postgres]'"
        ) from error
    try:
        return PostgresStores(settings.url)
    except InvalidRequest as error:
        raise InvalidRequest(f"store {settings.name!r}: {error.message}") from None


@runtime_checkable
class Placed(Protocol):
    """Stores in a place that may be the wrong one: a disk that is not mounted, another database."""

    def settle_in(self) -> None:
        """Make it the right one. Raises StoreFailed."""
        ...


def prepare(stores: Stores, *, unused: bool) -> None:
    """Before a queue is placed there: raises StoreFailed if it cannot be used now. `unused`: no partition is there."""
    if unused and isinstance(stores, Placed):
        stores.settle_in()
    stores.incarnations()


# ---- a directory that may be a disk of its own --------------------------------------------------------------------


class PlacedStores(SqliteStores):
    """In a directory beside the data directory. It may be where a disk is mounted, or is not: then it is away.

    Without its mark nothing is made there: partitions that seem empty would take items in the wrong place.
    """

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(directory)
        self._name = name
        self._mark = directory.absolute() / MARK

    def settle_in(self) -> None:
        try:
            make_directory(self._mark.parent.parent)
            self._mark.parent.mkdir(DIRECTORY_MODE, exist_ok=True)
            with open(self._mark, "a") as file:
                os.fsync(file.fileno())
            sync_directory(self._mark.parent)
        except OSError as error:
            raise StoreFailed(
                f"{self._mark.parent} cannot be used ({error}); see to the disk, then try again"
            ) from error

    def check_mark(self) -> None:
        if not self._mark.exists():
            raise StoreFailed(
                f"{self._mark.parent} has no file {MARK!r}, so it is not the directory of store {self._name!r};"
                " see whether its disk is mounted"
            )

    def open(self, incarnation: str, partition: int, durability: str) -> Store:
        path = self._path(incarnation, partition)
        return PlacedStore(path, durability, self._reserve, self._logs, self.check_mark)

    def incarnations(self) -> list[str]:
        self.check_mark()
        try:
            return super().incarnations()
        except OSError as error:
            raise StoreFailed(f"{self._mark.parent} cannot be read ({error}); see to the disk") from error


class PlacedStore(SqliteStore):
    def __init__(
        self, path: Path, durability: str, reserve: Reserve, logs: Semaphore, check_mark: Callable[[], None]
    ) -> None:
        super().__init__(path, durability, reserve, logs)
        self._check_mark = check_mark

    def recover(self) -> Recovered:
        self.close()
        self._check_mark()
        return super().recover()


# ---- a store that is named and not there --------------------------------------------------------------------------

Find = Callable[[], Stores | None]


class AbsentStores:
    """In place of a store that partitions are in and that nobody configured: they are away until `find` finds it."""

    def __init__(self, name: str, find: Find) -> None:
        self._find = find
        self._error = (
            f"store {name!r} is not configured here; add it under [[stores]] as it was, then `millpond config reload`"
        )

    def open(self, incarnation: str, partition: int, durability: str) -> Store:
        return AbsentStore(lambda: self._there().open(incarnation, partition, durability))

    def incarnations(self) -> list[str]:
        return self._there().incarnations()

    def destroy(self, incarnation: str, partitions: Sequence[int] | None = None) -> None:
        self._there().destroy(incarnation, partitions)

    def _there(self) -> Stores:
        found = self._find()
        if found is None:
            raise StoreFailed(self._error)
        return found


class AbsentStore:
    """Each `recover` looks whether it is there by now."""

    blocking = True

    def __init__(self, open_it: Callable[[], Store]) -> None:
        self._open_it = open_it
        self._store: Store | None = None

    def recover(self) -> Recovered:
        if self._store is None:
            self._store = self._open_it()
        return self._store.recover()

    def commit(self, turn: Turn) -> None:
        self._there().commit(turn)

    def read(self, chunks: Sequence[int], docs: Sequence[int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        return self._there().read(chunks, docs)

    def journal(self, after: int, limit: int) -> list[JournalRow]:
        return self._there().journal(after, limit)

    def ended(self, low: int, high: int, since: int) -> Iterator[JournalRow]:
        return self._there().ended(low, high, since)

    def check(self) -> list[str]:
        return self._there().check()

    def relieve(self, full: bool) -> bool:
        return self._store.relieve(full) if self._store is not None else not full

    def size(self) -> int:
        return 0 if self._store is None else self._store.size()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _there(self) -> Store:
        if self._store is None:
            raise StoreFailed("the store is not open; recover it first")
        return self._store
