"""Leave to begin a job, which can be taken back as long as it was not used.

A process of a pool is sent some jobs ahead, and a ticket for each through a socket of its own. It reads a ticket before
it begins a job. The worker has the reading end too: a ticket that the worker reads first is one that the process never
will, so the system decides between the two, whatever the process is busy with.
"""

from __future__ import annotations

import socket
from typing import Final

TICKET_BYTES: Final = 4  # written and read in one piece
MANY_BYTES: Final = 4096
NUMBERS: Final = 1 << 32


class Tickets:
    """The worker's side. `theirs` is what the process is given."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.theirs = self._theirs.fileno()
        self._last = 0

    def give(self) -> int:
        """The number that the job is to have."""
        self._last = (self._last + 1) % NUMBERS
        if self._ours.fileno() >= 0:
            self._ours.send(self._last.to_bytes(TICKET_BYTES, "little"), socket.MSG_DONTWAIT)
        return self._last

    def take_back(self) -> int:
        """How many were not used: the newest."""
        if self._ours.fileno() < 0:
            return 0
        try:
            return len(self._theirs.recv(MANY_BYTES, socket.MSG_DONTWAIT)) // TICKET_BYTES
        except BlockingIOError:
            return 0

    def unused(self) -> int:
        """How many were not used so far."""
        if self._ours.fileno() < 0:
            return 0
        try:
            return len(self._theirs.recv(MANY_BYTES, socket.MSG_DONTWAIT | socket.MSG_PEEK)) // TICKET_BYTES
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """There will be no more. Twice is once."""
        self._ours.close()
        self._theirs.close()


def read_ticket(tickets: socket.socket) -> int | None:
    """In the process: the number of the next job, once there is one. None: there will be no more."""
    data = tickets.recv(TICKET_BYTES, socket.MSG_WAITALL)
    return int.from_bytes(data, "little") if len(data) == TICKET_BYTES else None
