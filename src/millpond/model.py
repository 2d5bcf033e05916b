"""Every noun of millpond: states, items, queues, and the limits on them. Read this first. No I/O.

Inside the engine an instant is an int of milliseconds since 1970 and a duration an int of milliseconds; the
types that callers see carry `datetime`s and take durations as seconds, `timedelta` or strings ("1m30s").
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise, repeat
from typing import Any, Literal, Protocol, TypeVar, overload

import msgspec

Duration = float | int | str | timedelta
OnConflict = Literal["ignore", "reject", "replace"]
Intent = Literal["failure", "defer"]

# ---- limits: each with its reason -------------------------------------------------------------------------

QUEUE_NAME_PATTERN = r"(?!\.{1,2}(/|$))[A-Za-z0-9._-]+(/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)*"  # no part is "." or ".."
QUEUE_NAME_MAX = 200  # a name travels in every request, log line and metric label
PARTITIONS_MAX = 1_000  # each has a file, and a lease looks at all of them
PARTITION_NUMBER_MAX = 0xFFFF  # numbers are not used again, and a lease token has 16 bits for one
PRODUCE_BATCH_MAX = 1_000  # a request is one chunk: one row in the store
LEASE_BATCH_MAX = 1_000  # a reply must fit in memory several times over
TOKEN_BATCH_MAX = 1_000  # as many as one lease can hand out
PAYLOAD_BYTES_MAX = 1 << 20  # larger things belong in an object store, with a reference here
PRODUCE_BYTES_MAX = 16 << 20  # the bound on one request's payloads together
STATE_DOC_BYTES_MAX = 64 << 10  # a note between attempts, rewritten whole on every write
STATE_DOC_DEPTH_MAX = 100  # what was encoded must be decodable anywhere, and decoders recurse
ERROR_CHARS_MAX = 4_096  # longer error texts are cut: the head says what failed
STRING_MAX = 1_024  # kind, encoding, reference, client_id
KEY_MAX = 1_024  # deduplication keys are hashed, but must be read from requests
PRIORITY_LIMIT = 32_767  # fits 16 bits on either side of 0
ATTEMPTS_LIMIT = 1_000_000  # 0 is the way to say unlimited
WAIT_MAX_MS = 15 * 60_000  # a parked lease holds a connection
DURATION_MAX_MS = 10 * 365 * 86_400_000  # ten years: anything longer is a unit mistake
LIST_LIMIT_MAX = 1_000  # a page
CLAIM_ITEMS_MAX = 10_000_000  # a claim is a few runs in memory, but its parts are read one page at a time
CLAIM_PARTS_MAX = 1_000  # each is a task of the batch reader
CLAIM_PAGE_MAX = 10_000  # items of a claim read at a time: as many as a batch reader likes in one batch
CLAIM_PAGE_BYTES = 8 << 20  # payloads after which a page ends: it is in memory several times over
CLAIM_MEMORY_MS = 7 * 86_400_000  # how long a completed claim, or a published transaction, is remembered
NAME_MAX = 200  # claim_id, consumer, txn, chunk
VERDICTS_MAX = 1_000  # in one request
STAGE_ITEMS_MAX = 10_000  # in one chunk of a transaction
STAGE_TIMEOUT_MS = 86_400_000  # what was staged and not published for so long is dropped
CLEAR_STATES = ("ready", "scheduled", "retrying")  # what clear removes unless told otherwise
REQUEST_TIMEOUT_MS = 10_000  # how long a request waits for a partition that is away

# ---- states -----------------------------------------------------------------------------------------------


class State(enum.StrEnum):
    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    RETRYING = "retrying"
    COMPLETED = "completed"
    CLAIMED = "claimed"
    DEAD = "dead"
    CANCELLED = "cancelled"


ENDED = frozenset({State.COMPLETED, State.DEAD, State.CANCELLED})  # what has come to its end, and is only kept


class DeadReason(enum.StrEnum):
    MAX_ATTEMPTS = "max_attempts"
    EXPIRED = "expired"
    REJECTED = "rejected"


# ---- replies of many --------------------------------------------------------------------------------------

T = TypeVar("T")


class Batch(Sequence[T]):
    """Many entries, made when one of them is first looked at: few callers look.

    How they are made is a method, not a function that is kept: that would hold the batch, and all that it was made of,
    until the collector comes.
    """

    __slots__ = ("_count", "_made")

    def __init__(self, count: int) -> None:
        self._count = count
        self._made: list[T] | None = None

    def _make(self) -> list[T]:
        raise NotImplementedError

    @property
    def made(self) -> list[T]:
        if self._made is None:
            self._made = self._make()
        return self._made

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self.made[index]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return iter(self.made)

    def __eq__(self, other: object) -> bool:
        return self.made == (other.made if isinstance(other, Batch) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.made)


# ---- items ------------------------------------------------------------------------------------------------


class NewItem(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a producer hands in. A bare `bytes` or `str` in its place is an item with only a payload."""

    payload: bytes | bytearray | memoryview | str = b""
    id: str | None = None
    key: str | None = None
    kind: str = ""
    encoding: str = ""
    reference: str = ""
    priority: int = 0
    group: str | None = None
    enqueue_at: datetime | None = None
    delay: Duration | None = None
    max_attempts: int | None = None
    expire_timeout: Duration | None = None
    correlation_id: str | None = None


