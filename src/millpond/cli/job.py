"""`millpond job`: one job and its story; its output and result; the ways to end it or to let it run at once."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments, Run, Subparsers, add_command, add_noun, duration, whole
from millpond.cli.output import DONE, FAILED, fail, print_fields, print_json, print_table, say
from millpond.cli.pond import on_pond, runs_on_pond
from millpond.cli.text import first_line, instant, progress_text, span

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.jobs.timeline import Attempt, Timeline
    from millpond.jobs.view import Job

SHOW = """\
  millpond job show job1                           all there is to know, with every attempt
  millpond job show job1 --json | jq .timeline
"""
LOGS = """\
  millpond job logs job1                           what the last attempt has printed
  millpond job logs job1 -f                        and what it prints from now on, until it ends
  millpond job logs job1 --attempt 1

The output is on the machine of the worker that ran it, in DATA/logs; --logs names another place.
"""
CANCEL = """\
  millpond job cancel job1                         also if it runs: it is told to stop
  millpond job cancel job1 job2 --dry-run
  millpond job cancel --state pending --queue reports --yes
"""
EXPLAIN = """\
  millpond job explain job1                        one sentence: why it is not running
"""
RESULT = """\
  millpond job result job1                         as JSON
  millpond job result job1 --wait 10m              once it has ended
"""
RELEASE = """\
  millpond job release job1                        does not wait any more: for its time, its backoff, or other jobs
