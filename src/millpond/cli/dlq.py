"""`millpond dlq`: what has died, of what, and the way back. The dead lie in their queue, or are letters in another.

Without a queue it is about jobs (`dlq_jobs.py`).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from millpond.cli import dlq_jobs
from millpond.cli.dlq_redrive import redrive, redrives, undo
from millpond.cli.flags import Arguments, Subparsers, add_command, add_noun
from millpond.cli.output import DONE, WRONG_USAGE, agreed, fail, print_fields, print_json, print_table, say
from millpond.cli.pond import open_pond, runs_on_pond
from millpond.cli.text import first_line, shown

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import Client
    from millpond.model import Item

QUEUES_A_PAGE = 1_000  # as many as there are in one
LIST_LIMIT = 100  # as many as a person looks through

REASONS = ("max_attempts", "expired", "rejected")  # the model's, which is not imported for a help text

LIST = """\
  millpond dlq list                                the dead jobs, and which other queues have dead items
  millpond dlq list --queues                       which queues have dead items, and how many
  millpond dlq list orders --limit 20              of any queue
  millpond dlq list orders --json | jq '.[].last_error'
"""
SHOW = """\
  millpond dlq show job1                           a dead job, with every attempt
  millpond dlq show orders getmzben-0-17           all there is to know of it, payload and all
"""
RETRY = """\
  millpond dlq retry job1                          runs again, with all its attempts before it
  millpond dlq retry job1 job2 --queue reports
  millpond dlq retry --all
"""
REDRIVE = """\
  millpond dlq redrive orders                      all that is dead there, back to where it came from
  millpond dlq redrive orders getmzben-0-17 getmzben-0-18
  millpond dlq redrive orders --reason max_attempts --error-contains timeout --rate 500/s
  millpond dlq redrive orders --where "error like '%timeout%' and kind = 'mail'" --dry-run
  millpond dlq redrive orders --where "get_json_object(text, '$.customer') = 'acme'" --rate 500/s

--where is a condition in Spark SQL on the table `dead`: the fields of an item, with error, reason, text (the payload as
text) and signature (the error without its numbers and names). It needs millpond[spark]; the other choices do not.
"""
REDRIVES = """\
  millpond dlq redrives                            what was redriven from here, newest first
"""
UNDO = """\
  millpond dlq undo 20260301T120000-1f2e3d --dry-run
  millpond dlq undo 20260301T120000-1f2e3d --rate 500/s

Of the items that were redriven, those that still wait die again, of what they had died of.
"""
PURGE = """\
  millpond dlq purge                               the dead jobs; asks first
  millpond dlq purge orders --dry-run
  millpond dlq purge orders --yes
