"""How a command is started: a shell in a session of its own, its output into a pipe, its life tied to its supervisor's.

With posix_spawn: it does not copy the process that calls it, which in Python costs more than most commands take.
"""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress
from typing import Final

from millpond.worker import tree
from millpond.worker.orders import Order

SHELL: Final = "/bin/sh"
LEASH_FD: Final = 200  # where the command has its end of the leash, if so many files may be open: out of scripts' way
_F_SETSIG: Final = 10
_RESET: Final = [  # to their defaults in the command: those that some program above may ignore
    getattr(signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "PIPE", "ALRM", "TERM", "USR1", "USR2", "CHLD", "TSTP", "TTIN", "TTOU", "XFSZ")
    if hasattr(signal, f"SIG{name}")
]


class Leash:
    """Kills a command's process group when this process dies. The system does it, so SIGKILL is no way round it.

    The command inherits the reading end of a pipe that nobody writes to. When the writing end closes, which only
    the death of this process does, the system sends SIGKILL to the group that owns the reading end. Only on Linux.
    (PR_SET_PDEATHSIG does less, for the one child, and must be set by the child itself, so it needs a fork.)
    """

    def __init__(self) -> None:
        self.end = -1
        if tree.LINUX:
            self.end, self._held = os.pipe()  # the writing end is never used, only held
            fcntl.fcntl(self.end, _F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(self.end, fcntl.F_SETFL, os.O_RDONLY | os.O_ASYNC)

    def tie(self, group: int) -> None:
        if tree.LINUX:
            fcntl.fcntl(self.end, fcntl.F_SETOWN, -group)


class Spawner:
    """Starts commands, each with the name of this process in its environment."""

    def __init__(self) -> None:
        self._leash = Leash()
        files_max = os.sysconf("SC_OPEN_MAX")
        self._leash_fd = LEASH_FD if files_max < 0 else min(LEASH_FD, files_max - 1)
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._home = os.open(".", os.O_RDONLY | os.O_CLOEXEC)
        self._away = False
        self._environment = dict(os.environb)
        self._name = tree.supervisor_name().encode()

    def spawn(self, order: Order) -> tuple[int, int]:
        """Its process id, which is that of its group and session, and the reading end of its output.

        Raises OSError and ValueError for what cannot be run.
        """
        environment = self._environment_of(order)
        reading, writing = os.pipe()
        try:
            os.set_blocking(reading, False)
            pid = self._run(["sh", "-c", order.command], environment, order.cwd, writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._leash.tie(pid)
        return pid, reading

    def _environment_of(self, order: Order) -> dict[bytes, bytes]:
        given = {os.fsencode(name): os.fsencode(text) for name, text in order.environment.items()}
        return self._environment | given | {tree.RUN: b"%s-%d" % (self._name, order.number)}

    def _run(self, arguments: list[str], environment: dict[bytes, bytes], cwd: str | None, output: int) -> int:
        actions = [(os.POSIX_SPAWN_DUP2, self._null, 0), (os.POSIX_SPAWN_DUP2, output, 1)]
        actions.append((os.POSIX_SPAWN_DUP2, output, 2))
        if self._leash.end >= 0:
            actions.append((os.POSIX_SPAWN_DUP2, self._leash.end, self._leash_fd))
        if self._away:
            self._go_home()
        if cwd is not None:
            self._away = True
            os.chdir(cwd)  # this process's own, since a spawn has none
        try:
            return os.posix_spawn(
                SHELL, arguments, environment, file_actions=actions, setsid=True, setsigmask=[], setsigdef=_RESET
            )
        finally:
            if self._away:
                with suppress(OSError):  # what was started must not be lost by it; the next one tries again, and tells
                    self._go_home()

    def _go_home(self) -> None:
        os.fchdir(self._home)
        self._away = False
