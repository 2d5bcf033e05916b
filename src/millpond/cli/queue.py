"""`millpond queue`: the queues themselves. The items in them are the business of other nouns."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from millpond.cli import queue_audit, queue_rebalance, queue_settings
from millpond.cli.flags import Arguments, Run, Subparsers, add_command, add_noun, whole
from millpond.cli.output import DONE, WRONG_USAGE, agreed, fail, print_fields, print_json, print_table, say
from millpond.cli.pond import open_pond, runs_on_pond
from millpond.cli.text import counted, instant, span

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import Client
    from millpond.model import QueueInfo, QueueStats

OWN = "millpond/"  # queues of our own begin so: workers, schedules, and jobs that wait for others
QUEUES_A_PAGE = 1_000  # as many as there are in one
STATES = ("ready", "scheduled", "leased", "retrying", "claimed", "completed", "dead", "cancelled")
CLEARED = ("ready", "scheduled", "retrying")  # the model's CLEAR_STATES, which is not imported for a help text

CREATE = """\
  millpond queue create orders
  millpond queue create orders --lease-timeout 5m --max-attempts 3 --dead-queue letters
  millpond queue create orders --if-missing        in scripts: it may be there already
  millpond queue create reports --jobs             for jobs: 3 attempts, completed ones kept for a day

On a data directory a queue of jobs is made by the first job that names it. On a server with tokens an admin makes it.
"""
LIST = """\
  millpond queue list                              with what is in them
  millpond queue list team-a/ --json
"""
INFO = """\
  millpond queue info orders                       all its settings
"""
UPDATE = """\
  millpond queue update orders --max-attempts 10 --backoff-base 3
  millpond queue update orders --no-dead-queue

What is not named stays as it was.
"""
DELETE = """\
  millpond queue delete orders --dry-run           what would go with it
  millpond queue delete orders
  millpond queue delete orders --force             also if there are items in it
"""
STATS = """\
  millpond queue stats orders                      counts, rates, partitions
"""
PAUSE = """\
  millpond queue pause orders                      nothing is leased until it is resumed; produce goes on
"""
RESUME = """\
  millpond queue resume orders
"""
CLEAR = """\
  millpond queue clear orders --dry-run
  millpond queue clear orders --yes                what waits: ready, scheduled, retrying
  millpond queue clear orders --state scheduled --state dead
"""
AUDIT = """\
  millpond queue audit orders                      what was done to it by hand, the newest first
  millpond queue audit orders --limit 1000 --json  also of a queue that was deleted
