"""Poison among a batch's items is given a verdict; the rest of the batch is completed as ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millpond.spark.formats import give_verdicts
from tests.server.process import until
from tests.spark.server import Pond, pond_in
from tests.spark.streams import consume

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEAD = "select id, 'dead' as verdict, 'not for us' as error from {batch} where payload = 'n3'"
RETRY = "select id, 'retry' as verdict, 'come back' as error from {batch} where payload = 'n5'"


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pond]:
    with pond_in(tmp_path_factory.mktemp("pond")) as served:
        yield served


def judge(pond: Pond, queue: str, df: DataFrame, *queries: str, consumer: str = "c") -> None:
    for query in queries:
        options = {"url": pond.url, "queue": queue, "consumer": consumer}
        give_verdicts(df.sparkSession.sql(query, batch=df), **options)


def test_an_item_with_a_verdict_is_not_completed(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue(backoff={"base": 60})
    pond.fill(queue, 10)
    options = pond.options(queue, consumer="c")
    consume(spark, options, tmp_path, lambda df, _: judge(pond, queue, df, DEAD, RETRY))
    assert pond.counts(queue) == {"dead": 1, "retrying": 1}
    [dead] = pond.items(queue, "dead")
    assert (dead["text"], dead["dead_reason"], dead["last_error"]) == ("n3", "rejected", "not for us")
    [retrying] = pond.items(queue, "retrying")
    assert (retrying["text"], retrying["attempts"], retrying["last_error"]) == ("n5", 1, "come back")
    assert pond.claims(queue) == []


def test_a_retried_item_comes_again_when_its_delay_is_over(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    pond.fill(queue, 10)
    options = pond.options(queue, consumer="c")
    at_once = RETRY.replace(" from", ", 0 as delay from")
    assert len(consume(spark, options, tmp_path, lambda df, _: judge(pond, queue, df, at_once)).rows) == 10
    [row] = consume(spark, options, tmp_path).rows
    assert (row.payload, row.attempts, row.last_error) == ("n5", 1, "come back")
    assert pond.counts(queue) == {}


def test_verdicts_that_are_given_again_change_nothing(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    dead_letters = pond.queue()
    queue = pond.queue(dead_queue=dead_letters, backoff={"base": 60})
    pond.fill(queue, 10)
    tries: list[int] = []

    def twice(df: DataFrame, batch: int) -> None:
        judge(pond, queue, df, DEAD, RETRY)
        tries.append(batch)
        if len(tries) == 1:
            raise RuntimeError("after the verdicts")

    options = pond.options(queue, consumer="c")
    with pytest.raises(Exception, match="after the verdicts"):
        consume(spark, options, tmp_path, twice)
    assert pond.counts(queue) == {"claimed": 10}
    again = consume(spark, options, tmp_path, twice)
    assert (tries, again.sizes) == ([0, 0], [10])
    until(lambda: pond.counts(queue) == {"retrying": 1}, "the dead letter to be moved")
    assert pond.items(queue, "retrying")[0]["attempts"] == 1
    assert pond.texts(dead_letters) == ["n3"]


def test_many_verdicts_go_in_several_requests(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    pond.fill(queue, 2_500)
    all_dead = "select id, 'dead' as verdict from {batch}"
    consume(spark, pond.options(queue, consumer="c"), tmp_path, lambda df, _: judge(pond, queue, df, all_dead))
    assert pond.counts(queue) == {"dead": 2_500}


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select 'another' as id, 'dead' as verdict from {batch} limit 1", "1 verdicts were refused: 'another'"),
        ("select id, 'later' as verdict from {batch}", "is 'later'; give every row an id and one of retry, dead"),
        ("select id from {batch}", "there is no column verdict"),
        ("select id, 'dead' as verdict, 1 as why from {batch}", "a verdict has no 'why'"),
        ("select id, 'dead' as verdict, 1 as error from {batch}", "the column error is int; it must be a string"),
    ],
)
def test_a_wrong_verdict_fails_the_batch_and_says_why(
    spark: SparkSession, pond: Pond, tmp_path: Path, query: str, said: str
) -> None:
    queue = pond.queue()
    pond.fill(queue, 2)
    with pytest.raises(Exception) as caught:
        consume(spark, pond.options(queue, consumer="c"), tmp_path, lambda df, _: judge(pond, queue, df, query))
    assert said in str(caught.value)
    assert pond.counts(queue) == {"claimed": 2}


def test_a_verdict_outside_a_batch_has_no_claim_to_go_to(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    df = spark.createDataFrame([("a", "dead")], "id string, verdict string")
    with pytest.raises(Exception, match="has no open claim; give verdicts inside foreachBatch"):
        give_verdicts(df, url=pond.url, queue=queue, consumer="c")
