"""The formats get to where Spark runs them: by name, by value, to machines that have no millpond."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import cloudpickle

from millpond.spark.formats import CONNECTOR, PUT_BY_SPARK, MillpondSource, pack
from millpond.spark.verdicts import VerdictSource
from tests.spark.cluster import local_cluster, run_driver
from tests.spark.server import Pond, pond_in
from tests.spark.streams import Gathered, end, started, stream_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ITEMS = 30_000  # in three parts, of more than a chunk each


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pond]:
    with pond_in(tmp_path_factory.mktemp("pond")) as served:
        yield served


def test_the_connector_imports_nothing_of_millpond_but_itself() -> None:
    script = "import sys, millpond.spark.formats as f; print(*[m for m in sys.modules if m.startswith('millpond')])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    own = {f"millpond.spark.{name}" for name in CONNECTOR}
    assert set(ran.stdout.split()) == {"millpond", "millpond.spark", *own}


UNPACK = """
import pickle, sys
sys.modules["millpond"] = None  # not to be imported
for source in pickle.load(sys.stdin.buffer):
    print(source.name())
    made = source({"url": "http://127.0.0.1:1", "queue": "q", "consumer": "c", "payload": "string"})
    print(type(made.streamReader(made.schema())).__name__ if source.name() == "millpond" else "")
"""


def test_the_connector_travels_by_value() -> None:
    pack()
    packed = cloudpickle.dumps([MillpondSource, VerdictSource])  # type: ignore[no-untyped-call]
    ran = subprocess.run([sys.executable, "-c", UNPACK], input=packed, capture_output=True, check=True, timeout=60)
    assert ran.stdout.decode().split() == ["millpond", "ClaimReader", "millpond.verdicts"]


def test_the_format_is_known_where_millpond_is_installed(spark: SparkSession, pond: Pond) -> None:
    queue = pond.queue()
    pond.fill(queue, 3)
    fresh = spark.newSession()  # in which nothing was registered
    assert fresh.read.format("millpond").options(**pond.options(queue)).load().count() == 3


def test_a_stream_that_starts_adds_nothing_to_what_streams_of_a_format_share(
    spark: SparkSession, pond: Pond, tmp_path: Path
) -> None:
    queue = pond.queue()
    pond.fill(queue, 3)
    stream = stream_of(spark, pond.options(queue, consumer="c"))
    java: Any = spark._jsparkSession
    shared = java.sessionState().dataSourceManager().lookupDataSource("millpond").dataSourceCls().envVars()
    before = dict(shared)
    gathered = Gathered()
    end(started(stream, gathered, tmp_path / "checkpoint", availableNow=True))
    assert len(gathered.rows) == 3
    assert dict(shared).keys() == before.keys()
    assert dict(shared) != before  # what is there is replaced
    assert not PUT_BY_SPARK.keys() & spark.sparkContext.environment.keys()


MOVE = """
import json, os, sys
from pyspark import TaskContext
from pyspark.sql.functions import udf
from millpond.spark.formats import register
from millpond.spark.session import session

settings, source, target, checkpoint, elsewhere = map(json.loads, sys.argv[1:])
os.environ["PYTHONPATH"] = elsewhere
spark = session("move", **settings)
register(spark)

@udf("string")
def fragile(payload):
    task = TaskContext.get()
    if task.partitionId() == 0 and task.attemptNumber() == 0 and payload == "n9999":
        raise RuntimeError("the first try of the first task fails at its last row")
    return payload.upper()

df = spark.readStream.format("millpond").options(**source).load().select(fragile("payload").alias("payload"))
writer = df.writeStream.format("millpond").options(**target).option("checkpointLocation", checkpoint)
writer.trigger(availableNow=True).start().awaitTermination()
rows = spark.read.format("millpond").options(**target).load()
print("read again:", rows.count(), rows.rdd.mapPartitions(lambda _: [os.getpid()]).distinct().count())
spark.stop()
"""


def test_on_a_cluster_without_millpond_a_task_that_is_tried_again_changes_nothing(pond: Pond, tmp_path: Path) -> None:
    source, target = pond.queue(), pond.queue()
    pond.fill(source, ITEMS)
    elsewhere = tmp_path / "elsewhere"  # all that Spark starts looks here first, and finds a millpond that is none
    elsewhere.mkdir()
    (elsewhere / "millpond.py").write_text("raise ModuleNotFoundError('not on this machine')\n")
    settings = {**local_cluster(), "spark.executorEnv.PYTHONPATH": str(elsewhere)}
    options = pond.options(source, consumer="c", parts="3", payload="string")
    arguments = [settings, options, pond.options(target), str(tmp_path / "checkpoint"), str(elsewhere)]

    said = run_driver(MOVE, tmp_path, *map(json.dumps, arguments))

    assert "the first try of the first task fails" in said
    assert f"read again: {ITEMS}" in said
    assert sorted(pond.texts(target)) == sorted(f"N{number}" for number in range(ITEMS))
    assert (pond.counts(source), pond.claims(source)) == ({}, [])
