"""`millpond dlq`: what has died, of what, and the way back. The dead lie in their queue, or are letters in another."""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Any

from millpond.cli.dlq_redrive import redrive, redrives, undo
from millpond.cli.flags import Arguments, Subparsers, add_command, add_json
from millpond.cli.output import DONE, WRONG_USAGE, fail, print_json, print_table, say
from millpond.cli.pond import add_pond_flags, open_pond
from millpond.cli.text import short

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import Client
    from millpond.model import Item

QUEUES_A_PAGE = 1_000  # as many as there are in one
LIST_LIMIT = 100  # as many as a person looks through

REASONS = ("max_attempts", "expired", "rejected")  # the model's, which is not imported for a help text

LIST = """\
  millpond dlq list                                which queues have dead items, and how many
  millpond dlq list orders --limit 20
  millpond dlq list orders --json | jq '.[].last_error'
"""
SHOW = """\
  millpond dlq show orders getmzben-0-17           all there is to know of it, payload and all
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
  millpond dlq purge orders                        asks first
  millpond dlq purge orders --yes
"""


def add(subparsers: Subparsers) -> None:
    about = "look at dead items, bring them back, undo that"
    examples = (LIST, SHOW, REDRIVE, REDRIVES, UNDO, PURGE)
    noun = add_command(subparsers, "dlq", about, "".join(one.partition("\n\n")[0].rstrip() + "\n" for one in examples))
    verbs = noun.add_subparsers(metavar="VERB", required=True)
    _add_looks(verbs)
    _add_redrive(verbs)

    verb = add_command(verbs, "redrives", "list the redrives that were made from here", REDRIVES)
    _finish(verb, redrives)

    verb = add_command(verbs, "undo", "let the items of a redrive that still wait die again", UNDO)
    verb.add_argument("redrive", metavar="REDRIVE", help="as in `millpond dlq redrives`")
    _add_rate(verb)
    verb.add_argument("--dry-run", action="store_true", help="say what would become of them, and change nothing")
    _finish(verb, undo)

    verb = add_command(verbs, "purge", "remove the dead items of a queue, for good", PURGE)
    verb.add_argument("queue", metavar="QUEUE")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    _finish(verb, purge)


def _add_looks(verbs: Subparsers) -> None:
    verb = add_command(verbs, "list", "list dead items, or the queues that have some", LIST)
    verb.add_argument("queue", metavar="QUEUE", nargs="?", help="all queues without")
    verb.add_argument("--limit", type=int, default=LIST_LIMIT, help=f"items at most, the oldest ({LIST_LIMIT})")
    _finish(verb, list_dead)

    verb = add_command(verbs, "show", "show a dead item with its payload", SHOW)
    verb.add_argument("queue", metavar="QUEUE")
    verb.add_argument("id", metavar="ID")
    _finish(verb, show)


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
    _finish(verb, redrive)


def _add_rate(verb: Any) -> None:
    verb.add_argument("--rate", metavar="N/s", help="items a second (or /m, /h); as fast as it goes without")


def _finish(verb: Any, run: Any) -> None:
    add_pond_flags(verb)
    add_json(verb)
    verb.set_defaults(run=run)


# ---- looking ------------------------------------------------------------------------------------------------------


def list_dead(asked: Arguments) -> int:
    if asked.limit < 1:
        return fail(f"--limit is {asked.limit}; give 1 or more", WRONG_USAGE)
    with open_pond(asked) as pond:
        return _list_queues(pond, asked) if asked.queue is None else _list_items(pond, asked)


def _list_queues(pond: Pond | Client, asked: Arguments) -> int:
    from millpond.triage.dead import dead_in

    found = [one for one in (dead_in(pond, name) for name in _queues(pond)) if one.count]
    if asked.json:
        print_json([{"queue": one.queue, "dead": one.count, "letters": one.letters} for one in found])
    elif found:
        kinds = ["letters from other queues" if one.letters else "its own" for one in found]
        rows = [[one.queue, str(one.count), kind] for one, kind in zip(found, kinds, strict=True)]
        print_table(["QUEUE", "DEAD", "WHAT"], rows)
    else:
        say("nothing is dead")
    return DONE


def _queues(pond: Pond | Client) -> list[str]:
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
    items = list(islice(dead_items(pond, dead), asked.limit + 1))
    more, items = len(items) > asked.limit, items[: asked.limit]
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
                    short(item.last_error),
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

    with open_pond(asked) as pond:
        item = dead_item(pond, dead_in(pond, asked.queue), asked.id)
    shown = _without_payload(item) | _payload(item.payload)
    if asked.json:
        print_json(shown)
        return DONE
    width = max(map(len, shown))
    for name, value in shown.items():
        print(f"{name:{width}}  {value}".rstrip())
    return DONE


def _without_payload(item: Item) -> dict[str, Any]:
    import msgspec

    shown: dict[str, Any] = msgspec.to_builtins(item)
    del shown["payload"]
    return shown


def _payload(payload: bytes) -> dict[str, str]:
    """As items.get shows it: `text` if it is that, else `bytes` in base64."""
    from base64 import b64encode

    try:
        return {"text": payload.decode()}
    except UnicodeDecodeError:
        return {"bytes": b64encode(payload).decode()}


# ---- purge --------------------------------------------------------------------------------------------------------


def purge(asked: Arguments) -> int:
    from millpond.triage.dead import dead_in
    from millpond.triage.purging import purge as remove

    with open_pond(asked) as pond:
        dead = dead_in(pond, asked.queue)
        if not asked.yes and dead.count and not _agreed(f"remove {dead.count} dead items of {asked.queue} for good?"):
            return fail("nothing was removed; say --yes", WRONG_USAGE)
        removed = remove(pond, dead)
    if asked.json:
        print_json({"queue": asked.queue, "removed": removed})
    else:
        say(f"removed {removed} dead items of {asked.queue}")
    return DONE


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    say(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