Payload = NewItem | bytes | str
Items = Sequence[Payload]


class ItemColumns(Batch[Payload]):
    """New items by columns: a value a row, None where it has none. Who can check whole columns makes no NewItem."""

    __slots__ = ("columns", "payloads")

    def __init__(self, payloads: list[bytes], columns: dict[str, list[Any]]) -> None:
        self.payloads = payloads
        self.columns = columns
        super().__init__(len(payloads))

    def _make(self) -> list[Payload]:
        rows = zip(self.payloads, *self.columns.values(), strict=True)
        return [self._item(payload, row) for payload, *row in rows]

    def _item(self, payload: bytes, row: Sequence[Any]) -> Payload:
        """One that has nothing but a payload is its payload."""
        fields = {name: value for name, value in zip(self.columns, row, strict=True) if value is not None}
        return NewItem(payload=payload, **fields) if fields else payload


class PlainItems(Batch[Payload]):
    """New items that are nothing but payloads, as Arrow has them: `offsets` (32 bits each) tell where in `data` each
    begins, and where the last one ends. Who stores many of them at a time looks at none.
    """

    __slots__ = ("data", "largest", "offsets")

    def __init__(self, offsets: memoryview, data: memoryview, largest: int) -> None:
        self.offsets = offsets
        self.data = data
        self.largest = largest
        super().__init__(len(offsets) - 1)

    @property
    def size(self) -> int:
        """Of all payloads together."""
        return int(self.offsets[-1] - self.offsets[0])

    def _make(self) -> list[Payload]:
        return [bytes(self.data[start:end]) for start, end in pairwise(self.offsets.tolist())]


class Produced(msgspec.Struct, gc=False, omit_defaults=True):
    id: str
    correlation_id: str | None = None
    duplicate: bool = False


class ProducedItems(Batch[Produced]):
    """Plain items that came in together: their numbers, and what their ids and correlation ids begin with."""

    __slots__ = ("correlation", "ids", "numbers")

    def __init__(self, ids: str, correlation: str, numbers: range) -> None:
        self.ids = ids
        self.correlation = correlation
        self.numbers = numbers
        super().__init__(len(numbers))

    def _make(self) -> list[Produced]:
        ids, correlation = self.ids, self.correlation
        return [Produced(f"{ids}{n}", correlation + n.to_bytes(6, "big").hex()) for n in self.numbers]


class LeasedFields(msgspec.Struct, gc=False, omit_defaults=True):
    """All there is to say of an item in a consumer's hands."""

    id: str
    lease: str
    payload: bytes
    correlation_id: str
    attempts: int
    deliveries: int
    fencing_token: int
    lease_deadline: datetime
    created_at: datetime
    kind: str = ""
    encoding: str = ""
    reference: str = ""
    priority: int = 0
    group: str | None = None
    key: str | None = None
    state_doc: Any = None
    state_version: int = 0
    last_error: str | None = None
    dead_reason: str | None = None
    source_queue: str | None = None
    source_id: str | None = None
    source_attempts: int | None = None


