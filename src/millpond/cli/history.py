"""`millpond history`: everything that ever happened to items, kept beside the queues and asked about."""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
from typing import TYPE_CHECKING

from millpond.cli.flags import Arguments, Subparsers, add_command, add_config_flags, add_json
from millpond.cli.output import DONE, FAILED, NOT_FOUND, fail, print_json, print_table, say
from millpond.cli.pond import LAKE_FOLDER, add_pond_flags, data_of, lake_of, needs_extra, open_async_pond, server_of

if TYPE_CHECKING:
    from millpond.history.exporter import SyncReport
    from millpond.history.lookup import ItemEvent

ERROR_SHOWN_MAX = 60  # characters
NEGATIVE = re.compile(r"-\d.*")  # a value, such as -5m, and no flag: then it can be told what is wrong with it
RETAIN_DAYS_MAX = 36_500  # a hundred years: anything longer is a unit mistake

SYNC = """\
  millpond history sync                            what is new, into DATA/history
  millpond history sync --server http://10.0.0.5:7410 --lake /srv/history
  millpond history sync --follow --retain 90       go on, compact now and then, keep 90 days
"""
REPORT = """\
  millpond history report                          all of it, as tables
  millpond history report --queue mail --since 24h --window 15m
  millpond history report --html report.html --parquet ./report
  millpond history report --incremental            reads only what is new since the last time
  millpond history report --at 2026-03-01T12:00Z   with what was in the queues then
"""
ITEM = """\
  millpond history item kq3v0a-0-4711              what happened to it, step by step, in its dead queue too
"""
SQL = """\
  millpond history sql "select queue, why, count(*) from events group by all"
  millpond history sql "select signature, failures, queues from failures limit 10"
  millpond history sql "select id, error, text from dead where error like '%timeout%'" --json
  millpond history sql - < query.sql

The tables: events, items, attempts, dead, metrics, failures, consumers. `describe items` tells the columns of one.
"""


def add(subparsers: Subparsers) -> None:
    summary = "keep the history of all items, and ask it"
    noun = add_command(subparsers, "history", summary, SYNC + REPORT + ITEM + SQL.partition("\n\n")[0] + "\n")
    verbs = noun.add_subparsers(metavar="VERB", required=True)
    _add_sync(verbs)
    _add_report(verbs)
    _add_item(verbs)
    _add_sql(verbs)


