from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.model import QueueDefinition
from millpond.store.base import Registry, Store, Stores
from tests.conformance.engine import FaultyStores, SteppedPond, spread
from tests.conformance.stores import Backend, parameters
from tests.drive import definition

MakePond = Callable[..., SteppedPond]


@pytest.fixture(params=parameters(), ids=str)
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


@pytest.fixture
def faulty(stores: Stores) -> FaultyStores:
    """The backend's stores, with faults that a test can switch on."""
    return FaultyStores(stores)


@pytest.fixture
def make_pond(stores: Stores) -> Iterator[MakePond]:
    """Makes ponds of the given queues (one of one partition if none is) and closes their stores in the end."""
    made: list[SteppedPond] = []

    def make(*definitions: QueueDefinition, on: Stores | None = None) -> SteppedPond:
        made.append(SteppedPond(on or stores, *definitions or [definition()]))
        return made[-1]

    yield make
    for pond in made:
        pond.drop()


@pytest.fixture
def pond(make_pond: MakePond) -> SteppedPond:
    """One queue of one partition."""
    return make_pond()


@pytest.fixture
def three(make_pond: MakePond) -> SteppedPond:
    """Three partitions with two items each, `0` to `5` in the order of production."""
    pond = make_pond(definition(partitions=3))
    spread(pond, 6)
    return pond
