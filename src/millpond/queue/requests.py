"""What can be asked of a logical queue. Each request carries one reply slot, filled exactly once.

Arguments are validated before they get here; instants and durations are ms on the server's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from millpond.errors import MillpondError
from millpond.history.format import Record
from millpond.model import (
    REQUEST_TIMEOUT_MS,
    DeadReason,
    LeaseLike,
    OnConflict,
    PlainItems,
    RedriveFilter,
    Result,
    State,
)


def _nobody(request: Request) -> None:
    """The default receiver of replies."""


class Keeper(Protocol):
    """Whoever has taken a request."""

    unanswered: set[Any]

    def withdraw(self, request: Request) -> None: ...


class Request(msgspec.Struct, kw_only=True, eq=False):
    """`at` is when it arrived.

    A Struct, for it is made in a quarter of the time; there is one for every call.
    """

    changes: ClassVar[bool] = False  # whether it takes several turns of which each changes something

    at: int = 0
    answered: bool = False
    gone: bool = False  # the caller has left: nobody reads the reply
    value: Any = None
    error: MillpondError | None = None
    done: Callable[[Any], None] = _nobody
    runner: Keeper | None = None  # who keeps it until it is answered

    @property
    def deadline(self) -> int:
        """Until when it may wait for a partition that is away."""
        return self.at + REQUEST_TIMEOUT_MS

    def answer(self, value: Any) -> None:
        assert not self.answered, f"{type(self).__name__} is answered twice"
        self.answered = True
        self.value = value
        if self.runner is not None:
            self.runner.unanswered.discard(self)
        self.done(self)

    def fail(self, error: MillpondError) -> None:
        assert not self.answered, f"{type(self).__name__} is answered twice"
        self.answered = True
        self.error = error
        if self.runner is not None:
            self.runner.unanswered.discard(self)
        self.done(self)

    def withdraw(self) -> None:
        """The caller has gone: what it would have got goes back."""
        assert self.runner is not None, "nobody withdraws what nobody has taken"
        self.runner.withdraw(self)


class Produce(Request, eq=False):
    """Reply: list[Produced]. `named`: some record has an id or key of its own."""

    records: list[bytes | Record]
    size: int
    on_conflict: OnConflict = "ignore"
    request: bytes | None = None
    named: bool = False


class Lease(Request, eq=False):
    """Reply: list[LeasedItem]."""

    batch: int
    wait: int = 0
    lease_timeout: int | None = None
    client: str = ""
    order: int = -1  # its place among the waiters
    parts: int = 0  # partitions whose commit it waits for
    items: list[Any] = []

    @property
    def until(self) -> int:
        return self.at + self.wait

    @property
    def deadline(self) -> int:
        return self.until + REQUEST_TIMEOUT_MS


class Tokens(Request, kw_only=True, eq=False):
    """A batch of lease tokens, or items in their place, answered one by one. Reply: Sequence[Result]."""

    leases: Sequence[LeaseLike] = ()
    results: Sequence[Result] = ()
    filled: int = 0  # how many are answered
    gathered: dict[int, Result] = {}

    @property
    def missing(self) -> bool:
        return self.filled < len(self.leases)

    def fill(self, indexes: Sequence[int], results: Sequence[Result]) -> None:
        """`indexes` are ascending, so that all of them are all in order."""
        self.filled += len(indexes)
        if len(indexes) == len(self.leases):
            self.results = results
            return
        self.gathered.update(zip(indexes, results, strict=True))
        if not self.missing:
            self.results = [self.gathered[index] for index in range(len(self.leases))]


class Complete(Tokens, eq=False):
    """`result` is MessagePack, kept with the item where the queue keeps completed ones."""

    leases: Sequence[LeaseLike]
    result: bytes | None = None


class RetryItem(msgspec.Struct, gc=False):
    """`due` None: the queue's backoff for a failure, at once for a defer."""

    lease: LeaseLike
    deferred: bool = False
    due: int | None = None
    error: str | None = None
    dead: bool = False


class RetryItems(Tokens, eq=False):
    items: Sequence[RetryItem]

    def __post_init__(self) -> None:
        self.leases = [item.lease for item in self.items]


class Extend(Tokens, eq=False):
    leases: Sequence[LeaseLike]
    lease_timeout: int | None = None


class WriteState(Tokens, eq=False):
    """One token. Reply: StateWritten. `document` is MessagePack."""

    lease: LeaseLike
    version: int
    document: bytes
    written: Any = None

    def __post_init__(self) -> None:
        self.leases = [self.lease]


