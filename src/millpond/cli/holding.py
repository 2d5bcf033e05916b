"""`millpond complete`, `retry`, `extend` and `state`: what the holder of a lease can do, for shell scripts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments, Subparsers, add_command, duration, moment, whole
from millpond.cli.output import DONE, code_of_results, print_json, say
from millpond.cli.pond import open_pond, runs_on_pond
from millpond.cli.text import instant, short

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import Client
    from millpond.model import Result

LEASE_VARIABLE, VERSION_VARIABLE = "MILLPOND_LEASE", "MILLPOND_STATE_VERSION"
BATCH = 1_000  # tokens of one request: the model's TOKEN_BATCH_MAX

COMPLETE = """\
  millpond complete                                the lease in MILLPOND_LEASE
  millpond complete LEASE LEASE LEASE
  millpond complete --result '{"pages": 12}'       kept as long as the queue keeps completed items
  millpond lease orders --batch 100 --json | jq -r '.[].lease' | millpond complete -
"""
RETRY = """\
  millpond retry --error 'no such customer'        failed; again after the queue's backoff
  millpond retry LEASE --delay 10m
  millpond retry LEASE --defer                     not failed: the attempt does not count
  millpond retry LEASE --dead --error 'bad order'  no further attempt
"""
EXTEND = """\
  millpond extend                                  by the queue's lease timeout, from now
  millpond extend LEASE --lease-timeout 10m
  millpond extend LEASE --lease-timeout 0          give it back at once

It says so if the item was cancelled: stop then.
"""
STATE = """\
  millpond state '{"page": 3}'                     the lease in MILLPOND_LEASE, version in MILLPOND_STATE_VERSION
  millpond state LEASE '{"page": 4}' --version 1   prints the new version
  millpond state LEASE - --version 2 < state.json