class Grant(Protocol):
    """What the items of one grant share: enough to say all of a plain one from its number and payload."""

    holding: Any  # who leased them: what the items' own methods go through
    form: Any  # what the wire has made of what the items share

    def held_by(self, holding: Any) -> Grant:
        """A copy: others may have got items of the same grant."""
        ...

    @property
    def incarnation(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def turn(self) -> int: ...

    @property
    def created(self) -> int: ...

    @property
    def fencing_token(self) -> int: ...

    @property
    def lease_deadline(self) -> datetime: ...

    @property
    def created_at(self) -> datetime: ...

    def token(self, number: int) -> str: ...

    def names(self, first: int, count: int) -> list[tuple[str, str, str]]:
        """Id, lease token and correlation id of each of these neighbours."""
        ...

    def beginnings(self) -> tuple[str, str, int, str]:
        """What their ids begin with, what their tokens do, the checksum up to there, and their correlation ids'.

        Ids end with the item's number, tokens and correlation ids with its 12 hex digits; a token is then sealed.
        """
        ...

    def end(self, number: int, check: int) -> tuple[bytes, bytes]:
        """The hex digits of an item's number, and those that seal its token."""
        ...

    def ends(self, numbers: range, check: int) -> list[bytes]:
        """Both together, of many."""
        ...

    def fields(self, number: int, payload: bytes) -> LeasedFields: ...


class LeasedItem(msgspec.Struct, gc=False, eq=False):
    """An item in a consumer's hands. `lease` is its token; complete, retry and extend take the item itself too.

    The fields of a plain item follow from its grant and are made when they are first asked for: a consumer that
    looks at the payload and completes the item pays for nothing else.
    """

    payload: bytes
    number: int
    grant: Grant | None
    known: LeasedFields | None = None

    @property
    def fields(self) -> LeasedFields:
        if self.known is None:
            assert self.grant is not None, "an item has a grant or its fields"
            self.known = self.grant.fields(self.number, self.payload)
        return self.known

    @property
    def text(self) -> str:
        """Raises ValueError if the payload is not UTF-8."""
        try:
            return self.payload.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"the payload is not text ({error.reason} at byte {error.start}); use `payload`") from None

    @property
    def id(self) -> str:
        return self.fields.id

    @property
    def lease(self) -> str:
        if self.known is None and self.grant is not None:
            return self.grant.token(self.number)
        return self.fields.lease

    @property
    def correlation_id(self) -> str:
        return self.fields.correlation_id

    @property
    def attempts(self) -> int:
        return self.fields.attempts

    @property
    def deliveries(self) -> int:
        return self.fields.deliveries

    @property
    def fencing_token(self) -> int:
        return self.fields.fencing_token

    @property
    def lease_deadline(self) -> datetime:
        return self.fields.lease_deadline

    @property
    def created_at(self) -> datetime:
        return self.fields.created_at

    @property
    def kind(self) -> str:
        return self.fields.kind

    @property
    def encoding(self) -> str:
        return self.fields.encoding

    @property
    def reference(self) -> str:
        return self.fields.reference

    @property
    def priority(self) -> int:
        return self.fields.priority

    @property
    def group(self) -> str | None:
        return self.fields.group

    @property
    def key(self) -> str | None:
        return self.fields.key

    @property
    def state_doc(self) -> Any:
        return self.fields.state_doc

    @property
    def state_version(self) -> int:
        return self.fields.state_version

    @property
    def last_error(self) -> str | None:
        return self.fields.last_error

    @property
    def dead_reason(self) -> str | None:
        return self.fields.dead_reason

    @property
    def source_queue(self) -> str | None:
        return self.fields.source_queue

    @property
    def source_id(self) -> str | None:
        return self.fields.source_id

    @property
    def source_attempts(self) -> int | None:
        return self.fields.source_attempts

    def __repr__(self) -> str:
        return repr(self.fields).replace("LeasedFields", "LeasedItem", 1)


