"""What can be asked of a logical queue. Each request carries one reply slot, filled exactly once.

Arguments are validated before they get here; instants and durations are ms on the server's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from millpond.errors import MillpondError
from millpond.history.format import Record
from millpond.model import REQUEST_TIMEOUT_MS, LeaseLike, OnConflict, RedriveFilter, Result, State


def _nobody(request: Request) -> None:
    """The default receiver of replies."""


class Request:
    """`at` is when it arrived, `deadline` until when it may wait for a partition that is away."""

    __slots__ = ("answered", "at", "deadline", "done", "error", "gone", "value")

    def __init__(self) -> None:
        self.at = 0
        self.deadline = 0
        self.answered = False
        self.gone = False  # the caller has left: nobody reads the reply
        self.value: Any = None
        self.error: MillpondError | None = None
        self.done: Callable[[Any], None] = _nobody

    def arrive(self, now: int, timeout: int = REQUEST_TIMEOUT_MS) -> None:
        self.at = now
        self.deadline = now + timeout

    def answer(self, value: Any) -> None:
        assert not self.answered, f"{type(self).__name__} is answered twice"
        self.answered = True
        self.value = value
        self.done(self)

    def fail(self, error: MillpondError) -> None:
        assert not self.answered, f"{type(self).__name__} is answered twice"
        self.answered = True
        self.error = error
        self.done(self)


class Produce(Request):
    """Reply: list[Produced]. `named`: some record has an id or key of its own."""

    __slots__ = ("named", "on_conflict", "records", "request", "size")

    def __init__(
        self,
        records: list[bytes | Record],
        size: int,
        on_conflict: OnConflict = "ignore",
        request: bytes | None = None,
        named: bool = False,
    ) -> None:
        super().__init__()
        self.records = records
        self.size = size
        self.on_conflict = on_conflict
        self.request = request
        self.named = named


class Lease(Request):
    """Reply: list[LeasedItem]."""

    __slots__ = ("batch", "client", "items", "lease_timeout", "order", "parts", "until", "wait")

    def __init__(self, batch: int, wait: int = 0, lease_timeout: int | None = None, client: str = "") -> None:
        super().__init__()
        self.batch = batch
        self.wait = wait
        self.lease_timeout = lease_timeout
        self.client = client
        self.until = 0
        self.order = -1  # its place among the waiters
        self.parts = 0  # partitions whose commit it waits for
        self.items: list[Any] = []

    def arrive(self, now: int, timeout: int = REQUEST_TIMEOUT_MS) -> None:
        super().arrive(now, timeout + self.wait)
        self.until = now + self.wait


class Tokens(Request):
    """A batch of lease tokens, or items in their place, answered one by one. Reply: Sequence[Result]."""

    __slots__ = ("_gathered", "leases", "missing", "results")

    def __init__(self, leases: Sequence[LeaseLike]) -> None:
        super().__init__()
        self.leases = leases
        self.missing = len(leases)
        self.results: Sequence[Result] = ()
        self._gathered: dict[int, Result] = {}

    def fill(self, indexes: Sequence[int], results: Sequence[Result]) -> None:
        """`indexes` are ascending, so that all of them are all in order."""
        self.missing -= len(indexes)
        if len(indexes) == len(self.leases):
            self.results = results
            return
        self._gathered.update(zip(indexes, results, strict=True))
        if not self.missing:
            self.results = [self._gathered[index] for index in range(len(self.leases))]


class Complete(Tokens):
    """`result` is MessagePack, kept with the item where the queue keeps completed ones."""

    __slots__ = ("result",)

    def __init__(self, leases: Sequence[LeaseLike], result: bytes | None = None) -> None:
        super().__init__(leases)
        self.result = result


class RetryItem(msgspec.Struct, gc=False):
    """`due` None: the queue's backoff for a failure, at once for a defer."""

    lease: LeaseLike
    deferred: bool = False
    due: int | None = None
    error: str | None = None
    dead: bool = False


class RetryItems(Tokens):
    __slots__ = ("items",)

    def __init__(self, items: Sequence[RetryItem]) -> None:
        super().__init__([item.lease for item in items])
        self.items = items


class Extend(Tokens):
    __slots__ = ("lease_timeout",)

    def __init__(self, leases: Sequence[LeaseLike], lease_timeout: int | None = None) -> None:
        super().__init__(leases)
        self.lease_timeout = lease_timeout


class WriteState(Tokens):
    """One token. Reply: StateWritten. `document` is MessagePack."""

    __slots__ = ("document", "version", "written")

    def __init__(self, lease: LeaseLike, version: int, document: bytes) -> None:
        super().__init__([lease])
        self.version = version
        self.document = document
        self.written: Any = None


class Cancel(Request):
    """Reply: list[Result], one an id."""

    __slots__ = ("ids",)

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__()
        self.ids = ids


class GetItem(Request):
    """Reply: Item."""

    __slots__ = ("id",)

    def __init__(self, item_id: str) -> None:
        super().__init__()
        self.id = item_id


class ListItems(Request):
    """Reply: ItemPage. `state` None is all of them; `after` is a cursor: a partition, and a number in it."""

    __slots__ = ("after", "kind", "limit", "partition", "state")

    def __init__(
        self, state: State | None, partition: int | None, kind: str | None, after: tuple[int, int], limit: int
    ) -> None:
        super().__init__()
        self.state = state
        self.partition = partition
        self.kind = kind
        self.after = after
        self.limit = limit


class Clear(Request):
    """Reply: dict[state, removed]."""

    __slots__ = ("states",)

    def __init__(self, states: Sequence[State]) -> None:
        super().__init__()
        self.states = states


class Redrive(Request):
    """Reply: Redriven. `rate` is items a second, None as fast as it goes."""

    __slots__ = ("dry_run", "filter", "ids", "rate")

    def __init__(
        self,
        ids: Sequence[str] | None,
        chosen: RedriveFilter,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> None:
        super().__init__()
        self.ids = ids
        self.filter = chosen
        self.rate = rate
        self.dry_run = dry_run


class GetStats(Request):
    """Reply: QueueStats."""

    __slots__ = ()


class Transfer(msgspec.Struct, gc=False):
    """One item on its way between two queues; `name` tells a repeat. `documents` as in the partition's column."""

    name: bytes
    record: Record
    wanted_id: str | None
    documents: int
    parts: dict[int, bytes]
    fence: int  # no fencing token of the item was above this


class Arrive(Request):
    """Items from another queue. Reply: None, once they are here, be it since an earlier try."""

    __slots__ = ("left", "numbers", "partition", "target", "transfers")

    def __init__(self, target: str, partition: int, numbers: list[int], transfers: list[Transfer]) -> None:
        super().__init__()
        self.target = target
        self.partition = partition  # of the sender, and the numbers there
        self.numbers = numbers
        self.transfers = transfers
        self.left = transfers  # those not known to have arrived: once they have, they are never looked for again


class Forget(Request):
    """The sender has let go of these transfers. Reply: None."""

    __slots__ = ("missing", "names", "partition", "target")

    def __init__(self, target: str, partition: int, names: list[bytes]) -> None:
        super().__init__()
        self.target = target
        self.partition = partition
        self.names = names
        self.missing = 0
