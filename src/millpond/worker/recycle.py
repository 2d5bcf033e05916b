"""A worker that has reached a limit of its own is replaced by a fresh one: the process becomes it.

The program is executed anew in the same process, with the same arguments and environment: no parent is needed, and its
number stays, so that whoever started it (a shell, systemd, `worker stop`) still has the right one. To be called when
the pond or client is closed: what it owned is free then. Between the two it stays listed under the old name, so that
who stops workers sees it; the fresh one looks whether somebody did, and takes the old one's name off the list.
"""

from __future__ import annotations

import os
import sys
from typing import Final, NoReturn

REPLACES: Final = "MILLPOND_REPLACES"  # in the environment: the incarnation before


def replaced() -> str:
    """Whom this worker replaces, if anybody. Told once: it is not for what the worker runs."""
    return os.environ.pop(REPLACES, "")


def restart(incarnation: str = "") -> NoReturn:
    """Does not return. What is not inherited (PEP 446: all but 0, 1, 2) is closed by the system."""
    os.environ[REPLACES] = incarnation
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
