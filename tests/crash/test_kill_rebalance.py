"""kill -9 in a loop, while partitions come and go: nothing is lost, nothing exists twice, and it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import pytest

import millpond
from millpond import Pond
from millpond.queue import draining
from tests.crash.doomed_rebalance import at_once
from tests.crash.test_kill import Said, check, drain, live_and_die, produce_again

LIVES = 10
STEPS_MAX = 300


def is_running(pond: Pond, queue: str) -> bool:
    pond.stats(queue)  # a turn of its loop
    found = pond.queue_info(queue).rebalance
    return found is not None and found.status == "running"


def live_through(
    lives: Iterable[str], directory: Path, module: str, open_pond: Callable[[Path], Pond], seed: int
) -> None:
    """Killed at the end of each of these lives; and a last one, in which the rebalances end."""
    random, said = Random(seed), Said()
    for life in lives:
        steps = random.choice([random.randrange(20), random.randrange(STEPS_MAX), random.randrange(STEPS_MAX)])
        live_and_die(directory, life, steps, said, module)
        if said.of("produce"):
            with open_pond(directory) as pond:
                produce_again(pond, said)
                check(pond, said)
    assert said.of("running"), "a rebalance was begun"
    with open_pond(directory) as pond:
        drain(pond, said)
        check(pond, said)
        while any(is_running(pond, queue) for queue in ("work", "letters")):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed-{seed}-")
def test_kill_in_the_middle_of_a_rebalance_loses_and_doubles_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "removable_at", at_once)
    directory, lives = tmp_path / "data", [f"life{life}" for life in range(LIVES)]
    live_through(lives, directory, "tests.crash.doomed_rebalance", millpond.open, seed)
    with millpond.open(directory) as pond:
        there = {one.partition for one in pond.queue_info("work").partitions}
        [folder] = [one for one in (directory / "queues").iterdir() if one.name == pond.queue_info("work").incarnation]
        assert {int(file.stem) for file in folder.glob("[0-9]*.db")} == there
