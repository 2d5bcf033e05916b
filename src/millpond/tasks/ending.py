"""The end of a process and of all that it has started. Only what the system itself tells."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import Final, NoReturn

from millpond.worker.tree import LINUX, below, processes, signal_below, signal_group

ROUNDS_MAX: Final = 100  # each finds what was started while the one before was looking
KILL_PAUSE: Final = 0.005  # seconds between two looks at what SIGKILL has left
KILL_PATIENCE: Final = 5.0  # seconds after which processes that cannot be killed are left
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4


def end_tree(root: int) -> None:
    """From the root, which starts nothing more once it is stopped, and which adopts what loses its parent."""
    if not LINUX:
        signal_group(root, signal.SIGKILL)
        return
    _send(root, signal.SIGSTOP)
    for _ in range(ROUNDS_MAX):
        among = processes()
        living = [pid for pid in below([root], among) if not among[pid].zombie]
        if not living:
            break
        for pid in living:
            _send(pid, signal.SIGKILL)
    signal_group(root, signal.SIGKILL)
    _send(root, signal.SIGKILL)


def end_below(*, everywhere: bool) -> None:
    """All that is below this process, which adopts what loses its parent. `everywhere`: its whole group where that is
    all that can be found, and so this process too.
    """
    if not LINUX:
        if everywhere:
            signal_group(os.getpgrp(), signal.SIGKILL)
        return
    until = time.monotonic() + KILL_PATIENCE
    while signal_below(os.getpid(), signal.SIGKILL).living and time.monotonic() < until:
        time.sleep(KILL_PAUSE)


def die_as(status: int | None) -> NoReturn:
    """As a process that ended with this status, but with no second core dump of the same end."""
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        if LINUX:
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        with suppress(OSError):  # SIGKILL can have no other action
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


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
