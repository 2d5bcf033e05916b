"""How fast a rebalance carries items: at full speed while nobody asks for anything, else no faster than this."""

from __future__ import annotations

CARRIED_A_SECOND = 1_000  # while somebody asks: a twentieth of what a loop can do in all
AHEAD_MS = 200  # how far one may be ahead of that: a batch begins as a whole
QUIET_MS = 100  # without a request, after which nobody is kept waiting


class Pace:
    """One for all queues of a pond: they share its loop."""

    __slots__ = ("_due_at", "_quiet_at")

    def __init__(self) -> None:
        self._due_at = 0  # when what was begun should have been
        self._quiet_at = 0

    def asked(self, now: int) -> None:
        self._quiet_at = now + QUIET_MS

    def next_at(self, now: int) -> int:
        """When more may begin."""
        return now if now >= self._quiet_at else max(now, self._due_at - AHEAD_MS)

    def begin(self, items: int, now: int) -> None:
        self._due_at = max(self._due_at, now) + items * 1000 // CARRIED_A_SECOND
