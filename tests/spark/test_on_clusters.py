"""Source, sink and a job on executors that are processes of their own and have no millpond: `register` brings it.

On Spark's local cluster and on a standalone master and worker. The Python of every process but the driver's own has
what PySpark needs and nothing of this project.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import venv
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from tests.server.process import token
from tests.spark.cluster import local_cluster, run_driver, standalone, submit, told
from tests.spark.server import Pond, pond_in
from tests.spark.told import Told, write_lake

ITEMS = 24_000  # four parts, each enough for a task of its own
TIMEOUT_S = 400.0  # of a driver that starts a cluster, on a machine that is busy

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)

ALL_OF_IT = """
import importlib.util, json, os, sys, urllib.request
from pathlib import Path

settings, place = map(json.loads, sys.argv[1:])
os.environ["PYSPARK_PYTHON"] = place["python"]

from pyspark.sql import functions as F
from millpond.spark.formats import MillpondSource, register
from millpond.spark.jobs.metrics import metrics
from millpond.spark.lake import events
from millpond.spark.session import session

spark = session("clusters", **settings)
with open(place["token"]) as file:
    server = {"url": place["url"], "token": file.read().strip()}
source = server | {"queue": place["source"]}
target = server | {"queue": place["target"]}
told = {}

def modules(rows):
    names = ("millpond", "pyspark_millpond", "pyarrow")
    yield sys.executable, [name for name in names if importlib.util.find_spec(name)]

told["modules"] = spark.sparkContext.parallelize(range(4), 4).mapPartitions(modules).collect()

spark.dataSource.register(MillpondSource)  # by name: it is to be imported where it is used
try:
    told["by_name"] = spark.read.format("millpond").options(**source).load().count()
except Exception as error:
    told["by_name"] = str(error)

register(spark)
seen = spark.read.format("millpond").options(**source).load()
told["seen"] = seen.count()
seen.limit(10).select("payload").write.format("millpond").mode("append").options(**target).save()

stream = spark.readStream.format("millpond").options(consumer="c", **source).load()
sent = stream.select("payload", F.upper("id").alias("reference"))
writer = sent.writeStream.format("millpond").options(**target).option("checkpointLocation", place["checkpoint"])
query = writer.queryName("moving").trigger(availableNow=True).start()
query.awaitTermination()
told["read"] = [progress["numInputRows"] for progress in query.recentProgress]

job = metrics(events(spark, place["lake"]), 60_000)
told["job"] = [[row.queue, row.produced, row.completed] for row in job.collect()]

seen.explain("extended")
query.explain(True)
job.explain("formatted")
print(seen._jdf.queryExecution().logical().toJSON(), query.lastProgress)

ui = spark.sparkContext.uiWebUrl
api = f"{ui}/api/v1/applications/{spark.sparkContext.applicationId}"
pages = [f"{ui}/{name}/" for name in ("jobs", "stages", "environment", "SQL", "StreamingQuery", "executors")]
pages += [f"{api}/{name}" for name in ("environment", "jobs", "stages?details=true", "sql?details=true&length=100")]
for page in pages:
    with urllib.request.urlopen(page, timeout=60) as reply:
        print("page:", page, reply.read().decode())
with urllib.request.urlopen(f"{api}/allexecutors", timeout=60) as reply:
    told["tasks"] = {one["id"]: one["completedTasks"] for one in json.load(reply)}
