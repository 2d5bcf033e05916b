"""What can be wrong with a query, a checkpoint or a server: an error that names the fix, and nothing lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millpond.spark.formats import register
from tests.server.process import token, until
from tests.spark.server import Pond, pond_in
from tests.spark.streams import Gathered, Then, consume, failure, started, stream_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pond]:
    with pond_in(tmp_path_factory.mktemp("pond")) as served:
        yield served


def refused(spark: SparkSession, options: dict[str, str], checkpoint: Path, then: Then | None = None) -> str:
    query = started(stream_of(spark, options), Gathered(then), checkpoint, availableNow=True)
    return failure(query)


# ---- options and names ----------------------------------------------------------------------------------------------


def test_a_queue_that_is_not_there(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    assert "no queue 'nosuch'" in refused(spark, pond.options("nosuch", consumer="c"), tmp_path)
    register(spark)
    with pytest.raises(Exception, match="no queue 'nosuch'"):
        spark.read.format("millpond").options(**pond.options("nosuch")).load().collect()
    df = spark.createDataFrame([("a",)], "payload string")
    with pytest.raises(Exception, match="no queue 'nosuch'"):
        df.write.format("millpond").mode("append").options(**pond.options("nosuch")).save()


def test_a_stream_without_a_consumer(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    told = refused(spark, pond.options(pond.queue()), tmp_path)
    assert "the option consumer is missing; choose a name" in told
    assert "UnboundLocalError" not in told


def test_an_option_that_does_not_exist(spark: SparkSession, pond: Pond) -> None:
    register(spark)
    with pytest.raises(Exception, match=r"no option 'consumr'; did you mean consumer\?"):
        spark.readStream.format("millpond").options(**pond.options("q", consumr="c")).load()


def test_a_queue_is_not_overwritten(spark: SparkSession, pond: Pond) -> None:
    register(spark)
    df = spark.createDataFrame([("a",)], "payload string")
    with pytest.raises(Exception, match=r"a queue is added to, not replaced; write with mode\('append'\)"):
        df.write.format("millpond").mode("overwrite").options(**pond.options(pond.queue())).save()


def test_a_queue_is_no_place_for_a_whole_result(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    source = pond.queue()
    pond.fill(source, 3)
    counted = stream_of(spark, pond.options(source, consumer="c")).groupBy("payload").count().select("payload")
    writer = counted.writeStream.outputMode("complete").format("millpond").options(**pond.options(pond.queue()))
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    assert "a queue is added to, not replaced" in failure(query)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("id string, amount double", "items have no column 'amount'; there are id, payload"),
        ("idd string", "items have no column 'idd'; did you mean id?"),
        ("priority string", "the column priority is string; it can be read as int"),
        ("payload int", "the column payload is int; it can be read as binary or string"),
    ],
)
def test_a_schema_that_does_not_fit(spark: SparkSession, pond: Pond, schema: str, said: str) -> None:
    register(spark)
    df = spark.read.format("millpond").options(**pond.options(pond.queue())).schema(schema).load()
    with pytest.raises(Exception) as caught:
        df.collect()
    assert said in str(caught.value)


# ---- payloads -------------------------------------------------------------------------------------------------------


def test_a_payload_that_is_not_text(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    [_, wrong] = pond.produce(queue, [{"text": "fine"}, {"bytes": "//4="}])
    options = pond.options(queue, consumer="c")
    told = refused(spark, options, tmp_path)
    assert f"1 payloads are not UTF-8 text, the first of item {wrong}; read with the option payload=binary" in told
    got = consume(spark, options | {"payload": "binary"}, tmp_path)  # as it says
    assert [row.payload for row in got.rows] == [b"fine", b"\xff\xfe"]
    assert pond.counts(queue) == {}


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_a_wrong_token(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    right = token(data, "admin")
    too_little = token(data, "viewer")
    with pond_in(data) as served:
        served.server.token = right
        queue = served.queue()
        for secret, said in ((None, "token"), ("mp_wrong", "token"), (too_little, "consumer.open")):
            more = {} if secret is None else {"token": secret}
            told = refused(spark, served.options(queue, consumer="c", **more), tmp_path / f"{secret}")
            assert said in told
            assert secret is None or secret not in told
        assert consume(spark, served.options(queue, consumer="c", token=right), tmp_path / "right").rows == []


# ---- a server that is away ------------------------------------------------------------------------------------------


def test_a_server_that_is_away_at_the_start(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    with pond_in(tmp_path / "data") as served:
        queue = served.queue()
        options = served.options(queue, consumer="c", retryFor="300ms")
    told = refused(spark, options, tmp_path / "checkpoint")
    assert f"no answer from {options['url']}" in told
    assert "in 0.3 s" in told
    assert "see that `millpond serve` runs there" in told


def test_a_server_that_comes_back_is_waited_for(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    got = Gathered()
    with pond_in(data) as served:
        queue, address = served.queue(), served.server.address
        served.fill(queue, 10)
        query = started(
            stream_of(spark, served.options(queue, consumer="c", retryFor="60s")), got, tmp_path / "checkpoint"
        )
        until(lambda: served.counts(queue) == {}, "the first items")
        served.server.process.kill()
    try:
        with pond_in(data, bind=("--bind", address)) as back:
            back.fill(queue, 10, "late")
            until(lambda: back.counts(queue) == {}, "the items after the restart")
            assert query.isActive
            query.stop()
    finally:
        query.stop()
    assert sorted(got.payloads) == sorted([f"{kind}{number}" for kind in ("n", "late") for number in range(10)])


def test_a_server_that_stays_away_in_the_middle_loses_nothing(spark: SparkSession, tmp_path: Path) -> None:
    data, checkpoint = tmp_path / "data", tmp_path / "checkpoint"
    with pond_in(data) as served:
        queue, address = served.queue(), served.server.address
        served.fill(queue, 10)
        options = served.options(queue, consumer="c", retryFor="300ms", maxItemsPerBatch="5")
        first = Gathered(lambda *_: served.server.process.kill())
        told = failure(started(stream_of(spark, options), first, checkpoint, availableNow=True))
    assert f"no answer from {options['url']}" in told
    assert "nothing is lost" in told
    with pond_in(data, bind=("--bind", address)) as back:
        second = consume(spark, options, checkpoint)
        assert back.counts(queue) == {}
    assert first.payloads + second.payloads == [f"n{number}" for number in range(10)]


# ---- checkpoints and consumers --------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_queue(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    mine, other = pond.queue(), pond.queue()
    pond.fill(mine, 3)
    pond.fill(other, 3)
    consume(spark, pond.options(mine, consumer="c"), tmp_path)
    told = refused(spark, pond.options(other, consumer="c"), tmp_path)
    assert f"the checkpoint is of consumer 'c' of queue '{mine}', not of consumer 'c' of queue '{other}'" in told
    assert "give this query a checkpointLocation of its own" in told
    told = refused(spark, pond.options(mine, consumer="d"), tmp_path)
    assert "not of consumer 'd'" in told
    for queue, consumer in ((other, "c"), (mine, "d")):  # neither was opened: whoever runs with it goes on
        assert pond.server.must("consumer.open", queue=queue, consumer=consumer)["epoch"] == 1
    assert (pond.counts(mine), pond.counts(other)) == ({}, {"ready": 3})


def test_a_checkpoint_of_a_queue_that_was_made_again(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    pond.fill(queue, 3)
    options = pond.options(queue, consumer="c")
    consume(spark, options, tmp_path)
    pond.server.must("queues.delete", name=queue)
    pond.server.must("queues.create", name=queue)
    pond.fill(queue, 3)
    assert "of an earlier queue" in refused(spark, options, tmp_path)
    assert pond.counts(queue) == {"ready": 3}


def test_a_checkpoint_that_was_deleted(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    pond.fill(queue, 3)
    options = pond.options(queue, consumer="c")
    consume(spark, options, tmp_path / "lost")
    pond.fill(queue, 3)
    told = refused(spark, options, tmp_path / "new")
    assert "has completed claim 1, but this query's checkpoint is new" in told
    assert "with a consumer of a new name" in told
    assert pond.server.must("consumer.open", queue=queue, consumer="c")["epoch"] == 2  # whoever runs with it goes on
    assert pond.counts(queue) == {"ready": 3}
    assert len(consume(spark, options | {"consumer": "d"}, tmp_path / "newer").rows) == 3  # as it says


def test_an_old_copy_of_a_checkpoint(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    options = pond.options(queue, consumer="c")
    pond.fill(queue, 3)
    consume(spark, options, tmp_path / "it")
    shutil.copytree(tmp_path / "it", tmp_path / "copy")
    pond.fill(queue, 3)
    consume(spark, options, tmp_path / "it")
    pond.fill(queue, 3)
    told = refused(spark, options, tmp_path / "copy")
    assert "the checkpoint has come to claim 1, but" in told
    assert "use the newest checkpoint" in told
    assert pond.counts(queue) == {"ready": 3}


def test_a_second_query_with_the_same_consumer_fences_off_the_first(
    spark: SparkSession, pond: Pond, tmp_path: Path
) -> None:
    """The second one is played by its first call: on the same checkpoint, Spark would not run two in one session."""
    queue = pond.queue()
    pond.fill(queue, 3)

    def open_elsewhere(df: DataFrame, batch: int) -> None:
        pond.server.must("consumer.open", queue=queue, consumer="c")

    options = pond.options(queue, consumer="c")
    told = refused(spark, options, tmp_path, open_elsewhere)
    assert "another query has opened consumer 'c'" in told
    assert "run one query a consumer" in told
    assert pond.counts(queue) == {"claimed": 3}
    assert consume(spark, options, tmp_path).rows == []  # it was committed, and is completed now
    assert pond.counts(queue) == {}


def test_a_claim_that_is_released_under_a_running_query(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    pond.fill(queue, 3)
    options = pond.options(queue, consumer="c")

    def release(df: DataFrame, batch: int) -> None:
        epoch = pond.server.must("claims.list", queue=queue)["claims"][0]["epoch"]
        pond.server.must("claim.release", queue=queue, claim_id="c:1", epoch=epoch)
        df.collect()

    for then in (release, None, None):  # the run that it happened to, and later ones
        told = refused(spark, options, tmp_path / "it", then)
        assert "claim 'c:1'" in told
        assert "was released under this query: its items are back in the queue" in told
        assert pond.counts(queue) == {"ready": 3}
    again = consume(spark, options | {"consumer": "d"}, tmp_path / "new")  # as it says
    assert len(again.rows) == 3


@pytest.mark.parametrize("read_before", [False, True])
def test_a_claim_that_an_operator_completes(spark: SparkSession, pond: Pond, tmp_path: Path, read_before: bool) -> None:
    queue = pond.queue()
    pond.fill(queue, 3)
    options = pond.options(queue, consumer="c")
    rows: list[int] = []

    def complete(df: DataFrame, batch: int) -> None:
        if read_before:
            rows.append(df.count())
        epoch = pond.server.must("claims.list", queue=queue)["claims"][0]["epoch"]
        pond.server.must("claim.complete", queue=queue, claim_id="c:1", epoch=epoch)
        if not read_before:
            df.collect()

    if read_before:
        consume(spark, options, tmp_path, complete)
        assert (rows, pond.counts(queue)) == ([3], {})
        return
    told = refused(spark, options, tmp_path, complete)
    assert "claim 'c:1'" in told
    assert "was completed under this query: its items are done" in told
    assert pond.counts(queue) == {}


def test_a_claim_that_is_released_after_its_batch_was_committed(
    spark: SparkSession, pond: Pond, tmp_path: Path
) -> None:
    queue = pond.queue()
    pond.fill(queue, 3)
    options = pond.options(queue, consumer="c")

    def release(df: DataFrame, batch: int) -> None:
        epoch = pond.server.must("claims.list", queue=queue)["claims"][0]["epoch"]
        pond.server.must("claim.release", queue=queue, claim_id="c:1", epoch=epoch)

    told = refused(spark, options, tmp_path, release)
    assert "claim 'c:1'" in told
    assert "was released under this query" in told
    assert pond.counts(queue) == {"ready": 3}
