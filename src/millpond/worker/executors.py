"""What a worker asks of those who run jobs, and what they tell it.

The runner leases items, keeps their leases and reports their ends; an executor runs them: commands in processes, tasks
in threads, processes or on a loop of their own. All of these methods are called on the runner's event loop, which must
never wait for a job, and `done` is to be called there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

from millpond.model import LeasedItem

if TYPE_CHECKING:
    from millpond.jobs.spec import JobSpec

Why = Literal["cancelled", "lease_lost", "stopping"]


class Outcome(msgspec.Struct, kw_only=True, gc=False):
    """How an attempt ended. `dead`: no further attempt. `delay`: seconds until the next one, else by spec or queue.

    `defer` gives the item back as if it had not been run: the attempt does not count.
    """

    ok: bool
    result: Any = None
    error: str | None = None
    dead: bool = False
    delay: float | None = None
    defer: bool = False


DONE = Outcome(ok=True)  # for those without a result: one for all
DEFERRED = Outcome(ok=False, defer=True)


class Running(msgspec.Struct, eq=False):
    """One delivery of an item in this worker. Instants are of the event loop's clock (monotonic seconds).

    Until `deadline` the lease is surely ours: it is the instant at which the lease was asked for, or an extension, and
    the lease's length. `started_at`: when it was handed to its executor, 0 before. `ending`: why it is being ended,
    once it is. `own` is the executor's, to keep what it likes, `place` the runner's.
    """

    item: LeasedItem
    queue: str
    spec: JobSpec | None
    deadline: float
    started_at: float = 0.0
    ending: Why | None = None
    outcome: Outcome | None = None  # once it has ended
    own: Any = None
    place: Any = None


Done = Callable[[Running, Outcome], None]


class Executor(Protocol):
    """One that `run` or a later `start` raises of has crashed: it is stopped, and started again after a pause."""

    def accepts(self, job: Running) -> bool:
        """Whether it is one of its jobs, by item, queue and spec. The first executor that says so gets it.

        `spec` is None for items that are neither commands nor tasks, and for those that are not readable.
        """
        ...

    async def start(self) -> None:
        """Before the first job; again after a crash."""
        ...

    async def stop(self, *, force: bool) -> None:
        """Waits for what runs; with `force` ends it. Every `done` was called when it returns."""
        ...

    def run(self, job: Running, done: Done) -> None:
        """Begins the job and returns. `done` is called exactly once, on this loop, perhaps before this returns."""
        ...

    def extended(self, job: Running) -> None:
        """`job.deadline` has moved."""
        ...

    def end(self, job: Running, why: Why) -> None:
        """Ends it as soon as can be; `done` is still called, when nothing of it runs any more.

        `cancelled` and `stopping` may give it some seconds; `lease_lost` not: another worker may have it already.
        Of a job that was ended only an `ok` counts (and not even that once the lease is lost); all else is put right
        by the runner: a cancelled job ends as cancelled, a stopped one goes back with its attempt.
        """
        ...


@runtime_checkable
class TakesBacklog(Protocol):
    """An executor that may be given more jobs than there are slots, if it alone has jobs and they are short.

    It runs at most as many as there are slots at a time, and keeps the others: so no job waits for a turn of the
    runner's loop. Who calls `done` for many at a time does so in one turn of that loop.
    """

    def take_back(self) -> Sequence[Running]:
        """Those not yet begun, which it forgets: `done` is not called for them."""
        ...
