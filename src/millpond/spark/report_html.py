"""A report as one HTML file: plots and tables, no script, nothing from elsewhere. All text is escaped."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from html import escape
from itertools import accumulate
from typing import Any

from millpond.spark.report import Report, Row
from millpond.spark.report_plots import Series, bar, duration_scale, plot
from millpond.spark.report_text import FIGURES, TIMES, cell, duration, instant, number, share, verdict

PLOT_WINDOWS_MAX = 2_000  # a plot is not wider; a span of more windows is told by its tables
TEXT_MAX = 400  # of an error, on the page

STYLE = """
:root{color-scheme:light dark;--ink:#1c2733;--soft:#566574;--line:#dde3ea;--page:#fbfcfd;--card:#fff;--mark:#0b6885;
--code:#eef3f7;--a:#0b6885;--b:#2f8f4e;--c:#b7791f;--d:#c53030}
@media(prefers-color-scheme:dark){:root{--ink:#e3e9ef;--soft:#9aa9b8;--line:#2a3540;--page:#10161c;--card:#161e26;
--mark:#5cc3e6;--code:#1e2832;--a:#5cc3e6;--b:#68c98a;--c:#e5b454;--d:#f08080}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:break-word}
main{max-width:78rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .25rem;letter-spacing:-.02em}
h2{font-size:1.25rem;margin:2.5rem 0 .75rem;letter-spacing:-.01em}
h3{font:600 1rem/1.4 ui-monospace,SFMono-Regular,Menlo,monospace;margin:0 0 .5rem}
p{margin:.25rem 0 1rem}.lead{color:var(--soft)}
nav{font-size:.92rem;margin:.5rem 0 0}
nav a{color:var(--mark);margin-right:1rem;text-underline-offset:.15em;white-space:nowrap}
section{background:var(--card);border:1px solid var(--line);border-radius:.5rem;margin:1rem 0;padding:1rem 1.25rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:.5rem 1.5rem}
figure{margin:0}figcaption{font-size:.86rem;font-weight:600;color:var(--soft)}
.legend{font-weight:400;margin-left:.75rem}.legend span{margin-right:.75rem;white-space:nowrap;color:var(--ink)}
.legend i{display:inline-block;width:.9rem;height:.18rem;margin-right:.3rem;vertical-align:middle;border-radius:1px}
.legend .a i{background:var(--a)}.legend .b i{background:var(--b)}.legend .c i{background:var(--c)}
.legend .d i{background:var(--d)}
svg{display:block;width:100%;height:auto}
svg text{font:11px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--soft)}
polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}
polyline.a{stroke:var(--a)}polyline.b{stroke:var(--b)}polyline.c{stroke:var(--c)}polyline.d{stroke:var(--d)}
circle.a{fill:var(--a)}circle.b{fill:var(--b)}circle.c{fill:var(--c)}circle.d{fill:var(--d)}
.tick{stroke:var(--line)}.zero{stroke:var(--soft)}.slot{fill:transparent}.slot:hover{fill:var(--mark);fill-opacity:.1}
.bar{display:inline-block;width:5rem;vertical-align:middle}.bar .back{fill:var(--line)}.bar .front{fill:var(--c)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:right;padding:.35rem .6rem;border-bottom:1px solid var(--line);vertical-align:top;
font-variant-numeric:tabular-nums;white-space:nowrap}
th{color:var(--soft);font-weight:500}tr:last-child td{border-bottom:0}
th:first-child,td:first-child{text-align:left;padding-left:0}th:last-child,td:last-child{padding-right:0}
td.text,th.text{text-align:left;white-space:normal;min-width:9rem}td.wide{min-width:20rem}
code{font:.92em ui-monospace,SFMono-Regular,Menlo,monospace;overflow-wrap:anywhere}
.example{color:var(--soft);font-size:.95em;margin-top:.15rem}
.found{background:var(--c);color:var(--page);border-radius:.25rem;padding:.05rem .4rem;font-size:.85em;
margin-right:.25rem;white-space:nowrap}
.none{color:var(--soft)}
"""
_POLICY = f"default-src 'none'; style-src 'sha256-{b64encode(sha256(STYLE.encode()).digest()).decode()}'"


def html(report: Report) -> str:
    span = f"{instant(report.since)} to {instant(report.until)} UTC, in windows of {duration(report.window_ms)}"
    parts = {
        "Queues": f"<section>{_queues(report)}</section>",
        "Over time": _over_time(report),
        "Failures": f"<section>{_failures(report.failures)}</section>",
        "Consumers": f"<section>{_consumers(report.consumers)}</section>",
        "Items": f"<section>{_states(report)}</section>",
    }
    anchors = "".join(f'<a href="#{_anchor(title)}">{title}</a>' for title, part in parts.items() if part)
    body = "".join(f'<h2 id="{_anchor(title)}">{title}</h2>{part}' for title, part in parts.items() if part)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>millpond: history</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main><h1>History</h1>"
        f"<p class=lead>{escape(span)}<br>{_code(report.lake)}, read {instant(report.made_at)} UTC</p>"
        f"<nav>{anchors}</nav>{body}</main></body></html>\n"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


# ---- tables -------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], first: str = "", texts: int = 0) -> str:
    """Cells are HTML already. `texts` columns after the first are texts; the others numbers."""
    kinds = [first, *[" class=text"] * texts, *[""] * (len(head) - 1 - texts)]
    top = "".join(f"<th{kind}>{title}</th>" for kind, title in zip(kinds, head, strict=True))
    lines = (
        "<tr>" + "".join(f"<td{kind}>{value}</td>" for kind, value in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _queues(report: Report) -> str:
    head = ["queue", *FIGURES.values(), *TIMES.values()]
    rows = [
        [_code(row["queue"]), *(number(row[name]) for name in FIGURES), *(duration(row[name]) for name in TIMES)]
        for row in report.queues
    ]
    return _table(head, rows)


def _failures(failures: Sequence[Row]) -> str:
    if not failures:
        return "<p class=none>None.</p>"
    most = max(one["failures"] for one in failures)
    rows = [
        [
            f"{_code(one['signature'])}{_example(one)}",
            escape(cell(", ".join(one["queues"]), TEXT_MAX)),
            f"{bar(one['failures'] / most)} {number(one['failures'])}",
            number(one["dead"]),
            instant(one["first_seen"]),
            instant(one["last_seen"]),
        ]
        for one in failures
    ]
    head = ["signature", "queues", "failures", "dead", "first seen", "last seen"]
    return _table(head, rows, ' class="text wide"', texts=1)


def _example(failure: Row) -> str:
    """The newest error, where it says more than the signature."""
    newest = failure["examples"][-1]
    if newest == failure["signature"]:
        return ""
    return f"<div class=example>{escape(cell(newest, TEXT_MAX))}</div>"


def _consumers(consumers: Sequence[Row]) -> str:
    if not consumers:
        return "<p class=none>No attempt has ended in this span.</p>"
    rows = [
        [
            f"{_code(one['who'] or '(no name)')} {_findings(one)}",
            _code(one["queue"]),
            number(one["attempts"]),
            number(one["failed"]),
            number(one["lease_expired"]),
            f"{bar(one['bad_share'])} {share(one['bad_share'])}",
            share(one["others_bad_share"]),
            duration(one["run_p50_ms"]),
            duration(one["run_p95_ms"]),
            "-" if one["slowness"] is None else f"{one['slowness']:.1f}×",
        ]
        for one in consumers
    ]
    head = ["consumer", "queue", "attempts", "failed", "lost", "bad", "others’", "run p50", "p95", "of queue’s p50"]
    return _table(head, rows, texts=1)


def _findings(consumer: Row) -> str:
    return "".join(f"<span class=found>{word}</span>" for word in verdict(consumer).split(", ") if word)


def _states(report: Report) -> str:
    queues: dict[str, dict[str, int]] = {}
    for row in report.states:
        queues.setdefault(row["queue"], {})[row["state"]] = row["items"]
    if not queues:
        return "<p class=none>None.</p>"
    states = sorted({row["state"] for row in report.states})
    rows = [[_code(queue), *(number(found.get(state, 0)) for state in states)] for queue, found in queues.items()]
    return f"<p class=lead>At {instant(report.states_at)} UTC</p>" + _table(["queue", *states], rows)


def _code(text: str) -> str:
    return f"<code>{escape(cell(text, TEXT_MAX))}</code>"


# ---- plots --------------------------------------------------------------------------------------------------


def _over_time(report: Report) -> str:
    windows = _all_windows(report)
    if not 1 < len(windows) <= PLOT_WINDOWS_MAX:
        return ""
    queues: dict[str, dict[datetime, Row]] = {}
    for row in report.windows:
        queues.setdefault(row["queue"], {})[row["window"]] = row
    return "".join(
        f"<section><h3>{escape(queue)}</h3><div class=plots>{_plots(windows, [rows.get(at, {}) for at in windows])}"
        "</div></section>"
        for queue, rows in queues.items()
    )


def _all_windows(report: Report) -> list[datetime]:
    """Also those in which nothing happened."""
    length = timedelta(milliseconds=report.window_ms)
    count = (report.until - report.since) // length
    return [report.since + place * length for place in range(min(count, PLOT_WINDOWS_MAX + 1))]


def _plots(windows: Sequence[datetime], rows: Sequence[Row]) -> str:
    changes = [row.get("backlog_change") or 0 for row in rows]
    return "".join(
        (
            plot("Items a window", windows, _counted(rows), _short),
            plot(
                "Backlog, from the start of the span",
                windows,
                [Series("backlog", "a", list(accumulate(changes)))],
                _short,
            ),
            plot("Wait for a lease", windows, _measured(rows, "wait"), duration, duration_scale),
            plot("Run time of attempts", windows, _measured(rows, "run"), duration, duration_scale),
        )
    )


def _counted(rows: Sequence[Row]) -> list[Series]:
    figures = {"produced": "a", "completed": "b", "retried": "c", "dead": "d"}
    return [Series(name, style, [row.get(name) or 0 for row in rows]) for name, style in figures.items()]


def _measured(rows: Sequence[Row], measure: str) -> list[Series]:
    styles = {"p50": "b", "p95": "c", "p99": "d"}
    return [Series(name, style, [row.get(f"{measure}_{name}_ms") for row in rows]) for name, style in styles.items()]


def _short(value: Any) -> str:
    """2,500,000 as 2.5M: an axis has little room."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
