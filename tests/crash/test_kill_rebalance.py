"""kill -9 in a loop, while partitions come and go: nothing is lost, nothing exists twice, and it goes on."""

from __future__ import annotations

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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed-{seed}-")
def test_kill_in_the_middle_of_a_rebalance_loses_and_doubles_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "removable_at", at_once)
    random, said = Random(seed), Said()
    directory = tmp_path / "data"
    for life in range(LIVES):
        steps = random.choice([random.randrange(20), random.randrange(STEPS_MAX), random.randrange(STEPS_MAX)])
        live_and_die(directory, f"life{life}", steps, said, "tests.crash.doomed_rebalance")
        if said.of("produce"):
            with millpond.open(directory) as pond:
                produce_again(pond, said)
                check(pond, said)
    assert said.of("running"), "a rebalance was begun"
    with millpond.open(directory) as pond:
        drain(pond, said)
        check(pond, said)
        while any(is_running(pond, queue) for queue in ("work", "letters")):
            pass
        there = {one.partition for one in pond.queue_info("work").partitions}
        [folder] = [one for one in (directory / "queues").iterdir() if one.name == pond.queue_info("work").incarnation]
        assert {int(file.stem) for file in folder.glob("[0-9]*.db")} == there
