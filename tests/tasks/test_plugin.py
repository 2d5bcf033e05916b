"""The fixtures that pytest has wherever millpond is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

PLUGIN = "millpond.tasks.pytest_plugin"
APP = """
import millpond
app = millpond.App(data=":memory:")
@app.task
def double(n: int) -> int:
    return 2 * n
"""
TESTS = """
from shop_jobs import app, double

def test_the_app_of_the_settings_is_tested(millpond_app, millpond_testing):
    assert millpond_app is app
    assert double.enqueue(2).result() == 4
"""


@pytest.mark.slow  # starts a pytest
@pytest.mark.parametrize("setting", ["-o", ""])
def test_the_fixtures_run_the_tasks_of_an_app(tmp_path: Path, setting: str) -> None:
    (tmp_path / "shop_jobs.py").write_text(APP)
    test = TESTS if setting else "def test_a_new_app(millpond_app):\n    assert millpond_app.tasks == {}\n"
    (tmp_path / "test_shop.py").write_text(test)
    arguments = ["-q", "-o", "pythonpath=."]
    if PLUGIN not in [one.value for one in entry_points(group="pytest11")]:  # an installation from before it was there
        arguments += ["-p", PLUGIN]
    arguments += [setting, "millpond_app=shop_jobs:app"] if setting else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
