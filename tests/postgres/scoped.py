"""Stores of one test on the server that all tests share: those of the same directory see each other, and no others."""

from __future__ import annotations

import atexit
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from millpond.store.base import Store, Stores
from millpond.store.postgres import PostgresStores
from tests.postgres.server import the_server


class ScopedStores:
    def __init__(self, inner: PostgresStores, scope: str) -> None:
        self.inner = inner
        self.scope = scope

    def open(self, incarnation: str, partition: int, durability: str) -> Store:
        return self.inner.open(self.scope + incarnation, partition, durability)

    def incarnations(self) -> list[str]:
        found = self.inner.incarnations()
        return [name.removeprefix(self.scope) for name in found if name.startswith(self.scope)]

    def destroy(self, incarnation: str, partitions: Sequence[int] | None = None) -> None:
        self.inner.destroy(self.scope + incarnation, partitions)


@functools.cache
def shared_stores() -> PostgresStores:
    made = PostgresStores(the_server().url())
    atexit.register(made.close)
    made.settle_in()
    return made


def scope_of(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:16] + "-"


def scoped_stores(path: Path) -> Stores:
    return ScopedStores(shared_stores(), scope_of(path))
