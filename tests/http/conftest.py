from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from millpond.http.app import Limits
from tests.http.served import WAY, Served, serve

_numbers = count(1)


@pytest.fixture(scope="module", params=["lean", "asgi"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything is tried twice: the lean protocol must answer as the application does."""
    before, WAY[0] = WAY[0], request.param
    yield request.param
    WAY[0] = before


@pytest.fixture(scope="module")
def server(way: str) -> Iterator[Served]:
    """One server a file: tests keep apart by their queues."""
    with serve() as served:
        yield served


@pytest.fixture
def queue(server: Served) -> str:
    name = f"q{next(_numbers)}"
    server.must("queues.create", name=name)
    return name


@pytest.fixture
def own() -> Iterator[Served]:
    """A server of the test's own, with a queue `q`; no more than two requests may wait."""
    with serve(limits=Limits(parked_max=2)) as served:
        served.must("queues.create", name="q")
        yield served


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made
