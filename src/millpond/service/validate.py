"""Every argument check, in one place. What passes is trusted inside.

Each function takes what a caller gave and returns what the engine works with (ms, records, settings), or raises an
InvalidRequest that says what is wrong and what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import Any

import msgspec

from millpond.durations import text_ms
from millpond.errors import BatchTooLarge, InvalidRequest, NotBuilt
from millpond.history.format import Payloads, Record, encode_state
from millpond.model import (
    ATTEMPTS_LIMIT,
    DURATION_MAX_MS,
    ERROR_CHARS_MAX,
    KEY_MAX,
    LEASE_BATCH_MAX,
    LIST_LIMIT_MAX,
    PARTITIONS_MAX,
    PAYLOAD_BYTES_MAX,
    PRIORITY_LIMIT,
    PRODUCE_BATCH_MAX,
    PRODUCE_BYTES_MAX,
    QUEUE_NAME_MAX,
    QUEUE_NAME_PATTERN,
    STATE_DOC_BYTES_MAX,
    STATE_DOC_DEPTH_MAX,
    STRING_MAX,
    TOKEN_BATCH_MAX,
    WAIT_MAX_MS,
    Items,
    LeasedItem,
    LeasedItems,
    LeaseLike,
    NewItem,
    RedriveFilter,
    Retry,
    State,
    to_ms,
)
from millpond.queue.requests import RetryItem

_NAME = re.compile(QUEUE_NAME_PATTERN)
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CORRELATION = re.compile(r"[\x20-\x7e]{1,128}")

# ---- simple values ----------------------------------------------------------------------------------------


def queue_name(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"a queue's name is a string, not {_type(value)}; give its name")
    shown = value if len(value) <= 60 else value[:57] + "..."
    if len(value) > QUEUE_NAME_MAX:
        raise InvalidRequest(f"queue name {shown!r} has {len(value)} characters; use at most {QUEUE_NAME_MAX}")
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"{shown!r} is not a queue name; use parts of letters, digits, '.', '_' and '-' joined by '/', none of"
            " them '.' or '..'"
        )
    return plain(value)


def plain(value: str) -> str:
    """Of a kind of string (an enum's member, one of numpy's) the string: the journal and the registry take no other."""
    return value if type(value) is str else str.__str__(value)


def integer(value: Any, name: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {_type(value)}; give a whole number from {low} to {high}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {_number(value)}; use {low} to {high}")
    return int(value)


def string(value: Any, name: str, limit: int = STRING_MAX) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {_type(value)}; give a string")
    if len(value) > limit:
        raise InvalidRequest(f"{name} has {len(value)} characters; use at most {limit}")
    _utf8(value, name)
    return plain(value)


def boolean(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {_type(value)}; give true or false")
    return value


def one_of(value: Any, name: str, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        near = get_close_matches(value[:STRING_MAX], choices, 1) if isinstance(value, str) else []
        hint = f"did you mean {str(near[0])!r}?" if near else f"use one of {', '.join(choices)}"
        raise InvalidRequest(f"{name} is {shown(value)}; {hint}")
    return plain(value)


def duration_ms(value: Any, name: str, *, low: int = 0, high: int = DURATION_MAX_MS) -> int:
    """Seconds, a timedelta, or a string such as 90s, 1m30s, 500ms or PT1M30S."""
    ms = _duration(value, name)
    if not low <= ms <= high:
        raise InvalidRequest(f"{name} is {_number(ms / 1000)} s; use {_number(low / 1000)} to {_number(high / 1000)} s")
    return ms


def _duration(value: Any, name: str) -> int:
    if isinstance(value, timedelta):
        return round(value.total_seconds() * 1000)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not -1e15 < value < 1e15:  # also refuses nan and infinities
            raise InvalidRequest(f"{name} is {_number(value)} s, which is no duration; use seconds or '1m30s'")
        return round(value * 1000)
    if isinstance(value, str):
        ms = text_ms(value)
        if ms is None:
            raise InvalidRequest(
                f"{name} is {value!r:.60}, which is no duration; write it like '90s', '1m30s' or 'PT90S'"
            )
        return ms
    raise InvalidRequest(f"{name} is {_type(value)}; give a duration: seconds, or a string like '90s'")


def instant_ms(value: Any, name: str) -> int:
    if not isinstance(value, datetime):
        raise InvalidRequest(f"{name} is {_type(value)}; give a datetime")
    try:
        ms = to_ms(value)
    except (OverflowError, ValueError):
        ms = -1
    if not 0 <= ms < 1 << 43:
        raise InvalidRequest(f"{name} is {value}, which is out of range; use an instant between 1970 and 2248")
    return ms


def _type(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def shown(value: Any) -> str:
    """A wrong value for a message; of anything that may be long or nested, only the type."""
    if isinstance(value, str):
        return f"{value[:60]!r}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value)
    return _type(value)


def _number(value: float) -> str:
    """A number for a message; the digits of a huge one are of no use there."""
    if abs(value) >= 10**18:
        return "beyond 10^18" if value > 0 else "below -10^18"
    return f"{value:.15g}"


def _utf8(value: str, name: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        where = f"a lone surrogate at {error.start}"
        raise InvalidRequest(f"{name} is not valid Unicode ({where}); mend the text") from None


# ---- produce ----------------------------------------------------------------------------------------------


def new_items(
    items: Items, clock: Callable[[], int], limit: int = PRODUCE_BATCH_MAX, *, repeats: bool = False
) -> tuple[list[bytes | Record], int, bool]:
    """Records, their bytes together, and whether any has an id or key of its own. `repeats`: an id may come twice."""
    if type(items) is not list and (isinstance(items, bytes | str) or not isinstance(items, Sequence)):
        raise InvalidRequest(f"items is a list of items, not {_type(items)}; put a single one into a list")
    if len(items) == 1 and type(items[0]) is bytes and len(items[0]) <= PAYLOAD_BYTES_MAX:  # the usual case
        return Payloads(items), len(items[0]), False
    batch(len(items), "items", limit)
    if set(map(type, items)) == {bytes}:
        records: list[bytes | Record] = Payloads(items)
        total = sum(map(len, records))  # type: ignore[arg-type]
        if total <= PAYLOAD_BYTES_MAX:  # so is each of them
            return records, total, False
        if total <= PRODUCE_BYTES_MAX and max(map(len, records)) <= PAYLOAD_BYTES_MAX:  # type: ignore[arg-type]
            return records, total, False
        sizes, named = list(map(len, records)), False  # type: ignore[arg-type]
    else:
        now = clock()
        records = [item if type(item) is bytes else _record(item, now, index) for index, item in enumerate(items)]
        sizes = [len(record.payload if isinstance(record, Record) else record) for record in records]
        named = _check_ids(records, repeats)
    if max(sizes) > PAYLOAD_BYTES_MAX:
        index = next(i for i, size in enumerate(sizes) if size > PAYLOAD_BYTES_MAX)
        raise BatchTooLarge(
            f"items[{index}] has a payload of {sizes[index]} bytes, over the limit of {PAYLOAD_BYTES_MAX}; store it"
            " elsewhere and send a reference"
        )
    total = sum(sizes)
    if total > PRODUCE_BYTES_MAX:
        raise BatchTooLarge(f"the request has {total} bytes of payload; split it, the limit is {PRODUCE_BYTES_MAX}")
    return records, total, named


def _check_ids(records: Sequence[bytes | Record], repeats: bool) -> bool:
    named = False
    seen: dict[str, int] = {}
    for index, record in enumerate(records):
        if type(record) is bytes:
            continue
        assert isinstance(record, Record)
        named = named or record.id is not None or record.key is not None
        if record.id is not None and not repeats and seen.setdefault(record.id, index) != index:
            first = seen[record.id]
            raise InvalidRequest(f"items[{first}] and items[{index}] have the same id {record.id!r}; send it once")
    return named


def _record(item: Any, now: int, index: int) -> bytes | Record:
    if isinstance(item, str):
        return _utf8(item, f"items[{index}]")
    if isinstance(item, bytes | bytearray | memoryview):
        return _bytes(item, f"items[{index}]")
    if not isinstance(item, NewItem):
        raise InvalidRequest(f"items[{index}] is {_type(item)}; give bytes, a string or a NewItem")
    where = f"items[{index}]."
    payload: Any = item.payload
    if isinstance(payload, str):
        payload = _utf8(payload, where + "payload")
    elif isinstance(payload, bytes | bytearray | memoryview):
        payload = _bytes(payload, where + "payload")
    else:
        raise InvalidRequest(f"{where}payload is {_type(payload)}; give bytes or a string")
    if item.group is not None:
        raise NotBuilt(f"{where}group: groups are not built yet; leave it out")
    enqueue_at = _enqueue_at(item, where, now)
    expires = 0
    if item.expire_timeout is not None:
        expires = now + duration_ms(item.expire_timeout, where + "expire_timeout", low=1)
    limit = -1
    if item.max_attempts is not None:
        limit = integer(item.max_attempts, where + "max_attempts", 0, ATTEMPTS_LIMIT)
    return Record(
        payload=payload,
        id=None if item.id is None else _matching(item.id, where + "id", _ID),
        key=None if item.key is None else _key(item.key, where + "key"),
        kind=string(item.kind, where + "kind"),
        encoding=string(item.encoding, where + "encoding"),
        reference=string(item.reference, where + "reference"),
        priority=integer(item.priority, where + "priority", -PRIORITY_LIMIT - 1, PRIORITY_LIMIT),
        enqueue_at=enqueue_at,
        max_attempts=limit,
        expire_deadline=expires,
        correlation_id=None
        if item.correlation_id is None
        else _matching(item.correlation_id, where + "correlation_id", _CORRELATION),
    )


def _bytes(value: bytes | bytearray | memoryview, name: str) -> bytes:
    try:
        return bytes(value)
    except ValueError as error:
        raise InvalidRequest(f"{name} cannot be read ({error}); produce it before its memory is released") from None


def _enqueue_at(item: NewItem, where: str, now: int) -> int:
    if item.delay is not None and item.enqueue_at is not None:
        raise InvalidRequest(f"{where}delay and {where}enqueue_at exclude each other; give one")
    due = 0
    if item.delay is not None:
        due = now + duration_ms(item.delay, where + "delay")
    elif item.enqueue_at is not None:
        due = instant_ms(item.enqueue_at, where + "enqueue_at")
    return due if due > now else 0


def _key(value: Any, name: str) -> str:
    if value == "":
        raise InvalidRequest(f"{name} is empty; leave it out for an item without a key")
    return string(value, name, KEY_MAX)


def _matching(value: Any, name: str, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        allowed = "letters, digits and '._:-'" if pattern is _ID else "printable ASCII"
        raise InvalidRequest(f"{name} is {shown(value)}; use 1 to 128 characters of {allowed}")
    return plain(value)


def request_id(value: Any) -> str:
    return _key(value, "request_id")


def batch(count: int, name: str, limit: int) -> None:
    if count == 0:
        raise InvalidRequest(f"{name} is empty; give at least one")
    if count > limit:
        raise BatchTooLarge(f"{name} has {count} entries; split it, the limit is {limit}")


# ---- the other calls --------------------------------------------------------------------------------------


def lease_batch(value: Any) -> int:
    if isinstance(value, int) and value > LEASE_BATCH_MAX:
        raise BatchTooLarge(f"batch is {_number(value)}; lease at most {LEASE_BATCH_MAX} at a time")
    return integer(value, "batch", 1, LEASE_BATCH_MAX)


def wait_ms(value: Any) -> int:
    return duration_ms(value, "wait", high=WAIT_MAX_MS)


def lease_timeout_ms(value: Any, *, low: int) -> int | None:
    return None if value is None else duration_ms(value, "lease_timeout", low=low)


def leases(value: Any) -> Sequence[LeaseLike]:
    if type(value) is LeasedItems and value.runs:
        return value
    if type(value) is not list and (isinstance(value, str | bytes | LeasedItem) or not isinstance(value, Sequence)):
        raise InvalidRequest(f"leases is a list of items or tokens, not {_type(value)}; put a single one into a list")
    if not 0 < len(value) <= TOKEN_BATCH_MAX:
        batch(len(value), "leases", TOKEN_BATCH_MAX)
    kinds = set(map(type, value))
    if kinds != {str} and not all(issubclass(kind, str | LeasedItem) for kind in kinds):
        index, lease = next((place, one) for place, one in enumerate(value) if not isinstance(one, str | LeasedItem))
        raise InvalidRequest(f"leases[{index}] is {_type(lease)}; give the leased item or its `lease`")
    return value


def ids(value: Any) -> list[str]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(f"ids is a list of item ids, not {_type(value)}; put a single one into a list")
    batch(len(value), "ids", TOKEN_BATCH_MAX)
    return [string(one, f"ids[{index}]") for index, one in enumerate(value)]


def retries(items: Any, now: int) -> list[RetryItem]:
    if isinstance(items, str | bytes | Retry | LeasedItem) or not isinstance(items, Sequence):
        raise InvalidRequest(f"items is a list, not {_type(items)}; put a single one into a list")
    batch(len(items), "items", TOKEN_BATCH_MAX)
    return [_retry(item, f"items[{index}]", now) for index, item in enumerate(items)]


def _retry(item: Any, where: str, now: int) -> RetryItem:
    if isinstance(item, str | LeasedItem):
        return RetryItem(item)
    if not isinstance(item, Retry):
        raise InvalidRequest(f"{where} is {_type(item)}; give a leased item, its `lease`, or a Retry")
    if not isinstance(item.lease, str | LeasedItem):
        raise InvalidRequest(f"{where}.lease is {_type(item.lease)}; give the leased item or its `lease`")
    if item.delay is not None and item.retry_at is not None:
        raise InvalidRequest(f"{where}.delay and {where}.retry_at exclude each other; give one")
    due = None
    if item.delay is not None:
        due = now + duration_ms(item.delay, f"{where}.delay")
    elif item.retry_at is not None:
        due = instant_ms(item.retry_at, f"{where}.retry_at")
    error = error_text(item.error, f"{where}.error")
    deferred = one_of(item.intent, f"{where}.intent", ("failure", "defer")) == "defer"
    return RetryItem(item.lease, deferred, due, error, boolean(item.dead, f"{where}.dead"))


def error_text(value: Any, name: str) -> str | None:
    return None if value is None else string(value, name, 1 << 30)[:ERROR_CHARS_MAX]


def document(value: Any, name: str) -> bytes:
    try:
        encoded = encode_state(value)
    except (TypeError, ValueError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{name} cannot be stored ({error}); use JSON values or bytes") from None
    if len(encoded) > STATE_DOC_BYTES_MAX:
        raise BatchTooLarge(f"{name} has {len(encoded)} bytes; the limit is {STATE_DOC_BYTES_MAX}: store it elsewhere")
    _check_document(value, name)
    return encoded


def _check_document(value: Any, name: str) -> None:
    """What would come back as something else, or not at all through JSON, is refused. It is known to be finite."""
    level = [value]
    for _ in range(STATE_DOC_DEPTH_MAX):
        inside: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                for key in one:
                    string(key, f"a key in {name}", STATE_DOC_BYTES_MAX)
                inside += one.values()
            elif isinstance(one, list | tuple):
                inside += one
            elif isinstance(one, float) and not math.isfinite(one):
                raise InvalidRequest(f"{name} holds {one}, which JSON does not know; use a finite number or null")
            elif not (one is None or isinstance(one, str | int | float | bytes)):
                raise InvalidRequest(f"{name} holds a {_type(one)}; use JSON values or bytes")
        if not inside:
            return
        level = inside
    raise InvalidRequest(f"{name} is nested too deeply; use at most {STATE_DOC_DEPTH_MAX} levels")


def states(value: Any) -> list[State]:
    """What can be cleared: what is claimed cannot."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidRequest("states is a list of states; give at least one")
    if str(State.CLAIMED) in list(value):
        raise InvalidRequest("what is claimed is not cleared; release its claim first")
    choices = [state for state in State if state != State.CLAIMED]
    return list(dict.fromkeys(State(one_of(state, "states", choices)) for state in value))


