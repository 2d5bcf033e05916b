from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.store.base import Registry, Store, Stores
from tests.conformance.stores import BACKENDS, Backend


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.param
    return made


@pytest.fixture
def stores(backend: Backend, tmp_path: Path) -> Stores:
    return backend.stores(tmp_path)


@pytest.fixture
def store(stores: Stores) -> Iterator[Store]:
    """A new store, recovered."""
    made = stores.open("incarnation", 0, "full")
    made.recover()
    yield made
    made.close()


@pytest.fixture
def registry(backend: Backend, tmp_path: Path) -> Iterator[Registry]:
    made = backend.registry(tmp_path)
    yield made
    made.close()
