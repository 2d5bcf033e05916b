"""The simulator, small in the fast set and in its CI size among the slow tests."""

from __future__ import annotations

import pytest

from tests.sim.run import main, run_seed, simulate

PAIR_MIN = 100  # how often each request must meet each fault in CI


def test_a_few_worlds_keep_all_promises() -> None:
    summary = simulate(seed=1, seeds=12, jobs=1)
    assert not summary.violations, summary.violations[0].violation


def test_a_seed_always_gives_the_same_run() -> None:
    assert run_seed((7, 400)) == run_seed((7, 400))


def test_the_last_line_counts_operations_seeds_and_violations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ops", "300", "--seed", "3", "--each", "150", "--jobs", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    words = last.replace(",", "").split()
    assert words[1::2] == ["operations", "seeds", "violations"]
    assert int(words[0]) >= 300
    assert words[2::2] == ["2", "0"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_worlds_and_a_million_operations_keep_all_promises() -> None:
    summary = simulate(seed=1, seeds=1_000)
    print(summary.pairs.table())
    print(summary.line())
    assert not summary.violations, summary.violations[0].violation
    assert summary.seeds >= 1_000
    assert summary.ops >= 1_000_000
    pair, count = summary.pairs.rarest()
    assert count >= PAIR_MIN, f"{pair} was met {count} times"