def state(value: Any) -> State | None:
    return None if value is None else State(one_of(value, "state", list(State)))


def list_limit(value: Any, limit_max: int = LIST_LIMIT_MAX) -> int:
    """More than a page can hold is asked for by those who want all they can get."""
    if isinstance(value, int) and value > LIST_LIMIT_MAX:
        return min(value, limit_max)
    return integer(value, "limit", 1, LIST_LIMIT_MAX)


def cursor(value: Any) -> tuple[tuple[int, int], int]:
    """A partition and a number in it; and the order of partitions."""
    if value is None:
        return (0, 0), 0
    match = re.fullmatch(r"([0-9]{1,5}):([0-9]{1,15})(?::([0-9]{1,15}))?", value) if isinstance(value, str) else None
    if match is None:
        raise InvalidRequest(f"after is {shown(value)}, which is no cursor; use the `next` of the page before")
    return (int(match[1]), int(match[2])), int(match[3] or 0)


def audit_cursor(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,15}", value):
        raise InvalidRequest(f"after is {shown(value)}, which is no cursor; use the `next` of the page before")
    return int(value)


def redrive_filter(value: Any) -> RedriveFilter:
    if value is None:
        return RedriveFilter()
    if isinstance(value, RedriveFilter):
        value = {name: wanted for name, wanted in msgspec.structs.asdict(value).items() if wanted is not None}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"filter is {_type(value)}; give a RedriveFilter or a mapping")
    fields, checked = RedriveFilter.__struct_fields__, {}
    for name, wanted in value.items():
        checked[one_of(name, "a filter's field", fields)] = string(wanted, f"filter.{name}")
    return RedriveFilter(**checked)


