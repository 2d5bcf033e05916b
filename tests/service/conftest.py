from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import millpond
from millpond import Pond
from millpond.clock import ManualClock
from tests.service.case import Case


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "directory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ":memory:" if request.param == "memory" else str(tmp_path / "data")


@pytest.fixture
def reopen(tmp_path: Path, clock: ManualClock) -> Iterator[Callable[[], Pond]]:
    """Closes the pond of before, if there is one, and opens the directory again."""
    opened: list[Pond] = []

    def again() -> Pond:
        for pond in opened:
            pond.close()
        opened.append(millpond.open(tmp_path, clock=clock))
        return opened[-1]

    yield again
    for pond in opened:
        pond.close()


@pytest.fixture
def case(clock: ManualClock) -> Iterator[Case]:
    with millpond.open(":memory:", clock=clock) as pond:
        yield Case(pond, clock)
