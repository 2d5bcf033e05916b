"""Which process a worker is, exactly: by that others on its machine see at once that it has died.

A name has the machine's boot and the namespace of process ids, and the instant at which the process began, in the
system's ticks: the number alone may be another's by now, or mean another process in a container.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final

_PROC: Final = "/proc"
_STARTED: Final = 19  # its place in /proc/PID/stat, from the state on
_GONE: Final = ("Z", "X")  # states of what only waits to be looked at by its parent


def name_of(pid: int) -> str:
    """Empty for a process that is not there, and where the system does not tell (macOS)."""
    place, started = _place(), _started(pid)
    return f"{place}/{started}" if place and started else ""


def is_gone(pid: int, name: str) -> bool:
    """Whether that process has surely ended: False for one that cannot be seen from here."""
    place = name.rpartition("/")[0]
    return bool(place) and place == _place() and name_of(pid) != name


@cache
def _place() -> str:
    try:
        with open(f"{_PROC}/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink(f'{_PROC}/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    try:
        with open(f"{_PROC}/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before it may hold anything
    except OSError:
        return ""
    return fields[_STARTED] if len(fields) > _STARTED and fields[0] not in _GONE else ""