LeaseLike = LeasedItem | str  # an item, or the token that came with it


def are_items(leases: Sequence[Any]) -> bool:
    """Some, of whatever kind of leased item, and not one of them a token."""
    kinds = set(map(type, leases))
    return bool(kinds) and all(issubclass(kind, LeasedItem) for kind in kinds)


class LeasedRun(msgspec.Struct):
    """Neighbours leased together: their grant, the first one's number, their payloads, and what is not plain."""

    grant: Grant
    first: int
    payloads: list[bytes]
    known: dict[int, LeasedFields]

    def items(self, kind: type[LeasedItem]) -> Iterable[LeasedItem]:
        numbers = range(self.first, self.first + len(self.payloads))
        if not self.known:
            return map(kind, self.payloads, numbers, repeat(self.grant))
        return map(kind, self.payloads, numbers, repeat(self.grant), map(self.known.get, numbers))


class LeasedItems(Batch[LeasedItem]):
    """What one lease handed out. Handed back whole, it is completed in one step, however many they are."""

    __slots__ = ("_kind", "runs")

    def __init__(self, runs: list[LeasedRun]) -> None:
        self.runs = runs
        self._kind = LeasedItem
        self._count = len(runs[0].payloads) if len(runs) == 1 else sum([len(run.payloads) for run in runs])
        self._made = None

    def _make(self) -> list[LeasedItem]:
        items: list[LeasedItem] = []
        for run in self.runs:
            items += run.items(self._kind)
        return items

    def held(self, kind: type[LeasedItem], holding: Any) -> None:
        """They are of a kind that finds in its grant who holds it: before any of them is looked at."""
        assert self._made is None, "the items were looked at already"
        self._kind = kind
        for run in self.runs:
            run.grant = run.grant.held_by(holding)


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item as seen by looking at it; nothing is leased by looking.

    `updated_at` is when its state last changed, as far as is known without its history: `created_at` if nothing is.
    """

    id: str
    state: State
    partition: int
    payload: bytes
    correlation_id: str
    created_at: datetime
    expire_deadline: datetime
    attempts: int = 0
    deliveries: int = 0
    fencing_token: int = 0
    max_attempts: int = 0
    key: str | None = None
    kind: str = ""
    encoding: str = ""
    reference: str = ""
    priority: int = 0
    group: str | None = None
    enqueue_at: datetime | None = None
    lease_deadline: datetime | None = None
    client_id: str | None = None
    cancel_asked: bool = False
    updated_at: datetime = None  # type: ignore[assignment]  # never left so
    ended_at: datetime | None = None
    keep_until: datetime | None = None
    state_doc: Any = None
    state_version: int = 0
    result: Any = None
    last_error: str | None = None
    dead_reason: str | None = None
    source_queue: str | None = None
    source_id: str | None = None
    source_attempts: int | None = None

    def __post_init__(self) -> None:
        given: object = self.updated_at
        if given is None:
            self.updated_at = self.created_at


class ItemPage(msgspec.Struct, omit_defaults=True):
    """Of a claim, `items` are ClaimRows."""

    items: Sequence[Item]
    next: str | None = None


# ---- what is asked of items, and what became of it --------------------------------------------------------


class Retry(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One item handed back: a failure (counts) or a defer (does not), now, later, or dead."""

    lease: LeaseLike
    intent: Intent = "failure"
    delay: Duration | None = None
    retry_at: datetime | None = None
    error: str | None = None
    dead: bool = False


class ErrorInfo(msgspec.Struct, omit_defaults=True):
    """One token's or one id's refusal in a batch whose other members took effect."""

    code: str
    message: str


class Result(msgspec.Struct, gc=False, omit_defaults=True):
    """What became of one token or id of a batch: `ok`, or `error`."""

    ok: bool = False
    correlation_id: str | None = None
    error: ErrorInfo | None = None
    lease_deadline: datetime | None = None
    cancelled: bool = False


