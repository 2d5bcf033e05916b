"""tests/crash/test_kill.py with all items in PostgreSQL."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.crash.test_kill import STEPS_MAX, Said, check, drain, live_and_die, produce_again
from tests.postgres.doomed_pond import URL, open_pond
from tests.postgres.server import Server

pytestmark = pytest.mark.slow

LIVES = 8


def test_a_killed_process_loses_nothing_and_doubles_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, said = Random(0), Said()
    schema = "killed"
    url = server.url(schema=schema)
    monkeypatch.setenv(URL, url)
    directory = tmp_path / "data"
    for life in range(LIVES):
        steps = random.choice([random.randrange(5), random.randrange(STEPS_MAX), random.randrange(STEPS_MAX)])
        live_and_die(directory, f"life{life}", steps, said, module="tests.postgres.doomed_pond")
        if said.of("produce"):
            with open_pond(directory, url) as pond:
                produce_again(pond, said)
                check(pond, said)
    assert said.of("completed")
    assert server.ask(f"SELECT 1 FROM {schema}.journal LIMIT 1"), "nothing was in PostgreSQL"
    with open_pond(directory, url) as pond:
        drain(pond, said)
        check(pond, said)
    server.ask(f"DROP SCHEMA {schema} CASCADE")
