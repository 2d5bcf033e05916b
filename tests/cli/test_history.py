"""`millpond history sync` and `item` as processes: on a directory, beside its owner, on a server; and in trouble."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import millpond
from millpond.blocking import Pond
from millpond.history.lake import Lake
from millpond.history.lookup import totals
from millpond.model import Retry
from tests.cli.dead import clean, run
from tests.server.process import serve, until

pytestmark = pytest.mark.slow  # each starts processes of its own


def work(pond: Pond) -> str:
    """Three items are produced and leased; one fails, whose id it is, and two are done."""
    pond.produce("mail", [b"x"] * 3)
    first, *rest = pond.lease("mail", batch=3, client_id="ann")
    pond.retry([Retry(lease=first, error="no route\nto host", delay="1h")], queue="mail")
    pond.complete(rest)
    return first.id


def exported(data: Path) -> dict[str, int]:
    """What the lake counts, of what there is."""
    return {name: n for name, n in totals(Lake(data / "history"), "mail").items() if n}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with millpond.open(tmp_path / "pond") as pond:
        pond.create_queue("mail")
        work(pond)
    return tmp_path / "pond"


def test_a_directory_that_nobody_owns_is_synced(tmp_path: Path, data: Path) -> None:
    done = run(tmp_path, "history", "sync", "--data", "pond", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["events"] == 9
    assert exported(data) == {"produced": 3, "leased": 3, "completed": 2, "retried": 1}

    again = run(tmp_path, "history", "sync", MILLPOND_DATA="pond")
    assert again.stdout.startswith("0 events of 0 queues")


def test_a_directory_is_synced_beside_its_owner(tmp_path: Path, data: Path) -> None:
    with millpond.open(data) as pond:
        work(pond)
        assert run(tmp_path, "history", "sync", "--data", "pond").returncode == 0
        assert exported(data)["produced"] == 6
        assert pond.stats("mail").totals["produced"] == 6


def test_a_server_is_synced_into_a_lake_of_ones_own(tmp_path: Path, data: Path) -> None:
    with serve(data) as server:
        done = run(tmp_path, "history", "sync", "--lake", "mine", "--queue", "mail", MILLPOND_SERVER=server.url)
    assert (done.returncode, done.stdout.split()[0]) == (0, "9")
    assert totals(Lake(tmp_path / "mine"), "mail")["produced"] == 3


def test_a_queue_that_was_deleted_is_told(tmp_path: Path, data: Path) -> None:
    assert run(tmp_path, "history", "sync", "--data", "pond").returncode == 0
    with millpond.open(data) as pond:
        pond.delete_queue("mail", force=True)
    told = run(tmp_path, "history", "sync", "--data", "pond")
    assert told.returncode == 0
    assert "queue mail was deleted; what it did after the sync before that is not in the history" in told.stderr


def test_an_item_of_no_lake_is_told_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path, "history", "item", "x", "--lake", "nolake")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "millpond: there is no history in nolake; fill it with `millpond history sync`, or name another lake\n"
    )
    assert not (tmp_path / "nolake").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["report", "--lake", "x", "--window", "-5m"],
            "--window is '-5m'; give a duration from 1s to 366d, such as 15m",
        ),
        (["sql", "select 1", "--lake", "x", "--window", "-5m"], "--window is '-5m'; give a duration from 1s to 366d"),
        (["report", "--lake", "x", "--since", "-24h"], "--since is '-24h'; write it like 2026-03-01T12:00Z, or 24h"),
        (["sync", "--interval", "-5s"], "--interval"),
        (["sync", "--retain", "-3"], "'-3' is no number of days; give 1 to 36500"),
    ],
)
def test_a_negative_value_is_told_as_such(tmp_path: Path, words: list[str], told: str) -> None:
    done = run(tmp_path, "history", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert "expected one argument" not in done.stderr


def test_following_goes_on_until_it_is_told_to_end(tmp_path: Path, data: Path) -> None:
    command = [sys.executable, "-m", "millpond.cli", "history", "sync", "--follow", "--interval", "100ms", "--json"]
    with millpond.open(data) as pond:
        following = subprocess.Popen(
            [*command, "--data", str(data)], env=clean({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until(lambda: exported(data).get("produced") == 3, "the first pass")
        work(pond)
        until(lambda: exported(data).get("produced") == 6, "a pass after it")
        following.send_signal(signal.SIGTERM)
        out, words = following.communicate(timeout=60)
    assert (following.returncode, json.loads(out)["events"]) == (0, 18)
    assert words.splitlines() == [f"following {data}; end with Ctrl-C"]


def test_an_items_life_is_told(tmp_path: Path, data: Path) -> None:
    with millpond.open(data) as pond:
        failed = work(pond)
    run(tmp_path, "history", "sync", "--data", "pond")
    told = run(tmp_path, "history", "item", failed, "--data", "pond")
    head, *lines = told.stdout.splitlines()
    assert (told.returncode, head.split()[:3]) == (0, ["AT", "QUEUE", "WHY"])
    assert [line.split()[3] for line in lines] == ["produced", "leased", "failure"]
    assert lines[-1].endswith("no route")
    steps = json.loads(run(tmp_path, "history", "item", failed, "--lake", "pond/history", "--json").stdout)
    assert [(step["why"], step["who"]) for step in steps] == [("produced", ""), ("leased", "ann"), ("failure", "ann")]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["sync", "--data", "nowhere"], 3, "there is no data directory"),
        (["sync", "--server", "http://127.0.0.1:1", "--lake", "x"], 4, "127.0.0.1:1"),
        (["sync", "--server", "http://127.0.0.1:1", "--data", "pond"], 2, "give one of them"),
        (["sync", "--data", "pond", "--queue", "nobody"], 3, "nobody"),
        (["sync", "--data", "pond", "--interval", "soon"], 2, "--interval is 'soon'"),
        (["item", "kq3v0a-0-7", "--lake", "nowhere"], 3, "there is no history in nowhere; fill it with"),
        (["report", "--window", "long", "--lake", "x"], 2, "--window is 'long'"),
        (["report", "--since", "soon", "--lake", "x"], 2, "--since is 'soon'"),
        (["report", "--since", "1h", "--until", "2h", "--lake", "x"], 2, "nothing lies between them"),
        (["report", "--lake", "nowhere"], 3, "millpond history sync"),
        (["sql", "select 1", "--lake", "nowhere"], 3, "millpond history sync"),
        (["sql"], 2, "QUERY"),
        (["sql", "select 1", "--json", "--csv"], 2, "--csv"),
        ([], 2, "VERB"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(
    tmp_path: Path, data: Path, arguments: list[str], code: int, words: str
) -> None:
    ended = run(tmp_path, "history", *arguments)
    assert (ended.returncode, ended.stdout) == (code, ""), ended
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        (["sync", "--data", "pond"], "pyarrow", "lake"),
        (["item", "x", "--data", "pond"], "pyarrow", "lake"),
        (["report", "--data", "pond"], "pyspark", "spark"),
        (["sql", "select 1", "--data", "pond"], "pyspark", "spark"),
    ],
)
def test_without_the_extras_it_says_what_to_install(
    tmp_path: Path, data: Path, arguments: list[str], missing: str, extra: str
) -> None:
    """As if it were not installed: what is imported in its place says so."""
    (tmp_path / "less" / missing).mkdir(parents=True)
    (tmp_path / "less" / missing / "__init__.py").write_text(
        f'raise ModuleNotFoundError("No module named {missing}", name="{missing}")'
    )
    ended = run(tmp_path, "history", *arguments, PYTHONPATH=str(tmp_path / "less"))
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert f"pip install 'millpond[{extra}]'" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_every_verb_teaches_by_example(tmp_path: Path) -> None:
    for verb in ("sync", "report", "item", "sql"):
        shown = run(tmp_path, "history", verb, "--help")
        assert f"examples:\n  millpond history {verb}" in shown.stdout
