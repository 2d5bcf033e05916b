"""Where a result was measured: without it the figures of two files cannot be compared."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import apsw


def describe_machine(directory: Path) -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "cpu": cpu_model(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "kernel": platform.release(),
        "filesystem": filesystem_of(directory),
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def filesystem_of(directory: Path) -> str:
    """The type of the mount that holds the directory: the deepest one that is above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    above = [(len(point), kind) for point, kind in mounts if directory.resolve().is_relative_to(point)]
    return max(above)[1] if above else "unknown"


def busy_seconds() -> float:
    """CPU time that the machine has spent on whatever it was, since it started: user, nice, system, irq, …, steal."""
    line = Path("/proc/stat").read_text("ascii").partition("\n")[0]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def commit_of(root: Path) -> str:
    """The short commit; `-dirty` if the sources differ from it; `none` outside of a repository."""
    try:
        commit = git(root, "rev-parse", "--short", "HEAD")
        changed = git(root, "status", "--porcelain", "--", "src", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return f"{commit}-dirty" if changed else commit


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
