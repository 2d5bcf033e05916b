"""kill -9 at every step of an export and of a compaction: repeated, never doubled or lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.history.doomed import EXPORT_STEPS, GAP_STEP, MERGE_STEPS

ROOT = Path(__file__).parents[2]


def deaths(story: str, directory: Path, seed: int) -> Counter[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.history.doomed", story, str(directory), str(seed)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Counter(line.removeprefix("killed ") for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_lake_killed_at_every_step_has_every_row_once(tmp_path: Path, seed: int) -> None:
    died = deaths("work", tmp_path, seed)
    assert set(died) == {*EXPORT_STEPS, *MERGE_STEPS}
    assert died.total() >= 12


@pytest.mark.slow
def test_a_gap_is_told_once_however_often_its_finder_is_killed(tmp_path: Path) -> None:
    assert deaths("gaps", tmp_path, 0)[GAP_STEP] == 2
