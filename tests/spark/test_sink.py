"""Rows become items: all of a write or none of it, and once, whatever is tried again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from millpond.spark import sink
from millpond.spark.formats import register
from millpond.spark.options import sink_options
from millpond.spark.schema import to_payload
from millpond.spark.sink import CHUNK_BYTES, CHUNK_ROWS, BatchWriter, Stager, chunked, ipc_stream
from tests.spark.server import Pond, pond_in
from tests.spark.streams import end, stream_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pond]:
    with pond_in(tmp_path_factory.mktemp("pond")) as served:
        yield served


def write(df: DataFrame, options: dict[str, str]) -> None:
    register(df.sparkSession)
    df.write.format("millpond").mode("append").options(**options).save()


# ---- batch writes ---------------------------------------------------------------------------------------------------


def test_columns_are_the_fields_of_items(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    texts = {"id": "a", "key": "k", "kind": "order", "encoding": "utf-8", "reference": "r", "correlation_id": "c"}
    row: dict[str, Any] = {"payload": "one", **texts, "priority": 3, "max_attempts": 2, "expire_timeout": "10d"}
    names = [*row, "enqueue_at", "delay"]
    plain = {"payload": "two"}
    rows = [row | {"enqueue_at": due}, plain, plain | {"delay": "2h"}]
    kinds = (
        "payload string, id string, key string, kind string, encoding string, reference string, correlation_id string"
    )
    schema = f"{kinds}, priority int, max_attempts long, expire_timeout string, enqueue_at timestamp, delay string"
    df = spark.createDataFrame([tuple(one.get(name) for name in names) for one in rows], schema)

    write(df, pond.options(queue))

    [first] = [item for item in pond.items(queue, "scheduled") if item["id"] == "a"]
    assert {name: first[name] for name in texts} == texts
    assert (first["text"], first["priority"], first["max_attempts"]) == ("one", 3, 2)
    assert datetime.fromisoformat(first["enqueue_at"]) == due
    assert pond.texts(queue, "ready") == ["two"]
    assert pond.counts(queue) == {"ready": 1, "scheduled": 2}


def test_rows_that_were_left_out_are_told(pond: Pond, caplog: pytest.LogCaptureFixture) -> None:
    queue = pond.queue()
    options = sink_options(pond.options(queue, txn="t"), streaming=False)
    schema = StructType([StructField("payload", StringType()), StructField("key", StringType())])
    rows = pa.RecordBatch.from_pylist([{"payload": "x", "key": key} for key in ("a", "a", "b")])
    for said in (["millpond: 1 of 3 rows were not added to queue %s by transaction t: their key or id is taken"], []):
        caplog.clear()
        with options.server.transport() as transport:
            staged = Stager(options, transport, "t", 0).run(iter([rows]))
        BatchWriter(options, schema, overwrite=False).commit([staged])
        assert caplog.messages == [line % queue for line in said], "and nothing when it was done before"
    assert pond.counts(queue) == {"ready": 2}


def test_payloads_are_bytes_or_text(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    write(spark.createDataFrame([(bytearray(b"\xff\x00"),)], "payload binary"), pond.options(queue))
    write(spark.createDataFrame([("grün",)], "payload string"), pond.options(queue))
    register(spark)
    read = spark.read.format("millpond").options(**pond.options(queue)).load()
    assert [row.payload for row in read.collect()] == [b"\xff\x00", "grün".encode()]


def test_durations_may_be_numbers_of_seconds(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    write(
        spark.createDataFrame([("a", 3600.5, 7200)], "payload string, delay double, expire_timeout int"),
        pond.options(queue),
    )
    assert pond.counts(queue) == {"scheduled": 1}


def test_any_columns_are_packed_into_the_payload(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    df = spark.createDataFrame([(1, "x", "k1")], "n int, `s p` string, key string")
    write(to_payload(df, "key"), pond.options(queue))
    [item] = pond.items(queue)
    assert (item["text"], item["key"]) == ('{"n":1,"s p":"x"}', "k1")


def test_all_tasks_rows_arrive_once(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue(partitions=2)
    df = spark.range(12_345, numPartitions=3).selectExpr("concat('n', id) as payload")
    write(df, pond.options(queue))
    assert sorted(pond.texts(queue)) == sorted(f"n{number}" for number in range(12_345))


def test_a_write_with_the_same_txn_is_done_once(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    df = spark.range(100).selectExpr("concat('n', id) as payload")
    for _ in range(2):
        write(df, pond.options(queue, txn="import-7"))
    assert pond.counts(queue) == {"ready": 100}
    for _ in range(2):
        write(df, pond.options(queue))
    assert pond.counts(queue) == {"ready": 300}


def test_a_key_that_is_taken_adds_nothing(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    df = spark.range(10).selectExpr("concat('n', id) as payload", "concat('k', id % 4) as key")
    write(df, pond.options(queue))
    assert pond.counts(queue) == {"ready": 4}
    write(df, pond.options(queue))
    assert pond.counts(queue) == {"ready": 4}


def test_an_empty_write_adds_nothing(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    write(spark.createDataFrame([], "payload string"), pond.options(queue))
    assert pond.counts(queue) == {}


# ---- rejected rows --------------------------------------------------------------------------------------------------


def bad_rows(spark: SparkSession) -> DataFrame:
    """Of ten, two have no payload and one has a priority that is out of range."""
    return spark.range(10, numPartitions=2).selectExpr(
        "if(id in (3, 8), null, concat('n', id)) as payload",
        "concat('k', id) as key",
        "if(id = 5, 40000, 0) as priority",
    )


def test_rejected_rows_are_told_and_nothing_is_published(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    with pytest.raises(Exception, match=r"3 of 10 rows cannot become items, nothing was published") as caught:
        write(bad_rows(spark), pond.options(queue))
    told = str(caught.value)
    assert "row 3 of task 0 (key 'k3'): payload is null" in told
    assert "row 0 of task 1 (key 'k5'): priority is not from -32768 to 32767" in told
    assert "the option rejects" in told
    assert pond.counts(queue) == {}


def test_rejected_rows_are_put_aside_and_the_rest_is_published(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    aside = str(tmp_path / "rejects")
    for _ in range(2):  # the second run of the same transaction replaces what the first has put there
        write(bad_rows(spark), pond.options(queue, rejects=aside, txn="t:1"))
    assert pond.counts(queue) == {"ready": 7}
    rejected = spark.read.parquet(aside).orderBy("key").collect()
    assert [(row.key, row.priority, row._task, row._row) for row in rejected] == [
        ("k3", 0, 0, 3),
        ("k5", 40_000, 1, 0),
        ("k8", 0, 1, 3),
    ]
    assert rejected[0]._reason.startswith("payload is null")


# ---- tries that do not count ----------------------------------------------------------------------------------------


def test_what_other_tries_have_staged_is_never_seen(pond: Pond) -> None:
    """A failed task, its second try, and a speculative twin of another: the driver hears of one each."""
    queue = pond.queue()
    options = sink_options(pond.options(queue, txn="t:1"), streaming=False)

    def staged(task: int, payloads: list[str]) -> Any:
        batch = pa.RecordBatch.from_arrays([pa.array(payloads)], ["payload"])
        with options.server.transport() as transport:
            return Stager(options, transport, "t:1", task).run(iter([batch]))

    staged(0, ["a", "b"])
    second_try = staged(0, ["b", "a"])
    twin = staged(1, ["c"])
    staged(1, ["c"])
    assert pond.counts(queue) == {}
    writer = BatchWriter(options, _schema("payload"), overwrite=False)
    writer.commit([second_try, twin])
    assert sorted(pond.texts(queue)) == ["a", "b", "c"]
    writer.commit([second_try, twin])  # the reply was lost, and Spark asks again
    writer.abort([second_try, twin])
    assert sorted(pond.texts(queue)) == ["a", "b", "c"]


def test_rows_of_a_task_keep_their_order_over_many_chunks(pond: Pond, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "CHUNK_ROWS", 10)
    queue = pond.queue()
    options = sink_options(pond.options(queue, txn="t"), streaming=False)
    texts = [f"{number}" for number in range(95)]
    batches = [pa.RecordBatch.from_arrays([pa.array(texts[at : at + 10])], ["payload"]) for at in range(0, 95, 10)]
    with options.server.transport() as transport:
        staged = Stager(options, transport, "t", 0).run(iter(batches))
    assert len(staged.chunks) == 10
    BatchWriter(options, _schema("payload"), overwrite=False).commit([staged])
    assert pond.texts(queue) == texts


def test_an_aborted_write_leaves_nothing(pond: Pond) -> None:
    queue = pond.queue()
    options = sink_options(pond.options(queue, txn="t"), streaming=False)
    batch = pa.RecordBatch.from_arrays([pa.array(["a"])], ["payload"])
    with options.server.transport() as transport:
        staged = Stager(options, transport, "t", 0).run(iter([batch]))
    writer = BatchWriter(options, _schema("payload"), overwrite=False)
    writer.abort([staged, None])
    assert pond.counts(queue) == {}


def _schema(*names: str) -> Any:
    from pyspark.sql.types import StringType, StructField, StructType

    return StructType([StructField(name, StringType()) for name in names])


# ---- streaming writes -----------------------------------------------------------------------------------------------


def test_a_stream_from_queue_to_queue_moves_each_item_once(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    source, target = pond.queue(), pond.queue()
    options = pond.options(source, consumer="mover", maxItemsPerBatch="40")
    runs = []
    for prefix in ("first", "second"):
        pond.fill(source, 100, prefix)
        df = stream_of(spark, options).selectExpr("upper(payload) as payload", "id as reference")
        writer = df.writeStream.format("millpond").options(**pond.options(target))
        end(writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start())
        runs.append(len(pond.texts(target)))
    assert runs == [100, 200]
    expected = [f"{prefix}{number}".upper() for prefix in ("first", "second") for number in range(100)]
    assert sorted(pond.texts(target)) == sorted(expected)
    assert pond.counts(source) == {}


def test_a_batch_that_is_written_again_is_published_once(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    """The driver dies after publishing and before its own log of that: the commit is taken out of the checkpoint."""
    source, target = pond.queue(), pond.queue()
    pond.fill(source, 10)

    def move() -> None:
        df = stream_of(spark, pond.options(source, consumer="mover")).select("payload")
        writer = df.writeStream.format("millpond").options(**pond.options(target))
        end(writer.option("checkpointLocation", str(tmp_path)).trigger(once=True).start())

    move()
    assert pond.claims(source) == ["mover:1"]
    for file in (tmp_path / "commits").iterdir():
        file.unlink()
    move()
    assert pond.counts(target) == {"ready": 10}
    assert len(pond.texts(target)) == 10


def test_a_batch_inside_for_each_batch_is_written_once_by_its_txn(
    spark: SparkSession, pond: Pond, tmp_path: Path
) -> None:
    source, target = pond.queue(), pond.queue()
    pond.fill(source, 10)
    tries: list[int] = []

    def forward(df: DataFrame, batch: int) -> None:
        write(df.select("payload"), pond.options(target, txn=f"forward:{batch}"))
        tries.append(batch)
        if len(tries) == 1:
            raise RuntimeError("after the write")

    def move() -> None:
        df = stream_of(spark, pond.options(source, consumer="mover"))
        writer = df.writeStream.foreachBatch(forward).option("checkpointLocation", str(tmp_path))
        end(writer.trigger(availableNow=True).start())

    with pytest.raises(Exception, match="after the write"):
        move()
    move()
    assert tries == [0, 0]
    assert pond.counts(target) == {"ready": 10}


# ---- chunks ---------------------------------------------------------------------------------------------------------


def batch_of(payloads: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(payloads)], ["payload"])


@pytest.mark.parametrize(
    "sizes",
    [
        [[10] * 3],
        [[10] * (2 * CHUNK_ROWS + 1)],
        [[10] * 100] * 120,
        [[10] * 3_000, [1 << 20] * 9, [10] * 3_000],
        [[5 << 20]],
    ],
)
def test_chunks_are_within_their_bounds_and_keep_the_order(sizes: list[list[int]]) -> None:
    number = iter(range(1 << 30))
    given = [[str(next(number)).encode().ljust(size, b".") for size in some] for some in sizes]
    chunks = list(chunked(iter([batch_of(payloads) for payloads in given])))
    found = [row for chunk in chunks for batch in chunk for row in batch.column("payload").to_pylist()]
    assert found == [payload for payloads in given for payload in payloads]
    for chunk in chunks:
        rows = sum(batch.num_rows for batch in chunk)
        assert rows <= CHUNK_ROWS
        assert rows == 1 or sum(batch.nbytes for batch in chunk) <= CHUNK_BYTES
    assert len(chunks) <= 2 * sum(map(len, map(batch_of, given))) // CHUNK_ROWS + 12


def test_a_chunk_is_one_stream() -> None:
    batches = [batch_of([b"a"]), batch_of([b"b", b"c"])]
    with pa.ipc.open_stream(ipc_stream(batches)) as stream:
        assert stream.read_all().column("payload").to_pylist() == [b"a", b"b", b"c"]