"""
FIELDS = (  # in this order; what a job does not have is not shown
    ("id", "id"),
    ("queue", "queue"),
    ("state", "state"),
    ("command", "command"),
    ("task", "task"),
    ("args", "args"),
    ("kwargs", "kwargs"),
    ("priority", "priority"),
    ("timeout", "timeout"),
    ("created_at", "created"),
    ("updated_at", "updated"),
    ("run_at", "due"),
    ("after", "after"),
    ("schedule", "schedule"),
    ("worker", "worker"),
    ("lease_deadline", "leased until"),
    ("progress", "progress"),
    ("exit_code", "exit code"),
    ("result", "result"),
    ("last_error", "last error"),
    ("dead_reason", "died of"),
    ("correlation_id", "correlation id"),
)


def add(subparsers: Subparsers) -> None:
    summary = "look at one job: its story, output and result; cancel it"
    verbs = add_noun(subparsers, "job", summary, SHOW, LOGS, CANCEL, EXPLAIN, RESULT, RELEASE)
    _verb(verbs, "show", "all about a job, with every attempt", SHOW, show)
    verb = _verb(verbs, "logs", "what a job has printed", LOGS, _logs)
    verb.add_argument("-f", "--follow", action="store_true", help="go on until it ends")
    verb.add_argument("--attempt", type=whole(1), metavar="N", help="of this attempt; the last without")
    verb.add_argument("--logs", metavar="DIR", help="where the worker keeps its logs (DATA/logs)")
    _add_cancel(add_command(verbs, "cancel", "end jobs for good", CANCEL))
    _verb(verbs, "explain", "one sentence: why it is not running, or what became of it", EXPLAIN, explain)
    verb = _verb(verbs, "result", "what came out of it", RESULT, result)
    verb.add_argument("--wait", type=duration, default=0.0, metavar="TIME", help="wait so long for its end (0s)")
    _verb(verbs, "release", "let a job that waits run as soon as a worker is free", RELEASE, release)


def _verb(verbs: Subparsers, name: str, summary: str, examples: str, run: Run) -> argparse.ArgumentParser:
    verb = add_command(verbs, name, summary, examples)
    verb.add_argument("id", metavar="ID", help="or QUEUE/ID")
    _finish(verb, run)
    return verb


def _add_cancel(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("ids", metavar="ID", nargs="*", help="or QUEUE/ID")
    verb.add_argument("--state", choices=("pending", "processing", "failed"), help="in their place: all in this state")
    verb.add_argument("--dry-run", action="store_true", help="say which, and change nothing")
    verb.add_argument("--yes", action="store_true", help="with --state: do not ask")
    _finish(verb, _cancel)


def _finish(verb: argparse.ArgumentParser, run: Run) -> None:
    verb.add_argument("--queue", help="where it is; all are looked at without")
    runs_on_pond(verb, run)


def _logs(asked: Arguments) -> int:
    from millpond.cli.job_logs import logs

    return logs(asked)


def _cancel(asked: Arguments) -> int:
    from millpond.cli.job_cancel import cancel

    return cancel(asked)


# ---- show and explain -----------------------------------------------------------------------------------------------


def show(asked: Arguments) -> int:
    job, story, why = on_pond(asked, lambda pond: _look(pond, asked))
    if asked.json:
        import msgspec

        told = None if story is None else story.attempts
        print_json(msgspec.to_builtins(job) | {"timeline": told, "explanation": why})
        return DONE
    shown = {name: _text(getattr(job, field)) for field, name in FIELDS if getattr(job, field) not in (None, [], {})}
    if job.progress is not None:
        shown["progress"] = progress_text(job.progress)
    attempts = f"{job.attempts} of {job.max_retries or 1}"
    print_fields(shown | {"attempts": attempts, "now": why})
    if story is None:
        say("its attempts are not shown: this token may not read the journal")
    else:
        _print_story(story)
    return DONE


async def _look(pond: Api, asked: Arguments) -> tuple[Job, Timeline | None, str]:
    from millpond.errors import Forbidden
    from millpond.jobs.control import find_item
    from millpond.jobs.explain import explain_item
    from millpond.jobs.held import due_of
    from millpond.jobs.timeline import timeline
    from millpond.jobs.view import job_of

    queue, item = await find_item(pond, asked.id, asked.queue)
    try:
        story = await timeline(pond, queue, item)
    except Forbidden:
        story = None
    why = await explain_item(pond, queue, item, datetime.now(UTC))
    job = job_of(item, queue)
    if job.held:
        job.run_at = await due_of(pond, queue, item)
    return job, story, why.sentence


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{instant(value)} UTC"
    if isinstance(value, dict | list):
        import msgspec

        return msgspec.json.encode(value, enc_hook=str).decode()
    return str(value)


def _print_story(story: Timeline) -> None:
    if story.since is not None:
        say(f"what was before {instant(story.since)} UTC is not in the journal any more")
    if not story.attempts:
        return
    print()
    rows = [row for one in story.attempts for row in _rows(one)]
    if story.redriven_at is not None:
        rows.append(_redriven(story.redriven_at))
    print_table(["ATTEMPT", "BEGAN", "TOOK", "ENDED", "BY", "ERROR"], rows)
    if story.partial:
        say("there is more: the journal was too long to be read to its end")


def _rows(one: Attempt) -> list[list[str]]:
    """What did not count has no number: the next one has it."""
    row = [
        str(one.number) if one.counted else "-",
        instant(one.leased_at),
        span(one.seconds),
        (one.how or "running").replace("_", " "),
        one.by or "-",
        first_line(one.error),
    ]
    return [row] if one.redriven_at is None else [_redriven(one.redriven_at), row]


def _redriven(at: datetime) -> list[str]:
    """Attempts count from 1 again below it."""
    return ["-", instant(at), "-", "redriven", "-", "-"]


def explain(asked: Arguments) -> int:
    from millpond.jobs.control import find_item
    from millpond.jobs.explain import Explanation, explain_item

    async def work(pond: Api) -> Explanation:
        queue, item = await find_item(pond, asked.id, asked.queue)
        return await explain_item(pond, queue, item, datetime.now(UTC))

    found = on_pond(asked, work)
    if asked.json:
        print_json(found)
    else:
        print(found.sentence)
    return DONE


# ---- result and release ---------------------------------------------------------------------------------------------


def result(asked: Arguments) -> int:
    job = on_pond(asked, lambda pond: _wait(pond, asked), listen=asked.wait > 0)
    if asked.json:
        ended = {"id": job.id, "queue": job.queue, "state": job.state, "result": job.result}
        print_json(ended | {"exit_code": job.exit_code, "last_error": job.last_error})
    elif job.state == "completed":
        print_json(job.result)
    if job.state == "completed":
        return DONE
    if asked.json:
        return FAILED
    why = f": {job.cause}" if job.cause else ""
    return fail(f"job {job.id} is {job.state}{why}; see `millpond job explain {job.id}`")


async def _wait(pond: Api, asked: Arguments) -> Job:
    from millpond.jobs.control import find_item, wait_for_end
    from millpond.jobs.view import job_of

    queue, item = await find_item(pond, asked.id, asked.queue)
    if asked.wait:
        item = await wait_for_end(pond, queue, item.id, asked.wait)
    return job_of(item, queue)


def release(asked: Arguments) -> int:
    from millpond.jobs.control import find_item
    from millpond.jobs.control import release as release_one

    async def work(pond: Api) -> str:
        queue, item = await find_item(pond, asked.id, asked.queue)
        await release_one(pond, queue, item.id)
        return item.id

    id = on_pond(asked, work)
    if asked.json:
        print_json({"id": id, "released": True})
    else:
        say(f"job {id} runs as soon as a worker is free")
    return DONE