class Cancel(Request, eq=False):
    """Reply: list[Result], one an id."""

    changes = True
    ids: Sequence[str]


class GetItem(Request, eq=False):
    """Reply: Item, once it has ended or `wait` is over."""

    id: str
    wait: int = 0
    watch: Any = None  # that waits for it, while it does

    @property
    def until(self) -> int:
        return self.at + self.wait


class MakeReady(Request, eq=False):
    """Reply: list[Result], one an id."""

    changes = True
    ids: Sequence[str]


class ListItems(Request, eq=False):
    """Reply: ItemPage. `state` None is all of them; `after` is a cursor: a partition, and a number in it.

    `order`: in which the cursor goes from partition to partition.
    """

    state: State | None
    partition: int | None
    kind: str | None
    after: tuple[int, int]
    limit: int
    until: int | None = None
    order: int = 0


class Clear(Request, eq=False):
    """Reply: dict[state, removed]."""

    changes = True
    states: Sequence[State]


class Redrive(Request, eq=False):
    """Reply: Redriven. `rate` is items a second, None as fast as it goes."""

    changes = True
    ids: Sequence[str] | None
    filter: RedriveFilter
    rate: float | None = None
    dry_run: bool = False


class GetStats(Request, eq=False):
    """Reply: QueueStats."""


class Bury(Request, eq=False):
    """Reply: list[Result], one an id."""

    changes = True
    ids: Sequence[str]
    reason: DeadReason
    text: str | None = None  # why, for its last_error


class ReadJournal(Request, eq=False):
    """Reply: JournalPage."""

    partition: int
    after: int
    limit: int


class OpenConsumer(Request, eq=False):
    """Reply: Consumer."""

    consumer: str
    after: int | None = None


class ClaimItems(Request, eq=False):
    """Reply: Claim."""

    claim_id: str
    max_items: int
    max_bytes: int | None = None
    parts: int = 1
    wait: int = 0
    epoch: int | None = None
    owner: str = ""

    @property
    def until(self) -> int:
        return self.at + self.wait


class ReadClaim(Request, eq=False):
    """Reply: ItemPage of ClaimRows. `after` is how many of the part were read."""

    claim_id: str
    part: int
    after: int
    limit: int
    epoch: int | None = None


class JudgeItem(msgspec.Struct, gc=False):
    """`delay` None: the queue's backoff."""

    id: str
    dead: bool
    delay: int | None = None
    error: str | None = None


class JudgeClaim(Request, eq=False):
    """Reply: list[Result], one a verdict."""

    changes = True
    claim_id: str
    verdicts: Sequence[JudgeItem]
    epoch: int | None = None


class EndClaim(Request, eq=False):
    """Reply: ClaimEnded."""

    changes = True
    claim_id: str
    completed: bool
    epoch: int | None = None


class ListClaims(Request, eq=False):
    """Reply: list[Claim]."""


class StageItems(Request, eq=False):
    """Reply: Staged."""

    txn: str
    chunk: str
    records: list[bytes | Record] | PlainItems
    size: int
    named: bool = True  # whether any may have an id of its own


class PublishStage(Request, eq=False):
    """Reply: Published."""

    changes = True
    txn: str
    chunks: Sequence[str]


class AbortStage(Request, eq=False):
    """Reply: Staged."""

    changes = True
    txn: str


class Carried(msgspec.Struct, gc=False):
    """What an item is besides, that goes to another partition of its queue: in a chunk of these instants, and as in
    the partition's columns.
    """

    created: int
    deadline: int
    state: str
    value: int
    tries: int
    changed: int


class Transfer(msgspec.Struct, gc=False):
    """One item on its way between two queues; `name` tells a repeat. `documents` as in the partition's column."""

    name: bytes
    record: Record
    wanted_id: str | None
    documents: int
    parts: dict[int, bytes]
    fence: int  # no fencing token of the item was above this
    carried: Carried | None = None  # it stays in its queue


class Arrive(Request, eq=False):
    """Items from another queue. Reply: None, once they are here, be it since an earlier try."""

    target: str
    partition: int  # of the sender, and the numbers there
    numbers: list[int]
    transfers: list[Transfer]
    left: list[Transfer] = []  # those not known to have arrived: once they have, they are never looked for again

    def __post_init__(self) -> None:
        self.left = self.transfers


class Forget(Request, eq=False):
    """The sender has let go of these transfers. Reply: None."""

    target: str
    partition: int
    names: list[bytes]
    missing: int = 0
