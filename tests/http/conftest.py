from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

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
