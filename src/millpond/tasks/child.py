"""A process of a pool: loads the app, and runs the jobs that the worker sends, one at a time, in its main thread.

    python -m millpond.tasks.child CHANNEL LIFE TICKETS WORKER

    worker ── watcher ── process ── what its tasks have started

CHANNEL is the socket to the worker, TICKETS the one that says which job may begin. LIFE is a pipe that ends with the
worker, WORKER its process id. What the worker starts is the watcher: it forks the process before anything else, and
ends it with all that its tasks have started, whatever they do, when the worker ends. It does so too when the lease of a
job is over, by what the worker last said through that pipe: a worker that is stopped cannot. It is the parent, so that
tasks have no children but their own, and what loses its parent has one that sees to its end. The worker ends a task by
SIGTERM, which is raised in it as `Interrupted`, and kills what does not end by that.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import Final

from millpond.tasks.ending import die_as, die_with_parent, end_below
from millpond.worker.supervision import wake_on_children
from millpond.worker.tree import LINUX, adopt_orphans, handle_of

DEADLINE: Final = struct.Struct("d")  # by the clock of this machine: when the job in hand must have ended
READ_BYTES: Final = 64 * DEADLINE.size


def main(channel: int, life: int, tickets: int, worker: int) -> None:
    adopt_orphans()
    watcher = os.getpid()
    if watched := os.fork():
        os.close(channel)
        os.close(tickets)
        _watch(watched, life, worker)
    die_with_parent(watcher)
    if LINUX:  # elsewhere what is ended is the group
        os.setsid()
    os.close(life)
    from millpond.tasks.child_work import Work

    Work(socket.socket(fileno=channel), socket.socket(fileno=tickets)).run()


def _watch(watched: int, life: int, worker: int) -> None:
    """Does not return."""
    watcher = Watcher(watched, wake_on_children())
    signal.signal(signal.SIGTERM, watcher.hand_on)
    watcher.wait(life, worker)
    end_below(everywhere=watcher.status is None)
    watcher.reap()
    die_as(watcher.status)


class Watcher:
    """`children` is a file that becomes readable when one has ended. `status` is that of the process, once it has."""

    def __init__(self, watched: int, children: int) -> None:
        self._watched = watched
        self._children = children
        self.status: int | None = None

    def hand_on(self, number: int, frame: object) -> None:
        """A signal, to the process."""
        if self.status is None:
            os.kill(self._watched, number)  # not reaped yet, so the number is still its own

    def reap(self) -> None:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._watched:
                    self.status = ended[1]
        except ChildProcessError:
            pass

    def wait(self, life: int, worker: int) -> None:
        """For the end of the process, of the worker, or of a lease. What the worker forked may hold its end of the pipe
        for longer, so it is looked at itself too.
        """
        poll = select.poll()
        for file in (life, self._children):
            poll.register(file, select.POLLIN)
        if (handle := handle_of(worker)) is None:
            return
        if handle >= 0:
            poll.register(handle, select.POLLIN)
        deadline = math.inf
        self.reap()  # what has ended before anybody told
        while self.status is None and (ready := dict(poll.poll(_milliseconds_to(deadline)))):
            if ready.pop(self._children, None):
                os.read(self._children, READ_BYTES)
                self.reap()
            if ready:
                said = os.read(life, READ_BYTES) if ready == {life: select.POLLIN} else b""
                if not said:
                    return
                [deadline] = DEADLINE.unpack(said[-DEADLINE.size :])


def _milliseconds_to(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic()) * 1_000


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
