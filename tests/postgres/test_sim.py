"""The simulator's worlds on PostgreSQL: all promises are kept, and each goes exactly as it does in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millpond.store import postgres_connections
from millpond.store.base import Chunk
from millpond.store.memory import Contents
from millpond.store.postgres_errors import describe
from tests.postgres.scoped import ScopedStores, scope_of, shared_stores
from tests.postgres.server import the_server
from tests.sim import world
from tests.sim.run import run_seed

pytestmark = pytest.mark.slow

OPERATIONS = 400


class SeenStores(ScopedStores):
    """In the place of MemoryStores: a world also looks at the numbers of all that its stores hold in the end."""

    def __init__(self, scope: str) -> None:
        super().__init__(shared_stores(), scope)
        self._room = self
        self.partitions = self

    def __getitem__(self, key: tuple[str, int]) -> Contents:
        incarnation, partition = key
        of = "JOIN millpond.owner USING (place) WHERE incarnation = %s AND partition = %s"
        place = f"{self.scope}{incarnation}", partition
        docs = the_server().ask(f"SELECT number FROM millpond.doc {of}", *place)
        chunks = the_server().ask(f"SELECT first, count FROM millpond.chunk {of}", *place)
        return Contents(
            docs={number: b"" for (number,) in docs},
            chunks={first: Chunk(first, count, b"") for first, count in chunks},
        )


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_world_goes_on_postgresql_as_it_goes_in_memory(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_seed((seed, OPERATIONS))
    monkeypatch.setattr(world, "MemoryStores", lambda: SeenStores(scope_of(tmp_path)))
    failures: list[str] = []  # of PostgreSQL itself: those of the world are none that it knows of

    def noting(*arguments: Any) -> str:
        failures.append(describe(*arguments))
        return failures[-1]

    monkeypatch.setattr(postgres_connections, "describe", noting)
    outcome = run_seed((seed, OPERATIONS))
    assert failures == []
    assert outcome.violation is None
    assert outcome == expected
