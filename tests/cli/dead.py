"""Ponds with dead items in them, and the command line on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import millpond
from millpond.blocking import Pond
from millpond.model import Item, NewItem, Retry

TIMEOUT_S = 60.0  # for a command
SPARK_TIMEOUT_S = 200.0  # for one that starts Spark beside other tests
LOOK_S = 0.01  # between looks at whether letters have come


class Place(NamedTuple):
    """A pond that commands work on: in a data directory, or at a server that owns it."""

    home: Path
    data: Path
    flags: Sequence[str]
    environment: Mapping[str, str] = {}

    def open(self) -> Pond:
        return millpond.open(self.data)

    def run(self, *arguments: str, timeout: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        return run(self.home, "dlq", *arguments, *self.flags, timeout=timeout, **self.environment)

    def value(self, *arguments: str, code: int = 0, timeout: float = TIMEOUT_S) -> Any:
        """What a command prints with --json."""
        ended = self.run(*arguments, "--json", timeout=timeout)
        assert ended.returncode == code, ended
        return json.loads(ended.stdout)


def run(
    home: Path, *arguments: str, timeout: float = TIMEOUT_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    return _run(home, ["-m", "millpond.cli", *arguments], timeout, environment)


def python(place: Place, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of a few lines, for what a command cannot be made to do."""
    return _run(place.home, ["-c", program, *arguments], TIMEOUT_S, {})


def _run(
    home: Path, command: Sequence[str], timeout: float, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=clean(environment) | {"HOME": str(home), "COLUMNS": "100"},
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def clean(more: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_")} | dict(more)


def kill(pond: Pond, queue: str, errors: Sequence[str | None], **fields: Any) -> list[str]:
    """As many items as there are errors, dead of these; their ids."""
    made = [NewItem(payload=b'{"n": %d}' % number, **fields) for number in range(len(errors))]
    ids = [one.id for one in pond.produce(queue, made)]
    leased = {item.id: item for item in pond.lease(queue, batch=len(ids))}
    dead = [Retry(lease=leased[id].lease, dead=True, error=error) for id, error in zip(ids, errors, strict=True)]
    assert all(result.ok for result in pond.retry(dead, queue=queue))
    return ids


def counts(pond: Pond, queue: str) -> dict[str, int]:
    """Of the states that there are items in."""
    return {str(state): items for state, items in pond.stats(queue).counts.items() if items}


def items(pond: Pond, queue: str) -> list[Item]:
    return list(pond.list_items(queue, limit=1_000).items)


def settled(pond: Pond, queue: str, expected: Mapping[str, int]) -> list[Item]:
    """Once the items that are on their way have come."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while counts(pond, queue) != dict(expected):
        assert time.monotonic() < give_up_at, counts(pond, queue)
        time.sleep(LOOK_S)
    return items(pond, queue)
