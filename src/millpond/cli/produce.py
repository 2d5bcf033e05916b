"""`millpond produce`: items into a queue, one of an argument or a file, or one of each line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from millpond.cli.flags import Arguments, Subparsers, add_command, duration, moment, whole
from millpond.cli.output import DONE, print_json, say
from millpond.cli.pond import open_pond, runs_on_pond
from millpond.cli.progress import Progress
from millpond.cli.text import counted

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import Client
    from millpond.model import NewItem, Produced

BATCH_ITEMS = 1_000  # of one request: the model's PRODUCE_BATCH_MAX
BATCH_BYTES = 4 << 20  # after which a request is sent: well below what a server takes

EXAMPLES = """\
  millpond produce orders 'one order'              prints the item's id
  millpond produce orders '{"amount": 7}' --key invoice-7 --delay 10m
  echo one order | millpond produce orders -
  millpond produce pictures --file cat.png --kind png
  millpond produce orders --lines < orders.ndjson  an item a line, empty ones left out

A key or an id that a live item has already adds nothing: its item is answered with. --on-conflict reject makes that a
failure. --lines sends batches as they come; what was produced before a failure stays, and the count says how much.
"""
FIELDS = (
    "id",
    "key",
    "kind",
    "encoding",
    "reference",
    "priority",
    "group",
    "delay",
    "enqueue_at",
    "max_attempts",
    "expire_timeout",
    "correlation_id",
)


def add(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "produce", "add items to a queue", EXAMPLES)
    verb.add_argument("queue", metavar="QUEUE")
    verb.add_argument("text", metavar="TEXT", nargs="?", help="the payload; - reads it from stdin, all of it")
    verb.add_argument("--file", metavar="FILE", help="the payload is in this file; with --lines the items are")
    verb.add_argument("--lines", action="store_true", help="an item a line, of stdin or --file")
    verb.add_argument("--id", help="the item's own id; one is made without")
    verb.add_argument("--key", help="deduplication: one live item a key")
    verb.add_argument("--kind", help="a word for consumers")
    verb.add_argument("--encoding", help="how to read the payload, for consumers")
    verb.add_argument("--reference", help="anything that travels with it")
    verb.add_argument("--priority", type=whole(-32_767, 32_767), metavar="N", help="lower goes first (0)")
    verb.add_argument("--group", help="items of a group are worked on one at a time, in order")
    verb.add_argument("--delay", type=duration, metavar="TIME", help="not before so long")
    verb.add_argument("--at", type=moment, dest="enqueue_at", metavar="INSTANT", help="not before this instant")
    verb.add_argument("--max-attempts", type=whole(0), metavar="N", help="as the queue has it without")
    verb.add_argument("--expire-timeout", type=duration, metavar="TIME", help="as the queue has it without")
    verb.add_argument("--correlation-id", metavar="ID", help="follows the item wherever it goes")
    verb.add_argument("--on-conflict", choices=("ignore", "reject", "replace"), default="ignore", help="(ignore)")
    runs_on_pond(verb, produce)


def produce(asked: Arguments) -> int:
    _check(asked)
    if asked.lines:
        return _produce_lines(asked)
    item = _item(asked, _payload(asked))
    with open_pond(asked) as pond:
        [made] = pond.produce(asked.queue, [item], on_conflict=asked.on_conflict)
    if asked.json:
        print_json(made)
    else:
        print(made.id)
        if made.duplicate:
            say(f"{made.id} was there already; nothing was added")
    return DONE


def _check(asked: Arguments) -> None:
    from millpond.errors import InvalidRequest

    if asked.text is not None and (asked.file is not None or asked.lines):
        raise InvalidRequest("TEXT does not go with --file or --lines; the payload is from one place")
    if asked.lines and (asked.id is not None or asked.key is not None):
        raise InvalidRequest("--id and --key name one item; with --lines there are many")
    if asked.delay is not None and asked.enqueue_at is not None:
        raise InvalidRequest("--delay and --at do not go together; give one of them")
    if asked.text is None and asked.file is None and sys.stdin.isatty():
        raise InvalidRequest("there is no payload; give TEXT, - for stdin, or --file FILE")


def _payload(asked: Arguments) -> bytes:
    """An argument's own bytes, whatever they are."""
    if asked.text not in (None, "-"):
        return os.fsencode(asked.text)
    with _input(asked) as file:
        return file.read()


@contextmanager
def _input(asked: Arguments) -> Iterator[IO[bytes]]:
    if asked.file in (None, "-"):
        yield sys.stdin.buffer
    else:
        with open(asked.file, "rb") as file:
            yield file


def _item(asked: Arguments, payload: bytes) -> NewItem:
    from millpond.model import NewItem

    given: dict[str, Any] = {name: getattr(asked, name) for name in FIELDS}
    return NewItem(payload=payload, **{name: value for name, value in given.items() if value is not None})


# ---- lines --------------------------------------------------------------------------------------------------------


def _produce_lines(asked: Arguments) -> int:
    total = 0
    duplicates = 0
    try:
        with _input(asked) as file, open_pond(asked, listen=True) as pond, Progress(None, "produced") as progress:
            for batch in _batches(file):
                duplicates += sum(one.duplicate for one in _send(pond, asked, batch))
                total += len(batch)
                progress(total)
    except BaseException:
        if total:
            say(f"stopped after {counted(total, 'item')}, now in {asked.queue}; the lines after them are not")
        raise
    if asked.json:
        print_json({"queue": asked.queue, "produced": total, "duplicates": duplicates})
    else:
        say(f"produced {counted(total, 'item')} in {asked.queue}")
    return DONE


def _send(pond: Pond | Client, asked: Arguments, batch: list[bytes]) -> list[Produced]:
    items = [_item(asked, payload) for payload in batch]
    return list(pond.produce(asked.queue, items, on_conflict=asked.on_conflict))


def _batches(file: IO[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for payload in _payloads(file):
        if batch and (len(batch) == BATCH_ITEMS or size + len(payload) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(payload)
        size += len(payload)
    if batch:
        yield batch


def _payloads(file: IO[bytes]) -> Iterator[bytes]:
    """No line is read further than a payload may be long."""
    from millpond.errors import BatchTooLarge
    from millpond.model import PAYLOAD_BYTES_MAX

    number = 0
    while line := file.readline(PAYLOAD_BYTES_MAX + 2):
        number += 1
        payload = line.removesuffix(b"\n").removesuffix(b"\r")
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise BatchTooLarge(
                f"line {number} is longer than {PAYLOAD_BYTES_MAX:,} bytes; keep it elsewhere and produce a reference"
            )
        if payload:
            yield payload
