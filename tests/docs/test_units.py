"""The systemd units of docs/howto/deploy-with-systemd.md are units that systemd takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.session import BLOCK, ROOT

PAGE = ROOT / "docs" / "howto" / "deploy-with-systemd.md"
NAME = re.compile(r"# /etc/systemd/system/(\S+)\n")
INSTALLED = "/opt/millpond/bin/millpond"  # as the page takes it


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    units = [tmp_path / named[1] for _, text in BLOCK.findall(PAGE.read_text()) if (named := NAME.match(text))]
    texts = [text for _, text in BLOCK.findall(PAGE.read_text()) if NAME.match(text)]
    for unit, text in zip(units, texts, strict=True):
        unit.write_text(text.replace(INSTALLED, str(Path(sys.executable).parent / "millpond")))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *units],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, len(units)) == (0, 2), found.stderr
    assert not [line for line in found.stderr.splitlines() if "millpond" in line]
