"""`millpond config check`: whether a server would start with this configuration, and where each value is from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments, Subparsers, add_command, add_config_flags, add_json, load_config
from millpond.cli.output import DONE, WRONG_USAGE, print_json, print_table, say

if TYPE_CHECKING:
    from millpond.config.load import Loaded

CHECK = """\
  millpond config check
  millpond config check --config /etc/millpond.toml
  millpond config check --bind 0.0.0.0:7410          would it start so?
  MILLPOND_LOG_LEVEL=debug millpond config check --json
"""


def add(subparsers: Subparsers) -> None:
    config = add_command(subparsers, "config", "check the configuration, and see where each value came from", CHECK)
    verbs = config.add_subparsers(metavar="VERB", required=True)
    verb = add_command(verbs, "check", "check the configuration as `millpond serve` does, and show it", CHECK)
    verb.set_defaults(run=check)
    add_config_flags(verb)
    add_json(verb)


def check(asked: Arguments) -> int:
    loaded = load_config(asked)
    problems = [*map(str, loaded.problems), *start_problems(loaded)]
    for text in (*loaded.warnings, *problems):
        say(f"millpond: {text}")
    if asked.json:
        print_json(_as_json(loaded, problems))
    elif not problems:
        print_table(["KEY", "VALUE", "FROM"], [[one["key"], one["text"], one["from"]] for one in _values(loaded)])
    return WRONG_USAGE if problems else DONE


def start_problems(loaded: Loaded) -> list[str]:
    """What would keep a server from starting. Not while a value is wrong: it may not be the one that was meant."""
    from millpond.access.tokens_file import TokensFile
    from millpond.clock import Clock
    from millpond.config.addresses import check_bind
    from millpond.config.certificates import tls_context
    from millpond.errors import MillpondError

    if loaded.problems:
        return []
    try:
        tls_context(loaded.config.tls)
        tokens = TokensFile(loaded.config.data).read()
    except MillpondError as error:
        return [error.message]
    now = Clock().now()
    has_tokens = any(token.status(now) == "active" for token in tokens)
    return [f"{loaded.origins['bind']}: {text}" for text in check_bind(loaded.config, has_tokens)]


def _as_json(loaded: Loaded, problems: list[str]) -> dict[str, Any]:
    """A problem of a value has its key and line; one of starting has its text."""
    told: list[dict[str, Any]] = [
        {"where": one.where, "key": one.key, "line": one.line, "text": one.text} for one in loaded.problems
    ]
    return {
        "ok": not problems,
        "file": None if loaded.file is None else str(loaded.file),
        "problems": told or [{"where": None, "key": None, "line": None, "text": text} for text in problems],
        "warnings": loaded.warnings,
        "config": {one["key"]: {"value": one["value"], "from": one["from"]} for one in _values(loaded)},
    }


def _values(loaded: Loaded) -> list[dict[str, Any]]:
    from millpond.config.keys import KEYS

    shown = []
    for key in KEYS:
        value: Any = loaded.config
        for part in key.path:
            value = getattr(value, part)
        shown.append({"key": key.name, "value": _plain(value), "text": _text(value), "from": loaded.origins[key.name]})
    return shown


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [str(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _text(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
