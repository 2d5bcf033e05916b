"""Every test here runs on a client, on the engine in this process, and on a guest of another's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import AsyncClient, AsyncPond, Client, Pond
from tests.client.conftest import brief_pauses, nothing_left, server

__all__ = ["brief_pauses", "nothing_left", "server"]

Open = Callable[[], AbstractContextManager[Pond]]
AsyncOpen = Callable[[], AbstractAsyncContextManager[AsyncPond]]
KINDS = ["client", "pond", "guest"]
_made = iter(range(1_000_000))


@pytest.fixture
def queue() -> str:
    return f"q{next(_made)}"


@pytest.fixture(params=KINDS)
def where(request: pytest.FixtureRequest, tmp_path: Path, queue: str) -> Iterator[str]:
    """An address or a directory that has the queue."""
    if request.param == "client":
        url: str = request.getfixturevalue("server").url
        with Client(url) as client:
            client.create_queue(queue)
        yield url
        return
    with millpond.open(tmp_path) as owner:
        owner.create_queue(queue)
        if request.param == "guest":
            yield str(tmp_path)
            return
    yield str(tmp_path)


@pytest.fixture
def opened(where: str) -> Open:
    made: Any = Client if where.startswith("http") else millpond.open
    return lambda: made(where)


@pytest.fixture
def opened_async(where: str) -> AsyncOpen:
    made: Any = AsyncClient if where.startswith("http") else millpond.open_async
    return lambda: made(where)


@pytest.fixture
def pond(opened: Open) -> Iterator[Pond]:
    with opened() as pond:
        yield pond
