"""`millpond queue rebalance`: how many partitions a queue has, and in which stores."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from millpond.cli.flags import Arguments, whole
from millpond.cli.output import DONE, WRONG_USAGE, fail, print_json, say
from millpond.cli.pond import open_pond
from millpond.cli.progress import Progress
from millpond.cli.text import counted, instant

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import Client
    from millpond.model import QueueInfo, Rebalance

LOOK_S = 0.5  # between looks at how far it is
QUEUES_A_PAGE = 1_000

EXAMPLES = """\
  millpond queue rebalance orders --partitions 8 --dry-run
  millpond queue rebalance orders --partitions 8
  millpond queue rebalance orders                  as many as there are, where the stores' affinities say now
  millpond queue rebalance --all --wait            every queue: off a store whose affinity is 0

New partitions take new items. Old ones drain through consumers and are removed: --wait waits for that, and may be
stopped, as the server goes on without it. One that runs already is in the way, unless --wait waits for it first.
"""


def add(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("queue", metavar="QUEUE", nargs="?")
    verb.add_argument("--all", action="store_true", help="every queue")
    verb.add_argument("--partitions", type=whole(1), metavar="N", help="how many; as many as there are without")
    verb.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
    verb.add_argument(
        "--wait", action="store_true", help="for one that runs already, then for the old partitions to be removed"
    )


def rebalance(asked: Arguments) -> int:
    if asked.all == (asked.queue is not None):
        return fail("name a queue, or say --all", WRONG_USAGE)
    failed = 0
    with open_pond(asked) as pond:
        done = []
        for name in [one.name for one in _all(pond)] if asked.all else [asked.queue]:
            told, code = _begin(pond, name, asked)
            failed = failed or code
            if told is not None:
                done.append(_wait(pond, told) if asked.wait else told)
                if not asked.json:
                    say(_said(done[-1]))
    if asked.json:
        print_json(done if asked.all else done[0])
    return failed or DONE


def _begin(pond: Pond | Client, name: str, asked: Arguments) -> tuple[Rebalance | None, int]:
    """With --all, one queue that cannot be does not stop the others."""
    from millpond.errors import MillpondError

    try:
        if asked.wait and not asked.dry_run:
            _wait_for_another(pond, name)
        return pond.rebalance(name, partitions=asked.partitions, dry_run=asked.dry_run), DONE
    except MillpondError as error:
        if not asked.all:
            raise
        return None, fail(f"{name}: {error.message}")


def _wait_for_another(pond: Pond | Client, name: str) -> None:
    running = pond.queue_info(name).rebalance
    if running is not None and running.status == "running":
        say(f"{name} is being rebalanced already; when that is done, this one begins")
        _wait(pond, running)


def _wait(pond: Pond | Client, told: Rebalance) -> Rebalance:
    total, is_empty = sum(told.items.values()), False
    with Progress(total, f"items out of the old partitions of {told.queue}") as progress:
        while told.status == "running":
            time.sleep(LOOK_S)
            now = pond.queue_info(told.queue).rebalance
            assert now is not None, "the one that runs, or the last one"
            told = now
            progress(max(0, total - sum(told.items.values())))
            if told.removable_at is not None and not is_empty:
                is_empty = True
                say(f"{told.queue}: {removal(told)}")
    return told


def removal(told: Rebalance) -> str:
    """Of partitions that are empty, but in which items were completed a moment ago."""
    assert told.removable_at is not None
    return f"the old partitions are empty, and removed at {instant(told.removable_at)} UTC"


def _said(told: Rebalance) -> str:
    where = ", ".join(f"{count} in {store}" for store, count in told.stores.items())
    if told.status == "unchanged":
        return f"{told.queue} has {counted(told.partitions, 'partition')} ({where}); there is nothing to do"
    new, old = counted(len(told.added), "new partition"), counted(len(told.removing), "old one")
    if told.status == "planned":
        return f"{told.queue} would have {counted(told.partitions, 'partition')} ({where}): {new}, {old} to be removed"
    if told.status == "done":
        return f"{told.queue} has {counted(told.partitions, 'partition')} ({where}): {new}, {old} removed"
    left = counted(sum(told.items.values()), "item")
    return f"{told.queue}: {new}; {old} with {left} to be removed; see `millpond queue info {told.queue}`"


def _all(pond: Pond | Client) -> list[QueueInfo]:
    queues: list[QueueInfo] = []
    after: str | None = ""
    while after is not None:
        page = pond.list_queues(after=after, limit=QUEUES_A_PAGE)
        queues += page.queues
        after = page.next
    return queues
