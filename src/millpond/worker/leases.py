"""Which leases a worker holds, and when they are to be extended or are lost. No I/O; instants are given."""

from __future__ import annotations

from collections.abc import Iterator

from millpond.model import TOKEN_BATCH_MAX
from millpond.worker.executors import Running

NOTICE_S = 5.0  # a job that was cancelled learns of it at its next extension, so that is never further away
LOOK_S_MAX = 1.0  # between looks at the leases
LOOK_S_MIN = 0.01


class Leases:
    """`timeout` is the length of each, in seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.every = min(timeout / 2, NOTICE_S)  # an extension may fail, and be tried again
        self.look_every = max(LOOK_S_MIN, min(LOOK_S_MAX, timeout / 16))
        self.wait = timeout / 4  # for items of an empty queue: a lease counts from when it was asked for
        self._held: set[Running] = set()
        self.add = self._held.add
        self.drop = self._held.discard
        self.drop_all = self._held.difference_update
        self.add_all = self._held.update

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Running]:
        return iter(list(self._held))

    def is_fresh(self, deadline: float, now: float) -> bool:
        """Long enough for a job to begin; a lease that took so long to come is extended first."""
        return deadline - now >= self.timeout / 2

    def due(self, now: float) -> dict[str, list[list[Running]]]:
        """By queue, in batches. What is due before the next look goes along."""
        latest = now + self.timeout - self.every + self.look_every
        found: dict[str, list[list[Running]]] = {}
        for job in self._held:
            if job.deadline <= latest and job.ending != "lease_lost":
                lots = found.setdefault(job.queue, [[]])
                if len(lots[-1]) == TOKEN_BATCH_MAX:
                    lots.append([])
                lots[-1].append(job)
        return found

    def lost(self, now: float) -> list[Running]:
        """Those whose deadline passes before the look after the next: rather early than late, as that may be late."""
        latest = now + 2 * self.look_every
        return [job for job in self._held if job.deadline <= latest and job.ending != "lease_lost"]
