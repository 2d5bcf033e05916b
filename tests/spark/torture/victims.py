"""Who is killed: the processes of a driver, which all belong to one session of the system's; and who calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from tests.spark.cluster import members

DRIVER_JVM = "org.apache.spark.deploy.SparkSubmit"
EXECUTOR_JVM = "CoarseGrainedExecutorBackend"
LISTENING_HERE = "0100007F"  # 127.0.0.1, as /proc/net/tcp writes it


def kill(processes: Iterable[int]) -> list[int]:
    """Those that were still there."""
    killed = []
    for process in processes:
        try:
            os.kill(process, signal.SIGKILL)
            killed.append(process)
        except ProcessLookupError:
            pass
    return killed


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has just ended
        return ""


def driver_of(session: int) -> list[int]:
    """Its Python process, which leads the session, and first: else it would tell of the end of its JVM."""
    return [session, *(process for process in members(session) if DRIVER_JVM in command_of(process))]


def executors_of(session: int) -> list[int]:
    return [process for process in members(session) if EXECUTOR_JVM in command_of(process)]


def pythons_of(session: int) -> list[int]:
    """All that the JVMs have started: the readers of streams, those that plan and commit, and those of tasks."""
    return [process for process in members(session) if "pyspark" in command_of(process).partition(" -m ")[2]]


def executor_above(process: int) -> list[int]:
    """That which has started this Python process, or the one that was forked into it."""
    while process > 1:
        if EXECUTOR_JVM in command_of(process):
            return [process]
        process = _parent(process)
    return []


def is_of(session: int, process: int) -> bool:
    return process in members(session)


def caller(ports: tuple[int, int], session: int) -> int | None:
    """The process of a session that has the connection from the one port of this machine to the other."""
    inode = _inode(ports)
    if inode is None:
        return None
    for process in members(session):
        try:
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                if _target(descriptor) == f"socket:[{inode}]":
                    return process
        except OSError:  # it has just ended
            continue
    return None


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # it was closed meanwhile
        return ""


def _inode(ports: tuple[int, int]) -> str | None:
    """By both ends: connections to other ports, and those that are over, may be from the same one."""
    ends = [f"{LISTENING_HERE}:{port:04X}" for port in ports]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == ends:
            return fields[9]
    return None


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
