"""What each call answers with, where that is not a noun of model.py as it is.

A field that has its default is left out. Readers ignore fields they do not know, so that fields can be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from millpond.model import Claim, Produced, Result, State
from millpond.wire.requests import Instant


class Empty(Struct, gc=False):
    """`{}`"""


class ProduceReply(Struct, gc=False):
    items: Sequence[Produced]


class LeaseItem(Struct, gc=False, omit_defaults=True):
    """An item in a consumer's hands. JSON has the payload as `text` where it is UTF-8, else as `bytes` (base64)."""

    id: str
    lease: str
    correlation_id: str
    attempts: int
    deliveries: int
    fencing_token: int
    lease_deadline: Instant
    created_at: Instant
    text: str | None = None
    data: bytes | None = field(default=None, name="bytes")
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


class LeaseReply(Struct, gc=False):
    items: list[LeaseItem]


class Results(Struct, gc=False):
    """One a token or id, in order."""

    results: Sequence[Result]


class Cleared(Struct, gc=False):
    """How many were removed, by the state they were in."""

    cleared: dict[str, int]


class LookItem(Struct, gc=False, omit_defaults=True, kw_only=True):
    """An item as seen by looking at it."""

    id: str
    state: State
    partition: int
    correlation_id: str
    created_at: Instant
    expire_deadline: Instant
    text: str | None = None
    data: bytes | None = field(default=None, name="bytes")
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
    enqueue_at: Instant | None = None
    lease_deadline: Instant | None = None
    client_id: str | None = None
    cancel_asked: bool = False
    updated_at: Instant | None = None
    ended_at: Instant | None = None
    keep_until: Instant | None = None
    state_doc: Any = None
    state_version: int = 0
    result: Any = None
    last_error: str | None = None
    dead_reason: str | None = None
    source_queue: str | None = None
    source_id: str | None = None
    source_attempts: int | None = None


class LookPage(Struct, gc=False, omit_defaults=True):
    items: list[LookItem]
    next: str | None = None


class ClaimList(Struct, gc=False):
    claims: Sequence[Claim]


class ErrorBody(Struct, gc=False):
    """`message` reads `what is wrong; what to do`."""

    code: str
    message: str
    details: dict[str, Any]


class ErrorReply(Struct, gc=False):
    error: ErrorBody
