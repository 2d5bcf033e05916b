"""How a task's jobs are made, unless a call says otherwise; and what one call says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from millpond.durations import checked_seconds
from millpond.errors import InvalidRequest
from millpond.jobs.names import JOBS_QUEUE
from millpond.jobs.spec import IfDead, JobSpec, checked
from millpond.model import ATTEMPTS_LIMIT, PRIORITY_LIMIT, Duration, OnConflict
from millpond.tasks.functions import check_queue

Encoding = Literal["json", "msgpack"]
BackoffLike = float | int | Mapping[str, Any]
WIRE: dict[str, str] = {"json": "", "msgpack": "msgpack"}  # an item's encoding


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """As checked. None is the queue's own, or no limit. `encoding` is the item's."""

    name: str
    queue: str = JOBS_QUEUE
    max_attempts: int | None = None
    backoff_base: float | None = None
    backoff_cap: float | None = None
    backoff_jitter: float | None = None
    timeout: float | None = None
    priority: int = 0
    encoding: str = ""

    @property
    def whole(self) -> bool:
        """It leaves nothing to the queue: no need to look at that."""
        return self.max_attempts is not None and self.backoff_base is not None

    def spec(self, args: Sequence[Any], kwargs: dict[str, Any]) -> JobSpec:
        return JobSpec(
            task=self.name,
            args=list(args),
            kwargs=kwargs,
            timeout=self.timeout,
            backoff_base=self.backoff_base,
            backoff_cap=self.backoff_cap,
            backoff_jitter=self.backoff_jitter,
        )


def policy(
    name: str,
    queue: str,
    max_attempts: int | None,
    backoff: BackoffLike | None,
    timeout: Duration | None,
    priority: int,
    encoding: Encoding,
) -> Policy:
    """Checked at once, where the task is defined, and not when it is first enqueued."""
    if encoding not in WIRE:
        raise InvalidRequest(f"encoding is {encoding!r:.60}; use 'json' or 'msgpack'")
    base, cap, jitter = _backoff(backoff)
    made = Policy(
        name=name,
        queue=check_queue(queue),
        max_attempts=attempts(max_attempts),
        backoff_base=base,
        backoff_cap=cap,
        backoff_jitter=jitter,
        timeout=None if timeout is None else checked_seconds(timeout, "timeout"),
        priority=_priority(priority),
        encoding=WIRE[encoding],
    )
    checked(made.spec((), {}))
    return made


def attempts(given: Any) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= ATTEMPTS_LIMIT:
        raise InvalidRequest(f"max_attempts is {given!r:.60}; use 1 to {ATTEMPTS_LIMIT}, the first included")
    return given


def _priority(given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not -PRIORITY_LIMIT <= given <= PRIORITY_LIMIT:
        raise InvalidRequest(f"priority is {given!r:.60}; use {-PRIORITY_LIMIT} to {PRIORITY_LIMIT}, a lower one first")
    return given


def _backoff(given: BackoffLike | None) -> tuple[float | None, float | None, float | None]:
    """A number is the base: 2 waits 2, 4, 8 seconds."""
    if given is None:
        return None, None, None
    if not isinstance(given, Mapping):
        return _number(given, "backoff"), None, None
    unknown = sorted(set(given) - {"base", "cap", "jitter"})
    if unknown:
        raise InvalidRequest(f"backoff has no {unknown[0]!r:.60}; use base, cap and jitter")
    cap = given.get("cap")
    return (
        _number(given.get("base", 2), "backoff base"),
        None if cap is None else checked_seconds(cap, "backoff cap"),
        None if given.get("jitter") is None else _number(given["jitter"], "backoff jitter"),
    )


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} is {value!r:.60}; give a number, or {{'base': 2, 'cap': '1h', 'jitter': 0.1}}")
    return float(value)


class CallOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one call says of its job. `after` are ids ("ID" or "QUEUE/ID"), `correlation_id` None inherits."""

    delay: Duration | None = None
    run_at: datetime | None = None
    priority: int | None = None
    id: str | None = None
    key: str | None = None
    after: tuple[str, ...] = ()
    if_dead: IfDead | None = None
    correlation_id: str | None = None
    queue: str | None = None
    max_attempts: int | None = None
    timeout: float | None = None
    expire_timeout: Duration | None = None
    on_conflict: OnConflict = "ignore"
