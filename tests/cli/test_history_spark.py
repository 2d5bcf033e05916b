"""`millpond history report` and `sql` as processes, with a Spark of their own."""

from __future__ import annotations

import csv
import json
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import millpond
from millpond.model import NewItem, Retry
from tests.cli.dead import SPARK_TIMEOUT_S, run

HOSTILE = "<script>alert('7')</script> \x1b[31m failed"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark"), pytest.mark.timeout(3 * SPARK_TIMEOUT_S)]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a pond and its history: of ten items seven are done, two fail, one is dead."""
    with millpond.open(tmp_path / "pond") as pond:
        pond.create_queue("team/mail")
        pond.produce("team/mail", [NewItem(payload=b'{"n": %d}' % number) for number in range(10)])
        items = list(pond.lease("team/mail", batch=10, client_id="ann"))
        pond.retry([Retry(lease=item, error=HOSTILE) for item in items[:2]], queue="team/mail")
        pond.retry([Retry(lease=items[2], error="no route to 10.0.0.7", dead=True)], queue="team/mail")
        pond.complete(items[3:])
    assert run(tmp_path, "history", "sync", "--data", "pond").returncode == 0
    return tmp_path


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "style")], attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_is_text_json_a_page_and_tables(home: Path) -> None:
    shown = run(
        *(home, "history", "report", "--data", "pond", "--window", "1h", "--html", "page.html", "--parquet", "tables"),
        timeout=SPARK_TIMEOUT_S,
    )
    assert shown.returncode == 0, shown
    assert shown.stderr.splitlines() == ["the tables are in tables", "the page is page.html"]
    queues, figures = shown.stdout.split("Queues\n")[1].splitlines()[:2]
    assert queues.split()[:7] == ["queue", "produced", "completed", "retried", "lost", "dead", "backlog"]
    assert figures.split()[:7] == ["team/mail", "10", "7", "2", "0", "1", "2"]
    assert "<script>alert(<text>)</script>" in shown.stdout
    assert "\x1b" not in shown.stdout

    page = Page((home / "page.html").read_text())
    assert "script" not in page.tags
    assert HOSTILE.replace("\x1b", " ") in page.text

    assert pq.read_table(home / "tables/metrics").column("produced").to_pylist() == [10]
    assert sorted(pq.read_table(home / "tables/items").column("state").to_pylist()) == [
        *["completed"] * 7,
        "dead",
        *["retrying"] * 2,
    ]


def test_an_incremental_report_keeps_its_sums(home: Path) -> None:
    command = ("history", "report", "--data", "pond", "--window", "1h", "--json", "--incremental")
    shown = run(home, *command, timeout=SPARK_TIMEOUT_S)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert (home / "pond/history/sums/window-3600000ms/plans/0.json").exists()
    whole = json.loads(shown.stdout)
    assert [(one["queue"], one["produced"], one["dead"]) for one in whole["queues"]] == [("team/mail", 10, 1)]
    assert [one["signature"] for one in whole["failures"]] == [
        "<script>alert(<text>)</script> [<n>m failed",
        "no route to <n>",
    ]
    assert [(one["who"], one["attempts"], one["failed"]) for one in whole["consumers"]] == [("ann", 10, 3)]
    assert {one["state"]: one["items"] for one in whole["states"]} == {"completed": 7, "dead": 1, "retrying": 2}


def test_the_dead_are_asked_with_their_payloads(home: Path) -> None:
    query = "select queue, reason, error, signature, text from dead where error like '%route%'"
    asked = run(home, "history", "sql", query, "--data", "pond", "--json", timeout=SPARK_TIMEOUT_S)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert json.loads(asked.stdout) == [
        {
            "queue": "team/mail",
            "reason": "rejected",
            "error": "no route to 10.0.0.7",
            "signature": "no route to <n>",
            "text": '{"n": 2}',
        }
    ]


def test_a_lake_alone_answers_too(home: Path) -> None:
    query = """
        select e.n, i.n, d.n, d.error, a.n, m.produced, f.failures, c.who, map('a', array(1, 2)) as nested
        from (select count(*) n from events) e, (select count(*) n from items) i,
             (select count(*) n, max(error) error from dead) d, (select count(*) n from attempts) a,
             metrics m, failures f, consumers c where f.signature like 'no route%'
    """
    asked = run(home, "history", "sql", query, "--lake", "pond/history", "--csv", timeout=SPARK_TIMEOUT_S)
    assert asked.stderr.splitlines() == [
        "the dead are those of the history, without payloads; name their place with --data or --server"
    ]
    assert list(csv.reader(asked.stdout.splitlines()))[1] == [
        *("30", "10", "1", "no route to 10.0.0.7", "10", "10", "1", "ann", '{"a":[1,2]}')
    ]


def test_a_question_that_is_wrong_ends_in_a_line(home: Path) -> None:
    asked = run(home, "history", "sql", "select nonsense from events", "--data", "pond", timeout=SPARK_TIMEOUT_S)
    assert (asked.returncode, asked.stdout) == (2, ""), asked
    assert "the query cannot be answered: [UNRESOLVED_COLUMN" in asked.stderr
    assert len(asked.stderr.splitlines()) == 1, asked.stderr
