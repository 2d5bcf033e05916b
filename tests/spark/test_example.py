"""`make example`: what it prints is what a newcomer sees, so it is run as they would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders.py"
TIMEOUT_S = 600  # a minute on a quiet machine


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_the_example_accounts_for_every_order_and_leaves_a_report(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--no-open", "--folder", str(tmp_path)]
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        said, _ = ran.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):  # nothing of it is left, as it should be
            os.killpg(ran.pid, signal.SIGKILL)
    assert ran.returncode == 0, said
    assert "every order is accounted for, once" in said
    report = (tmp_path / "report.html").read_text()
    assert "timed out" in report
    assert "parcels" in report