class CompletedItems(Batch[Result]):
    """Plain items leased together that are completed: their numbers, and what their correlation ids begin with."""

    __slots__ = ("correlation", "numbers")

    def __init__(self, correlation: str, numbers: Sequence[int]) -> None:
        self.correlation = correlation
        self.numbers = numbers
        super().__init__(len(numbers))

    def _make(self) -> list[Result]:
        correlation = self.correlation
        return [Result(True, correlation + n.to_bytes(6, "big").hex()) for n in self.numbers]


class StateWritten(msgspec.Struct, omit_defaults=True):
    version: int
    correlation_id: str | None = None
    cancelled: bool = False


class RedriveFilter(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    source_queue: str | None = None
    dead_reason: str | None = None
    kind: str | None = None
    error_contains: str | None = None


class Redriven(msgspec.Struct, omit_defaults=True):
    """`errors` names the items that could not go back, by id."""

    matched: int
    moved: int
    errors: dict[str, ErrorInfo] = {}


# ---- claims and transactions ------------------------------------------------------------------------------


class Names(Protocol):
    """What the names of plain items follow from: `id_prefix` and the number, and so on."""

    @property
    def id_prefix(self) -> str: ...

    def id(self, number: int) -> str: ...

    def correlation_prefix(self, created: int) -> str: ...

    def correlation_id(self, number: int, created: int) -> str: ...


class Source(Protocol):
    """Whence an item came that died elsewhere."""

    queue: str
    id: str
    attempts: int
    reason: str | None


class Full(Protocol):
    """An item as it was produced: what a run says of its items, an own value of the same name overrules."""

    payload: bytes
    id: str | None
    key: str | None
    kind: str
    encoding: str
    reference: str
    priority: int
    max_attempts: int  # below 0: the queue's
    correlation_id: str | None

    @property
    def source(self) -> Source | None: ...


class ClaimRun(msgspec.Struct, kw_only=True):
    """Claimed items of one chunk, mostly neighbours: what they share, their numbers and payloads, what is not plain.

    `records` are all of them as they were produced, or none where nobody has more than a payload; `known` are those
    whose record does not tell all.
    """

    mint: Names
    partition: int
    numbers: range | list[int]
    created: int
    deadline: int
    max_attempts: int
    payloads: list[bytes]
    known: dict[int, Item]
    state: State = State.CLAIMED
    records: Sequence[Full] = ()

    def items(self) -> Iterator[Item]:
        if self.records:
            for number, record in zip(self.numbers, self.records, strict=True):
                yield self.known.get(number) or self.full(number, record)
        else:
            for number, payload in zip(self.numbers, self.payloads, strict=True):
                yield self.known.get(number) or self._plain(number, payload)

    def full(self, number: int, record: Full) -> Item:
        source = record.source
        return Item(
            id=record.id or self.mint.id(number),
            state=self.state,
            partition=self.partition,
            payload=record.payload,
            correlation_id=record.correlation_id or self.mint.correlation_id(number, self.created),
            created_at=to_datetime(self.created),
            expire_deadline=to_datetime(self.deadline),
            max_attempts=self.max_attempts if record.max_attempts < 0 else record.max_attempts,
            key=record.key,
            kind=record.kind,
            encoding=record.encoding,
            reference=record.reference,
            priority=record.priority,
            dead_reason=source.reason if source else None,
            source_queue=source.queue if source else None,
            source_id=source.id if source else None,
            source_attempts=source.attempts if source else None,
        )

    def _plain(self, number: int, payload: bytes) -> Item:
        return Item(
            id=self.mint.id(number),
            state=self.state,
            partition=self.partition,
            payload=payload,
            correlation_id=self.mint.correlation_id(number, self.created),
            created_at=to_datetime(self.created),
            expire_deadline=to_datetime(self.deadline),
            max_attempts=self.max_attempts,
        )


class ClaimRows(Batch[Item]):
    """A page of a claim. Who can work by columns takes the runs and makes no item."""

    __slots__ = ("runs",)

    def __init__(self, runs: list[ClaimRun]) -> None:
        self.runs = runs
        super().__init__(sum([len(run.payloads) for run in runs]))

    def _make(self) -> list[Item]:
        return [item for run in self.runs for item in run.items()]


class ClaimPart(msgspec.Struct, gc=False):
    part: int
    items: int


class Claim(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A named set of items for a batch reader. With no items nothing was claimed, and the name is still free."""

    claim_id: str
    items: int
    parts: list[ClaimPart] = []
    owner: str = ""
    epoch: int | None = None
    created_at: datetime | None = None
    status: Literal["open", "completing", "releasing"] = "open"


class Verdict(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What becomes of one claimed item in place of completion, once its claim is completed.

    `retry` counts the attempt and waits `delay`, or the queue's backoff; `dead` kills the item.
    """

    id: str
    verdict: Literal["retry", "dead"]
    error: str | None = None
    delay: Duration | None = None


class ClaimEnded(msgspec.Struct, omit_defaults=True):
    """`items` that were completed, or given back; those with a verdict are counted apart."""

    claim_id: str
    items: int
    retried: int = 0
    dead: int = 0


class Consumer(msgspec.Struct, kw_only=True):
    """A batch reader by name. Its claims are `name:1`, `name:2`, …; `last_completed` 0: none yet."""

    consumer: str
    epoch: int
    last_completed: int


class Staged(msgspec.Struct):
    items: int


class Published(msgspec.Struct, omit_defaults=True):
    """`items` that came into the queue; `duplicates` had a key or id that is taken. `again`: it was done before."""

    txn: str
    items: int
    duplicates: int = 0
    again: bool = False


# ---- the journal ------------------------------------------------------------------------------------------


class JournalTurn(msgspec.Struct, gc=False):
    """One row of a partition's journal; `events` is in the format of `history.format`."""

    turn: int
    at: int
    events: bytes


class JournalPage(msgspec.Struct, kw_only=True):
    """Rows after the turn that was asked for. `last_turn` is the newest that is durable."""

    incarnation: str
    partition: int
    rows: list[JournalTurn]
    last_turn: int


# ---- queues -----------------------------------------------------------------------------------------------


class Backoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """After the n-th failed attempt wait `base ** n` seconds, at most `cap`, spread by +-`jitter` (0 to 1)."""

    base: float = 2.0
    cap_ms: int = 3_600_000
    jitter: float = 0.0


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's policy, as validated. Times in ms."""

    lease_timeout_ms: int = 30_000
    expire_timeout_ms: int = 14 * 86_400_000
    max_attempts: int = 5
    dead_queue: str | None = None
    dead: Literal["keep", "delete"] = "keep"
    backoff: Backoff = Backoff()
    dedup_window_ms: int = 300_000
    completed_retention_ms: int = 0
    completed_grace_ms: int = 300_000
    journal_retention_ms: int = 7 * 86_400_000
    journal_bytes_max: int = 1 << 30
    durability: Literal["full", "relaxed"] = "full"
    reference: str = ""


class PartitionDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a partition lives. Numbers are never used again within an incarnation of the queue."""

    partition: int
    store: str = "default"
    read_only: bool = False


class Rebalancing(msgspec.Struct, frozen=True, kw_only=True):
    """A rebalance as it is stored: the partitions that it adds and removes, and when it began and was over (ms)."""

    partitions: int
    added: tuple[PartitionDefinition, ...]
    removing: tuple[PartitionDefinition, ...]
    started_at: int
    finished_at: int = 0


class QueueDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """All that survives of a queue besides its items: the registry's row.

    `incarnation` tells a queue from an earlier one of the same name. `dirty` is set while the queue is loaded;
    a queue that was unloaded cleanly sleeps until `next_wake` (ms; 0 is never).
    """

    name: str
    incarnation: str
    settings: QueueSettings
    partitions: tuple[PartitionDefinition, ...]
    created_at: int
    updated_at: int
    paused: bool = False
    dirty: bool = False
    next_wake: int = 0
    version: int = 1
    rebalance: Rebalancing | None = None  # the one that runs, or the last one
    next_partition: int = 0  # the lowest number that no partition ever had; `__post_init__` knows better than 0
    past_totals: dict[str, int] = {}  # of partitions that are gone

    def __post_init__(self) -> None:
        lowest = max((one.partition for one in self.partitions), default=-1) + 1
        if self.next_partition < lowest:
            msgspec.structs.force_setattr(self, "next_partition", lowest)


class PartitionStats(msgspec.Struct, kw_only=True):
    partition: int
    store: str
    status: str
    counts: dict[str, int]
    failures: int = 0
    error: str | None = None
    last_number: int = 0  # of the newest item; `items.list` can be asked to stop there


class Rates(msgspec.Struct, kw_only=True):
    """Items a second over the last minute."""

    produced: float = 0.0
    leased: float = 0.0
    completed: float = 0.0
    retried: float = 0.0
    dead: float = 0.0


class QueueStats(msgspec.Struct, kw_only=True):
    queue: str
    counts: dict[str, int]
    waiters: int
    oldest_ready_age: float | None
    rates: Rates
    totals: dict[str, int]
    partitions: list[PartitionStats]
    paused: bool = False


class Rebalance(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A rebalance: what it would do, or how far it is. `unchanged`: there is nothing to do.

    `stores` says how many partitions each store has when it is over. `items` are those in the partitions that are yet
    to be removed, by state; ready ones are taken by consumers. Once they are empty they go at `removable_at`: until
    then, completes that are sent again are answered.
    """

    queue: str
    status: Literal["unchanged", "planned", "running", "done"]
    partitions: int
    stores: dict[str, int]
    added: list[int] = []
    removing: list[int] = []
    removed: list[int] = []
    items: dict[str, int] = {}
    removable_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class QueueInfo(msgspec.Struct, kw_only=True):
    """A queue as callers see it; durations in seconds."""

    name: str
    incarnation: str
    partitions: list[PartitionStats]
    lease_timeout: float
    expire_timeout: float
    max_attempts: int
    dead_queue: str | None
    dead: str
    backoff: dict[str, float]
    dedup_window: float
    completed_retention: float
    durability: str
    reference: str
    paused: bool
    created_at: datetime
    updated_at: datetime
    loaded: bool
    rebalance: Rebalance | None = None  # the one that runs, or the last one


class QueuePage(msgspec.Struct, omit_defaults=True):
    queues: list[QueueInfo]
    next: str | None = None


# ---- a server ---------------------------------------------------------------------------------------------


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A place for partitions, by name. `sqlite` has the `path` of a directory, `postgres` a `url`.

    `affinity` is its share of the partitions of new queues, beside those of the others; 0 takes none. One that is
    named `default` is the data directory, and has nothing else but its affinity.
    """

    name: str
    driver: str = ""
    path: str = ""
    url: str = ""
    affinity: float = 1.0


class Reloaded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A server has read its configuration again. With `problems` nothing has changed.

    `changed` holds from now on; `restart` are the keys that have other values, which hold after a restart.
    """

    changed: list[str] = []
    restart: list[str] = []
    problems: list[str] = []


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One administrative action on a queue. `who` is an access token's name, `local` (no token) or `embedded`."""

    at: datetime
    who: str
    action: str
    queue: str
    detail: dict[str, Any] = {}
    error: str | None = None


class AuditPage(msgspec.Struct, omit_defaults=True):
    """The newest first; `next` leads to older ones."""

    entries: list[AuditEntry]
    next: str | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    status: Literal["ok", "warning", "failed"]
    detail: str = ""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """One failed check is enough to say no; warnings are for people. Names no queue: anybody may ask."""

    status: str
    checks: dict[str, Check]

    @property
    def reason(self) -> str | None:
        """Why not; None: all is well, or well enough."""
        return "; ".join(one.detail for one in self.checks.values() if one.status == "failed") or None


# ---- instants ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)  # what was leased in one turn shares its instants
def to_datetime(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def to_ms(instant: datetime) -> int:
    """A naive datetime is taken as UTC: instants have one zone here."""
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    return round(instant.timestamp() * 1000)
