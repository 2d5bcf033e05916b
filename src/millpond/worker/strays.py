"""Supervisors that were stopped (SIGSTOP) while all who would have ended them died: nobody else ends them.

One that runs goes by itself. One that is stopped cannot, and holds what it runs. So the next worker looks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from millpond.worker import tree

PROGRAM: Final = b"/worker/supervisor.py"  # how the path of their program ends
KILL_PATIENCE: Final = 2.0  # seconds for them to be gone


def end_strays() -> None:
    """What they ran is killed with them (see `spawning.Leash`), or found later as a leftover."""
    if tree.LINUX:
        among = tree.processes()
        tree.kill_all({pid: one for pid, one in among.items() if one.stopped and _is_stray(pid, one)}, KILL_PATIENCE)


def _is_stray(pid: int, process: tree.Process) -> bool:
    worker = worker_of(pid)
    if worker is None or tree.namespace(pid) != tree.namespace(os.getpid()):
        return False
    began = tree.started(worker)
    return not began or began > process.started  # it has gone, or its number is another's


def worker_of(pid: int) -> int | None:
    """The worker that a supervisor or warden is of; None for other processes."""
    try:
        words = Path(tree.PROC, str(pid), "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if len(words) < 4 or not words[-4].endswith(PROGRAM) or not words[-3].isdigit():  # the last one is empty
        return None
    return int(words[-3])
