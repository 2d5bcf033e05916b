"""The jobs as an application, for spark-submit on a cluster or `python -m millpond.spark.jobs` on this machine.

Only the driver needs millpond: to executors the jobs are plain expressions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from pyspark.sql import DataFrame

from millpond.errors import MillpondError
from millpond.spark import lake as lakes
from millpond.spark.jobs import attempts, consumers, dead, incremental, items, metrics, signatures, timelines, times
from millpond.spark.session import session

INCREMENTAL = "incremental"
EXAMPLES = """\
examples:
  python -m millpond.spark.jobs metrics --lake ./history --out ./metrics --window 15m
  spark-submit --master spark://10.0.0.9:7077 jobs/__main__.py timelines --lake s3a://lake/history --out s3a://lake/lives
  python -m millpond.spark.jobs incremental --lake ./history --out ./sums --window 15m --every '1 minute'
"""


class Question(NamedTuple):
    window_ms: int
    at: datetime


JOBS: dict[str, Callable[[DataFrame, Question], DataFrame]] = {
    "metrics": lambda events, asked: metrics.metrics(events, asked.window_ms),
    "failures": lambda events, asked: signatures.signatures(events),
    "consumers": lambda events, asked: consumers.consumers(events, asked.window_ms),
    "timelines": lambda events, _: timelines.timelines(events),
    "attempts": lambda events, _: attempts.attempts(events),
    "items": lambda events, asked: items.items_at(events, asked.at),
    "states": lambda events, asked: items.states(items.items_at(events, asked.at)),
    "dead": lambda events, _: dead.dead(items.items(events)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    now = datetime.now(UTC)
    try:
        window_ms = times.window_ms(asked.window)
        since, until = times.span(asked.since, asked.until, now)
        question = Question(window_ms, times.instant(asked.at, "--at", now) or now)
        spark = session(f"millpond {asked.job}")
        try:
            if asked.job == INCREMENTAL:
                incremental.run(spark, asked.lake, asked.out, window_ms, asked.every).awaitTermination()
            else:
                events = lakes.events(spark, asked.lake, queues=asked.queue, since=since, until=until)
                _write(JOBS[asked.job](events, question), asked)
        finally:
            spark.stop()
    except MillpondError as error:
        print(f"millpond: {error.message}", file=sys.stderr)
        return 1
    return 0


def _write(table: DataFrame, asked: argparse.Namespace) -> None:
    table.write.format(asked.format).mode(asked.mode).save(lakes.address(asked.out))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millpond.spark.jobs",
        description="Ask the history of queues.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("job", choices=[*JOBS, INCREMENTAL])
    parser.add_argument("--lake", required=True, help="the history: a path, or a URL that Spark can read")
    parser.add_argument("--out", required=True, help="where the answer goes, the same")
    parser.add_argument("--queue", action="append", help="only this; again for more")
    parser.add_argument("--since", metavar="TIME", help="an instant, or how long ago: 2026-03-01T12:00Z, 24h")
    parser.add_argument("--until", metavar="TIME", help="the same; it is not included")
    parser.add_argument("--window", metavar="TIME", default="1h", help="how long a window is (1h)")
    parser.add_argument("--at", metavar="TIME", help="for items and states: as they were then (now)")
    parser.add_argument("--every", metavar="TIME", help="for incremental: go on, and look so often: '1 minute'")
    parser.add_argument("--format", default="parquet", help="parquet, or what the cluster has jars for")
    parser.add_argument("--mode", default="overwrite", choices=["overwrite", "append", "errorifexists"])
    return parser


if __name__ == "__main__":
    sys.exit(main())
