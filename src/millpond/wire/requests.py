"""What each call takes. The checks of values are the engine's (service/validate.py); here are names and types.

An unknown field is refused. A duration is a number of seconds or a string ("1m30s"), an instant RFC 3339.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from millpond.model import CLEAR_STATES, Intent, OnConflict

Instant = Annotated[datetime, Meta(tz=True)]  # without an offset nobody knows which instant is meant
WireDuration = str | int | float  # not the model's: a timedelta is a string on the wire

# ---- queues -----------------------------------------------------------------------------------------------


class BackoffFields(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """What is left out stays, or is the default: 2, 1h, 0."""

    base: float | UnsetType = UNSET
    cap: WireDuration | UnsetType = UNSET
    jitter: float | UnsetType = UNSET


class CreateQueue(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    partitions: int = 1
    lease_timeout: WireDuration = "30s"
    expire_timeout: WireDuration = "14d"
    max_attempts: int = 5
    dead_queue: str | None = None
    dead: Literal["keep", "delete"] = "keep"
    backoff: BackoffFields | None = None
    dedup_window: WireDuration = "5m"
    completed_retention: WireDuration = "0s"
    durability: Literal["full", "relaxed"] = "full"
    reference: str = ""


class UpdateQueue(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """What is left out stays as it was."""

    name: str
    lease_timeout: WireDuration | UnsetType = UNSET
    expire_timeout: WireDuration | UnsetType = UNSET
    max_attempts: int | UnsetType = UNSET
    dead_queue: str | UnsetType | None = UNSET
    dead: Literal["keep", "delete"] | UnsetType = UNSET
    backoff: BackoffFields | UnsetType = UNSET
    dedup_window: WireDuration | UnsetType = UNSET
    completed_retention: WireDuration | UnsetType = UNSET
    reference: str | UnsetType = UNSET


class NamedQueue(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    name: str


class DeleteQueue(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    name: str
    force: bool = False


class ListQueues(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    prefix: str = ""
    after: str = ""
    limit: int = 100


class OneQueue(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str


class ClearQueue(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    states: list[str] = field(default_factory=lambda: list(CLEAR_STATES))


# ---- items ------------------------------------------------------------------------------------------------


class PlainItem(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """A payload and nothing else: what most producers send."""

    text: str | None = None
    data: bytes | None = field(default=None, name="bytes")


class ProduceItem(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The payload is one of `text`, `bytes` (base64 in JSON) and `json`, which is kept as its compact text."""

    text: str | None = None
    data: bytes | None = field(default=None, name="bytes")
    json: Raw | UnsetType = UNSET
    id: str | None = None
    key: str | None = None
    kind: str = ""
    encoding: str = ""
    reference: str = ""
    priority: int = 0
    group: str | None = None
    enqueue_at: Instant | None = None
    delay: WireDuration | None = None
    max_attempts: int | None = None
    expire_timeout: WireDuration | None = None
    correlation_id: str | None = None


class ProducePlain(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """A produce of plain items only; the general one takes all that this does."""

    queue: str
    items: list[PlainItem]
    on_conflict: OnConflict = "ignore"
    request_id: str | None = None


class Produce(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    items: list[ProduceItem]
    on_conflict: OnConflict = "ignore"
    request_id: str | None = None


class Lease(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    batch: int = 1
    wait: WireDuration = "0s"
    lease_timeout: WireDuration | None = None
    client_id: str = ""


class Subscribe(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """`prefetch` is how many unfinished items the stream holds at most, `batch` how many are leased at a time.

    `wait` is taken because a lease has it, and changes nothing: a stream waits as long as it lives.
    """

    queue: str
    prefetch: int = 10
    batch: int | None = None
    wait: WireDuration | None = None
    lease_timeout: WireDuration | None = None
    client_id: str = ""


class Complete(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    leases: list[str]
    queue: str | None = None
    result: Any = None


class RetryItem(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    lease: str
    intent: Intent = "failure"
    delay: WireDuration | None = None
    retry_at: Instant | None = None
    error: str | None = None
    dead: bool = False


class Retry(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    items: list[RetryItem]
    queue: str | None = None


class Extend(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    leases: list[str]
    queue: str | None = None
    lease_timeout: WireDuration | None = None


class WriteState(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    lease: str
    version: int
    state_doc: Any
    queue: str | None = None


class Cancel(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    ids: list[str]


class Bury(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    ids: list[str]
    reason: str = "rejected"
    error: str | None = None


class MakeReady(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    ids: list[str]


class RedriveFields(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    source_queue: str | None = None
    dead_reason: str | None = None
    kind: str | None = None
    error_contains: str | None = None


class Redrive(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    ids: list[str] | None = None
    filter: RedriveFields | None = None
    rate: float | None = None
    dry_run: bool = False


class GetItem(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """`wait` is for the item to end; it comes as it is then, or when the wait is over."""

    queue: str
    id: str
    wait: WireDuration = "0s"


class ListItems(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    state: str | None = None
    partition: int | None = None
    kind: str | None = None
    after: str | None = None
    until: int | None = None
    limit: int = 100


# ---- batches: claims, stages, history ---------------------------------------------------------------------


class OpenConsumer(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    consumer: str
    after: int | None = None


class MakeClaim(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """`epoch` is for claims named `consumer:seq`. `parts` is how many may read at a time."""

    queue: str
    claim_id: str
    max_items: int = 10_000
    max_bytes: int | None = None
    parts: int = 1
    wait: WireDuration = "0s"
    epoch: int | None = None
    owner: str = ""


class ReadClaim(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    claim_id: str
    part: int = 0
    after: str | None = None
    limit: int = 1_000
    epoch: int | None = None


class VerdictItem(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """`retry` counts the attempt and waits `delay`, or the queue's backoff; `dead` kills the item."""

    id: str
    verdict: Literal["retry", "dead"]
    error: str | None = None
    delay: WireDuration | None = None


class GiveVerdicts(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    claim_id: str
    verdicts: list[VerdictItem]
    epoch: int | None = None


class OneClaim(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    claim_id: str
    epoch: int | None = None


class StagePlain(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """A stage of plain items only; the general one takes all that this does."""

    queue: str
    txn: str
    chunk: str
    items: list[PlainItem]


class Stage(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    txn: str
    chunk: str
    items: list[ProduceItem]


class PublishStage(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    txn: str
    chunks: list[str]


class AbortStage(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    queue: str
    txn: str


class ReadJournal(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """`after` is the turn of the last row that was read."""

    queue: str
    partition: int = 0
    after: int = 0
    limit: int = 500


class Audit(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """`after` is the `next` of the page before."""

    queue: str
    after: str | None = None
    limit: int = 100


class RebalanceQueue(Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """`partitions` left out: as many as there are, where the stores' affinities say now."""

    queue: str
    partitions: int | None = None
    dry_run: bool = False
