"""What can be wrong with the settings of stores, from a file or from a program. All of it is told, not the first."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from msgspec import structs

from millpond.errors import InvalidRequest
from millpond.model import StoreSettings
from millpond.service.validate import shown
from millpond.store.base import DEFAULT, DRIVERS

STORES_MAX = 100  # a thread and perhaps connections each; nobody has more disks and databases than this
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", re.ASCII)
_URL = re.compile(r"postgres(ql)?://.+", re.DOTALL)
_NEEDS = {"sqlite": "path", "postgres": "url"}  # what a driver cannot be without; no other takes it

Wrong = tuple[int, str, str]  # which store, which field, and what is wrong: `is …; do …`


def stores(given: Any, data: Path | None) -> tuple[StoreSettings, ...]:
    """Of a program. `data` is the data directory, if there is one."""
    if isinstance(given, str | bytes | Mapping | StoreSettings) or not isinstance(given, Sequence):
        raise InvalidRequest(f"stores is {shown(given)}; give a list of StoreSettings")
    for position, one in enumerate(given):
        if not isinstance(one, StoreSettings):
            raise InvalidRequest(f"stores[{position}] is {shown(one)}; give StoreSettings")
    fields = [
        {name: value for name, value in structs.asdict(one).items() if value != "" or name == "name"} for one in given
    ]
    for position, field, text in problems(fields, data):
        raise InvalidRequest(f"stores[{position}].{field} {text}" if field else f"stores {text}")
    return tuple(given)


def problems(given: Sequence[Mapping[str, Any]], data: Path | None) -> Iterator[Wrong]:
    """A mapping a store, of what was written of it."""
    if len(given) > STORES_MAX:
        yield STORES_MAX, "", f"are {len(given)}; use at most {STORES_MAX}"
    names: dict[str, int] = {}
    places: dict[str, str] = {} if data is None else {_real(str(data)): DEFAULT}
    for position, one in enumerate(given):
        wrong = [*_fields(one), *_together(one)]
        yield from ((position, field, text) for field, text in wrong)
        name = one.get("name")
        if any(field == "name" for field, _ in wrong) or not isinstance(name, str):
            continue
        if name in names:
            yield position, "name", f"is {name!r} a second time; give each store a name of its own"
        names.setdefault(name, position)
        yield from ((position, field, text) for field, text in _taken(one, name, places))


def _fields(one: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for field, value in one.items():
        check = _CHECKS.get(field)
        if check is None:
            near = get_close_matches(str(field)[:100], _CHECKS, 1)
            yield field, f"is no key of a store; {f'did you mean {near[0]!r}?' if near else 'remove it'}"
        elif text := check(value):
            yield field, text


def _together(one: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is missing, or too much, beside the rest."""
    if "name" not in one:
        yield "name", "is missing; give the store a name"
    if one.get("name") == DEFAULT:
        for field in ("driver", "path", "url"):
            if field in one:
                yield field, f"is set for store {DEFAULT!r}, which is the data directory; remove it, or name the store"
        return
    driver = one.get("driver")
    if driver is None:
        yield "driver", f"is missing; use {' or '.join(DRIVERS)}"
    if driver not in DRIVERS:
        return
    for kind, field in _NEEDS.items():
        if kind == driver and field not in one:
            yield field, f"is missing; a store of driver {driver!r} needs it"
        if kind != driver and field in one:
            yield field, f"is for driver {kind!r}; remove it, or change the driver"


def _taken(one: Mapping[str, Any], name: str, places: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Two stores in one place would be one."""
    for field, place in (("path", _real), ("url", str)):
        if isinstance(one.get(field), str):
            other = places.setdefault(place(one[field]), name)
            if other != name:
                yield field, f"is that of store {other!r} too; give each store a place of its own"


def _real(path: str) -> str:
    """What is no path is told by who opens it."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return path


def _name(value: Any) -> str | None:
    if isinstance(value, str) and _NAME.fullmatch(value):
        return None
    return f"is {shown(value)}; use 1 to 63 letters, digits, '-' and '_', and begin with a letter or a digit"


def _driver(value: Any) -> str | None:
    if value in DRIVERS:
        return None
    near = get_close_matches(str(value).lower()[:100], DRIVERS, 1)
    return f"is {shown(value)}; {f'did you mean {near[0]!r}?' if near else 'use ' + ' or '.join(DRIVERS)}"


def _path(value: Any) -> str | None:
    return None if isinstance(value, str) and value and "\0" not in value else f"is {shown(value)}; write a path"


def _url(value: Any) -> str | None:
    """Not shown: it may have a password in it."""
    if isinstance(value, str) and _URL.fullmatch(value):
        return None
    return "is no address of a database; write it like 'postgresql://user@host:5432/database'"


def _affinity(value: Any) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value) and 0 <= value <= 1:
        return None
    return f"is {shown(value)}; use a number from 0.0 (no partitions) to 1.0"


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "name": _name,
    "driver": _driver,
    "path": _path,
    "url": _url,
    "affinity": _affinity,
}