"""


def add(subparsers: Subparsers) -> None:
    examples = (CREATE, LIST, INFO, UPDATE, DELETE, STATS, PAUSE, RESUME, CLEAR, queue_rebalance.EXAMPLES, AUDIT)
    verbs = add_noun(subparsers, "queue", "create, look at, change and delete queues", *examples)
    verb = _verb(verbs, "create", "create a queue", CREATE, create)
    queue_settings.add_create(verb)
    verb = add_command(verbs, "list", "list the queues", LIST)
    verb.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="those whose names begin so; all without")
    verb.add_argument("--all", action="store_true", help=f"also millpond's own, {OWN}…")
    runs_on_pond(verb, list_queues)
    _verb(verbs, "info", "show a queue's settings", INFO, info)
    verb = _verb(verbs, "update", "change a queue's settings", UPDATE, update)
    queue_settings.add_update(verb)
    verb = _verb(verbs, "delete", "delete a queue", DELETE, delete)
    verb.add_argument("--force", action="store_true", help="also if it has items, which are deleted with it")
    verb.add_argument("--dry-run", action="store_true", help="say what would be deleted, and change nothing")
    _verb(verbs, "stats", "show what is in a queue, and how fast it moves", STATS, stats)
    _verb(verbs, "pause", "let nothing be leased from a queue", PAUSE, pause)
    _verb(verbs, "resume", "end a pause", RESUME, resume)
    verb = _verb(verbs, "clear", "remove a queue's items by state, for good", CLEAR, clear)
    verb.add_argument(
        "--state", action="append", choices=STATES, dest="states", help="again for more; what waits without"
    )
    verb.add_argument("--dry-run", action="store_true", help="say how many, and remove nothing")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    verb = _verb(verbs, "audit", "show what was done to a queue by hand", AUDIT, queue_audit.audit)
    verb.add_argument(
        "--limit", type=whole(1), default=queue_audit.SHOWN, metavar="N", help="the newest N; 100 without"
    )
    verb = add_command(
        verbs, "rebalance", "change how many partitions a queue has, and in which stores", queue_rebalance.EXAMPLES
    )
    queue_rebalance.add(verb)
    runs_on_pond(verb, queue_rebalance.rebalance)


def _verb(verbs: Subparsers, name: str, summary: str, examples: str, run: Run) -> argparse.ArgumentParser:
    verb = add_command(verbs, name, summary, examples)
    verb.add_argument("queue", metavar="QUEUE")
    runs_on_pond(verb, run)
    return verb


# ---- the queue itself ---------------------------------------------------------------------------------------------


def create(asked: Arguments) -> int:
    from millpond.errors import QueueExists

    with open_pond(asked, create=True) as pond:
        try:
            made = pond.create_queue(asked.queue, **queue_settings.of_create(asked))
        except QueueExists:
            if not asked.if_missing:
                raise
            return _tell(asked, pond.queue_info(asked.queue), f"queue {asked.queue} was there already")
    return _tell(asked, made, f"created queue {made.name}")


def update(asked: Arguments) -> int:
    changes = queue_settings.of_update(asked)
    if not changes:
        return fail("nothing to change was named; see `millpond queue update --help`", WRONG_USAGE)
    with open_pond(asked) as pond:
        return _tell(asked, pond.update_queue(asked.queue, **changes), f"updated queue {asked.queue}")


def delete(asked: Arguments) -> int:
    with open_pond(asked) as pond:
        if asked.dry_run:
            return _would_delete(asked, pond.stats(asked.queue))
        pond.delete_queue(asked.queue, force=asked.force)
    if asked.json:
        print_json({"queue": asked.queue, "deleted": True, "dry_run": False})
    else:
        say(f"deleted queue {asked.queue}")
    return DONE


def _would_delete(asked: Arguments, found: QueueStats) -> int:
    items = sum(found.counts.values())
    if asked.json:
        print_json({"queue": asked.queue, "deleted": False, "dry_run": True, "items": items, "counts": found.counts})
    else:
        print(f"queue {asked.queue} would be deleted with {counted(items, 'item')}{_by_state(found.counts)}")
    return DONE


def pause(asked: Arguments) -> int:
    with open_pond(asked) as pond:
        return _tell(asked, pond.pause(asked.queue), f"queue {asked.queue} is paused")


def resume(asked: Arguments) -> int:
    with open_pond(asked) as pond:
        return _tell(asked, pond.resume(asked.queue), f"queue {asked.queue} goes on")


def _tell(asked: Arguments, queue: QueueInfo, done: str) -> int:
    if asked.json:
        print_json(queue)
    else:
        say(done)
    return DONE


# ---- looking ------------------------------------------------------------------------------------------------------


def list_queues(asked: Arguments) -> int:
    with open_pond(asked) as pond:
        shows_own = asked.all or asked.prefix.startswith(OWN)
        queues = [one for one in _all(pond, asked.prefix) if shows_own or not one.name.startswith(OWN)]
        counts = [pond.stats(one.name).counts for one in queues]
    if asked.json:
        print_json(
            [{"name": one.name, "paused": one.paused, "counts": n} for one, n in zip(queues, counts, strict=True)]
        )
    elif queues:
        print_table(
            ["QUEUE", "READY", "WAITING", "LEASED", "COMPLETED", "DEAD", "STATUS"],
            [[one.name, *_columns(n), "paused" if one.paused else "-"] for one, n in zip(queues, counts, strict=True)],
        )
    else:
        say("there are no queues; create one with `millpond queue create NAME`")
    return DONE


def _all(pond: Pond | Client, prefix: str) -> list[QueueInfo]:
    queues: list[QueueInfo] = []
    after: str | None = ""
    while after is not None:
        page = pond.list_queues(prefix=prefix, after=after, limit=QUEUES_A_PAGE)
        queues += page.queues
        after = page.next
    return queues


def _columns(counts: dict[str, int]) -> list[str]:
    columns = (("ready",), ("scheduled", "retrying"), ("leased", "claimed"), ("completed",), ("dead",))
    return [str(sum(counts.get(state, 0) for state in states)) for states in columns]


def info(asked: Arguments) -> int:
    with open_pond(asked) as pond:
        found = pond.queue_info(asked.queue)
    if asked.json:
        print_json(found)
        return DONE
    backoff = found.backoff
    print_fields(
        {
            "name": found.name,
            "created": f"{instant(found.created_at)} UTC",
            "paused": "yes" if found.paused else "no",
            "partitions": len(found.partitions),
            **({"rebalance": _rebalancing(found)} if found.rebalance is not None else {}),
            "lease timeout": span(found.lease_timeout),
            "max attempts": found.max_attempts or "unlimited",
            "backoff": f"{backoff['base']:g} ** attempts s, to {span(backoff['cap'])}, jitter {backoff['jitter']:g}",
            "dead items": f"to {found.dead_queue}" if found.dead_queue else found.dead,
            "expire timeout": span(found.expire_timeout),
            "completed kept": span(found.completed_retention),
            "dedup window": span(found.dedup_window),
            "durability": found.durability,
            "reference": found.reference or "-",
        }
    )
    return DONE


def _rebalancing(found: QueueInfo) -> str:
    last = found.rebalance
    assert last is not None
    if last.status == "done":
        return f"done {instant(last.finished_at)} UTC" if last.finished_at is not None else "done"
    left = counted(sum(last.items.values()), "item")
    gone = f"{len(last.removed)} of {counted(len(last.removing), 'old partition')} removed"
    if last.removable_at is not None:
        return f"to {counted(last.partitions, 'partition')}: {gone}; {queue_rebalance.removal(last)}"
    return f"to {counted(last.partitions, 'partition')}: {gone}, {left} left{_by_state(last.items)}"


def stats(asked: Arguments) -> int:
    with open_pond(asked) as pond:
        found = pond.stats(asked.queue)
    if asked.json:
        print_json(found)
        return DONE
    rates = found.rates
    print_fields(
        {
            "queue": found.queue + (" (paused)" if found.paused else ""),
            **{state: f"{found.counts.get(state, 0):,}" for state in STATES},
            "waiting consumers": found.waiters,
            "oldest ready": span(found.oldest_ready_age),
            "a second": f"{rates.produced:.1f} produced, {rates.leased:.1f} leased, {rates.completed:.1f} completed,"
            f" {rates.retried:.1f} retried, {rates.dead:.1f} died",
        }
    )
    print()
    print_table(
        ["PARTITION", "STORE", "STATUS", "ITEMS", "ERROR"],
        [
            [str(one.partition), one.store, one.status, str(sum(one.counts.values())), one.error or "-"]
            for one in found.partitions
        ],
    )
    return DONE


# ---- clear --------------------------------------------------------------------------------------------------------


def clear(asked: Arguments) -> int:
    states = tuple(dict.fromkeys(asked.states or CLEARED))
    with open_pond(asked) as pond:
        counts = pond.stats(asked.queue).counts
        there = {state: counts.get(state, 0) for state in states}
        if asked.dry_run:
            removed = there
        elif any(there.values()) and not asked.yes and not agreed(_question(asked.queue, there)):
            return fail("nothing was removed; say --yes", WRONG_USAGE)
        else:
            removed = pond.clear(asked.queue, states)
    if asked.json:
        print_json({"queue": asked.queue, "dry_run": asked.dry_run, "removed": removed})
    else:
        would = "would remove" if asked.dry_run else "removed"
        say(f"{would} {counted(sum(removed.values()), 'item')} of {asked.queue}{_by_state(removed)}")
    return DONE


def _question(queue: str, there: dict[str, int]) -> str:
    return f"remove {counted(sum(there.values()), 'item')} of {queue}{_by_state(there)} for good?"


def _by_state(counts: dict[str, int]) -> str:
    some = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    return f" ({some})" if some else ""
