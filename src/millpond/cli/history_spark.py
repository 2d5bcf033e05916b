"""`millpond history report` and `sql`: from flags to Spark's jobs, and from what they find to stdout."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments
from millpond.cli.output import DONE, print_json, say
from millpond.cli.pond import data_of, lake_of, needs_extra, open_for_spark, server_of

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import Client
    from millpond.spark.jobs.views import Answer
    from millpond.spark.report import Asked

SUMS_FOLDER = "sums"  # of the lake: what incremental runs keep
TABLE_ROWS_MAX = 1_000  # more is for a file, not for eyes
QUEUES_A_PAGE = 1_000  # as many as there are in one


# ---- report ---------------------------------------------------------------------------------------------------


def report(asked: Arguments) -> int:
    with needs_extra("spark"):
        from millpond.spark.lake import check_there
        from millpond.spark.report import findings, write_parquet
        from millpond.spark.report import report as collect
        from millpond.spark.report_html import html
        from millpond.spark.report_text import text
        from millpond.spark.triage import explained, quiet_session
    lake, question = lake_of(asked), _question(asked)
    check_there(lake)
    with quiet_session("millpond history report") as spark, explained(), findings(spark, lake, question) as found:
        made = collect(found, lake, _now())
        if asked.parquet is not None:
            write_parquet(found, asked.parquet)
            say(f"the tables are in {asked.parquet}")
    _tell_gaps(lake, asked.queues)
    if asked.html is not None:
        Path(asked.html).write_text(html(made), encoding="utf-8")
        say(f"the page is {asked.html}")
    if asked.json:
        print_json(made)
    else:
        print(text(made), end="")
    return DONE


def _tell_gaps(lake: str, queues: list[str] | None) -> None:
    from millpond.history.lake import Lake
    from millpond.spark.lake import is_remote

    gaps = [] if is_remote(lake) else [gap for gap in Lake(lake).gaps() if not queues or gap.queue in queues]
    for queue in sorted({gap.queue for gap in gaps}):
        say(f"the history of {queue} has gaps: what its journal had dropped before a sync is not counted")


def _question(asked: Arguments) -> Asked:
    from millpond.spark.jobs import times
    from millpond.spark.report import Asked

    since, until = times.span(asked.since, asked.until, _now())
    return Asked(
        queues=tuple(asked.queues or ()),
        since=since,
        until=until,
        window_ms=None if asked.window == "auto" else times.window_ms(asked.window),
        at=times.instant(asked.at, "--at", _now()),
        sums=f"{lake_of(asked)}/{SUMS_FOLDER}" if asked.incremental else None,
    )


def _now() -> datetime:
    return datetime.now(UTC)


# ---- sql ------------------------------------------------------------------------------------------------------


def sql(asked: Arguments) -> int:
    with needs_extra("spark"):
        from millpond.spark.jobs.dead import dead_in
        from millpond.spark.jobs.times import window_ms
        from millpond.spark.jobs.views import Answer, make_views
        from millpond.spark.lake import check_there
        from millpond.spark.triage import quiet_session
    query = sys.stdin.read() if asked.query == "-" else asked.query
    lake, window = lake_of(asked), window_ms(asked.window)
    check_there(lake)
    with ExitStack() as held:
        options, queues = None, []
        if re.search(r"\bdead\b", query, re.IGNORECASE) and _has_pond(asked):
            pond, options = held.enter_context(open_for_spark(asked))
            queues = _with_dead(pond)
        elif re.search(r"\bdead\b", query, re.IGNORECASE):
            say("the dead are those of the history, without payloads; name their place with --data or --server")
        spark = held.enter_context(quiet_session("millpond history sql"))
        lying = None if options is None else dead_in(spark, options, queues)
        make_views(spark, lake, window, lying)
        _print(Answer(spark, query), asked)
    return DONE


def _has_pond(asked: Arguments) -> bool:
    """A lake alone may be of another machine."""
    if server_of(asked) is not None or asked.data is not None:
        return True
    return asked.lake is None and data_of(asked).is_dir()


def _with_dead(pond: Pond | Client) -> list[tuple[str, bool]]:
    """The queues that have dead items, and whether these are letters."""
    from millpond.triage.dead import dead_in

    found = []
    after: str | None = ""
    while after is not None:
        page = pond.list_queues(after=after, limit=QUEUES_A_PAGE)
        found += [dead_in(pond, queue.name) for queue in page.queues]
        after = page.next
    return [(one.queue, one.letters) for one in found if one.count]


# ---- answers --------------------------------------------------------------------------------------------------


def _print(answer: Answer, asked: Arguments) -> None:
    if asked.json:
        print_json([dict(zip(answer.columns, row, strict=True)) for row in answer.rows()])
    elif asked.csv:
        _print_csv(answer)
    else:
        _print_table(answer)


def _print_csv(answer: Answer) -> None:
    import csv

    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow(answer.columns)
    for row in answer.rows():
        lines.writerow(["" if value is None else _text(value) for value in row])


def _print_table(answer: Answer) -> None:
    from millpond.spark.report_text import table

    rows = answer.first(TABLE_ROWS_MAX + 1)
    if answer.columns:
        shown = [["null" if value is None else _text(value) for value in row] for row in rows[:TABLE_ROWS_MAX]]
        print(table(answer.columns, shown, left=len(answer.columns)))
    if len(rows) > TABLE_ROWS_MAX:
        say(f"these are the first {TABLE_ROWS_MAX:,} rows; see all with --csv or --json")


def _text(value: Any) -> str:
    import msgspec

    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}" + (f".{value.microsecond // 1000:03d}" if value.microsecond else "")
    if isinstance(value, list | dict | bool):
        return msgspec.json.encode(value, enc_hook=str).decode()
    return str(value)
