"""What every command says and how it ends: data on stdout, words on stderr, one of five exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

DONE = 0
FAILED = 1
WRONG_USAGE = 2
NOT_FOUND = 3
NO_ANSWER = 4


def say(text: str) -> None:
    """To the person, never to the next program in the pipe."""
    print(text, file=sys.stderr)


def fail(text: str, code: int = FAILED) -> int:
    say(f"millpond: {text}")
    return code


def print_json(value: Any) -> None:
    """One JSON value, and a line's end."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def code_of(error: Exception) -> int:
    """By what the caller can do about it."""
    from millpond.errors import InvalidRequest, NotFound, Unavailable

    if isinstance(error, InvalidRequest):
        return WRONG_USAGE
    if isinstance(error, NotFound):
        return NOT_FOUND
    return NO_ANSWER if isinstance(error, Unavailable) else FAILED
