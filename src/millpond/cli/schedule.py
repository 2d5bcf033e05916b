"""`millpond schedule`: jobs by the clock. Workers fire them; a tick is fired once, however many workers there are."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments, Run, Subparsers, add_command, add_noun, duration, moment, whole
from millpond.cli.output import DONE, print_json, print_table, say
from millpond.cli.pond import on_pond, runs_on_pond
from millpond.cli.text import first_line, instant

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.cli.job_json import Given
    from millpond.jobs.schedule import Scheduled

ADD = """\
  millpond schedule add backup --cron '0 3 * * *' --timezone Europe/Berlin ./backup.sh
  millpond schedule add ping --every 5m 'curl -fsS https://example.org/ping'
  millpond schedule add report --cron '0 8 * * mon' --missed skip -- make report --quiet
  millpond schedule add ping --every 1m --replace 'curl -fsS https://example.org/ping'

Of the ticks that no worker was there for, --missed latest runs the newest, all runs each, skip none. A tick was missed
if the next one is due too, or if it is over a minute late. A command that has flags of its own goes in quotes, or after
--.
"""
LIST = """\
  millpond schedule list                           with when they are due next
  millpond schedule list --json
"""
REMOVE = """\
  millpond schedule remove ping --dry-run
  millpond schedule remove ping                    jobs that it has enqueued stay
"""
PAUSE = """\
  millpond schedule pause backup                   the ticks meanwhile are not made up for
"""
RESUME = """\
  millpond schedule resume backup
