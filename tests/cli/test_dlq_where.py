"""`millpond dlq redrive --where` as a process, with a Spark of its own: from the predicate to the undo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.dead import SPARK_TIMEOUT_S, Place, counts, items, kill, settled
from tests.server.process import serve, token

ERRORS = ("timeout after 3 s", "bad amount")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark"), pytest.mark.timeout(3 * SPARK_TIMEOUT_S)]


@pytest.fixture
def alone(tmp_path: Path) -> Place:
    data = tmp_path / "pond"
    return Place(tmp_path, data, ("--data", str(data)))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Place]:
    """At a server that asks for a token."""
    data = tmp_path / "pond"
    secret = token(data, "operator")
    with serve(data) as server:
        yield Place(tmp_path, data, ("--server", server.url), {"MILLPOND_TOKEN": secret})


def test_items_are_chosen_by_sql_and_the_choice_is_undone(alone: Place) -> None:
    with alone.open() as pond:
        pond.create_queue("letters")
        pond.create_queue("orders", dead_queue="letters", partitions=2)
        ids = kill(pond, "orders", ERRORS * 50, kind="mail")
        letters = settled(pond, "letters", {"ready": 100})
    where = ("--where", "error like '%timeout%' and get_json_object(text, '$.n') < 50")

    seen = alone.value("redrive", "letters", *where, "--dry-run", timeout=SPARK_TIMEOUT_S)
    assert (seen["matched"], seen["dead"], seen["redrive"]) == (25, 100, None)
    assert seen["signatures"] == [{"reason": "rejected", "signature": "timeout after <n> s", "items": 25}]
    assert {(one["to"], one["error"]) for one in seen["sample"]} == {("orders", "timeout after 3 s")}
    with alone.open() as pond:
        assert (counts(pond, "letters"), counts(pond, "orders")) == ({"ready": 100}, {})

    done = alone.run("redrive", "letters", *where, "--json", timeout=SPARK_TIMEOUT_S)
    assert done.returncode == 0, done
    assert done.stderr.splitlines() == ["looking at 100 dead items with Spark"]
    [story] = alone.value("redrives")
    assert (story["items"], story["moved"], story["why"]) == (25, 25, {"where": where[1]})
    with alone.open() as pond:
        back = settled(pond, "orders", {"ready": 25})
        assert {item.id for item in back} == set(ids[:50:2])
        settled(pond, "letters", {"ready": 75})

    assert alone.value("undo", story["redrive"])["counts"] == {"buried": 25}
    with alone.open() as pond:
        again = settled(pond, "letters", {"ready": 100})
        settled(pond, "orders", {})  # they are let go of there once they have arrived
    assert sorted((str(one.source_id), str(one.last_error)) for one in again) == sorted(
        (str(one.source_id), str(one.last_error)) for one in letters
    )


def test_a_server_that_wants_a_token_is_read_by_spark_too(guarded: Place) -> None:
    with guarded.open() as pond:
        pond.create_queue("orders")
        kill(pond, "orders", ERRORS * 5)
    done = guarded.value(
        "redrive", "orders", "--where", "reason = 'rejected' and error = 'bad amount'", timeout=SPARK_TIMEOUT_S
    )
    assert (done["matched"], done["moved"]) == (5, 5)
    with guarded.open() as pond:
        assert {item.last_error for item in items(pond, "orders") if item.state == "ready"} == {"bad amount"}


def test_a_wrong_predicate_is_wrong_usage_and_moves_nothing(alone: Place) -> None:
    with alone.open() as pond:
        pond.create_queue("orders")
        kill(pond, "orders", ERRORS)
    ended = alone.run("redrive", "orders", "--where", "eror like '%timeout%'", timeout=SPARK_TIMEOUT_S)
    assert (ended.returncode, ended.stdout) == (2, "")
    [_, told] = ended.stderr.splitlines()
    assert told.startswith("millpond: --where: [UNRESOLVED_COLUMN.WITH_SUGGESTION]")
    assert "`error`" in told
    with alone.open() as pond:
        assert counts(pond, "orders") == {"dead": 2}
    assert not (alone.data / "redrives").exists()
