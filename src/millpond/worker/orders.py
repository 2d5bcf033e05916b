"""What a worker tells a supervisor, and what it hears from it. Kept apart: both sides need it, and one imports little.

Down go ("run", *Order), ("extend", number, deadline) and ("end", number, why, grace); up comes a Report for each order,
when nothing of the command is left. Instants are of the system's monotonic clock, which all processes share: a worker
that is stopped cannot make a command outlive its lease.
"""

from __future__ import annotations

from typing import Final, NamedTuple

TIMED_OUT: Final = "timed_out"  # why a supervisor ends a command by itself
LEASE_OVER: Final = "lease_over"
WORKER_GONE: Final = "worker_gone"
WARDEN_GONE: Final = "warden_gone"
NO_ROOM: Final = "no_room"  # it never began: the system had no process, memory or file left for it


class Order(NamedTuple):
    """A command to run. `names` are queue, id and correlation id of its item, where leftovers are to be ended first."""

    number: int
    command: str
    environment: dict[str, str]
    cwd: str | None
    timeout: float | None
    deadline: float
    grace: float
    folder: str
    attempt: int
    head_bytes: int
    names: tuple[str, str, str] | None


class Report(NamedTuple):
    """How it ended. `status` as waitpid has it, None if it never began; `why` it was ended, if it was.

    `problem` is what to tell besides; `left` are processes that could not be ended (they run as another user).
    """

    number: int
    status: int | None = None
    seconds: float = 0.0
    last: bytes = b""
    log: str | None = None
    problem: str | None = None
    why: str | None = None
    left: tuple[int, ...] = ()