"""


def add(subparsers: Subparsers) -> None:
    about = "look at dead jobs and items, bring them back, undo that"
    verbs = add_noun(subparsers, "dlq", about, LIST, SHOW, RETRY, REDRIVE, REDRIVES, UNDO, PURGE)
    _add_looks(verbs)
    verb = add_command(verbs, "retry", "let dead jobs run again", RETRY)
    verb.add_argument("ids", metavar="ID", nargs="*")
    verb.add_argument("--all", action="store_true", help="in their place: all that are dead")
    _add_queue(verb)
    runs_on_pond(verb, dlq_jobs.retry)
    _add_redrive(verbs)

    verb = add_command(verbs, "redrives", "list the redrives that were made from here", REDRIVES)
    runs_on_pond(verb, redrives)

    verb = add_command(verbs, "undo", "let the items of a redrive that still wait die again", UNDO)
    verb.add_argument("redrive", metavar="REDRIVE", help="as in `millpond dlq redrives`")
    _add_rate(verb)
    verb.add_argument("--dry-run", action="store_true", help="say what would become of them, and change nothing")
    runs_on_pond(verb, undo)

    verb = add_command(verbs, "purge", "remove the dead items of a queue, for good", PURGE)
    verb.add_argument("queue", metavar="QUEUE", nargs="?", help="(jobs)")
    _add_queue(verb)
    verb.add_argument("--dry-run", action="store_true", help="say how many, and remove nothing")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    runs_on_pond(verb, purge)


def _add_looks(verbs: Subparsers) -> None:
    verb = add_command(verbs, "list", "list dead jobs, or dead items, or the queues that have some", LIST)
    verb.add_argument("queue", metavar="QUEUE", nargs="?", help="the items of this queue; jobs without")
    verb.add_argument("--queues", action="store_true", help="in their place: the queues that have dead items")
    _add_queue(verb)
    verb.add_argument("--limit", type=int, help=f"so many at most, the oldest ({LIST_LIMIT}; with --json all jobs)")
    runs_on_pond(verb, list_dead)

    verb = add_command(verbs, "show", "show a dead job, or a dead item with its payload", SHOW)
    verb.add_argument("queue", metavar="QUEUE", nargs="?", help="an item of this queue; a job without")
    verb.add_argument("id", metavar="ID")
    _add_queue(verb)
    runs_on_pond(verb, show)


def _add_redrive(verbs: Subparsers) -> None:
    verb = add_command(verbs, "redrive", "bring dead items back to where they came from", REDRIVE)
    verb.add_argument("queue", metavar="QUEUE", help="the queue in which they died, or the dead queue")
    verb.add_argument("ids", metavar="ID", nargs="*", help="all that are dead without")
    verb.add_argument("--where", metavar="SQL", help="those for which this holds, in Spark SQL")
    verb.add_argument("--reason", metavar="WHY", choices=REASONS, help="those that died so: " + ", ".join(REASONS))
    verb.add_argument("--kind", help="those of this kind")
    verb.add_argument("--from", dest="source", metavar="QUEUE", help="of a dead queue's letters, those from this queue")
    verb.add_argument("--error-contains", dest="error", metavar="TEXT", help="those whose last error has this text")
    _add_rate(verb)
    verb.add_argument("--dry-run", action="store_true", help="show how many and of what they died, and move nothing")
    runs_on_pond(verb, redrive)


def _add_queue(verb: Any) -> None:
    verb.add_argument("--queue", dest="jobs_queue", metavar="QUEUE", help="the jobs of this queue; all without")


def _add_rate(verb: Any) -> None:
    verb.add_argument("--rate", metavar="N/s", help="items a second (or /m, /h); as fast as it goes without")


# ---- looking ------------------------------------------------------------------------------------------------------


def list_dead(asked: Arguments) -> int:
    if asked.limit is not None and asked.limit < 1:
        return fail(f"--limit is {asked.limit}; give 1 or more", WRONG_USAGE)
    if asked.queue is None and not asked.queues:
        return dlq_jobs.list_dead(asked, asked.limit if asked.limit or asked.json else LIST_LIMIT)
    with open_pond(asked) as pond:
        return _list_queues(pond, asked) if asked.queue is None else _list_items(pond, asked)


def _list_queues(pond: Pond | Client, asked: Arguments) -> int:
    from millpond.triage.dead import dead_in

    found = [one for one in (dead_in(pond, name) for name in queues_of(pond)) if one.count]
    if asked.json:
        print_json([{"queue": one.queue, "dead": one.count, "letters": one.letters} for one in found])
    elif found:
        kinds = ["letters from other queues" if one.letters else "its own" for one in found]
        rows = [[one.queue, str(one.count), kind] for one, kind in zip(found, kinds, strict=True)]
        print_table(["QUEUE", "DEAD", "WHAT"], rows)
    else:
        say("nothing is dead")
    return DONE


def queues_of(pond: Pond | Client) -> list[str]:
    names: list[str] = []
    after: str | None = ""
    while after is not None:
        page = pond.list_queues(after=after, limit=QUEUES_A_PAGE)
        names += [one.name for one in page.queues]
        after = page.next
    return names


def _list_items(pond: Pond | Client, asked: Arguments) -> int:
    from millpond.triage.dead import dead_in, dead_items

    dead = dead_in(pond, asked.queue)
    limit = asked.limit or LIST_LIMIT
    items = list(islice(dead_items(pond, dead), limit + 1))
    more, items = len(items) > limit, items[:limit]
    if asked.json:
        print_json([_without_payload(item) for item in items])
    elif items:
        print_table(
            ["ID", "FROM", "REASON", "ATTEMPTS", "KIND", "CREATED", "ERROR"],
            [
                [
                    item.id,
                    item.source_queue or "-",
                    item.dead_reason or "-",
                    str(item.attempts if item.source_attempts is None else item.source_attempts),
                    item.kind or "-",
                    f"{item.created_at:%Y-%m-%d %H:%M:%S}",
                    first_line(item.last_error),
                ]
                for item in items
            ],
        )
    else:
        say(f"nothing is dead in {asked.queue}")
    if more:
        say(f"there are more; see them with --limit {dead.count}")
    return DONE


def show(asked: Arguments) -> int:
    from millpond.triage.choosing import dead_item
    from millpond.triage.dead import dead_in

    if asked.queue is None:
        return dlq_jobs.show(asked)
    with open_pond(asked) as pond:
        item = dead_item(pond, dead_in(pond, asked.queue), asked.id)
    fields = shown(item)
    if asked.json:
        print_json(fields)
    else:
        print_fields(fields)
    return DONE


def _without_payload(item: Item) -> dict[str, Any]:
    import msgspec

    shown: dict[str, Any] = msgspec.to_builtins(item)
    del shown["payload"]
    return shown


# ---- purge --------------------------------------------------------------------------------------------------------


def purge(asked: Arguments) -> int:
    from millpond.jobs.names import JOBS_QUEUE
    from millpond.triage.dead import dead_in
    from millpond.triage.purging import purge as remove

    queue = asked.queue or asked.jobs_queue or JOBS_QUEUE
    with open_pond(asked, listen=True) as pond:
        dead = dead_in(pond, queue)
        if asked.dry_run:
            removed = dead.count
        elif not asked.yes and dead.count and not agreed(f"remove {dead.count} dead items of {queue} for good?"):
            return fail("nothing was removed; say --yes", WRONG_USAGE)
        else:
            removed = remove(pond, dead)
    if asked.json:
        print_json({"queue": queue, "removed": 0 if asked.dry_run else removed} | _dry(asked, dead.count))
    else:
        say(f"{'would remove' if asked.dry_run else 'removed'} {removed} dead items of {queue}")
    return DONE


def _dry(asked: Arguments, count: int) -> dict[str, Any]:
    return {"dry_run": True, "would_remove": count} if asked.dry_run else {}