The next attempt finds the document, as `state_doc` of `millpond lease --json`. A version that is not the
newest is refused.
"""

Send = Callable[["Pond | Client", list[str]], "Sequence[Result]"]


def add(subparsers: Subparsers, name: str) -> None:
    {"complete": _add_complete, "retry": _add_retry, "extend": _add_extend, "state": _add_state}[name](subparsers)


def _add_complete(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "complete", "say that leased items are done", COMPLETE)
    _add_leases(verb)
    verb.add_argument("--result", type=_json, metavar="JSON", help="what came out of it, of one lease")
    runs_on_pond(verb, complete)


def _add_retry(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "retry", "hand leased items back", RETRY)
    _add_leases(verb)
    verb.add_argument("--error", metavar="TEXT", help="why")
    verb.add_argument("--delay", type=duration, metavar="TIME", help="not again before so long")
    verb.add_argument("--at", type=moment, dest="retry_at", metavar="INSTANT", help="not again before this instant")
    verb.add_argument("--defer", action="store_true", help="it did not fail: the attempt does not count")
    verb.add_argument("--dead", action="store_true", help="no further attempt")
    runs_on_pond(verb, retry)


def _add_extend(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "extend", "work longer on leased items", EXTEND)
    _add_leases(verb)
    verb.add_argument("--lease-timeout", type=duration, metavar="TIME", help="from now; as the queue has it without")
    runs_on_pond(verb, extend)


def _add_state(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "state", "write a leased item's state document", STATE)
    verb.add_argument("lease", metavar="LEASE", nargs="?", help=f"{LEASE_VARIABLE} without")
    verb.add_argument("document", metavar="JSON", help="- reads it from stdin")
    verb.add_argument("--version", type=whole(0), metavar="N", help=f"the one it replaces ({VERSION_VARIABLE}, or 0)")
    runs_on_pond(verb, state)


def _add_leases(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("leases", metavar="LEASE", nargs="*", help=f"{LEASE_VARIABLE} without; - reads them from stdin")


def _json(text: str) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise argparse.ArgumentTypeError(f"is no JSON ({error}); text goes in quotes of its own: '\"text\"'") from None


# ---- the verbs ----------------------------------------------------------------------------------------------------


def complete(asked: Arguments) -> int:
    from millpond.errors import InvalidRequest

    leases = _leases(asked)
    if asked.result is not None and len(leases) > 1:
        raise InvalidRequest("--result is of one item; complete the others by themselves")
    return _for_each(asked, leases, lambda pond, some: pond.complete(some, result=asked.result), "completed")


def retry(asked: Arguments) -> int:
    from millpond.errors import InvalidRequest
    from millpond.model import Intent, Retry

    if asked.delay is not None and asked.retry_at is not None:
        raise InvalidRequest("--delay and --at do not go together; give one of them")
    intent: Intent = "defer" if asked.defer else "failure"
    fields = {"delay": asked.delay, "retry_at": asked.retry_at, "error": asked.error, "dead": asked.dead}

    def send(pond: Pond | Client, leases: list[str]) -> Sequence[Result]:
        return pond.retry([Retry(lease=lease, intent=intent, **fields) for lease in leases])

    return _for_each(asked, _leases(asked), send, "dead" if asked.dead else "handed back")


def extend(asked: Arguments) -> int:
    def send(pond: Pond | Client, leases: list[str]) -> Sequence[Result]:
        return pond.extend(leases, lease_timeout=asked.lease_timeout)

    return _for_each(asked, _leases(asked), send, "extended")


def state(asked: Arguments) -> int:
    from millpond.errors import InvalidRequest

    lease = asked.lease or _lease_of_environment()
    text = sys.stdin.read() if asked.document == "-" else asked.document
    try:
        document = _json(text)
    except argparse.ArgumentTypeError as error:
        raise InvalidRequest(f"the document {error}") from None
    with open_pond(asked) as pond:
        written = pond.write_state(lease, document, version=_version(asked))
    if asked.json:
        print_json(written)
    else:
        print(written.version)
        if written.cancelled:
            say("the item was cancelled; stop, and hand it back")
    return DONE


def _version(asked: Arguments) -> int:
    if asked.version is not None:
        return int(asked.version)
    text = os.environ.get(VERSION_VARIABLE, "0")
    if not text.isdecimal():
        from millpond.errors import InvalidRequest

        raise InvalidRequest(f"{VERSION_VARIABLE} is {text!r:.60}; give the version with --version")
    return int(text)


# ---- leases -------------------------------------------------------------------------------------------------------


def _leases(asked: Arguments) -> list[str]:
    if asked.leases == ["-"]:
        leases = [line.strip() for line in sys.stdin if line.strip()]
    else:
        leases = list(asked.leases) or [_lease_of_environment()]
    return list(dict.fromkeys(leases))


def _lease_of_environment() -> str:
    lease = os.environ.get(LEASE_VARIABLE)
    if not lease:
        from millpond.errors import InvalidRequest

        raise InvalidRequest(
            f"there is no lease; give one, or export {LEASE_VARIABLE} as `millpond lease --export` does"
        )
    return lease


def _for_each(asked: Arguments, leases: list[str], send: Send, done: str) -> int:
    """Good leases take effect, bad ones say why."""
    results: list[Result] = []
    with open_pond(asked) as pond:
        for first in range(0, len(leases), BATCH):
            results += send(pond, leases[first : first + BATCH])
    if asked.json:
        print_json(results)
    else:
        _tell(leases, results, done)
    return code_of_results(results)


def _tell(leases: list[str], results: Sequence[Result], done: str) -> None:
    good = [result for result in results if result.error is None]
    for lease, result in zip(leases, results, strict=True):
        if result.error is not None:
            say(f"millpond: {short(lease)}: {result.error.message}")
        elif result.cancelled:
            say("the item was cancelled; stop, and hand it back")
    until = {instant(result.lease_deadline) for result in good if result.lease_deadline is not None}
    if len(results) > 1 or until:
        say(f"{done} {len(good)} of {len(results)}" + (f", until {max(until)} UTC" if until else ""))
