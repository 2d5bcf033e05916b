from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from inspect import isawaitable
from itertools import count
from typing import Any

import pytest

from millpond import AsyncClient, Client
from millpond.consuming import pauses
from tests.client.served import Served, serve

_numbers = count(1)


class Blocked:
    """An AsyncClient behind blocking calls, so that one test serves both."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self.client = AsyncClient(*args, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            async def awaited() -> Any:
                value = method(*args, **kwargs)
                return await value if isawaitable(value) else value

            return self._runner.run(awaited())

        return call

    def __enter__(self) -> Blocked:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.client.close())
        self._runner.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve() as served:
        yield served
    gc.collect()  # a socket that was left open warns when it is collected, and warnings are errors


@pytest.fixture
def queue(server: Served) -> str:
    name = f"q{next(_numbers)}"
    server.on_loop(server.pond.create_queue(name))
    return name


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return Client if request.param == "sync" else Blocked


@pytest.fixture(autouse=True)
def brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries come right after each other."""
    monkeypatch.setattr(pauses, "PAUSE_MIN_S", 0.001)
    monkeypatch.setattr(pauses, "PAUSE_MAX_S", 0.002)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread of a client."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("millpond-leases")]
    assert left == []
