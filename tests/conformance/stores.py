"""The backends that the conformance suite runs on: one line each in BACKENDS, with what they cannot do as flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millpond.store.base import Chunk, Registry, Stores, Turn
from millpond.store.memory import MemoryRegistry, MemoryStores
from millpond.store.sqlite import SqliteStores
from millpond.store.sqlite_registry import SqliteRegistry
from tests.postgres.scoped import scoped_stores

RESERVE_BYTES = 64 << 10  # small, so that making it costs the suite nothing


@dataclass(frozen=True)
class Backend:
    """How to make a backend's factory and registry in a directory, and what it can do."""

    name: str
    stores: Callable[[Path], Stores]
    registry: Callable[[Path], Registry]  # where there is none of its own, the one that is used with it
    survives_restart: bool = True  # a second factory on the same directory finds what the first one stored
    exclusive: bool = True  # refuses to open what another store has open
    slow: bool = False  # it needs a server, or is another's other way

    def __str__(self) -> str:
        return self.name


def sqlite_stores(path: Path, **ways: Any) -> Stores:
    return SqliteStores(path, reserve_bytes=RESERVE_BYTES, **ways)


BACKENDS = [
    Backend("memory", lambda _: MemoryStores(), lambda _: MemoryRegistry(), survives_restart=False, exclusive=False),
    Backend("sqlite", sqlite_stores, SqliteRegistry),
    Backend("log", lambda path: sqlite_stores(path, turns_before=0), SqliteRegistry, slow=True),
    Backend("bulk", lambda path: sqlite_stores(path, bulk_bytes_min=1), SqliteRegistry, slow=True),
    Backend("postgres", scoped_stores, SqliteRegistry, exclusive=False, slow=True),
]


def parameters(can: Callable[[Backend], bool] = lambda _: True) -> list[Any]:
    """Those backends that can do something, as parameters of tests."""
    return [pytest.param(one, marks=[pytest.mark.slow] if one.slow else []) for one in BACKENDS if can(one)]


def only(can: Callable[[Backend], bool]) -> pytest.MarkDecorator:
    """Run a test on those backends alone that can do what it is about."""
    return pytest.mark.parametrize("backend", parameters(can), indirect=True, ids=str)


def turn(number: int, **fields: object) -> Turn:
    """A turn of which a test says only what it is about."""
    defaults: dict[str, object] = {"at": 1000 * number, "events": b"events of turn %d" % number}
    return Turn(number=number, **{**defaults, **fields})  # type: ignore[arg-type]


def chunk(first: int, count: int = 10, body: bytes | None = None) -> Chunk:
    return Chunk(first, count, body if body is not None else b"chunk %d" % first)


def turns(numbers: Sequence[int], **fields: object) -> list[Turn]:
    return [turn(number, **fields) for number in numbers]
