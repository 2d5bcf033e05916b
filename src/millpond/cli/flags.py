"""How nouns make their parsers, and the flags that several of them share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from millpond.cli.output import WRONG_USAGE, say
from millpond.config.keys import BY_NAME, KEYS
from millpond.config.load import Loaded, load

Subparsers = Any  # argparse does not name this type
Arguments = argparse.Namespace
Run = Callable[[Arguments], int]  # what a verb does; returns the exit code
COMPLETES = "completes"  # of an argument without choices: words that a shell may offer for it
NEGATIVE = re.compile(r"-\.?\d.*")  # a value, such as -5m, and no flag: then it can be told what is wrong with it


def add_command(subparsers: Subparsers, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """Help that teaches by example. Flags are written out: a short form of today is ambiguous tomorrow."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser._negative_number_matcher = NEGATIVE
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON value and nothing else")


def add_noun(subparsers: Subparsers, name: str, summary: str, *examples: str) -> Subparsers:
    """The verbs of a noun, whose help shows the examples of them all; what is told below those stays with its verb."""
    heads = (one.partition("\n\n")[0].rstrip() + "\n" for one in examples)
    noun = add_command(subparsers, name, summary, "".join(heads))
    return noun.add_subparsers(metavar="VERB", required=True)


# ---- what a flag's value may be -------------------------------------------------------------------------------


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number in these bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"is {text!r:.60}; give a whole number {bounds}")
        return value

    return read


def number(low: float, high: float = float("inf")) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high or value == float("inf"):
            bounds = f"of {low:g} or more" if high == float("inf") else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"is {text!r:.60}; give a number {bounds}")
        return value

    return read


def duration(text: str) -> float:
    """Seconds, of `90`, `90s`, `1m30s`, `500ms` or `PT1M30S`."""
    from millpond.durations import text_ms

    ms = text_ms(text)
    try:
        value = float(text) if ms is None else ms / 1000
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text!r:.60}; give a duration such as 90, '90s', '1m30s' or '2h'")
    return value


def moment(text: str) -> datetime:
    """An instant; UTC unless it names a zone."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"is {text!r:.60}; give an instant such as 2026-03-01T12:00:00Z or 2026-03-01T12:00+01:00"
        ) from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


# ---- the configuration ----------------------------------------------------------------------------------------


def add_config_flags(parser: argparse.ArgumentParser, names: Iterable[str] = BY_NAME) -> None:
    """--config, and a flag for each key. They stay text here: one place reads values, wherever they come from."""
    parser.add_argument("--config", metavar="FILE", help="the configuration, TOML (MILLPOND_CONFIG)")
    for key in (BY_NAME[name] for name in names):
        about = f"{key.about} ({key.variable})"
        if key.switch:
            parser.add_argument(key.flag, dest=key.name, action="store_const", const="true", help=about)
        elif key.many:
            parser.add_argument(
                key.flag, dest=key.name, action="append", metavar=key.metavar, help=f"{about}; again for more"
            )
        else:
            parser.add_argument(key.flag, dest=key.name, metavar=key.metavar, help=about)


def load_config(asked: Arguments) -> Loaded:
    given = vars(asked)
    return load(given["config"], {key.name: given[key.name] for key in KEYS if given.get(key.name) is not None})


def load_or_exit(asked: Arguments) -> Loaded:
    """For commands that cannot go on with a configuration that is wrong."""
    loaded = load_config(asked)
    for problem in loaded.problems:
        say(f"millpond: {problem}")
    if loaded.problems:
        raise SystemExit(WRONG_USAGE)
    return loaded
