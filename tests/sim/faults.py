"""What can go wrong: a store that fails on command, and the table of what was hit while it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from millpond.store.base import JournalRow, Recovered, Store, StoreFailed, StoreFull, Turn
from tests.sim.asks import KINDS

COMMIT_FAILED, COMMIT_UNREPORTED, COMMIT_SLOW = "commit failed", "commit unreported", "commit slow"
READ_FAILED, RECOVER_FAILED, DISK_FULL = "read failed", "recover failed", "disk full"
CRASH, CLOSE, CLOCK_FORWARDS, CLOCK_BACK = "crash", "close", "clock forwards", "clock back"
WAITER_GONE, PAUSED = "waiter gone", "paused"
FAULTS = (
    COMMIT_FAILED, COMMIT_UNREPORTED, COMMIT_SLOW, READ_FAILED, RECOVER_FAILED, DISK_FULL, CRASH, CLOSE,
    CLOCK_FORWARDS, CLOCK_BACK, WAITER_GONE, PAUSED,
)  # fmt: skip


class FaultyStore:
    """A store that does what it is told to fail at, and tells of every commit that happened, reported or not."""

    blocking = False

    def __init__(self, inner: Store, committed: Callable[[Turn, bool], None]) -> None:
        self.inner = inner
        self._committed = committed
        self.commit_fault: str | None = None  # for the next commit
        self.read_faults = 0  # as many reads fail
        self.recover_faults = 0
        self.full = False
        self.brimful = False  # not even the reserve helps
        self.reserve = True

    @property
    def in_force(self) -> list[str]:
        faults = [self.commit_fault] if self.commit_fault is not None else []
        if self.read_faults:
            faults.append(READ_FAILED)
        if self.recover_faults:
            faults.append(RECOVER_FAILED)
        if self.full:
            faults.append(DISK_FULL)
        return faults

    def heal(self) -> None:
        self.commit_fault = None
        self.read_faults = self.recover_faults = 0
        self.full = self.brimful = False

    def recover(self) -> Recovered:
        if self.recover_faults:
            self.recover_faults -= 1
            raise StoreFailed("the store cannot be opened; this is a drill")
        return self.inner.recover()

    def commit(self, turn: Turn) -> None:
        fault, self.commit_fault = self.commit_fault, None
        if fault == COMMIT_FAILED:
            self.inner.close()
            raise OSError("the commit failed; this is a drill")
        if self.full and (self.reserve or self.brimful):
            self.inner.close()
            raise StoreFull("there is no room; this is a drill")
        self.inner.commit(turn)
        self._committed(turn, fault != COMMIT_UNREPORTED)
        if fault == COMMIT_UNREPORTED:
            self.inner.close()
            raise StoreFailed("the commit may have failed; this is a drill")

    def read(self, chunks: Sequence[int], docs: Sequence[int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        self._may_read()
        return self.inner.read(chunks, docs)

    def journal(self, after: int, limit: int) -> list[JournalRow]:
        self._may_read()
        return self.inner.journal(after, limit)

    def ended(self, low: int, high: int, since: int) -> Iterator[JournalRow]:
        self._may_read()
        return self.inner.ended(low, high, since)

    def relieve(self, full: bool) -> bool:
        if full:
            self.reserve = False
        elif not self.full:
            self.reserve = True
        return self.reserve

    def size(self) -> int:
        return self.inner.size()

    def check(self) -> list[str]:
        return self.inner.check()

    def close(self) -> None:
        self.inner.close()

    def _may_read(self) -> None:
        if self.read_faults:
            self.read_faults -= 1
            self.inner.close()
            raise StoreFailed("the read failed; this is a drill")


class Pairs:
    """How often a request of a kind was sent, or was in flight, while a fault happened or was in force."""

    def __init__(self) -> None:
        self.counts = {(kind, fault): 0 for kind in KINDS for fault in FAULTS}

    def hit(self, kind: str, fault: str) -> None:
        self.counts[kind, fault] += 1

    def add(self, counts: dict[tuple[str, str], int]) -> None:
        for pair, count in counts.items():
            self.counts[pair] += count

    def rarest(self) -> tuple[tuple[str, str], int]:
        return min(self.counts.items(), key=lambda entry: entry[1])

    def table(self) -> str:
        width = max(map(len, FAULTS))
        lines = [" " * 14 + "".join(f"{fault:>{width + 2}}" for fault in FAULTS)]
        for kind in KINDS:
            cells = "".join(f"{self.counts[kind, fault]:>{width + 2}}" for fault in FAULTS)
            lines.append(f"{kind:<14}{cells}")
        return "\n".join(lines)
