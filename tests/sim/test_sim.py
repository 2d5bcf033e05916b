"""The simulator, small; `make test` runs it in its CI size."""

from __future__ import annotations

import pytest

from tests.sim.run import main, run_seed, simulate
from tests.sim.world import World


@pytest.mark.slow
def test_a_few_worlds_keep_all_promises() -> None:
    summary = simulate(seed=1, seeds=12, jobs=1)
    assert not summary.violations, summary.violations[0].violation


@pytest.mark.slow
def test_worlds_whose_partitions_come_and_go_keep_all_promises() -> None:
    made = 0
    for seed in range(1, 21):
        world = World(seed, 1_000, rebalances=True)
        world.run()
        made += sum(one.next_partition for one in world.definitions.values())
    assert made > 200, "partitions"


def test_a_seed_always_gives_the_same_run() -> None:
    assert run_seed((7, 400)) == run_seed((7, 400))


def test_the_last_line_counts_operations_seeds_and_violations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ops", "300", "--seed", "3", "--each", "150", "--jobs", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    words = last.replace(",", "").split()
    assert words[1::2] == ["operations", "seeds", "violations"]
    assert int(words[0]) >= 300
    assert words[2::2] == ["2", "0"]


def test_a_pair_that_is_met_too_seldom_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--each", "150", "--jobs", "1", "--pairs-min", "1000"]) == 1
    assert "at least 1000 wanted" in capsys.readouterr().out
