"""The checks of `validate.new_items` on whole columns: what many rows are staged with, at a fraction of the price.

Here it is only told whether all is in order. Where anything is not, the items are looked at one by one, and that finds
which, and says so as to any producer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from millpond.errors import InvalidRequest
from millpond.history.format import Record
from millpond.model import (
    ATTEMPTS_LIMIT,
    KEY_MAX,
    PAYLOAD_BYTES_MAX,
    PRIORITY_LIMIT,
    PRODUCE_BYTES_MAX,
    STAGE_ITEMS_MAX,
    STRING_MAX,
    ItemColumns,
    Items,
    PlainItems,
)
from millpond.service import validate

ID_MAX = 128  # as validate's patterns have it; so has a correlation id
_IDS = re.compile(r"[A-Za-z0-9._:-]*")
_CORRELATIONS = re.compile(r"[\x20-\x7e]*")

Columns = Mapping[str, Sequence[Any]]


def staged_items(items: Items, clock: Callable[[], int]) -> tuple[list[bytes | Record] | PlainItems, int, bool]:
    """Records, their bytes together, and whether any may have an id of its own; an id may come twice."""
    if type(items) is PlainItems and _is_in_bounds(len(items), items.size, items.largest):
        return items, items.size, False
    if type(items) is ItemColumns and len(items):
        total, largest = sum(map(len, items.payloads)), max(map(len, items.payloads))
        if _is_in_bounds(len(items), total, largest) and (records := _records(items, clock())) is not None:
            return records, total, "id" in items.columns
    return validate.new_items(items, clock, STAGE_ITEMS_MAX, repeats=True)


def _is_in_bounds(count: int, total: int, largest: int) -> bool:
    return 0 < count <= STAGE_ITEMS_MAX and total <= PRODUCE_BYTES_MAX and largest <= PAYLOAD_BYTES_MAX


def _records(items: ItemColumns, now: int) -> list[bytes | Record] | None:
    """None: not all is in order."""
    columns = items.columns
    if not columns:
        return list(items.payloads)
    if not columns.keys() <= _KNOWN:
        return None
    try:
        if not all(_CHECKS[name](_given(name, values)) for name, values in columns.items() if name in _CHECKS):
            return None
        due, expires = _due(columns, now), _expires(columns, now)
    except (InvalidRequest, UnicodeEncodeError):
        return None
    texts = [_filled(columns, name, "") for name in ("kind", "encoding", "reference")]
    priorities, limits = _filled(columns, "priority", 0), _filled(columns, "max_attempts", -1)
    ids, keys, correlations = [columns.get(name) or repeat(None) for name in ("id", "key", "correlation_id")]
    records: list[bytes | Record] = list(
        map(Record, items.payloads, ids, keys, *texts, priorities, due, limits, expires, correlations)
    )
    if all(None in values for values in columns.values()):
        nothing = (None,) * len(columns)
        rows = zip(records, items.payloads, zip(*columns.values(), strict=True), strict=True)
        records = [payload if row == nothing else record for record, payload, row in rows]
    return records


def _given(name: str, values: Sequence[Any]) -> Collection[Any]:
    """What is to be looked at: of values that many rows share, each once."""
    if name in _SHARED:
        return set(values) - {None}
    return [value for value in values if value is not None] if None in values else values


def _filled(columns: Columns, name: str, nothing: Any) -> Any:
    """The values, with those that are not there as a record has them."""
    values = columns.get(name)
    if values is None:
        return repeat(nothing)
    return [nothing if value is None else value for value in values] if None in values else values


def _due(columns: Columns, now: int) -> Any:
    delays, instants = columns.get("delay"), columns.get("enqueue_at")
    if delays is not None and instants is not None:
        raise InvalidRequest("some row may have both; see which")
    if delays is not None:
        dues = [0 if delay is None else now + validate.duration_ms(delay, "delay") for delay in delays]
    elif instants is not None:
        dues = [0 if at is None else validate.instant_ms(at, "enqueue_at") for at in instants]
    else:
        return repeat(0)
    return [due if due > now else 0 for due in dues]


def _expires(columns: Columns, now: int) -> Any:
    timeouts = columns.get("expire_timeout")
    if timeouts is None:
        return repeat(0)
    return [0 if one is None else now + validate.duration_ms(one, "expire_timeout", low=1) for one in timeouts]


# ---- whether all values of a column are in order -----------------------------------------------------------


def _are_texts(values: Collection[Any], low: int, high: int, allowed: re.Pattern[str] | None = None) -> bool:
    if set(map(type, values)) - {str}:
        return False
    lengths, joined = set(map(len, values)), "".join(values)
    if not joined.isascii():
        joined.encode()  # fails on lone surrogates
    return low <= min(lengths, default=low) and max(lengths, default=low) <= high and _matches(joined, allowed)


def _matches(joined: str, allowed: re.Pattern[str] | None) -> bool:
    return allowed is None or allowed.fullmatch(joined) is not None


def _are_integers(values: Collection[Any], low: int, high: int) -> bool:
    return set(map(type, values)) <= {int} and low <= min(values, default=low) and max(values, default=low) <= high


_SHARED = ("kind", "encoding", "reference", "priority", "max_attempts")
_CHECKS: dict[str, Callable[[Collection[Any]], bool]] = {
    "id": partial(_are_texts, low=1, high=ID_MAX, allowed=_IDS),
    "key": partial(_are_texts, low=1, high=KEY_MAX),
    "correlation_id": partial(_are_texts, low=1, high=ID_MAX, allowed=_CORRELATIONS),
    **dict.fromkeys(_SHARED[:3], partial(_are_texts, low=0, high=STRING_MAX)),
    "priority": partial(_are_integers, low=-PRIORITY_LIMIT - 1, high=PRIORITY_LIMIT),
    "max_attempts": partial(_are_integers, low=0, high=ATTEMPTS_LIMIT),
}
_KNOWN = {*_CHECKS, "delay", "enqueue_at", "expire_timeout"}
