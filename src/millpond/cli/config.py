"""`millpond config`: the settings of jobs, and whether a server would start with its configuration.

The settings of jobs are kept with their queue (`config get|set|list`); a server has a file, the environment and
flags (`config check`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.cli import config_jobs
from millpond.cli.flags import (
    Arguments,
    Subparsers,
    add_command,
    add_config_flags,
    add_json,
    add_noun,
    load_config,
    load_or_exit,
)
from millpond.cli.output import DONE, NO_ANSWER, WRONG_USAGE, fail, print_json, print_table, say

if TYPE_CHECKING:
    from millpond.config.load import Loaded
    from millpond.model import Reloaded, StoreSettings

CHECK = """\
  millpond config check
  millpond config check --config /etc/millpond.toml
  millpond config check --bind 0.0.0.0:7410          would it start so?
  MILLPOND_LOG_LEVEL=debug millpond config check --json
"""
RELOAD = """\
  millpond config reload                             the server of the data directory, as with SIGHUP
  millpond config reload --data /var/lib/millpond

The server reads its own file, environment and flags. Stores ([[stores]]) and the log change at once; other keys that
have changed are named, and need a restart. If anything is wrong, nothing changes.
"""


def add(subparsers: Subparsers) -> None:
    summary = "settings of jobs; check the configuration of a server"
    examples = (config_jobs.GET, config_jobs.SET, config_jobs.LIST, CHECK, RELOAD)
    verbs = add_noun(subparsers, "config", summary, *examples)
    config_jobs.add(verbs)
    verb = add_command(verbs, "check", "check the configuration as `millpond serve` does, and show it", CHECK)
    verb.set_defaults(run=check)
    add_config_flags(verb)
    add_json(verb)
    verb = add_command(verbs, "reload", "have the running server read its configuration again", RELOAD)
    verb.set_defaults(run=reload)
    add_config_flags(verb, ["data"])
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
    from millpond.store.base import DEFAULT
    from millpond.store.drivers import open_stores

    if loaded.problems:
        return []
    try:
        for store in loaded.config.stores:
            if store.name != DEFAULT:
                open_stores(store)
        tls_context(loaded.config.tls)
        tokens = TokensFile(loaded.config.data).read()
    except MillpondError as error:
        return [error.message]
    now = Clock().now()
    has_tokens = any(token.status(now) == "active" for token in tokens)
    return [f"{loaded.origins['bind']}: {text}" for text in check_bind(loaded.config, has_tokens)]


def reload(asked: Arguments) -> int:
    import msgspec

    from millpond.model import Reloaded
    from millpond.sharing import ask_owner

    data = load_or_exit(asked).config.data
    answered = ask_owner(data, "config.reload")
    if answered is None:
        return fail(f"no server runs on {data}; start one with `millpond serve`, or name its --data", NO_ANSWER)
    status, body = answered
    if status != 200:
        return fail(f"the process that owns {data} is no server and has no configuration (HTTP {status}); restart it")
    return _tell(asked, msgspec.json.decode(body, type=Reloaded))


def _tell(asked: Arguments, told: Reloaded) -> int:
    for problem in told.problems:
        say(f"millpond: {problem}")
    for key in told.restart:
        say(f"millpond: {key} has another value now; restart the server to use it")
    if asked.json:
        lists = {"changed": told.changed, "restart": told.restart, "problems": told.problems}
        print_json({"ok": not told.problems, **lists})
    elif not told.problems:
        for change in told.changed or ["nothing has changed"]:
            say(change)
    return WRONG_USAGE if told.problems else DONE


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
        value, text = _plain(key.value_in(loaded.config)), key.text_in(loaded.config)
        shown.append({"key": key.name, "value": value, "text": text, "from": loaded.origins[key.name]})
    return shown + [_store_value(one, loaded) for one in loaded.config.stores]


def _store_value(store: StoreSettings, loaded: Loaded) -> dict[str, Any]:
    from millpond.config.stores import without_password

    value = {"driver": store.driver, "path": store.path, "url": without_password(store.url), "affinity": store.affinity}
    value = {name: one for name, one in value.items() if one != ""}
    text = ", ".join(f"{name} {one}" for name, one in value.items())
    key = f"stores.{store.name}"
    return {"key": key, "value": value, "text": text, "from": loaded.origins[key]}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [str(one) for one in value]
    return str(value) if isinstance(value, Path) else value
