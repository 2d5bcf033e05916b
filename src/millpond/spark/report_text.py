"""A report as plain text: tables for a terminal, and the values in them as people write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from millpond.spark.report import Report, Row

WINDOWS_SHOWN = 12  # the last ones of each queue: a screen's worth for a few queues
FAILURES_SHOWN = 15
CONSUMERS_SHOWN = 15
PATH_MAX = 4_096  # as long as the system takes
CELL_MAX = 60  # characters: a longer text is cut, or the table would not be one

FIGURES = {
    "produced": "produced",
    "completed": "completed",
    "retried": "retried",
    "lease_expired": "lost",
    "dead": "dead",
    "backlog_change": "backlog",
}
TIMES = {
    "wait_p50_ms": "wait p50",
    "wait_p95_ms": "p95",
    "wait_p99_ms": "p99",
    "run_p50_ms": "run p50",
    "run_p95_ms": "p95",
    "run_p99_ms": "p99",
}
_UNITS = ((86_400_000, "d", 3_600_000, "h"), (3_600_000, "h", 60_000, "m"), (60_000, "m", 1_000, "s"))


def text(report: Report) -> str:
    span = f"{instant(report.since)} to {instant(report.until)} UTC, by {duration(report.window_ms)}"
    parts = [f"{cell(report.lake, PATH_MAX)}\n{span}", _queues(report), *_windows(report)]
    parts += [_failures(report), _consumers(report), _states(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _queues(report: Report) -> str:
    head = ["queue", *FIGURES.values(), *TIMES.values()]
    rows = [[row["queue"], *_figures(row)] for row in report.queues]
    return "Queues\n" + table(head, rows, left=1)


def _windows(report: Report) -> Iterator[str]:
    if len({row["window"] for row in report.windows}) < 2:
        return  # the table of the queues says it all
    head = ["from", *FIGURES.values(), "done/s", *TIMES.values()]
    for queue in dict.fromkeys(row["queue"] for row in report.windows):
        rows = [row for row in report.windows if row["queue"] == queue]
        last = rows[-WINDOWS_SHOWN:]
        told = f", the last {len(last)} windows of {len(rows)}" if len(last) < len(rows) else ""
        lines = [[instant(row["window"]), *_figures(row, [f"{row['throughput']:,.2f}"])] for row in last]
        yield f"{queue}{told}\n" + table(head, lines, left=1)


def _figures(row: Row, between: Sequence[str] = ()) -> list[str]:
    return [*(number(row[name]) for name in FIGURES), *between, *(duration(row[name]) for name in TIMES)]


def _failures(report: Report) -> str:
    if not report.failures:
        return "Failures\nnone"
    rows = [
        [one["signature"], ",".join(one["queues"]), number(one["failures"]), number(one["dead"]), *_seen(one)]
        for one in report.failures[:FAILURES_SHOWN]
    ]
    head = ["signature", "queues", "failures", "dead", "first seen", "last seen"]
    return "Failures\n" + table(head, rows, left=2)


def _seen(failure: Row) -> list[str]:
    return [instant(failure["first_seen"]), instant(failure["last_seen"])]


def _consumers(report: Report) -> str:
    rows = [
        [
            one["who"] or "(no name)",
            one["queue"],
            verdict(one),
            number(one["attempts"]),
            number(one["failed"]),
            number(one["lease_expired"]),
            share(one["bad_share"]),
            duration(one["run_p50_ms"]),
            "-" if one["slowness"] is None else f"{one['slowness']:.1f}x",
        ]
        for one in report.consumers[:CONSUMERS_SHOWN]
    ]
    head = ["consumer", "queue", "", "attempts", "failed", "lost", "bad", "run p50", "of queue's"]
    return "Consumers\n" + table(head, rows, left=3) if rows else ""


def _states(report: Report) -> str:
    queues: dict[str, dict[str, int]] = {}
    for row in report.states:
        queues.setdefault(row["queue"], {})[row["state"]] = row["items"]
    states = sorted({row["state"] for row in report.states})
    rows = [[queue, *(number(found.get(state, 0)) for state in states)] for queue, found in queues.items()]
    return f"Items at {instant(report.states_at)} UTC\n" + table(["queue", *states], rows, left=1) if rows else ""


# ---- values -------------------------------------------------------------------------------------------------


def verdict(consumer: Row) -> str:
    return ", ".join(word for word in ("slow", "flapping") if consumer[word])


def instant(value: datetime | None) -> str:
    if value is None:
        return "-"
    return f"{value:%Y-%m-%d %H:%M:%S}" if value.second else f"{value:%Y-%m-%d %H:%M}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def duration(ms: float | None) -> str:
    """In its two largest units at most: 250ms, 1.3s, 2m5s, 3h, 4d12h."""
    if ms is None:
        return "-"
    if ms < 1_000:
        return f"{ms:.0f}ms"
    if ms < 10_000:
        return f"{ms / 1_000:.1f}".removesuffix(".0") + "s"
    if ms < 60_000:
        return f"{ms / 1_000:.0f}s"
    for size, unit, smaller_size, smaller in _UNITS:
        if ms >= size:
            rest = int(ms % size // smaller_size)
            return f"{int(ms // size)}{unit}" + (f"{rest}{smaller}" if rest else "")
    raise AssertionError("a minute is the smallest")


# ---- tables -------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Aligned: the first `left` columns to the left, the others, which are numbers, to the right."""
    lines = [head, *([cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths, left) for line in lines)


def _line(line: Sequence[str], widths: Sequence[int], left: int) -> str:
    cells = [
        value.ljust(width) if place < left else value.rjust(width)
        for place, (value, width) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def cell(value: Any, limit: int = CELL_MAX) -> str:
    """One line of printable characters: a text from elsewhere must not move the cursor of whoever reads it."""
    shown = "".join(char if char.isprintable() else " " for char in str(value))
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