def _add_verb(verbs: Subparsers, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    verb = add_command(verbs, name, summary, examples)
    verb._negative_number_matcher = NEGATIVE
    return verb


def _add_sync(verbs: Subparsers) -> None:
    verb = _add_verb(verbs, "sync", "bring the history up to date", SYNC)
    add_pond_flags(verb)
    _add_lake(verb)
    _add_queues(verb)
    verb.add_argument("--follow", action="store_true", help="go on until SIGTERM or Ctrl-C")
    verb.add_argument("--interval", metavar="TIME", default="5s", help="with --follow: how often (5s)")
    verb.add_argument("--retain", metavar="DAYS", type=_days, help="drop the dates before; never without")
    add_json(verb)
    verb.set_defaults(run=sync)


def _days(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= RETAIN_DAYS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days; give 1 to {RETAIN_DAYS_MAX}")
    return int(text)


def _add_report(verbs: Subparsers) -> None:
    verb = _add_verb(verbs, "report", "how the queues did, what failed, who is slow (runs Spark)", REPORT)
    add_config_flags(verb, ["data"])
    _add_lake(verb)
    _add_queues(verb)
    verb.add_argument("--since", metavar="TIME", help="an instant, or how long ago: 2026-03-01T12:00Z, 24h")
    verb.add_argument("--until", metavar="TIME", help="the same; it is not part of the report")
    verb.add_argument("--window", metavar="TIME", default="auto", help="how long a window is: 1m, 15m, 1h … (auto)")
    verb.add_argument("--at", metavar="TIME", help="show what was in the queues then, not at the end")
    verb.add_argument("--html", metavar="FILE", help="also as one HTML file with plots")
    verb.add_argument("--parquet", metavar="DIR", help="also as Parquet: metrics, failures, consumers, items")
    verb.add_argument("--incremental", action="store_true", help="keep sums in LAKE/sums, and read only what is new")
    add_json(verb)
    verb.set_defaults(run=_report)


def _add_item(verbs: Subparsers) -> None:
    verb = _add_verb(verbs, "item", "what happened to an item", ITEM)
    verb.add_argument("id", metavar="ID")
    add_config_flags(verb, ["data"])
    _add_lake(verb)
    _add_queues(verb)
    add_json(verb)
    verb.set_defaults(run=item)


def _add_sql(verbs: Subparsers) -> None:
    verb = _add_verb(verbs, "sql", "ask the history in SQL (runs Spark)", SQL)
    verb.add_argument("query", metavar="QUERY", help="- reads it from stdin")
    add_pond_flags(verb)
    _add_lake(verb)
    verb.add_argument("--window", metavar="TIME", default="1h", help="how long a window of metrics is (1h)")
    shape = verb.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON value and nothing else")
    shape.add_argument("--csv", action="store_true", help="print CSV, with a line of names first")
    verb.set_defaults(run=_sql)


def _add_lake(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--lake", metavar="DIR", help=f"where the history is (DATA/{LAKE_FOLDER})")


def _add_queues(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--queue", metavar="QUEUE", action="append", dest="queues", help="only this; again for more")


# ---- sync -----------------------------------------------------------------------------------------------------


def sync(asked: Arguments) -> int:
    with needs_extra("lake"):
        import millpond.history.exporter  # noqa: F401
    from millpond.service.validate import duration_ms

    interval = duration_ms(asked.interval, "--interval", low=100) / 1000
    done = asyncio.run(_sync(asked, lake_of(asked), interval))
    if asked.json:
        print_json(done)
    else:
        _tell(done, lake_of(asked))
    return FAILED if done.problems else DONE


async def _sync(asked: Arguments, lake: str, interval: float) -> SyncReport:
    from millpond.history.exporter import sync as export

    stop = asyncio.Event()
    if asked.follow:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_async_pond(asked) as pond:
        if asked.follow:
            say(f"following {server_of(asked) or data_of(asked)}; end with Ctrl-C")
        return await export(
            pond,
            lake,
            queues=asked.queues,
            follow=asked.follow,
            interval=interval,
            retain_days=asked.retain,
            stop=stop,
        )


def _tell(done: SyncReport, lake: str) -> None:
    for problem in done.problems:
        say(f"millpond: {problem}")
    for gap in done.gaps:
        say(
            f"millpond: {gap.queue}: turns {gap.from_turn} to {gap.to_turn} of partition {gap.partition} were gone"
            " before they could be exported; sync more often"
        )
    for queue in done.deleted:
        say(
            f"millpond: queue {queue} was deleted; what it did after the sync before that is not in the history:"
            " sync before you delete a queue"
        )
    busy = sum(1 for one in done.queues.values() if one.events)
    print(f"{done.events:,} events of {busy:,} queues in {done.seconds:.1f} s, into {lake}")


# ---- item -----------------------------------------------------------------------------------------------------


def item(asked: Arguments) -> int:
    with needs_extra("lake"):
        from millpond.history.lake import Lake
        from millpond.history.lookup import timeline
    lake = lake_of(asked)
    if not Lake(lake).dates():
        return fail(
            f"there is no history in {lake}; fill it with `millpond history sync`, or name another lake", NOT_FOUND
        )
    steps = timeline(Lake(lake), asked.id, queues=asked.queues)
    if not steps:
        return fail(f"the history in {lake} does not know {asked.id!r}; check the id, or sync it first", NOT_FOUND)
    if asked.json:
        print_json(steps)
    else:
        print_table(
            ["AT", "QUEUE", "WHY", "FROM", "TO", "ATTEMPT", "WHO", "SINCE", "ERROR"], [_row(one) for one in steps]
        )
    return DONE


def _row(step: ItemEvent) -> list[str]:
    since = "-" if step.since_ms is None else f"{step.since_ms / 1000:,.3f}s"
    error = (step.error or "-").splitlines()[0][:ERROR_SHOWN_MAX]
    attempt = "-" if step.attempt is None else str(step.attempt)
    at = f"{step.at:%Y-%m-%d %H:%M:%S}.{step.at.microsecond // 1000:03d}"
    return [
        at,
        step.queue,
        step.why,
        step.from_state or "-",
        step.to_state or "-",
        attempt,
        step.who or "-",
        since,
        error,
    ]


# ---- Spark ----------------------------------------------------------------------------------------------------


def _report(asked: Arguments) -> int:
    from millpond.cli import history_spark

    return history_spark.report(asked)


def _sql(asked: Arguments) -> int:
    from millpond.cli import history_spark

    return history_spark.sql(asked)
