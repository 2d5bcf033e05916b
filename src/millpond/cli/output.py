"""What every command says and how it ends: data on stdout, words on stderr, one of five exit codes.

A table on a terminal is drawn with rich, which is not imported for anybody else: a pipe gets plain text, aligned, with
all that is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from millpond.cli.text import one_line

if TYPE_CHECKING:
    from millpond.model import Result

DONE = 0
FAILED = 1
WRONG_USAGE = 2
NOT_FOUND = 3
NO_ANSWER = 4


def say(text: str) -> None:
    """To the person, never to the next program in the pipe. Whether anybody can hear it changes nothing."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def fail(text: str, code: int = FAILED) -> int:
    say(f"millpond: {text}")
    return code


def print_json(value: Any) -> None:
    """One JSON value, and a line's end."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())


def print_json_line(value: Any) -> None:
    """One of many, for what has no end."""
    import msgspec

    print(msgspec.json.encode(value, enc_hook=str).decode(), flush=True)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    rows = [[one_line(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from millpond.cli.drawing import draw

        draw(head, rows)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_fields(fields: Mapping[str, Any]) -> None:
    """One thing, a line for each of its fields. Text of several lines is set in below its name."""
    width = max(map(len, fields))
    for name, value in fields.items():
        first, *rest = str(value).splitlines() or [""]
        print(f"{name:{width}}  {one_line(first)}".rstrip())
        for line in rest:
            print(f"{'':{width}}  {one_line(line)}".rstrip())


def agreed(question: str) -> bool:
    """Whether the person says yes; nobody there is a no."""
    if not sys.stdin.isatty():
        return False
    say(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def code_of(error: Exception) -> int:
    """By what the caller can do about it."""
    from millpond.errors import BadReply, DirectoryInUse, InvalidRequest, NotFound, Unavailable

    if isinstance(error, InvalidRequest):
        return WRONG_USAGE
    if isinstance(error, NotFound):
        return NOT_FOUND
    silent = isinstance(error, DirectoryInUse) and error.details.get("silent")
    return NO_ANSWER if isinstance(error, Unavailable | BadReply) or silent else FAILED


def code_of_results(results: Iterable[Result]) -> int:
    """Of a batch: what its errors say if they agree, else that it failed."""
    from millpond.errors import made

    return agreed_code({code_of(made(one.error.code, one.error.message)) for one in results if one.error is not None})


def agreed_code(codes: set[int]) -> int:
    """Of several failures, the one code that they have; no failure at all is done."""
    return FAILED if len(codes) > 1 else next(iter(codes), DONE)