def rate(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e9:
        raise InvalidRequest(f"rate is {shown(value)}; give items a second, above 0")
    return float(value)


# ---- settings ---------------------------------------------------------------------------------------------


_BACKOFF_HIGH = {"base": 1_000, "jitter": 1}  # a base beyond it reaches any cap at once


def backoff(value: Any) -> dict[str, float]:
    """The fields of Backoff that were given."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"backoff is {_type(value)}; give a mapping of base, cap and jitter")
    checked: dict[str, float] = {}
    for name, given in value.items():
        if one_of(name, "a field of backoff", ("base", "cap", "jitter")) == "cap":
            checked["cap_ms"] = duration_ms(given, "backoff.cap")
            continue
        high = _BACKOFF_HIGH[name]
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= high:
            raise InvalidRequest(f"backoff.{name} is {shown(given)}; use a number from 0 to {high}")
        checked[name] = float(given)
    return checked


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of QueueSettings, and within `backoff` of Backoff, for the arguments that were given."""
    checked: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("lease_timeout", "expire_timeout"):
            checked[f"{name}_ms"] = duration_ms(value, name, low=1)
        elif name in ("dedup_window", "completed_retention"):
            checked[f"{name}_ms"] = duration_ms(value, name)
        elif name == "max_attempts":
            checked[name] = integer(value, name, 0, ATTEMPTS_LIMIT)
        elif name == "dead_queue":
            checked[name] = None if value is None else queue_name(value)
        elif name == "dead":
            checked[name] = one_of(value, name, ("keep", "delete"))
        elif name == "durability":
            checked[name] = one_of(value, name, ("full", "relaxed"))
        elif name == "backoff":
            checked[name] = backoff(value)
        else:
            assert name == "reference", name
            checked[name] = string(value, name)
    return checked


def partitions(value: Any) -> int:
    return integer(value, "partitions", 1, PARTITIONS_MAX)
