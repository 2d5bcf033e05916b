"""The command line, called in this process: what goes in, what comes out, and the exit code."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import millpond
from millpond.blocking import Pond
from millpond.cli.main import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Cli:
    """Commands on a data directory of their own."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.data = home / "pond"
        self._capsys = capsys
        self._patch = patch
        for name in os.environ:
            if name.startswith("MILLPOND_"):
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("MILLPOND_DATA", str(self.data))
        patch.setenv("COLUMNS", "100")
        patch.chdir(home)

    def __call__(self, *arguments: str, stdin: str | bytes = "") -> Ran:
        text = stdin.encode() if isinstance(stdin, str) else stdin
        self._patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        self._capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse's
            code = int(end.code or 0)
        return Ran(code, *self._capsys.readouterr())

    def ok(self, *arguments: str, stdin: str | bytes = "") -> str:
        ran = self(*arguments, stdin=stdin)
        assert ran.code == 0, ran
        return ran.out

    def value(self, *arguments: str, code: int = 0, stdin: str | bytes = "") -> Any:
        """What it prints with --json: one value and nothing else."""
        ran = self(*arguments, "--json", stdin=stdin)
        assert ran.code == code, ran
        return json.loads(ran.out)

    def setenv(self, name: str, value: str) -> None:
        self._patch.setenv(name, value)

    def open(self) -> Pond:
        return millpond.open(self.data)
