"""Reports: what is in them, and that they are safe and readable as text, as a page and as tables."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from millpond.errors import NotFound
from millpond.spark import report as reports
from millpond.spark.report import Asked, Report
from millpond.spark.report_html import html
from millpond.spark.report_plots import Series, duration_scale, linear_scale, plot
from millpond.spark.report_text import cell, duration, table, text
from tests.spark.told import NOON, Told, write_lake

MINUTE = 60_000
HOSTILE = """</code></td><script>alert(1)</script><img src=x onerror="alert(2)">&amp;\x1b[2J\x07'"""


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def mail() -> Told:
    told = (
        Told()
        .at(0)
        .produce(1, 2, 3)
        .at(1)
        .lease(1, 2, who="ann")
        .at(2)
        .complete(1, who="ann")
        .at(70)
        .fail(2, error="no route to 10.0.0.7", who="ann")
    )
    return told.at(130).lease(3, who="bob")


def made(spark: SparkSession, lake: Path, **asked: Any) -> Report:
    with reports.findings(spark, lake, Asked(**asked)) as found:
        return reports.report(found, lake, NOON)


def test_a_report_tells_all_that_the_jobs_find(spark: SparkSession, tmp_path: Path) -> None:
    write_lake(tmp_path, mail(), Told("team/bills", "second").at(59).produce(1))
    found = made(spark, tmp_path)
    assert (found.since, found.until, found.window_ms, found.states_at) == (NOON, after(180), MINUTE, after(180))
    assert [(row["queue"], row["produced"], row["completed"]) for row in found.queues] == [
        ("mail", 3, 1),
        ("team/bills", 1, 0),
    ]
    assert [(row["queue"], row["window"], row["retried"]) for row in found.windows] == [
        ("mail", NOON, 0),
        ("mail", after(60), 1),
        ("mail", after(120), 0),
        ("team/bills", NOON, 0),
    ]
    assert [(row["signature"], row["failures"]) for row in found.failures] == [("no route to <n>", 1)]
    assert [(row["who"], row["attempts"]) for row in found.consumers] == [("ann", 2)]
    assert [(row["queue"], row["state"], row["items"]) for row in found.states] == [
        ("mail", "completed", 1),
        ("mail", "leased", 1),
        ("mail", "retrying", 1),
        ("team/bills", "ready", 1),
    ]


def test_a_report_is_of_the_queues_and_the_span_that_were_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    write_lake(tmp_path, mail(), Told("team/bills", "second").at(59).produce(1))
    found = made(spark, tmp_path, queues=("mail",), since=after(65), until=after(90), window_ms=MINUTE, at=after(1))
    assert (found.since, found.until) == (after(60), after(120))
    assert [(row["queue"], row["produced"], row["retried"]) for row in found.queues] == [("mail", 0, 1)]
    assert [(row["who"], row["run_p50_ms"]) for row in found.consumers] == [("ann", 69_120.0)]
    assert {row["state"]: row["items"] for row in found.states} == {"leased": 2, "ready": 1}
    with pytest.raises(NotFound, match="nothing of nobody in that span"):
        made(spark, tmp_path, queues=("nobody",))


@pytest.mark.parametrize(
    ("seconds", "window"), [(0, "1m"), (3_600, "1m"), (86_400, "1h"), (30 * 86_400, "1d"), (10**9, "7d")]
)
def test_a_window_is_chosen_that_makes_a_plot(spark: SparkSession, tmp_path: Path, seconds: int, window: str) -> None:
    write_lake(tmp_path, Told().at(0).produce(1).at(seconds).lease(1))
    from millpond.spark.lake import events

    assert duration(reports.span_of(events(spark, tmp_path), tmp_path, Asked()).window_ms) == window


# ---- the page and the text, from made-up findings -------------------------------------------------------------------


def made_up(windows: int = 3, hostile: str = "plain") -> Report:
    figures = dict.fromkeys(["produced", "completed", "retried", "lease_expired", "dead"], 1_234)
    times = {f"{measure}_{name}_ms": 1_500.0 for measure in ("wait", "run") for name in ("p50", "p95", "p99")}
    row = {"queue": "mail", **figures, **times, "backlog_change": -5}
    failure = {"signature": hostile, "failures": 7, "dead": 1, "queues": ["mail", hostile]}
    failure |= {"first_seen": NOON, "last_seen": after(1), "examples": [hostile, f"{hostile} again"]}
    consumer = {"who": hostile, "queue": "mail", "attempts": 9, "failed": 3, "lease_expired": 0, "bad_share": 0.3333}
    consumer |= {"others_bad_share": None, "run_p50_ms": None, "run_p95_ms": None, "slowness": None}
    return Report(
        lake=f"/lake/{hostile}",
        made_at=NOON,
        since=NOON,
        until=NOON + timedelta(minutes=windows),
        window_ms=MINUTE,
        queues=[row],
        windows=[row | {"window": after(60 * place), "throughput": 20.57} for place in range(windows)],
        failures=[failure],
        consumers=[consumer | {"slow": True, "flapping": True}],
        states_at=NOON,
        states=[{"queue": "mail", "state": "ready", "items": 12_345}],
    )


class Page(HTMLParser):
    """Complains about what is not closed, and of what could run or be fetched."""

    VOID = ("meta", "br", "!doctype")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert name not in ("src", "style", "xlink:href")
            assert not name.startswith("on")
            assert name != "href" or (value or "").startswith("#"), value

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_hostile_texts_and_does_not_run_them() -> None:
    page = html(made_up(hostile=HOSTILE))
    parsed = Page(page)
    assert not {"script", "img", "iframe", "link", "object"} & set(parsed.tags)
    assert "alert(1)" in parsed.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", page)
    assert "default-src 'none'" in page
    assert parsed.tags.count("figure") == 4


def test_a_span_of_one_window_has_no_plots() -> None:
    assert "figure" not in Page(html(made_up(windows=1))).tags


def test_a_report_without_failures_says_so() -> None:
    quiet = msgspec.structs.replace(made_up(), failures=[], consumers=[], states=[])
    assert "None." in Page(html(quiet)).text
    assert "Failures\nnone" in text(quiet)


def test_the_text_is_aligned_and_moves_no_cursor() -> None:
    shown = text(made_up(hostile=HOSTILE))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)
    [figures] = [line for line in shown.splitlines() if line.startswith("mail  ")][:1]
    assert figures.split()[1:7] == ["1,234", "1,234", "1,234", "1,234", "1,234", "-5"]
    assert "slow, flapping" in shown


