"""`millpond worker`: runs jobs until it is signalled; stops and lists those that do."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import Any

from millpond.cli.flags import (
    Arguments,
    Subparsers,
    add_command,
    add_config_flags,
    add_noun,
    duration,
    whole,
)
from millpond.cli.output import DONE, print_json, print_table, say
from millpond.cli.pond import on_pond, runs_on_pond
from millpond.cli.text import span

SLOTS_MAX = 10_000  # of one worker: each command is a process, each thread has a stack
SIZES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

START = """\
  millpond worker start                            one job at a time, until Ctrl-C
  millpond worker start --count 3
  millpond worker start --queue mail=3 --queue reports --count 8
  millpond worker start --app shop.jobs:app --pool processes --count 4
  MILLPOND_TOKEN=… millpond worker start --server https://queue.example.org --allow-commands

The first SIGTERM or Ctrl-C drains: running jobs are finished, nothing new is begun. The second ends them, and they run
again elsewhere. A terminal that is closed drains too; under nohup it changes nothing. With --max-jobs or --max-rss the
worker replaces itself by a fresh one. From a server commands run only with --allow-commands: whoever may enqueue there
may run anything here. An App that names its data or server is followed there, unless --data or --server say otherwise.
"""
STOP = """\
  millpond worker stop                             those on this machine; waits until their jobs have ended
  millpond worker stop build-7-4711-0a1b2c3d
  millpond worker stop --force                     ends their jobs too, which run again elsewhere
  millpond worker stop --all --no-wait             also on other machines
"""
LIST = """\
  millpond worker list
  millpond worker list --json | jq '.[].running'

One that was killed on this machine is shown as lost, until its last heartbeat runs out half a minute later.
"""


def add(subparsers: Subparsers) -> None:
    verbs = add_noun(subparsers, "worker", "run jobs; stop and list workers", START, STOP, LIST)
    _add_start(add_command(verbs, "start", "run jobs, in the foreground, until signalled", START))
    _add_stop(add_command(verbs, "stop", "let workers finish what they run, and end", STOP))
    verb = add_command(verbs, "list", "list the workers that are alive", LIST)
    runs_on_pond(verb, list_all)


def _add_start(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--count", type=whole(1, SLOTS_MAX), default=1, metavar="N", help="slots: jobs at a time (1)")
    verb.add_argument(
        "--queue", type=_weighted, action="append", dest="queues", metavar="Q[=WEIGHT]",
        help="jobs of this queue; again for more, by weight (jobs, or those of the app)",
    )  # fmt: skip
    verb.add_argument("--app", metavar="MODULE:APP", help="the Python tasks of this millpond.App, where it says")
    verb.add_argument("--pool", choices=("threads", "processes"), default="threads", help="for plain tasks (threads)")
    verb.add_argument("--allow-commands", action="store_true", help="run commands that come from a server")
    verb.add_argument("--no-commands", action="store_true", help="run no commands, only tasks")
    verb.add_argument("--max-jobs", type=whole(1), metavar="N", help="begin afresh after so many jobs")
    verb.add_argument(
        "--max-rss", type=_size, metavar="SIZE",
        help="begin afresh above so much memory, such as 512M: the worker, and each process of its pool by itself",
    )  # fmt: skip
    verb.add_argument("--lease-timeout", type=duration, metavar="TIME", help="jobs of a dead worker wait so long (20s)")
    verb.add_argument("--logs", metavar="DIR", help="the output of commands (DATA/logs)")
    verb.add_argument("--name", default="", help="how it is listed (host and process)")
    verb.add_argument("--server", metavar="URL", help="jobs of a server (MILLPOND_SERVER, MILLPOND_TOKEN)")
    add_config_flags(verb, ["data", "log.level", "log.format"])
    verb.set_defaults(run=_start)


def _add_stop(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("workers", metavar="WORKER", nargs="*", help="as in `millpond worker list`; those here without")
    verb.add_argument("--all", action="store_true", help="also those on other machines")
    verb.add_argument("--force", action="store_true", help="end their jobs, which go back to their queue")
    verb.add_argument("--no-wait", action="store_true", help="do not wait until they are gone")
    verb.add_argument("--timeout", type=duration, metavar="TIME", help="wait so long at most; it is a failure then")
    runs_on_pond(verb, _stop)


def _weighted(text: str) -> tuple[str, float]:
    name, equals, weight = text.partition("=")
    try:
        value = float(weight) if equals else 1.0
    except ValueError:
        value = 0.0
    if not name or not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text!r:.60}; give a queue, or QUEUE=WEIGHT with a weight above 0")
    return name, value


def _size(text: str) -> int:
    digits, unit = (text[:-1], text[-1].lower()) if text[-1:].lower() in SIZES else (text, "")
    try:
        value = int(float(digits) * SIZES.get(unit, 1))
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {text!r:.60}; give bytes, or a size such as 512M or 2G")
    return value


def _start(asked: Arguments) -> int:
    from millpond.cli.worker_start import start

    return start(asked)


def _stop(asked: Arguments) -> int:
    from millpond.cli.worker_stop import stop

    return stop(asked)


def list_all(asked: Arguments) -> int:
    from millpond.jobs.workers import list_workers

    found = on_pond(asked, list_workers, empty=True)
    if asked.json:
        import msgspec

        print_json([msgspec.structs.asdict(one) for one in found])
    elif found:
        print_table(
            ["WORKER", "HOST", "PID", "SLOTS", "RUNNING", "DONE", "FAILED", "QUEUES", "STATUS", "UP", "SEEN"],
            [_row(one, datetime.now(UTC)) for one in found],
        )
    else:
        say("no worker is running; start one with `millpond worker start`")
    return DONE


def _row(one: Any, now: datetime) -> list[str]:
    return [
        one.incarnation,
        one.host,
        str(one.pid),
        str(one.slots),
        str(one.running_count),
        str(one.done),
        str(one.failed),
        ", ".join(name if weight == 1 else f"{name}={weight:g}" for name, weight in one.queues.items()),
        one.status,
        span(max(0.0, (now - one.started_at).total_seconds())),
        f"{span(max(0.0, (now - one.heartbeat_at).total_seconds()))} ago",
    ]
