"""The end of a process and of all that it has started. Only what the system itself tells."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

from millpond.worker.tree import LINUX, below, processes, signal_group

ROUNDS_MAX: Final = 100  # each finds what was started while the one before was looking
_PR_SET_PDEATHSIG: Final = 1


def end_tree(root: int, but: int = 0) -> None:
    """From the root, which starts nothing more once it is stopped, and which adopts what loses its parent."""
    if not LINUX:
        signal_group(root, signal.SIGKILL)
        return
    _send(root, signal.SIGSTOP)
    for _ in range(ROUNDS_MAX):
        among = processes()
        living = [pid for pid in below([root], among) if pid != but and not among[pid].zombie]
        if not living:
            break
        for pid in living:
            _send(pid, signal.SIGKILL)
    signal_group(root, signal.SIGKILL)
    _send(root, signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """For a process that is of no use without. Only on Linux."""
    if LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(0)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
