"""`millpond token`: the access tokens of a data directory. Works beside a running server, which sees the change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millpond.access.roles import ROLES
from millpond.cli.flags import Arguments, Subparsers, add_command, add_config_flags, add_json, load_or_exit
from millpond.cli.output import DONE, print_json, print_table, say

if TYPE_CHECKING:
    from millpond.access.tokens_file import Token, TokensFile

CREATE = """\
  millpond token create --role producer --queues 'team-a/*'
  millpond token create --role consumer --queues orders --queues 'orders-*' --name billing --expires 30d
  millpond token create --role operator --queues '*' --commands     may also produce jobs for workers
  export MILLPOND_TOKEN=$(millpond token create --role viewer --queues '*')

The secret goes to stdout, once; only its hash is kept. In a pattern, * also matches '/'.
"""

LIST = """\
  millpond token list
  millpond token list --json
"""

REVOKE = """\
  millpond token revoke 4fXq09Zb --dry-run
  millpond token revoke 4fXq09Zb     the id as in `millpond token list`; a secret in its place is understood
"""


def add(subparsers: Subparsers) -> None:
    token = add_command(subparsers, "token", "create, list and revoke access tokens", CREATE + LIST + REVOKE)
    verbs = token.add_subparsers(metavar="VERB", required=True)

    verb = add_command(verbs, "create", "create a token and print its secret", CREATE)
    verb.add_argument("--role", required=True, choices=list(ROLES), help="what its holder may do")
    verb.add_argument(
        "--queues", required=True, action="append", metavar="PATTERN", help="which queues, '*' for all; again for more"
    )
    verb.add_argument("--name", default="", help="who it is for, shown in lists and logs")
    verb.add_argument("--expires", metavar="TIME", help="how long it counts, like 30d; for ever without")
    verb.add_argument("--commands", action="store_true", help="may produce jobs, which workers run")
    verb.set_defaults(run=create)
    _add_place(verb)

    verb = add_command(verbs, "list", "list the tokens, also those that have ended", LIST)
    verb.set_defaults(run=list_tokens)
    _add_place(verb)

    verb = add_command(verbs, "revoke", "end a token, within 5 seconds in a running server", REVOKE)
    verb.add_argument("id", metavar="ID")
    verb.add_argument("--dry-run", action="store_true", help="say what would be revoked, and change nothing")
    verb.set_defaults(run=revoke)
    _add_place(verb)


def _add_place(parser: Any) -> None:
    add_config_flags(parser, ["data"])
    add_json(parser)


def create(asked: Arguments) -> int:
    from millpond.service.validate import duration_ms

    expires = None if asked.expires is None else duration_ms(asked.expires, "--expires", low=1_000)
    token, secret = _file(asked).create(
        _now(),
        role=asked.role,
        queues=asked.queues,
        name=asked.name,
        commands=asked.commands,
        expire_timeout_ms=expires,
    )
    if asked.json:
        print_json({**_shown(token), "secret": secret})
    else:
        print(secret)
        say(f"token {token.id}: keep the secret, it is not shown again; end it with `millpond token revoke {token.id}`")
    return DONE


def list_tokens(asked: Arguments) -> int:
    shown = [_shown(token) for token in _file(asked).read()]
    if asked.json:
        print_json(shown)
    elif not shown:
        say("no tokens; create one with `millpond token create --role admin --queues '*'`")
    else:
        print_table(["ID", "NAME", "ROLE", "QUEUES", "COMMANDS", "STATUS", "EXPIRES"], [_row(one) for one in shown])
    return DONE


def revoke(asked: Arguments) -> int:
    file = _file(asked)
    token = file.get(asked.id) if asked.dry_run else file.revoke(asked.id, _now())
    if asked.json:
        print_json({**_shown(token), "dry_run": asked.dry_run})
    elif asked.dry_run:
        say(f"would revoke token {token.id} ({token.name or token.role}), which is {token.status(_now())}")
    else:
        say(f"token {token.id} is revoked; a running server refuses it within 5 seconds")
    return DONE


def _file(asked: Arguments) -> TokensFile:
    from millpond.access.tokens_file import TokensFile

    return TokensFile(load_or_exit(asked).config.data)


def _now() -> int:
    from millpond.clock import Clock

    return Clock().now()


def _shown(token: Token) -> dict[str, Any]:
    """All but the hash, which is nobody's business."""
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "queues": list(token.queues),
        "commands": token.commands,
        "status": token.status(_now()),
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
    }


def _row(shown: dict[str, Any]) -> list[str]:
    ends = shown["expires_at"]
    commands = "yes" if shown["commands"] else "no"
    until = "never" if ends is None else f"{ends:%Y-%m-%d %H:%M}Z"
    return [
        shown["id"],
        shown["name"] or "-",
        shown["role"],
        ",".join(shown["queues"]),
        commands,
        shown["status"],
        until,
    ]
