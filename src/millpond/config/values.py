"""From what somebody wrote to a value: one function a kind of value, for TOML, environment and flags alike.

Environment and flags are text, TOML has types; each function takes either. A ValueError says `is …; do …`, without the
key, which the caller knows.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millpond.config.addresses import is_host, read_address
from millpond.config.settings import Address
from millpond.errors import InvalidRequest
from millpond.service.validate import duration_ms

ADDRESSES_MAX = 16  # a listening socket each; nobody has more networks than this
HOSTS_MAX = 1_000  # looked through at a Host header that was not seen before

_SIZE = re.compile(r"(\d{1,15})\s*(b|kb|mb|gb|kib|mib|gib)?", re.IGNORECASE | re.ASCII)
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")

Read = Callable[[Any, Path], Any]
"""Of what was written, and the directory from which relative paths start."""


class MemberError(ValueError):
    """Of one member of an array: `position` finds its line."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(text)
        self.position = position


def boolean(raw: Any, _: Path) -> bool:
    word = str(raw).strip().lower() if isinstance(raw, bool | str) else ""
    if word not in _TRUE + _FALSE:
        raise ValueError(f"is {shown(raw)}; write true or false")
    return word in _TRUE


def count(low: int, high: int) -> Read:
    def read(raw: Any, _: Path) -> int:
        number = int(raw) if isinstance(raw, str) and re.fullmatch(r"\s*\d{1,15}\s*", raw, re.ASCII) else raw
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"is {shown(raw)}; write a whole number from {low} to {high}")
        if not low <= number <= high:
            raise ValueError(f"is {number}; use {low} to {high}")
        return number

    return read


def size(low: int, high: int) -> Read:
    """Bytes, or a text with a unit."""

    def read(raw: Any, _: Path) -> int:
        match = _SIZE.fullmatch(str(raw).strip()) if isinstance(raw, str | int) and not isinstance(raw, bool) else None
        if match is None:
            raise ValueError(f"is {shown(raw)}; write a number of bytes, or '16MiB'")
        number = int(match[1]) * _SIZE_UNITS[(match[2] or "").lower()]
        if not low <= number <= high:
            raise ValueError(f"is {size_text(number)}; use {size_text(low)} to {size_text(high)}")
        return number

    return read


def duration(low: float, high: float) -> Read:
    """Seconds, or a text like '1m30s'."""

    def read(raw: Any, _: Path) -> float:
        number = isinstance(raw, str) and re.fullmatch(r"\s*\d{1,15}(\.\d{1,9})?\s*", raw, re.ASCII)
        try:
            ms = duration_ms(float(raw) if number else raw, "", low=round(low * 1000), high=round(high * 1000))
        except InvalidRequest as error:
            raise ValueError(error.message.strip()) from None
        return ms / 1000

    return read


def choice(*choices: str) -> Read:
    def read(raw: Any, _: Path) -> str:
        if not isinstance(raw, str) or raw.strip().lower() not in choices:
            raise ValueError(f"is {shown(raw)}; {nearest(raw, choices) or 'use ' + ' or '.join(choices)}")
        return raw.strip().lower()

    return read


def path(raw: Any, base: Path) -> Path:
    if not isinstance(raw, str) or not raw or "\0" in raw:
        raise ValueError(f"is {shown(raw)}; write a path")
    try:
        return (base / Path(raw).expanduser()).absolute()
    except RuntimeError as error:  # ~ of nobody
        raise ValueError(f"is {shown(raw)} ({error}); write a path from /") from None


def addresses(raw: Any, base: Path) -> tuple[Address, ...]:
    found = tuple(_each(raw, ADDRESSES_MAX, "an address, like '127.0.0.1:7410'", lambda one: read_address(one, base)))
    for position, address in enumerate(found):
        if address in found[:position] and (address.port or address.path):
            raise MemberError(position, f"names {address} twice; write it once")
    if not found:
        raise ValueError("is empty; write at least one address, like '127.0.0.1:7410'")
    return found


def hosts(raw: Any, _: Path) -> tuple[str, ...]:
    return tuple(_each(raw, HOSTS_MAX, "a host's name, like 'queue.example.org'", _host))


def _host(text: str) -> str:
    host = text.strip("[]").lower()
    if host != "*" and not is_host(host):
        raise ValueError(f"is {shown(text)}; write a host's name without port, or '*' for any")
    return host


def _each(raw: Any, most: int, what: str, read: Callable[[str], Any]) -> list[Any]:
    """Of an array; or of one text, with commas between."""
    members = [part.strip() for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw
    if not isinstance(members, list):
        raise ValueError(f"is {shown(raw)}; write {what}, or an array of them")
    if len(members) > most:
        raise ValueError(f"has {len(members)} entries; use at most {most}")
    return [_member(position, member, what, read) for position, member in enumerate(members)]


def _member(position: int, member: Any, what: str, read: Callable[[str], Any]) -> Any:
    if not isinstance(member, str):
        raise MemberError(position, f"has {shown(member)} in it; write {what}")
    try:
        return read(member)
    except ValueError as error:
        raise MemberError(position, str(error)) from None


# ---- words for people -------------------------------------------------------------------------------------


def shown(raw: Any) -> str:
    if isinstance(raw, dict):
        return "a table"
    if isinstance(raw, list):
        return "an array"
    return str(raw).lower() if isinstance(raw, bool) else f"{raw!r:.60}"


def text_of(value: Any) -> str:
    """Of one that was read."""
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def size_text(number: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        scale = _SIZE_UNITS[unit.lower()]
        if number >= scale and number % scale == 0:
            return f"{number // scale}{unit}"
    return str(number)


def nearest(wrong: Any, right: Sequence[str]) -> str:
    """`did you mean …?`, or nothing."""
    found = difflib.get_close_matches(str(wrong).lower()[:100], right, 1)
    return f"did you mean {found[0]!r}?" if found else ""
