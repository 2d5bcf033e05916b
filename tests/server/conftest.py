from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.server.process import Server, serve

_numbers = count(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    """One server a file, without tokens: tests keep apart by their queues."""
    with serve(data) as served:
        yield served


@pytest.fixture
def queue(server: Server) -> str:
    name = f"q{next(_numbers)}"
    server.must("queues.create", name=name)
    return name
