"""A token needs one role, and is not seen in plans, the UI, its API, the event log, checkpoints, errors or logs."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.spark.formats import give_verdicts, register
from tests.server.process import token
from tests.spark.cluster import run_driver
from tests.spark.server import pond_in
from tests.spark.streams import consume

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def test_each_use_needs_one_role(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    secrets = {role: token(data, role) for role in ("admin", "producer", "viewer", "consumer")}
    files = {role: tmp_path / f"{role}.token" for role in secrets}
    for role, file in files.items():
        file.write_text(secrets[role] + "\n")
    with pond_in(data) as served:
        served.server.token = secrets["admin"]
        queue = served.queue()
        register(spark)

        def options(role: str, **more: str) -> dict[str, str]:
            return served.options(queue, tokenFile=str(files[role]), **more)

        df = spark.range(5).selectExpr("concat('n', id) as payload")
        df.write.format("millpond").mode("append").options(**options("producer")).save()
        assert spark.read.format("millpond").options(**options("viewer")).load().count() == 5

        def bury_one(batch: DataFrame, _: int) -> None:
            verdicts = batch.where("payload = 'n3'").selectExpr("id", "'dead' as verdict")
            give_verdicts(verdicts, **options("consumer", consumer="c"))

        assert len(consume(spark, options("consumer", consumer="c"), tmp_path / "checkpoint", bury_one).rows) == 5
        assert served.counts(queue) == {"dead": 1}


SHOW_ALL = """
import json, os, sys, urllib.request

settings, source, target, log4j, checkpoint = map(json.loads, sys.argv[1:])
os.environ["LOG4J_CONFIGURATION_FILE"] = log4j

from pyspark.sql import SparkSession
from millpond.spark.formats import register

spark = SparkSession.builder.config(map=settings).getOrCreate()
register(spark)
df = spark.read.format("millpond").options(**source).load().select("payload")
for mode in ("extended", "formatted", "cost"):
    df.explain(mode)
print(df, df._jdf.queryExecution().logical().toJSON(), df._jdf.queryExecution().executedPlan().toJSON())
df.write.format("millpond").mode("append").options(**target).save()

stream = spark.readStream.format("millpond").options(consumer="c", **source).load().select("payload")
writer = stream.writeStream.format("millpond").options(**target).option("checkpointLocation", checkpoint)
query = writer.queryName("moving").trigger(availableNow=True).start()
query.awaitTermination()
query.explain(True)
print(query.lastProgress, query.status)

for wrong in ({"queue": "nosuch"}, {"tokn": "x"}):
    try:
        spark.read.format("millpond").options(**(source | wrong)).load().collect()
    except Exception as error:
        print("refused:", error)
away = {"url": "http://127.0.0.1:1", "retryFor": "100ms"}
stream = spark.readStream.format("millpond").options(**(source | away), consumer="c").load()
try:
    stream.writeStream.format("noop").option("checkpointLocation", f"{checkpoint}/away").start().awaitTermination()
except Exception as error:
    print("refused:", error)

ui, app = spark.sparkContext.uiWebUrl, spark.sparkContext.applicationId
api = f"{ui}/api/v1/applications/{app}"
pages = [f"{ui}/{name}/" for name in ("jobs", "stages", "environment", "SQL", "StreamingQuery", "executors")]
pages += [f"{ui}/SQL/execution/?id={number}" for number in range(4)]
pages += [f"{api}/{name}" for name in ("environment", "jobs", "stages?details=true", "allexecutors")]
pages += [f"{api}/sql?details=true&planDescription=true&length=100"]
for page in pages:
    with urllib.request.urlopen(page, timeout=30) as reply:
        print("page:", page, reply.read().decode())
spark.stop()
"""

LOG4J = """
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n%ex
logger.spark.name = org.apache.spark
logger.spark.level = info
logger.sql.name = org.apache.spark.sql
logger.sql.level = debug
logger.codegen.name = org.apache.spark.sql.catalyst.expressions.codegen
logger.codegen.level = info
"""


def test_a_token_is_shown_nowhere(tmp_path: Path) -> None:
    data, events, checkpoint = tmp_path / "data", tmp_path / "events", tmp_path / "checkpoint"
    events.mkdir()
    secret = token(data, "admin")
    log4j = tmp_path / "log4j2.properties"
    log4j.write_text(LOG4J)
    settings = {
        "spark.master": "local[2]",
        "spark.ui.port": "0",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": str(events),
    }
    with pond_in(data) as served:
        served.server.token = secret
        source, target = served.queue(), served.queue()
        served.fill(source, 5)
        options = [served.options(queue, token=secret) for queue in (source, target)]
        said = run_driver(SHOW_ALL, tmp_path, *map(json.dumps, [settings, *options, str(log4j), str(checkpoint)]))
        assert served.counts(target) == {"ready": 10}
        assert served.counts(source) == {}

    for sign in (
        "== Physical Plan ==",
        "no queue 'nosuch'",
        "did you mean token?",
        "no answer from",
        "moving",
        "\nDEBUG ",
    ):
        assert sign in said  # else there was nothing to look at
    kept = [
        file.read_text(errors="replace")
        for place in (events, checkpoint)
        for file in place.rglob("*")
        if file.is_file()
    ]
    assert any("SparkListenerSQLExecutionStart" in text for text in kept)
    shown = [secret, secret[-20:], base64.b64encode(secret.encode()).decode()[4:-4]]
    assert [sign for sign in shown for text in [said, *kept] if sign in text] == []
