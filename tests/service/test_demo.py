from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_demo_loses_nothing() -> None:
    ran = subprocess.run([sys.executable, "-m", "millpond.demo"], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "nothing lost" in ran.stdout.splitlines()[-1]
