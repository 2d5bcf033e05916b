"""Queues as streams and as tables: each item once, in claims that last; a look that touches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import BinaryType

from millpond.spark.formats import register
from millpond.spark.schema import COLUMNS
from millpond.spark.source import TASK_ITEMS_MIN, tasks
from millpond.wire.arrow import ITEM_FIELDS
from tests.server.process import until
from tests.spark.server import Pond, pond_in
from tests.spark.streams import Gathered, consume, end, started, stream_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pond]:
    with pond_in(tmp_path_factory.mktemp("pond")) as served:
        yield served


def look(spark: SparkSession, options: dict[str, str]) -> DataFrame:
    register(spark)
    return spark.read.format("millpond").options(**options).load()


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_the_columns_are_those_that_the_server_sends() -> None:
    assert list(COLUMNS) == [field.name for field in ITEM_FIELDS]


def test_all_fields_of_an_item_are_read(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    fields = {
        "id": "the-one",
        "key": "k",
        "kind": "order",
        "encoding": "utf-8",
        "reference": "s3://b/o",
        "priority": -7,
    }
    limits = {"max_attempts": 3, "expire_timeout": "10d", "correlation_id": "c 1", "enqueue_at": due.isoformat()}
    pond.produce(queue, [{"text": "é", **fields, **limits}])

    [row] = look(spark, pond.options(queue, state="scheduled")).collect()

    assert row.payload == "é".encode()
    assert {name: row[name] for name in fields} == fields
    assert (row.state, row.attempts, row.deliveries, row.max_attempts) == ("scheduled", 0, 0, 3)
    assert (row.correlation_id, row.partition, row.state_version) == ("c 1", 0, 0)
    assert row.enqueue_at.astimezone(UTC) == due
    expires_after = row.expire_deadline - row.created_at
    assert abs(expires_after - timedelta(days=10)) < timedelta(seconds=10)  # asked for, then produced
    empty = ("ended_at", "last_error", "state_doc", "dead_reason", "source_queue", "source_id", "source_attempts")
    assert [row[name] for name in empty] == [None] * len(empty)


def test_the_payload_is_bytes_or_text(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    pond.produce(queue, [{"text": "grün"}])
    assert [row.payload for row in look(spark, pond.options(queue)).collect()] == ["grün".encode()]
    assert [row.payload for row in look(spark, pond.options(queue, payload="string")).collect()] == ["grün"]


def test_a_schema_may_leave_columns_out(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    ids = pond.fill(queue, 3)
    register(spark)
    chosen = spark.read.format("millpond").options(**pond.options(queue)).schema("payload string, id string").load()
    assert [tuple(row) for row in chosen.collect()] == [("n0", ids[0]), ("n1", ids[1]), ("n2", ids[2])]


# ---- a look ---------------------------------------------------------------------------------------------------------


def test_a_look_touches_nothing_and_is_settled_when_it_is_planned(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue(partitions=3)
    pond.fill(queue, 2_500)
    df = look(spark, pond.options(queue))
    assert df.count() == 2_500
    pond.fill(queue, 10, "late")
    assert df.count() == 2_500
    assert df.where("payload like 'late%'").count() == 0
    assert look(spark, pond.options(queue)).count() == 2_510
    assert pond.counts(queue) == {"ready": 2_510}
    assert pond.claims(queue) == []


def test_a_look_is_at_one_state_and_kind(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    pond.produce(queue, [{"text": "a", "kind": "x"}, {"text": "b", "kind": "y"}, {"text": "c", "delay": "1h"}])
    [item] = pond.server.must("queue.lease", queue=queue)["items"]
    pond.server.must("queue.retry", queue=queue, items=[{"lease": item["lease"], "dead": True, "error": "no good"}])

    def payloads(**more: str) -> list[str]:
        return sorted(row.payload for row in look(spark, pond.options(queue, payload="string", **more)).collect())

    assert payloads() == ["b"]
    assert payloads(state="scheduled") == ["c"]
    assert payloads(state="any") == ["a", "b", "c"]
    assert payloads(state="any", kind="x") == ["a"]
    [dead] = look(spark, pond.options(queue, state="dead")).collect()
    assert (dead.dead_reason, dead.last_error) == ("rejected", "no good")


def test_an_empty_queue_has_no_rows(spark: SparkSession, pond: Pond) -> None:
    df = look(spark, pond.options(pond.queue()))
    assert df.collect() == []
    assert isinstance(df.schema["payload"].dataType, BinaryType)


# ---- a stream -------------------------------------------------------------------------------------------------------


def test_each_item_is_read_once_and_the_queue_ends_empty(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue(partitions=2)
    pond.fill(queue, 1_500)
    options = pond.options(queue, consumer="c", maxItemsPerBatch="600")
    got = consume(spark, options, tmp_path)
    assert got.sizes == [600, 600, 300]
    assert sorted(got.payloads) == sorted(f"n{number}" for number in range(1_500))
    assert (pond.counts(queue), pond.claims(queue)) == ({}, [])  # the last batch was completed too


def test_a_stopped_query_goes_on_from_its_checkpoint(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    options = pond.options(queue, consumer="c")
    runs = []
    for prefix in ("first", "second"):
        pond.fill(queue, 20, prefix)
        runs.append(consume(spark, options, tmp_path).payloads)
    assert runs == [[f"{prefix}{number}" for number in range(20)] for prefix in ("first", "second")]
    assert consume(spark, options, tmp_path).rows == []
    assert pond.counts(queue) == {}


def test_a_driver_that_was_killed_in_its_first_write_to_the_checkpoint_goes_on(
    spark: SparkSession, pond: Pond, tmp_path: Path
) -> None:
    queue = pond.queue()
    pond.fill(queue, 1)
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / ".0.5f2c.tmp").write_text("v1")
    assert consume(spark, pond.options(queue, consumer="c"), tmp_path).payloads == ["n0"]


def test_a_replayed_batch_has_the_same_rows(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue(partitions=2)
    pond.fill(queue, 300)
    options = pond.options(queue, consumer="c", parts="3")
    seen: list[Any] = []

    def crash(df: DataFrame, batch: int) -> None:
        seen.extend(df.collect())
        raise RuntimeError("the sink is away")

    with pytest.raises(Exception, match="the sink is away"):
        consume(spark, options, tmp_path, crash)
    assert (pond.counts(queue), pond.claims(queue)) == ({"claimed": 300}, ["c:1"])
    pond.fill(queue, 5, "late")

    again = consume(spark, options, tmp_path)

    assert again.batches[0] == seen
    assert sorted(again.payloads[300:]) == [f"late{number}" for number in range(5)]
    assert (pond.counts(queue), pond.claims(queue)) == ({}, [])


def test_a_claim_that_was_made_and_never_logged_is_found(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    """What a driver leaves that dies between the claim and its own log."""
    queue = pond.queue()
    pond.fill(queue, 10)
    epoch = pond.server.must("consumer.open", queue=queue, consumer="c")["epoch"]
    pond.server.must("queue.claim", queue=queue, claim_id="c:1", max_items=4, epoch=epoch)
    got = consume(spark, pond.options(queue, consumer="c"), tmp_path)
    assert got.sizes == [4, 6]
    assert pond.counts(queue) == {}


def test_an_available_now_query_ends_although_items_keep_coming(
    spark: SparkSession, pond: Pond, tmp_path: Path
) -> None:
    queue = pond.queue()
    pond.fill(queue, 30)

    def produce_more(df: DataFrame, batch: int) -> None:
        pond.fill(queue, 10, "late")

    got = consume(spark, pond.options(queue, consumer="c", maxItemsPerBatch="10"), tmp_path, produce_more)
    assert got.payloads == [f"n{number}" for number in range(30)]
    assert (pond.counts(queue), pond.claims(queue)) == ({"ready": 30}, [])


def test_a_running_query_waits_for_items_and_completes_them(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    got = Gathered()
    query = started(stream_of(spark, pond.options(queue, consumer="c")), got, tmp_path)
    try:
        for batch in ("a", "b"):
            pond.fill(queue, 3, batch)
            until(lambda: pond.counts(queue) == {}, "the items to be completed")
        assert query.isActive
    finally:
        query.stop()
    assert got.payloads == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_a_batch_is_bounded_by_bytes(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    pond.produce(queue, [{"text": "x" * 1_000}] * 10)
    got = consume(spark, pond.options(queue, consumer="c", maxBytesPerBatch="4000"), tmp_path)
    assert sum(got.sizes) == 10
    assert len(got.sizes) >= 3


def test_a_task_reads_a_part_and_small_parts_share_a_task(spark: SparkSession, pond: Pond, tmp_path: Path) -> None:
    queue = pond.queue()
    pond.fill(queue, 3 * TASK_ITEMS_MIN)
    got = consume(spark, pond.options(queue, consumer="c", parts="3"), tmp_path / "large")
    assert (got.sizes, got.tasks[0]) == ([3 * TASK_ITEMS_MIN], 3)
    pond.fill(queue, 30)
    got = consume(spark, pond.options(queue, consumer="d", parts="3"), tmp_path / "small")
    assert (got.sizes, got.tasks[0]) == ([30], 1)


@pytest.mark.parametrize(
    ("parts", "groups"),
    [
        ([], []),
        ([1], [[0]]),
        ([10, 0, 10], [[0, 2]]),
        ([TASK_ITEMS_MIN, 1, 1], [[0], [1, 2]]),
        ([TASK_ITEMS_MIN - 1, 1, 1], [[0, 1], [2]]),
        ([9 * TASK_ITEMS_MIN] * 3, [[0], [1], [2]]),
    ],
)
def test_parts_go_together_up_to_the_size_of_a_task(parts: list[int], groups: list[list[int]]) -> None:
    assert tasks(parts) == groups


def test_a_batch_that_its_query_did_not_come_back_for_is_completed_by_the_next_run(
    spark: SparkSession, pond: Pond, tmp_path: Path
) -> None:
    queue = pond.queue()
    pond.fill(queue, 10)
    options = pond.options(queue, consumer="c")
    first = Gathered()
    query = started(stream_of(spark, options), first, tmp_path, once=True)  # ends before the source is asked again
    end(query)
    assert first.sizes == [10]
    pond.fill(queue, 1, "late")
    assert consume(spark, options, tmp_path).payloads == ["late0"]
    assert (pond.counts(queue), pond.claims(queue)) == ({}, [])
