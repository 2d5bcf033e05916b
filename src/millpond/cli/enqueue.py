"""`millpond enqueue`: a job, or many of a file. A job is JSON, or a bare command."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments, Subparsers, add_command, duration, moment, number, whole
from millpond.cli.output import DONE, print_json, say
from millpond.cli.pond import on_pond, runs_on_pond

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.cli.job_json import Given

EXAMPLES = """\
  millpond enqueue 'sleep 2 && echo done'          prints the job's id
  millpond enqueue '{"id": "job1", "command": "sleep 2"}'
  millpond enqueue 'make report' --id report --timeout 10m --max-retries 5 --priority -1
  millpond enqueue './send.sh' --run-at 2026-03-01T12:00:00Z
  millpond enqueue './publish.sh' --after report --if-dead hold
  millpond enqueue --file jobs.ndjson              a job a line, JSON or bare; - is stdin

In JSON: id, command, queue, priority, max_retries, timeout, delay, run_at, backoff_base, env, cwd, after, if_dead, key,
correlation_id and more; a flag fills in what the JSON leaves out. max_retries counts all executions. Workers run
commands with a shell, in the directory that they were started in. An id that is taken is a failure.
"""
FLAGS = (  # of the parsed arguments, by the names that they have in JSON
    "id",
    "key",
    "queue",
    "priority",
    "max_retries",
    "timeout",
    "delay",
    "run_at",
    "backoff_base",
    "cwd",
    "env",
    "after",
    "if_dead",
    "correlation_id",
)


def add(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "enqueue", "add a job: a command for a worker to run", EXAMPLES)
    verb.add_argument("job", metavar="JOB", nargs="*", help="JSON, or a bare command; - reads a job a line")
    verb.add_argument("--file", metavar="FILE", help="a job a line; - is stdin")
    verb.add_argument("--id", help="the job's own id; one is made without")
    verb.add_argument("--key", help="deduplication: one live job a key")
    verb.add_argument("--queue", help="(jobs)")
    verb.add_argument("--priority", type=whole(-32_767, 32_767), metavar="N", help="lower goes first (0)")
    verb.add_argument("--delay", type=duration, metavar="TIME", help="not before so long")
    verb.add_argument("--run-at", type=moment, metavar="INSTANT", help="not before this instant; UTC unless it says")
    verb.add_argument("--timeout", type=duration, metavar="TIME", help="an execution that takes longer has failed")
    verb.add_argument("--max-retries", type=whole(0), metavar="N", help="executions in all; 0 is one (of the config)")
    verb.add_argument("--backoff-base", type=number(0), metavar="N", help="wait N ** attempts seconds (of the config)")
    verb.add_argument("--cwd", metavar="DIR", help="run it there")
    verb.add_argument("--env", type=_variable, action="append", metavar="NAME=VALUE", help="again for more")
    verb.add_argument(
        "--after", action="append", metavar="ID", help="run it when this job has completed; again for more"
    )
    verb.add_argument("--if-dead", choices=("cancel", "hold"), help="what if one of those dies (cancel)")
    verb.add_argument("--correlation-id", metavar="ID", help="follows the job wherever it goes")
    runs_on_pond(verb, enqueue)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"is {text!r:.60}; give NAME=VALUE")
    return name, value


def enqueue(asked: Arguments) -> int:
    from millpond.cli.job_json import read_job, words_of
    from millpond.errors import InvalidRequest

    source = asked.file if not asked.job else "-" if asked.job == ["-"] else None
    if asked.job and asked.file is not None:
        raise InvalidRequest("a job and --file do not go together; give one of them")
    if source is None and not asked.job:
        raise InvalidRequest("there is no job; give a command in quotes, JSON, or --file FILE")
    flags = _flags(asked)
    if source is not None:
        from millpond.cli.enqueue_many import enqueue_file

        return enqueue_file(asked, source, flags)
    given = read_job(words_of(asked.job), flags)
    return on_pond(asked, lambda pond: _enqueue(pond, asked, given), create=True)


def _flags(asked: Arguments) -> dict[str, Any]:
    given = {name: getattr(asked, name) for name in FLAGS}
    flags = {name: value for name, value in given.items() if value is not None}
    return flags | ({"env": dict(flags["env"])} if "env" in flags else {})


async def _enqueue(pond: Api, asked: Arguments, given: Given) -> int:
    from millpond.jobs.enqueue import enqueue_many

    [made] = await enqueue_many(pond, given.queue, [given.job], on_conflict="ignore" if given.job.key else "reject")
    if asked.json:
        print_json(
            {"id": made.id, "queue": given.queue, "correlation_id": made.correlation_id} | _again(made.duplicate)
        )
    else:
        print(made.id)
        if made.duplicate:
            say(f"{made.id} was there already; nothing was added")
    return DONE


def _again(duplicate: bool) -> dict[str, bool]:
    return {"duplicate": True} if duplicate else {}
