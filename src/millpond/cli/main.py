"""`millpond`: finds the noun, and leaves the rest to its file.

A noun is a module of this package with `add(subparsers)`, which adds a parser whose `run` default is a function from
the parsed arguments to an exit code. Only the module of the noun that was asked for is imported, and what is heavy is
imported inside the functions that need it: a command must answer before anybody waits.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from millpond.cli.output import FAILED, WRONG_USAGE, code_of, fail

NOUNS = {
    "enqueue": "add a job: a command for a worker to run",
    "worker": "run jobs; stop and list workers",
    "status": "how many jobs there are, and who works on them",
    "list": "list the jobs",
    "job": "look at one job: its story, output and result; cancel it",
    "schedule": "jobs by the clock: cron lines and intervals",
    "dlq": "look at dead jobs and items, bring them back, undo that",
    "config": "settings of jobs; check the configuration of a server",
    "queue": "create, look at, change and delete queues",
    "produce": "add items to a queue",
    "lease": "take items to work on, for shell scripts",
    "complete": "say that leased items are done",
    "retry": "hand leased items back",
    "extend": "work longer on leased items",
    "state": "write a leased item's state document",
    "tail": "follow what happens in a queue",
    "claim": "list and release the claims of batch readers",
    "serve": "run the server",
    "token": "create, list and revoke access tokens",
    "history": "keep the history of all items, and ask it",
    "bench": "measure this machine, in a minute",
    "demo": "the main job in a minute: produce, lease, complete, nothing lost",
    "completion": "make your shell complete these words",
}
FILES = {"complete": "holding", "retry": "holding", "extend": "holding", "state": "holding"}  # where it is not its name

EXAMPLES = """\
examples:
  millpond enqueue 'sleep 2 && echo done'                 a job; no server is needed
  millpond worker start --count 3                         runs jobs, until Ctrl-C
  millpond status                                         in another terminal
  millpond queue create orders                            a queue of your own items
  millpond produce orders 'one order'
  millpond serve                                          for other machines, on http://127.0.0.1:7410

`millpond COMMAND --help` shows more of each.
exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 no answer from the server or owner
"""

INTERRUPTED = 130  # as shells count a command that ended by SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    _fill_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that cannot be shown is no reason to fail
    try:
        asked = build_parser(arguments).parse_args(arguments)
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


def _fill_streams() -> None:
    """One that was closed (`>&-`) is /dev/null: else the next file that is opened would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends


def _told(error: Exception) -> int:
    """Errors that say what to do are told in a line; anything else is a bug, and its trace is what we need."""
    from millpond.errors import InternalError, MillpondError, Unauthorized

    if isinstance(error, Unauthorized):
        return fail(_refused(error))
    if isinstance(error, MillpondError) and not isinstance(error, InternalError):
        return fail(error.message.removeprefix("items[0]."), code_of(error))
    if isinstance(error, UnicodeEncodeError):
        return fail(f"{error.object!r:.60} is no UTF-8 text; give what is, or bytes in a file", WRONG_USAGE)
    if isinstance(error, OSError):
        return fail(f"{error}; check the path, its permissions and the disk")
    raise error


def _refused(error: Exception) -> str:
    """In words of the command line: the server's are for who writes a client."""
    from millpond.cli.pond import TOKEN_VARIABLE, token_of

    if token_of() is None:
        return f"the server wants a token; set {TOKEN_VARIABLE} to one that `millpond token create` printed there"
    return f"the server refuses the token in {TOKEN_VARIABLE}: {error}"


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser, nouns = bare_parser()
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for noun, summary in NOUNS.items():
        if noun == chosen:
            add_noun(nouns, noun)
        else:
            nouns.add_parser(noun, help=summary, add_help=False)
    return parser


def bare_parser() -> tuple[argparse.ArgumentParser, Any]:
    """And what its nouns are added to."""
    parser = argparse.ArgumentParser(
        prog="millpond",
        description="A durable work queue.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=ShowVersion, help="show the version and end")
    return parser, parser.add_subparsers(metavar="COMMAND", required=True)


def add_noun(nouns: Any, noun: str) -> None:
    module = importlib.import_module(f"millpond.cli.{FILES.get(noun, noun)}")
    if noun in FILES:
        module.add(nouns, noun)
    else:
        module.add(nouns)


class ShowVersion(argparse.Action):
    """argparse's own wants the version before anybody has asked, and looking it up takes its time."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"millpond {version('millpond')}")
        parser.exit()