def test_a_table_is_aligned() -> None:
    assert table(["a", "long"], [["x", "1"], ["yy", "23,456"]], left=1) == "a     long\nx        1\nyy  23,456"


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        *((None, "-"), (0, "0ms"), (999, "999ms"), (1_000, "1s"), (1_340, "1.3s"), (59_900, "60s"), (60_000, "1m")),
        *((125_000, "2m5s"), (3_600_000, "1h"), (5_400_000, "1h30m"), (86_400_000, "1d"), (90_000_000, "1d1h")),
    ],
)
def test_a_duration_is_written_as_people_do(ms: float | None, shown: str) -> None:
    assert duration(ms) == shown


def test_a_long_cell_is_cut() -> None:
    assert cell("x" * 100, 10) == "x" * 9 + "…"
    assert cell("a\nb\tc") == "a b c"


# ---- plots ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([], (0, 1)),
        ([0.0], (0, 1)),
        ([7.0], (0, 2, 4, 6, 8)),
        ([-30.0, 10.0], (-30, -20, -10, 0, 10)),
        ([81_000.0], (0, 50_000, 100_000)),
    ],
)
def test_a_scale_has_round_ticks_around_the_values(values: list[float], ticks: tuple[float, ...]) -> None:
    scale = linear_scale(values)
    assert (scale.ticks[0], scale.ticks[-1]) == (ticks[0], ticks[-1])
    assert all(scale.low <= value <= scale.high for value in values)


@pytest.mark.parametrize("values", [[], [0.0], [5.0], [0.2, 70.0], [61_000.0, 61_000.0], [1e12]])
def test_a_scale_of_durations_has_room_for_all(values: list[float]) -> None:
    scale = duration_scale(values)
    assert len(scale.ticks) >= 2
    assert all(10 <= scale.y(value) <= 166 for value in values)


def test_a_line_is_broken_where_nothing_was_measured() -> None:
    windows = [after(60 * place) for place in range(5)]
    drawn = plot("a & b", windows, [Series("p50", "a", [1.0, 2.0, None, 4.0, None])], str)
    assert (drawn.count("<polyline"), drawn.count("<circle"), drawn.count("<rect")) == (1, 1, 5)
    assert "a &amp; b" in drawn
