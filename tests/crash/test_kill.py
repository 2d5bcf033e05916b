"""kill -9 in a loop: nothing acknowledged is lost, nothing completed returns, nothing exists twice.

A failure names its seed: `pytest tests/crash/test_kill.py -k seed-2-` draws the same moments again, as far as the
scheduling of threads allows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Protocol

import pytest

import millpond
from millpond import Item, Pond
from tests.crash.doomed import payloads_of

ROOT = Path(__file__).parents[2]
LIVES = 12  # kills a seed
STEPS_MAX = 250  # lines that a life may report before it ends


class Said:
    """What the lives so far have said: all of it by word, subjects in order."""

    def __init__(self) -> None:
        self.subjects: dict[str, list[str]] = {}

    def hear(self, line: str) -> None:
        word, *subjects = line.split()
        self.subjects.setdefault(word, []).extend(subjects)

    def of(self, word: str) -> set[str]:
        return set(self.subjects.get(word, []))


class Listener(Protocol):
    def hear(self, line: str) -> None: ...


def live_and_die(
    directory: Path, life: str, steps: int, said: Listener, module: str = "tests.crash.doomed"
) -> None:  # fmt: skip
    """One life, killed when it has reported so many steps; what it had reported by then counts."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    arguments = [sys.executable, "-m", module, str(directory), life]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment, cwd=ROOT) as child:
        assert child.stdout is not None
        try:
            for number, line in enumerate(child.stdout):
                said.hear(line.decode())
                if number >= steps:
                    break
        finally:
            child.kill()
        for line in child.stdout:
            said.hear(line.decode())
    assert child.returncode == -9, "it must not have ended by itself"


def items_of(pond: Pond, queue: str) -> list[Item]:
    items: list[Item] = []
    after: str | None = "0:0"
    while after is not None:
        page = pond.list_items(queue, after=after, limit=1_000)
        items += page.items
        after = page.next
    return items


def texts(items: Iterable[Item]) -> Counter[str]:
    return Counter(item.payload.decode() for item in items)


def produce_again(pond: Pond, said: Said) -> None:
    """As a client does that got no answer: the same request, with the same id."""
    for request in said.of("produce") - said.of("produced"):
        pond.produce("work", payloads_of(request), request_id=request)
        said.hear(f"produced {request}")


def check(pond: Pond, said: Said) -> None:
    produced = {payload for request in said.of("produced") for payload in payloads_of(request)}
    while pond.stats("work").counts["dead"]:
        pass  # on their way to the dead queue
    work, letters = items_of(pond, "work"), items_of(pond, "letters")
    found = texts(work) + texts(letters)
    assert set(found) <= produced, "something that nobody produced"
    assert max(found.values(), default=0) <= 1, "something exists twice"
    assert not said.of("completed") & set(found), "something completed has returned"
    assert produced - said.of("complete") <= set(found), "something acknowledged is lost"
    assert said.of("rejected") <= set(texts(letters)), "a dead letter is lost"
    assert set(texts(letters)) <= said.of("reject"), "a dead letter that nobody rejected"
    assert {letter.last_error for letter in letters} == set(texts(letters)), "a dead letter lost its last error"
    for item in work:
        if item.payload.decode() in said.of("retried"):
            assert item.attempts >= 1
            assert item.last_error == item.payload.decode()


def drain(pond: Pond, said: Said) -> None:
    """Leases of the dead run out within a second; then everything left is handed out, once."""
    left = texts(items_of(pond, "work"))
    handed: Counter[str] = Counter()
    while sum(handed.values()) < sum(left.values()):
        items = pond.lease("work", batch=1_000, wait="1m", lease_timeout="1m")
        handed.update(item.text for item in items)
        said.hear(" ".join(["complete", *(item.text for item in items)]))
        assert all(result.ok for result in pond.complete(items))
    assert handed == left
    assert not items_of(pond, "work")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed-{seed}-")
def test_kill_loses_nothing_and_doubles_nothing(seed: int, tmp_path: Path) -> None:
    random, said = Random(seed), Said()
    directory = tmp_path / "data"
    for life in range(LIVES):
        steps = random.choice([0, random.randrange(5), random.randrange(STEPS_MAX), random.randrange(STEPS_MAX)])
        live_and_die(directory, f"life{life}", steps, said)
        if said.of("produce"):  # else it may have died before there were queues
            with millpond.open(directory) as pond:
                produce_again(pond, said)
                check(pond, said)
    assert said.of("completed")
    assert said.of("rejected")
    assert said.of("retried")
    with millpond.open(directory) as pond:
        drain(pond, said)
        check(pond, said)
