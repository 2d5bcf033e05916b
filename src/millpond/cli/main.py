"""`millpond`: finds the noun, and leaves the rest to its file.

A noun is a module of this package with `add(subparsers)`, which adds a parser whose `run` default is a function from
the parsed arguments to an exit code. Only the module of the noun that was asked for is imported, and what is heavy is
imported inside the functions that need it: a command must answer before anybody waits.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from millpond.cli.output import FAILED, code_of, fail

NOUNS = {
    "serve": "run the server",
    "token": "create, list and revoke access tokens",
    "config": "check the configuration, and see where each value came from",
    "history": "keep the history of all items, and ask it",
    "dlq": "look at dead items, bring them back, undo that",
}

EXAMPLES = """\
examples:
  millpond serve                                          on http://127.0.0.1:7410, for this machine only
  millpond token create --role producer --queues 'team-a/*'
  millpond config check --config millpond.toml

exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 no answer from the server
"""

INTERRUPTED = 130  # as shells count a command that ended by SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = build_parser(arguments).parse_args(arguments)
    try:
        code: int = asked.run(asked)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read this has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _told(error)


def _told(error: Exception) -> int:
    """Errors that say what to do are told in a line; anything else is a bug, and its trace is what we need."""
    from millpond.errors import InternalError, MillpondError

    if isinstance(error, MillpondError) and not isinstance(error, InternalError):
        return fail(error.message, code_of(error))
    if isinstance(error, OSError):
        return fail(f"{error}; check the path, its permissions and the disk")
    raise error


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millpond",
        description="A durable work queue.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=ShowVersion, help="show the version and end")
    nouns = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for noun, summary in NOUNS.items():
        if noun == chosen:
            importlib.import_module(f"millpond.cli.{noun}").add(nouns)
        else:
            nouns.add_parser(noun, help=summary, add_help=False)
    return parser


class ShowVersion(argparse.Action):
    """argparse's own wants the version before anybody has asked, and looking it up takes its time."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"millpond {version('millpond')}")
        parser.exit()
