"""A process of a pool: loads the app, and runs the jobs that the worker sends, one at a time, in its main thread.

    python -m millpond.tasks.child CHANNEL LIFE TICKETS WORKER

CHANNEL is the socket to the worker, TICKETS the one that says which job may begin. LIFE is a pipe that ends with the
worker, WORKER its process id: a watcher, forked before anything else and blocked in nothing but the wait for that end,
then ends this process and all that its tasks have started, whatever they do. It does so too when the lease of a job is
over, by what the worker last said through that pipe: a worker that is stopped cannot. The worker ends a task by
SIGTERM, which is raised in it as `Interrupted`, and kills what does not end by that.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import sys
import time
from typing import Final

from millpond.tasks.ending import die_with_parent, end_tree
from millpond.worker.tree import adopt_orphans, handle_of

DEADLINE: Final = struct.Struct("d")  # by the clock of this machine: when the job in hand must have ended
READ_BYTES: Final = 64 * DEADLINE.size


def main(channel: int, life: int, tickets: int, worker: int) -> None:
    _start_watcher(channel, life, tickets, worker)
    from millpond.tasks.child_work import Work

    Work(socket.socket(fileno=channel), socket.socket(fileno=tickets)).run()


def _start_watcher(channel: int, life: int, tickets: int, worker: int) -> None:
    adopt_orphans()
    watched = os.getpid()
    if os.fork():
        os.close(life)
        return
    die_with_parent(watched)
    os.setpgid(0, 0)  # not with what it ends
    os.close(channel)
    os.close(tickets)
    _wait_for_end(life, worker)
    end_tree(watched, but=os.getpid())
    os._exit(0)


def _wait_for_end(life: int, worker: int) -> None:
    """Of the worker, or of a lease. What the worker forked may hold its end of the pipe for longer, so it is looked at
    itself too.
    """
    poll = select.poll()
    poll.register(life, select.POLLIN)
    if (handle := handle_of(worker)) is None:
        return
    if handle >= 0:
        poll.register(handle, select.POLLIN)
    deadline = math.inf
    while ready := poll.poll(_milliseconds_to(deadline)):
        said = os.read(life, READ_BYTES) if ready == [(life, select.POLLIN)] else b""
        if not said:
            return
        [deadline] = DEADLINE.unpack(said[-DEADLINE.size :])


def _milliseconds_to(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic()) * 1_000


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
