"""`millpond lease`: items for shell scripts, which complete or retry them afterwards."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments, Subparsers, add_command, duration, whole
from millpond.cli.output import DONE, NOT_FOUND, print_json, print_table, say
from millpond.cli.pond import open_pond, runs_on_pond
from millpond.cli.text import first_line, instant, payload_text, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millpond.blocking import Pond
    from millpond.client import Client
    from millpond.model import LeasedItem

EXPORTED_MAX = 64 << 10  # bytes of a payload in a variable: the system has a bound on all of them together
FILE_MODE = 0o600  # as the data directory has it: a payload is not everybody's business
LISTEN_S = 1.0  # a lease that waits longer answers other processes of the directory meanwhile
VARIABLES = (
    "MILLPOND_ITEM_ID",
    "MILLPOND_LEASE",
    "MILLPOND_QUEUE",
    "MILLPOND_ATTEMPT",
    "MILLPOND_FENCING_TOKEN",
    "MILLPOND_CORRELATION_ID",
    "MILLPOND_STATE_VERSION",
    "MILLPOND_PAYLOAD",
    "MILLPOND_PAYLOAD_FILE",
)

EXAMPLES = """\
  millpond lease orders                            one item, if there is one
  millpond lease orders --batch 10 --wait 30s --json
  millpond lease orders --export --payload-file order.json

A worker in the shell. The loop ends when there was nothing, and when anything went wrong:

  while leased=$(millpond lease orders --wait 30s --lease-timeout 5m --export --payload-file order.json) &&
      eval "$leased"; do
    if ./handle order.json; then millpond complete; else millpond retry --error "handle failed"; fi
  done

complete, retry, extend and state take the lease from MILLPOND_LEASE, or as an argument. With --export come also
MILLPOND_ITEM_ID, _QUEUE, _ATTEMPT, _FENCING_TOKEN, _CORRELATION_ID, _STATE_VERSION, and _PAYLOAD_FILE or, if the
payload is short text, _PAYLOAD. The exit code is 3 when nothing was leased.
"""


def add(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "lease", "take items to work on, for shell scripts", EXAMPLES)
    verb.add_argument("queue", metavar="QUEUE")
    verb.add_argument("--batch", type=whole(1, 1_000), default=1, metavar="N", help="so many items at most (1)")
    verb.add_argument("--wait", type=duration, default=0.0, metavar="TIME", help="wait so long for the first (0s)")
    verb.add_argument("--lease-timeout", type=duration, metavar="TIME", help="as the queue has it without")
    verb.add_argument("--client-id", default="", metavar="NAME", help="who it is, for lists and the history")
    verb.add_argument("--export", action="store_true", help="print variables for `eval`, of one item")
    verb.add_argument("--payload-file", metavar="FILE", help="write the payload there, of one item")
    runs_on_pond(verb, lease)


def lease(asked: Arguments) -> int:
    try:
        _check(asked)
        return _lease(asked)
    except BaseException:
        if asked.export:
            print("false")  # for `eval`: what was exported before does not count any more
        raise


def _check(asked: Arguments) -> None:
    from millpond.errors import InvalidRequest

    if asked.batch > 1 and (asked.export or asked.payload_file):
        raise InvalidRequest("--export and --payload-file are for one item; leave out --batch")
    if asked.json and asked.export:
        raise InvalidRequest("--json and --export do not go together; choose one")


def _lease(asked: Arguments) -> int:
    with open_pond(asked, listen=asked.wait > LISTEN_S) as pond:
        options = {"batch": asked.batch, "wait": asked.wait, "lease_timeout": asked.lease_timeout}
        items = pond.lease(asked.queue, client_id=asked.client_id, **options)
        try:
            _hand_over(asked, items)
            sys.stdout.flush()  # here, where what cannot be told can still be given back
        except BaseException:
            _give_back(pond, items)
            raise
    return DONE if items else NOT_FOUND


def _give_back(pond: Pond | Client, items: Sequence[LeasedItem]) -> None:
    """Nobody has heard of them."""
    from millpond.model import Retry

    if items:
        pond.retry([Retry(lease=item.lease, intent="defer") for item in items])
        say("millpond: what was leased is back in its queue")


def _hand_over(asked: Arguments, items: Sequence[LeasedItem]) -> None:
    if asked.payload_file and items:
        _write(asked.payload_file, items[0].payload)
    if asked.export:
        text = _exports(asked, items[0]) if items else f"unset {' '.join(VARIABLES)}\nfalse"
        print(text)
    elif asked.json:
        print_json([shown(item) for item in items])
    elif items:
        print_table(
            ["ID", "ATTEMPT", "LEASED UNTIL", "LEASE", "PAYLOAD"],
            [
                [
                    one.id,
                    str(one.attempts),
                    instant(one.lease_deadline),
                    one.lease,
                    first_line(payload_text(one.payload)),
                ]
                for one in items
            ],
        )
    else:
        say(f"there is nothing to lease in {asked.queue}")


def _write(path: str, payload: bytes) -> None:
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, FILE_MODE)) as file:
        file.write(payload)


def _exports(asked: Arguments, item: LeasedItem) -> str:
    values: dict[str, Any] = {
        "MILLPOND_ITEM_ID": item.id,
        "MILLPOND_LEASE": item.lease,
        "MILLPOND_QUEUE": asked.queue,
        "MILLPOND_ATTEMPT": item.attempts,
        "MILLPOND_FENCING_TOKEN": item.fencing_token,
        "MILLPOND_CORRELATION_ID": item.correlation_id,
        "MILLPOND_STATE_VERSION": item.state_version,
    }
    if asked.payload_file:
        values["MILLPOND_PAYLOAD_FILE"] = os.path.abspath(asked.payload_file)
    elif _fits(item.payload):
        values["MILLPOND_PAYLOAD"] = item.payload.decode()
    else:
        say("the payload is no short text; take it with --payload-file")
    gone = [name for name in VARIABLES if name not in values]
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in values.items()]
    return "\n".join([f"unset {' '.join(gone)}", *lines])


def _fits(payload: bytes) -> bool:
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return len(payload) <= EXPORTED_MAX and b"\0" not in payload
