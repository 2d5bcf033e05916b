"""What the benchmarks share: a place to work in, measurements in processes of their own, tables, kept results."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.children import ROOT, python
from benchmarks.machine import commit_of, describe_machine

RESULTS = ROOT / "benchmarks" / "results"
CHILD_TIMEOUT_S = 120

# ---- measuring --------------------------------------------------------------------------------------------


@contextmanager
def scratch() -> Iterator[Path]:
    """On the repository's disk, for a temporary directory may be memory; BENCH_DIR names another place."""
    parent = Path(os.environ.get("BENCH_DIR") or ROOT / "build")
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


class Bench:
    """Runs measurements in processes of their own, in a directory that goes when all is done."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._fresh = 0

    def measure(self, name: str, *, killed: bool = False, **arguments: Any) -> dict[str, Any]:
        command = python("child", name, msgspec.json.encode(arguments).decode())
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=CHILD_TIMEOUT_S, check=False)
        if done.returncode != (-9 if killed else 0):
            raise SystemExit(f"{name} {arguments} ended with {done.returncode}; see its output above")
        return {} if killed else msgspec.json.decode(done.stdout, type=dict[str, Any])

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """A path for one measurement from empty."""
        self._fresh += 1
        folder = self.directory / f"fresh-{self._fresh}"
        folder.mkdir()
        try:
            yield str(folder / "data")
        finally:
            shutil.rmtree(folder)


def summary(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    return {
        "median": round(median(values), digits),
        "low": round(min(values), digits),
        "high": round(max(values), digits),
    }


# ---- printing ---------------------------------------------------------------------------------------------


def print_table(title: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
    lines = [list(columns), *([show(cell) for cell in row] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def show(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if cell >= 1000 else f"{cell:.2f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


# ---- the command ------------------------------------------------------------------------------------------


def add_quick(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="see that it runs; the figures mean nothing, none are kept"
    )


def tell_about(directory: Path, plan: msgspec.Struct | None = None) -> dict[str, Any]:
    """When, of what, where and how much was measured, for the result; the machine is also printed."""
    machine = describe_machine(directory)
    print(" ".join(f"{name}={value}" for name, value in machine.items()), flush=True)
    about = {
        "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit_of(ROOT),
        "machine": machine,
    }
    return about if plan is None else {**about, "plan": msgspec.to_builtins(plan)}


def keep(found: dict[str, Any], what: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{what}-{found['at'].replace(':', '').replace('-', '')}-{found['commit']}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(f"\nkept in {path.relative_to(ROOT)}")
