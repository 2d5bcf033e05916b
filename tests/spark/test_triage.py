"""Dead items as a table, chosen by a predicate in SQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millpond.errors import InvalidRequest, MillpondError, Unavailable
from millpond.spark import triage
from millpond.spark.formats import register
from millpond.spark.triage import Matches, dead_table
from tests.server.process import until
from tests.spark.server import Pond, pond_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ERRORS = ("timeout after 3 s", "timeout after 50 s", "bad amount '7'", None)


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pond]:
    with pond_in(tmp_path_factory.mktemp("pond")) as served:
        yield served


@pytest.fixture(scope="module")
def lying(pond: Pond) -> str:
    """A queue with 40 dead items in two partitions, and one that lives."""
    queue = pond.queue(partitions=2)
    kill(pond, queue, 40)
    pond.fill(queue, 1)
    return queue


def kill(pond: Pond, queue: str, items: int) -> list[str]:
    kinds = ("mail", "sms")
    made = [{"text": f'{{"n": {n}}}', "kind": kinds[n % 2]} for n in range(items)]
    ids = pond.produce(queue, made)
    leases = {one["id"]: one["lease"] for one in pond.server.must("queue.lease", queue=queue, batch=items)["items"]}
    dead: list[dict[str, Any]] = [{"lease": leases[id], "dead": True} for id in ids]
    for n, one in enumerate(dead):
        if (error := ERRORS[n % 4]) is not None:
            one["error"] = error
    pond.server.must("queue.retry", queue=queue, items=dead)
    return ids


def matches(spark: SparkSession, pond: Pond, queue: str, predicate: str, *, letters: bool = False) -> Matches:
    register(spark)
    return Matches(dead_table(spark, pond.options(queue), letters=letters), predicate, letters=letters)


@pytest.mark.parametrize(
    ("predicate", "count"),
    [
        ("true", 40),
        ("error like '%timeout%'", 20),
        ("error not like '%timeout%'", 10),
        ("error is null and reason = 'rejected' and dead_reason = reason", 10),
        ("kind = 'sms' and last_error = error", 10),
        ("get_json_object(text, '$.n') < 4", 4),
        ("cast(payload as string) = text", 40),
        ("signature = 'timeout after <n> s'", 20),
        ("signature in (select signature from dead group by signature having count(*) > 15)", 20),
        ("created_at > now() - interval 2 hours and ended_at >= created_at", 40),
    ],
)
def test_a_predicate_chooses(spark: SparkSession, pond: Pond, lying: str, predicate: str, count: int) -> None:
    with matches(spark, pond, lying, predicate) as found:
        assert found.count == count


def test_what_is_chosen_is_told_in_the_order_of_the_queue_and_some_at_a_time(
    spark: SparkSession, pond: Pond, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triage, "ROWS_AT_ONCE", 3)
    queue = pond.queue()
    ids = kill(pond, queue, 20)
    with matches(spark, pond, queue, "error like 'timeout%'") as found:
        told = list(found)
        assert [one.id for one in told] == [id for n, id in enumerate(ids) if n % 4 < 2]
        assert {(one.to, one.to_id, one.reason) for one in told} == {(None, None, "rejected")}
        assert [one.error for one in told[:2]] == list(ERRORS[:2])
        assert found.sample(3) == told[:3]
        assert found.signatures(5) == [("rejected", "timeout after <n> s", 10)]


def test_what_was_counted_is_what_is_told_though_it_was_redriven_meanwhile(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    ids = kill(pond, queue, 8)
    with matches(spark, pond, queue, "rand() >= 0") as found:
        assert pond.server.must("queue.redrive", queue=queue)["moved"] == 8
        assert [one.id for one in found] == ids


def test_letters_are_told_with_where_they_go(spark: SparkSession, pond: Pond) -> None:
    letters = pond.queue()
    queue = pond.queue(dead_queue=letters)
    pond.fill(letters, 2)
    ids = kill(pond, queue, 4)
    until(lambda: pond.counts(letters) == {"ready": 6}, "the letters")
    with matches(spark, pond, letters, "true", letters=True) as found:
        assert [(one.to, one.to_id, one.error) for one in found] == [
            (queue, id, error) for id, error in zip(ids, ERRORS, strict=True)
        ]


@pytest.mark.parametrize(
    ("predicate", "words"),
    [
        ("eror like 'x'", "name `eror` cannot be resolved. Did you mean one of the following? [`error`"),
        ("error =", "Syntax error at or near end of input"),
        ("true) or (true", "Syntax error at or near ')'"),
        ("error", 'Filter expression "error" of type "STRING" is not a boolean'),
        ("nofun(error)", "Cannot resolve routine `nofun`"),
        ("count(*) > 1", "contains invalid expressions: count(1)"),
        ("cast(kind as int) = 1", 'The value \'mail\' of the type "STRING" cannot be cast to "INT"'),
        ("", "Syntax error"),
    ],
)
def test_a_wrong_predicate_is_told_in_a_line(
    spark: SparkSession, pond: Pond, lying: str, predicate: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        matches(spark, pond, lying, predicate)
    assert refused.value.message.startswith("--where: [")
    assert words in refused.value.message
    assert "\n" not in refused.value.message


def test_a_server_that_refuses_or_is_away_is_told_as_it_says(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    with pytest.raises(MillpondError, match="there is no queue 'nope'; create it first") as refused:
        matches(spark, pond, "nope", "true")
    assert not isinstance(refused.value, InvalidRequest)
    register(spark)
    nowhere = {"url": "http://127.0.0.1:9", "queue": "nope", "retryFor": "1s"}
    with pytest.raises(Unavailable, match="no answer from http://127"):
        Matches(dead_table(spark, nowhere, letters=False), "true", letters=False)
