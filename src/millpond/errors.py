"""Every error that a caller can meet, chosen by what the caller can do about it.

MillpondError
├── InvalidRequest          400  the request is wrong; mend it and send it again
│   └── BatchTooLarge       413  too many items or too many bytes
├── NotFound                404  no such queue or item
├── Conflict                409  the request is right, but not in the present state
│   ├── LeaseLost                the token's delivery is over
│   ├── KeyConflict              a live item has this key or id
│   ├── VersionConflict          somebody wrote the state document in between
│   ├── QueueExists
│   └── QueueInUse               it has items, or is another queue's dead queue
├── NotBuilt                501  a promise of a later release
├── DiskFull                507  produce is refused; complete goes on working
├── Unavailable             503  try again later (retryable)
│   ├── OutcomeUnknown           the commit was issued and nobody knows how it ended
│   └── Closed                   the engine is shutting down
└── InternalError           500  a bug of ours

Messages read `what is wrong; what to do`.
"""

from __future__ import annotations

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


class QueueExists(Conflict):
    code = "queue_exists"


class QueueInUse(Conflict):
    code = "queue_in_use"


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
