"""Every error that a caller can meet, chosen by what the caller can do about it.

MillpondError
├── InvalidRequest          400  the request is wrong; mend it and send it again
│   └── BatchTooLarge       413  too many items or too many bytes
├── Unauthorized            401  no token, or one that does not count; `challenge` is the WWW-Authenticate header
├── Forbidden               403  the token is good, but not for this call, queue or kind
├── NotFound                404  no such queue or item
├── Conflict                409  the request is right, but not in the present state
│   ├── LeaseLost                the token's delivery is over
│   ├── KeyConflict              a live item has this key or id
│   ├── VersionConflict          somebody wrote the state document in between
│   ├── ClaimFinished            the claim was completed: its items are done
│   ├── Fenced                   a newer run of the same consumer has taken over
│   ├── QueueExists
│   ├── QueueInUse               it has items, or is another queue's dead queue
│   └── DirectoryInUse           another process owns the data directory
├── TooManyRequests         429  a limit of the server is reached; wait `retry_after` seconds (retryable)
├── NotBuilt                501  a promise of a later release
├── DiskFull                507  produce is refused; complete goes on working
├── Unavailable             503  try again later (retryable)
│   ├── OutcomeUnknown           the commit was issued and nobody knows how it ended
│   └── Closed                   the engine is shutting down
├── BadReply                502  what answers at that address is not millpond, or too much (only clients raise it)
└── InternalError           500  a bug of ours

Messages read `what is wrong; what to do`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar


class MillpondError(Exception):
    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class InvalidRequest(MillpondError):
    code = "invalid"
    status = 400


class BatchTooLarge(InvalidRequest):
    code = "too_large"
    status = 413


class Unauthorized(MillpondError):
    code = "unauthorized"
    status = 401

    def __init__(self, message: str, *, challenge: str = "Bearer", **details: Any) -> None:
        super().__init__(message, **details)
        self.challenge = challenge


class Forbidden(MillpondError):
    code = "forbidden"
    status = 403


class NotFound(MillpondError):
    code = "not_found"
    status = 404


class Conflict(MillpondError):
    code = "conflict"
    status = 409


class LeaseLost(Conflict):
    code = "lease_lost"


class KeyConflict(Conflict):
    code = "key_conflict"


class VersionConflict(Conflict):
    code = "version_conflict"


class ClaimFinished(Conflict):
    code = "claim_finished"


class Fenced(Conflict):
    code = "fenced"


class QueueExists(Conflict):
    code = "queue_exists"


class QueueInUse(Conflict):
    code = "queue_in_use"


class TooManyRequests(MillpondError):
    code = "too_many_requests"
    status = 429
    retryable = True

    def __init__(self, message: str, *, retry_after: float, **details: Any) -> None:
        super().__init__(message, **details)
        self.retry_after = retry_after


class DirectoryInUse(Conflict):
    code = "directory_in_use"


class NotBuilt(MillpondError):
    code = "not_built"
    status = 501


class DiskFull(MillpondError):
    code = "disk_full"
    status = 507
    retryable = True


class Unavailable(MillpondError):
    code = "unavailable"
    status = 503
    retryable = True


class OutcomeUnknown(Unavailable):
    code = "outcome_unknown"


class Closed(Unavailable):
    code = "closed"


class InternalError(MillpondError):
    code = "internal"


class BadReply(MillpondError):
    code = "bad_reply"
    status = 502


def _all(kind: type[MillpondError]) -> Iterator[type[MillpondError]]:
    for below in kind.__subclasses__():
        yield below
        yield from _all(below)


BY_CODE: dict[str, type[MillpondError]] = {kind.code: kind for kind in _all(MillpondError)}
_BY_STATUS: dict[int, type[MillpondError]] = {
    **{kind.status: kind for kind in BY_CODE.values() if MillpondError in kind.__bases__},
    409: Conflict,
    500: InternalError,
    502: OutcomeUnknown,  # a proxy's: the server may have got the request
    503: Unavailable,
    504: OutcomeUnknown,
}


def made(
    code: str, message: str, status: int = 0, details: dict[str, Any] | None = None, retry_after: float = 0.0
) -> MillpondError:
    """The error of that code; one that is not known here is what its status says, and keeps its code in `details`."""
    details = {} if details is None else details
    kind = BY_CODE.get(code)
    if kind is None:
        kind = _BY_STATUS.get(status) or (InvalidRequest if 400 <= status < 500 else InternalError)
        details = details | ({"code": code} if code else {})
    error = kind(message, retry_after=retry_after) if issubclass(kind, TooManyRequests) else kind(message)
    error.details = details
    return error
