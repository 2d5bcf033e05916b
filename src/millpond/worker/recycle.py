"""A worker that has reached a limit of its own is replaced by a fresh one: the process becomes it.

The program is executed anew in the same process, as it was started: no parent is needed, and its number stays, so that
whoever started it (a shell, systemd, `worker stop`) still has the right one. Between the two it stays listed under the
old name, so that who stops workers sees it; the fresh one looks whether somebody did, and takes that name off the list.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final, NoReturn

REPLACES: Final = "MILLPOND_REPLACES"  # in the environment: the incarnation before


class Program:
    """Made before the first job, and before an app is loaded: both may change the environment and the directory."""

    def __init__(self) -> None:
        self.replaces = os.environ.pop(REPLACES, "")  # whom this worker replaces; not for what it runs
        self._environment = dict(os.environ)
        try:
            self._directory = os.getcwd()
        except OSError:  # it was removed: then there is no way back
            self._directory = "."

    def restart(self, incarnation: str) -> NoReturn:
        """When the pond or client is closed: what it owned is free then. What is not inherited (PEP 446: all but 0, 1,
        2) is closed by the system.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(OSError):  # removed meanwhile: absolute paths are as good as ever
            os.chdir(self._directory)
        environment = self._environment | {REPLACES: incarnation}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
