"""A worker that has reached a limit of its own is replaced by a fresh one: the process becomes it.

The program is executed anew in the same process, with the same arguments and environment: no parent is needed, and its
number stays, so that whoever started it (a shell, systemd, `worker stop`) still has the right one. To be called when
the pond or client is closed: what it owned is free then.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def restart() -> NoReturn:
    """Does not return. What is not inherited (PEP 446: all but 0, 1, 2) is closed by the system."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
