"""The warden: forks supervisors for its worker, and ends what they leave behind when they are killed.

A file that comes on its channel, with a number, is the channel of a new supervisor; a number alone asks for that
supervisor to be killed. It tells the number of a supervisor that is gone, once nothing of its command is left; and,
marked as `UNBORN`, that of one for which the system had no room. Those that run are not touched by that.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import time
from collections.abc import Iterable
from typing import Final, NoReturn

from millpond.worker import tree
from millpond.worker.supervision import (
    FOREVER,
    KILL_PAUSE,
    KILL_PAUSE_MAX,
    REFUSED_PATIENCE,
    Supervisor,
    wake_on_children,
)

NUMBER_BYTES: Final = 4
UNBORN: Final = 1 << 31  # beside the number
GOING_PATIENCE: Final = 15.0  # seconds that supervisors have when the worker has gone: more than any grace


class Warden:
    """`worker` is a file that becomes readable when that has died, or -1: then the end of the channel tells."""

    def __init__(self, channel: socket.socket, worker: int) -> None:
        tree.adopt_orphans()
        self._channel = channel
        self._worker = worker
        self._supervisors: dict[int, int] = {}  # number by process id
        self._gone: list[int] = []  # whose orphans may not have ended
        self._kill_at = self._stuck_at = self._refused_at = FOREVER
        self._pause = KILL_PAUSE
        self._going = False
        self._children = wake_on_children()
        self._alive, self._life = os.pipe()  # the second closes with the death of this process
        self._poll = select.poll()
        for file in (channel.fileno(), self._children, worker):
            if file >= 0:
                self._poll.register(file, select.POLLIN)

    def serve(self) -> None:
        """Until the worker has gone, and all supervisors after it."""
        while not self._going or self._supervisors or self._gone:
            files = [file for file, _ in self._poll.poll(self._patience())]
            if self._channel.fileno() in files and not self._going:
                self._hear()
            if self._worker in files and not self._going:
                self._leave()
            if self._children in files:
                self._reap()
            if (now := time.monotonic()) >= self._kill_at:
                self._kill(now)
            if now >= self._stuck_at:
                self._kill_supervisors(self._supervisors)
                self._stuck_at = FOREVER

    def _patience(self) -> float | None:
        """Milliseconds, or for ever."""
        until = min(self._kill_at, self._stuck_at)
        return None if until == FOREVER else max(0.0, until - time.monotonic()) * 1_000 + 1

    # ---- what it hears and tells --------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            data, files, flags, _ = socket.recv_fds(self._channel, NUMBER_BYTES, 1)
        except OSError:
            data, files, flags = b"", [], 0
        number = int.from_bytes(data, "little")
        if not data:
            self._leave()
        elif files:
            os.set_inheritable(files[0], False)  # a command that had it would hide the supervisor's end
            self._fork(number, socket.socket(fileno=files[0]))
        elif flags & socket.MSG_CTRUNC:  # too many files are open for the one that came
            self._tell([number | UNBORN])
        else:
            self._kill_supervisors([pid for pid, its in self._supervisors.items() if its == number])

    def _kill_supervisors(self, pids: Iterable[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own

    def _fork(self, number: int, channel: socket.socket) -> None:
        with channel:
            try:
                pid = os.fork()
            except OSError:
                return self._tell([number | UNBORN])
            if pid == 0:
                self._supervise(channel)
            self._supervisors[pid] = number

    def _supervise(self, channel: socket.socket) -> NoReturn:
        """In the child. Whatever goes wrong ends this process, and the warden sees to what it leaves."""
        code = 1
        try:
            self._channel.close()
            os.close(self._life)
            Supervisor(channel, self._worker, self._alive).serve()
            code = 0
        finally:
            os._exit(code)

    def _leave(self) -> None:
        """Supervisors see for themselves that the worker has gone. Who has not gone after a while is stuck."""
        self._going = True
        for file in (self._channel.fileno(), self._worker):
            if file >= 0:
                self._poll.unregister(file)
        self._stuck_at = time.monotonic() + GOING_PATIENCE

    def _tell(self, numbers: list[int]) -> None:
        try:
            self._channel.sendall(b"".join([number.to_bytes(NUMBER_BYTES, "little") for number in numbers]))
        except OSError:  # nobody waits for it
            pass

    # ---- orphans ------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        os.read(self._children, 4_096)
        try:
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid in self._supervisors:
                    self._gone.append(self._supervisors.pop(pid))
                    self._kill_at = 0.0
        except ChildProcessError:
            pass

    def _kill(self, now: float) -> None:
        """What is below this process and not below a supervisor was left by one that is gone."""
        found = tree.signal_below(os.getpid(), signal.SIGKILL, but=self._supervisors)
        self._refused_at = min(self._refused_at, now) if found.refused else FOREVER
        if not found.living or now - self._refused_at >= REFUSED_PATIENCE:
            self._tell(self._gone)
            self._gone = []
            self._pause, self._kill_at = KILL_PAUSE, FOREVER
        else:
            self._kill_at = now + self._pause
            self._pause = min(self._pause * 2, KILL_PAUSE_MAX)


def main(worker: int, channel: int) -> None:
    """`worker` is the process that started this one, `channel` a socket to it."""
    handle = tree.handle_of(worker)
    if handle is None or os.getppid() != worker:  # it died meanwhile, and the number may be another's
        return
    os.set_inheritable(channel, False)
    gc.freeze()  # what is there stays, and is shared with the supervisors
    Warden(socket.socket(fileno=channel), handle).serve()
