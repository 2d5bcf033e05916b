from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.store.base import Store
from millpond.store.postgres import PostgresStores
from tests.postgres.scoped import ScopedStores, scope_of
from tests.postgres.server import Server, lent, the_server

MakeStores = Callable[..., ScopedStores]
At = Callable[[str], PostgresStores]


@pytest.fixture
def server() -> Server:
    return the_server()


@pytest.fixture
def own_server() -> Iterator[Server]:
    """One that a test may stop, and look into."""
    yield from lent()


@pytest.fixture
def make_stores(server: Server, tmp_path: Path) -> Iterator[MakeStores]:
    """Makes stores with connections of their own, the same for all of a test."""
    made: list[PostgresStores] = []

    def make(**options: Any) -> ScopedStores:
        made.append(PostgresStores(server.url(), **options))
        made[-1].settle_in()
        return ScopedStores(made[-1], scope_of(tmp_path))

    yield make
    for stores in made:
        stores.close()


@pytest.fixture
def stores(make_stores: MakeStores) -> ScopedStores:
    return make_stores()


@pytest.fixture
def store(stores: ScopedStores) -> Store:
    """A new store, recovered."""
    made = stores.open("incarnation", 0, "full")
    made.recover()
    return made


@pytest.fixture
def scope(stores: ScopedStores) -> str:
    return stores.scope


@pytest.fixture
def at() -> Iterator[At]:
    """Stores by their url."""
    made: list[PostgresStores] = []

    def make(url: str) -> PostgresStores:
        made.append(PostgresStores(url))
        return made[-1]

    yield make
    for stores in made:
        stores.close()
