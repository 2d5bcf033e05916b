"""How nouns make their parsers, and the flags that several of them share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from millpond.cli.output import WRONG_USAGE, say
from millpond.config.keys import BY_NAME, KEYS
from millpond.config.load import Loaded, load

Subparsers = Any  # argparse does not name this type
Arguments = argparse.Namespace


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
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON value and nothing else")


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