"""

OF_ONE_JOB = ("id", "key", "delay", "run_at", "expire_timeout", "correlation_id")  # not of all that a schedule enqueues


def add(subparsers: Subparsers) -> None:
    summary = "jobs by the clock: cron lines and intervals"
    verbs = add_noun(subparsers, "schedule", summary, ADD, LIST, REMOVE, PAUSE, RESUME)
    _add_add(add_command(verbs, "add", "enqueue a job by a cron line or an interval", ADD))
    runs_on_pond(add_command(verbs, "list", "list the schedules", LIST), list_all)
    verb = _named(verbs, "remove", "end a schedule", REMOVE, remove)
    verb.add_argument("--dry-run", action="store_true", help="say what would be removed, and change nothing")
    _named(verbs, "pause", "let a schedule rest", PAUSE, pause)
    _named(verbs, "resume", "let a schedule go on", RESUME, resume)


def _add_add(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("name", metavar="NAME")
    verb.add_argument("job", metavar="COMMAND", nargs="+", help="a command, or a job in JSON")
    when = verb.add_mutually_exclusive_group(required=True)
    when.add_argument("--cron", metavar="LINE", help="minute, hour, day, month, weekday")
    when.add_argument("--every", type=duration, metavar="TIME", help="an interval")
    verb.add_argument("--timezone", default="UTC", metavar="ZONE", help="of the cron line, such as Europe/Berlin (UTC)")
    verb.add_argument("--start", type=moment, metavar="INSTANT", help="the first tick of an interval")
    verb.add_argument("--missed", choices=("skip", "latest", "all"), default="latest", help="(latest)")
    verb.add_argument("--queue", help="(jobs)")
    verb.add_argument("--priority", type=whole(-32_767, 32_767), metavar="N", help="lower goes first (0)")
    verb.add_argument("--timeout", type=duration, metavar="TIME", help="an execution that takes longer has failed")
    verb.add_argument("--max-retries", type=whole(0), metavar="N", help="executions in all; 0 is one (of the config)")
    verb.add_argument("--replace", action="store_true", help="a schedule of this name makes way")
    runs_on_pond(verb, add_schedule)


def _named(verbs: Subparsers, name: str, summary: str, examples: str, run: Run) -> argparse.ArgumentParser:
    verb = add_command(verbs, name, summary, examples)
    verb.add_argument("name", metavar="NAME")
    runs_on_pond(verb, run)
    return verb


# ---- the verbs ----------------------------------------------------------------------------------------------------


def add_schedule(asked: Arguments) -> int:
    from millpond.cli.job_json import read_job, words_of
    from millpond.errors import InvalidRequest

    names = ("queue", "priority", "timeout", "max_retries")
    flags = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    given = read_job(words_of(asked.job), flags)
    for name in OF_ONE_JOB:
        if getattr(given.job, name) is not None:
            raise InvalidRequest(f"a job on a schedule has no {name} of its own; leave it out")
    made = on_pond(asked, lambda pond: _add(pond, asked, given), create=True)
    if asked.json:
        print_json(_shown(made))
    else:
        say(f"schedule {asked.name} is due first at {instant(made.next_at)} UTC; a running worker fires it")
    return DONE


async def _add(pond: Api, asked: Arguments, given: Given) -> Scheduled:
    from millpond.jobs.schedules import add as add_one

    return await add_one(
        pond,
        asked.name,
        given.job.spec,
        datetime.now(UTC),
        cron=asked.cron,
        every=asked.every,
        timezone=asked.timezone,
        queue=given.queue,
        priority=given.job.priority,
        max_retries=given.job.max_retries,
        missed=asked.missed,
        start=asked.start,
        on_conflict="replace" if asked.replace else "reject",
    )


def list_all(asked: Arguments) -> int:
    from millpond.jobs.schedules import list_schedules

    found = on_pond(asked, list_schedules, empty=True)
    if asked.json:
        print_json([_shown(one) for one in found])
    elif found:
        print_table(["NAME", "WHEN", "NEXT", "LAST", "QUEUE", "STATUS", "COMMAND"], [_row(one) for one in found])
    else:
        say("there are no schedules; add one with `millpond schedule add`")
    return DONE


def remove(asked: Arguments) -> int:
    from millpond.jobs.schedules import get
    from millpond.jobs.schedules import remove as remove_one

    async def work(pond: Api) -> None:
        await get(pond, asked.name)
        if not asked.dry_run:
            await remove_one(pond, asked.name)

    on_pond(asked, work)
    if asked.json:
        print_json({"name": asked.name, "removed": not asked.dry_run, "dry_run": asked.dry_run})
    else:
        say(f"{'would remove' if asked.dry_run else 'removed'} schedule {asked.name}")
    return DONE


def pause(asked: Arguments) -> int:
    from millpond.jobs.schedules import pause as pause_one

    return _told(asked, on_pond(asked, lambda pond: pause_one(pond, asked.name)))


def resume(asked: Arguments) -> int:
    from millpond.jobs.schedules import resume as resume_one

    return _told(asked, on_pond(asked, lambda pond: resume_one(pond, asked.name, datetime.now(UTC))))


def _told(asked: Arguments, found: Scheduled) -> int:
    if asked.json:
        print_json(_shown(found))
    elif found.schedule.paused:
        say(f"schedule {asked.name} is paused")
    else:
        say(f"schedule {asked.name} is due next at {instant(found.next_at)} UTC")
    return DONE


# ---- how they look ------------------------------------------------------------------------------------------------


def _shown(found: Scheduled) -> dict[str, Any]:
    one = found.schedule
    return {
        "name": one.name,
        "cron": one.cron,
        "every": one.every,
        "timezone": one.timezone,
        "queue": one.queue,
        "command": one.spec.command,
        "task": one.spec.task,
        "priority": one.priority,
        "max_retries": one.max_retries,
        "missed": one.missed,
        "paused": one.paused,
        "created_at": one.created_at,
        "next_at": found.next_at,
        "fired_at": found.fired_at,
        "error": found.error,
    }


def _row(found: Scheduled) -> list[str]:
    one = found.schedule
    status = "paused" if one.paused else first_line(found.error) if found.error else "-"
    what = one.spec.command or one.spec.task or "-"
    return [one.name, one.when, instant(found.next_at), instant(found.fired_at), one.queue, status, first_line(what)]
