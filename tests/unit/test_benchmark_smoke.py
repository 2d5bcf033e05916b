"""The benchmark runs from end to end; what it measures in so short a run says nothing, so no figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FIGURES = {
    "engine_vs_raw_100",
    "engine_vs_raw_1000",
    "gain_64_callers",
    "backlog_cost",
    "mib_per_million_ready",
}


@pytest.mark.slow
def test_the_last_line_of_a_benchmark_holds_the_figures_that_have_targets(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--quick"],
        cwd=ROOT,
        env={**os.environ, "BENCH_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() == FIGURES
    assert all(isinstance(value, float | int) for value in figures.values())
    assert not list(tmp_path.iterdir()), "nothing is left behind"
