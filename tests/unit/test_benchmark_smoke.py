"""The benchmarks run from end to end; what they measure in so short a run says nothing, so no figure is judged."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import on_postgres, rebalancing
from tests.postgres.server import the_server

ROOT = Path(__file__).parent.parent.parent
ENGINE_FIGURES = {
    "engine_vs_raw_100",
    "engine_vs_raw_1000",
    "gain_64_callers",
    "backlog_cost",
    "mib_per_million_ready",
}
SERVER_FIGURES = {
    "server_vs_bare_1",
    "served_vs_embedded_100",
    "idle_poll_kib",
    "idle_poll_slowdown",
    "vs_go",
}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "named"), [("run", ENGINE_FIGURES), ("server", SERVER_FIGURES)])
def test_the_last_line_of_a_benchmark_holds_the_figures_that_have_targets(
    tmp_path: Path, module: str, named: set[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--quick"],
        cwd=ROOT,
        env={**os.environ, "BENCH_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() == named
    assert all(isinstance(value, float | int) for name, value in figures.items() if name != "vs_go")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.slow
def test_without_go_there_is_no_figure_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.server import built_go

    monkeypatch.setenv("PATH", str(tmp_path))
    assert built_go(tmp_path) is None


@pytest.mark.slow
def test_a_rebalance_that_is_measured_loses_and_doubles_nothing(tmp_path: Path) -> None:
    stores = [{"name": name, "driver": "sqlite", "path": str(tmp_path / name)} for name in ("here", "there")]
    sizes = {"batch": 10, "clients": 4, "ready": 100, "carried": 50}
    found = asyncio.run(rebalancing.rebalanced(str(tmp_path / "data"), stores, seconds=0.1, **sizes))
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert found["phases"].keys() == {"before", "more", "off"}


@pytest.mark.slow
def test_a_cycle_on_postgresql_has_a_rate(tmp_path: Path) -> None:
    url = the_server().url(schema="benchmark_smoke")
    found = asyncio.run(on_postgres.cycle(str(tmp_path), url, batch=10, clients=4, seconds=0.1, partitions=2))
    assert found["rate"] > 0