Path(os.environ["TOLD"]).write_text(json.dumps(told))
spark.stop()
"""


def bare_python(folder: Path) -> Path:
    """One that finds what the tests' own finds, save for millpond, which a .pth file tells it of, and PySpark, which
    Spark tells its processes of.
    """
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for found in Path(pyarrow.__file__).parent.parent.iterdir():
        if found.suffix != ".pth" and not found.name.startswith(("millpond", "_millpond", "pyspark")):
            (packages / found.name).symlink_to(found)
    return folder / "bin" / "python"


class Clustered:
    """What a driver is told, and what it and its cluster leave behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = bare_python(folder / "bare")
        self.secret = token(folder / "data", "admin")
        self.kept = folder / "secret"
        self.kept.write_text(self.secret)
        self.events = folder / "events"
        self.events.mkdir()
        write_lake(folder / "lake", Told().at(0).produce(1, 2, 3).lease(1).complete(1))

    def settings(self) -> dict[str, str]:
        return {
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
            "spark.sql.shuffle.partitions": "2",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": str(self.events),
        }

    def place(self, served: Pond) -> dict[str, str]:
        served.server.token = self.secret
        source, target = served.queue(partitions=2), served.queue()
        served.fill(source, ITEMS)
        paths = {"checkpoint": self.folder / "checkpoint", "lake": self.folder / "lake", "token": self.kept}
        queues = {"url": served.url, "source": source, "target": target}
        return {**queues, "python": str(self.python), **{name: str(path) for name, path in paths.items()}}

    def check(self, served: Pond, place: dict[str, str]) -> dict[str, Any]:
        """What the driver has told, once it is seen that all of it was done."""
        found = told(self.folder)
        assert found["modules"] == [[str(self.python), ["pyarrow"]]] * 4
        assert "No module named 'millpond'" in found["by_name"]
        assert found["seen"] == sum(found["read"]) == ITEMS
        assert found["job"] == [["mail", 3, 1]]
        assert served.counts(place["source"]) == {}
        assert served.counts(place["target"]) == {"ready": ITEMS + 10}
        assert all(tasks > 0 for executor, tasks in found["tasks"].items() if executor != "driver")
        return found

    def check_secrecy(self, said: str, logs: Path) -> None:
        """Of the token, in what is shown and logged. `logs` are those of the executors."""
        written = [log.read_text(errors="replace") for log in logs.rglob("stderr")]
        assert any("Running task" in text for text in written)  # they tell much
        kept = [file for place in (self.events, self.folder / "checkpoint") for file in place.rglob("*")]
        written += [file.read_text(errors="replace") for file in kept if file.is_file()]
        assert any("SparkListenerSQLExecutionStart" in text for text in written)
        assert "== Physical Plan ==" in said
        assert "page:" in said
        signs = [self.secret, self.secret[-20:], base64.b64encode(self.secret.encode()).decode()[4:-4]]
        assert [sign for sign in signs for text in [said, *written] if sign in text] == []


def test_a_local_cluster_gets_the_connector_from_the_driver(tmp_path: Path) -> None:
    clustered = Clustered(tmp_path)
    settings = clustered.settings() | local_cluster()
    with pond_in(tmp_path / "data") as served:
        place = clustered.place(served)
        said = run_driver(ALL_OF_IT, tmp_path, json.dumps(settings), json.dumps(place), timeout_s=TIMEOUT_S)
        found = clustered.check(served, place)
    assert len(found["tasks"]) == 3  # with the driver
    clustered.check_secrecy(said, tmp_path / "spark-home" / "work")


def test_a_standalone_cluster_gets_the_connector_from_what_is_submitted(tmp_path: Path) -> None:
    clustered = Clustered(tmp_path)
    pythons = {"spark.pyspark.python": str(clustered.python), "spark.pyspark.driver.python": sys.executable}
    with pond_in(tmp_path / "data") as served, standalone(tmp_path) as cluster:
        settings = cluster.settings() | clustered.settings() | pythons
        place = clustered.place(served)
        said = submit(ALL_OF_IT, tmp_path, settings, "{}", json.dumps(place), timeout_s=TIMEOUT_S)
        found = clustered.check(served, place)
        shown = "".join(line for process in (cluster.master, *cluster.workers) for line in process.lines)
    assert len(found["tasks"]) == 2
    clustered.check_secrecy(said + shown, tmp_path / "work")
    assert os.listdir(tmp_path / "work") != []
