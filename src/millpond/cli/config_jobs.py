"""`millpond config get`, `set` and `list`: what jobs get that do not say otherwise, from the moment it is set."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import COMPLETES, Arguments, Run, Subparsers, add_command, duration, number, whole
from millpond.cli.output import DONE, print_json, print_table, say
from millpond.cli.pond import data_of, on_pond, runs_on_pond, server_of

if TYPE_CHECKING:
    from millpond.api import Api

KEYS: dict[str, Any] = {"max_retries": whole(0, 1_000_000), "backoff_base": number(0, 1_000), "poll_interval": duration}
ABOUT = {
    "max_retries": "executions of a job in all; 0 is one",
    "backoff_base": "after the n-th failure a job waits base ** n seconds",
    "poll_interval": "kept for QueueCTL's sake: nothing polls",
}

GET = """\
  millpond config get max-retries
"""
SET = """\
  millpond config set max-retries 5                for jobs that are enqueued from now on
  millpond config set backoff-base 3
  millpond config set max-retries 10 --queue reports

max-retries counts all executions. poll-interval is accepted and kept, but nothing polls: workers hear of jobs at once.
"""
LIST = """\
  millpond config list
  millpond config list --json
"""


def add(verbs: Subparsers) -> None:
    verb = add_command(verbs, "get", "show one setting of jobs", GET)
    _add_key(verb)
    _finish(verb, get)
    verb = add_command(verbs, "set", "change a setting of jobs, for those enqueued afterwards", SET)
    _add_key(verb)
    verb.add_argument("value", metavar="VALUE")
    _finish(verb, set_value)
    _finish(add_command(verbs, "list", "show all settings of jobs", LIST), list_values)


def _add_key(verb: argparse.ArgumentParser) -> None:
    key = verb.add_argument("key", metavar="KEY", type=_key, help=", ".join(KEYS))
    vars(key)[COMPLETES] = [name.replace("_", "-") for name in KEYS]


def _finish(verb: argparse.ArgumentParser, run: Run) -> None:
    verb.add_argument("--queue", default="jobs", help="of the jobs in this queue (jobs)")
    runs_on_pond(verb, run)


def _key(text: str) -> str:
    name = text.replace("-", "_")
    if name not in KEYS:
        from difflib import get_close_matches

        near = get_close_matches(name, KEYS, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(KEYS)}"
        raise argparse.ArgumentTypeError(f"is {text!r:.60}; {hint}")
    return name


def get(asked: Arguments) -> int:
    value = _values(asked)[asked.key]
    if asked.json:
        print_json({asked.key: value})
    else:
        print(_text(value))
    return DONE


def set_value(asked: Arguments) -> int:
    from millpond.errors import InvalidRequest

    try:
        value = KEYS[asked.key](asked.value)
    except argparse.ArgumentTypeError as error:
        raise InvalidRequest(f"{asked.key} {error}") from None
    settings = on_pond(asked, lambda pond: _change(pond, asked, value), create=True)
    if asked.json:
        print_json(settings)
    else:
        say(f"{asked.key} is {_text(settings[asked.key])} for jobs that are enqueued in {asked.queue} from now on")
    return DONE


def list_values(asked: Arguments) -> int:
    settings = _values(asked)
    if asked.json:
        print_json(settings)
    else:
        print_table(["KEY", "VALUE", "WHAT"], [[key, _text(value), ABOUT[key]] for key, value in settings.items()])
    return DONE


# ---- where they are -----------------------------------------------------------------------------------------------


def _values(asked: Arguments) -> dict[str, Any]:
    """Where there is no data directory yet, those that its first job would get."""
    from millpond.jobs.queues import JobSettings

    if server_of(asked) is None and not data_of(asked).is_dir():
        return _shown(JobSettings())
    return on_pond(asked, lambda pond: _look(pond, asked))


async def _look(pond: Api, asked: Arguments) -> dict[str, Any]:
    from millpond.errors import Forbidden, NotFound
    from millpond.jobs.names import JOBS_QUEUE
    from millpond.jobs.queues import JobSettings, job_settings

    try:
        found = await job_settings(pond, asked.queue)
    except NotFound:
        if asked.queue != JOBS_QUEUE:
            raise
        found = JobSettings()
    if found is None:
        raise Forbidden(f"this token may not look at queue {asked.queue!r}; use one that may")
    return _shown(found)


async def _change(pond: Api, asked: Arguments, value: Any) -> dict[str, Any]:
    from millpond.jobs.queues import change_settings

    return _shown(await change_settings(pond, asked.queue, **{asked.key: value}))


def _shown(settings: Any) -> dict[str, Any]:
    return {key: getattr(settings, key) for key in KEYS}


def _text(value: Any) -> str:
    return "unlimited" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
