"""`millpond claim`: the claims of batch readers, for operators. A reader that is gone for good leaves one behind."""

from __future__ import annotations

from millpond.cli.flags import Arguments, Subparsers, add_command, add_noun
from millpond.cli.output import DONE, WRONG_USAGE, agreed, fail, print_json, print_table, say
from millpond.cli.pond import open_pond, runs_on_pond
from millpond.cli.text import counted, instant

LIST = """\
  millpond claim list orders                       who has set which items apart, and since when
  millpond claim list orders --json
"""
RELEASE = """\
  millpond claim release orders spark:17 --dry-run
  millpond claim release orders spark:17           asks first
  millpond claim release orders spark:17 --yes

Its items are ready again, as if they had never been claimed. A reader that still works on them would do so twice.
"""


def add(subparsers: Subparsers) -> None:
    verbs = add_noun(subparsers, "claim", "list and release the claims of batch readers", LIST, RELEASE)
    verb = add_command(verbs, "list", "list the claims of a queue", LIST)
    verb.add_argument("queue", metavar="QUEUE")
    runs_on_pond(verb, list_claims)
    verb = add_command(verbs, "release", "give a claim's items back to their queue", RELEASE)
    verb.add_argument("queue", metavar="QUEUE")
    verb.add_argument("claim", metavar="CLAIM")
    verb.add_argument("--dry-run", action="store_true", help="say what would be released, and change nothing")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    runs_on_pond(verb, release)


def list_claims(asked: Arguments) -> int:
    with open_pond(asked) as pond:
        claims = pond.list_claims(asked.queue)
    if asked.json:
        print_json(list(claims))
    elif claims:
        print_table(
            ["CLAIM", "ITEMS", "PARTS", "STATUS", "SINCE", "OWNER"],
            [
                [
                    one.claim_id,
                    str(one.items),
                    str(len(one.parts)),
                    one.status,
                    instant(one.created_at),
                    one.owner or "-",
                ]
                for one in claims
            ],
        )
    else:
        say(f"there are no claims in {asked.queue}")
    return DONE


def release(asked: Arguments) -> int:
    from millpond.errors import NotFound

    with open_pond(asked) as pond:
        found = next((one for one in pond.list_claims(asked.queue) if one.claim_id == asked.claim), None)
        if found is None:
            raise NotFound(
                f"there is no claim {asked.claim!r} in {asked.queue}; see `millpond claim list {asked.queue}`"
            )
        if asked.dry_run:
            items = found.items
        elif not asked.yes and not agreed(f"release {counted(found.items, 'item')} of {asked.claim}?"):
            return fail("nothing was released; say --yes", WRONG_USAGE)
        else:
            items = pond.release_claim(asked.queue, asked.claim, epoch=found.epoch).items
    if asked.json:
        print_json({"queue": asked.queue, "claim_id": asked.claim, "items": items, "dry_run": asked.dry_run})
    else:
        say(f"{'would release' if asked.dry_run else 'released'} {counted(items, 'item')} of {asked.claim}")
    return DONE
