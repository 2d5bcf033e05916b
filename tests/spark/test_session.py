from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millpond.access.tokens_file import new_secret
from millpond.spark.session import cores_of, session
from tests.spark.cluster import DRIVER_TIMEOUT_S

_, SECRET = new_secret(set())


def test_a_session_has_the_settings_of_a_machine_of_its_own(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.execution.arrow.pyspark.enabled") == "true"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[3, 2]", 3),
        ("local[*]", os.cpu_count()),
        ("local[*, 2]", os.cpu_count()),
        ("local-cluster[2, 3, 1024]", 6),
    ],
)
def test_a_master_on_this_machine_says_how_many_tasks_run_at_once(master: str, cores: int) -> None:
    assert cores_of(master) == cores


def test_tasks_run_in_the_python_of_the_caller(spark: SparkSession) -> None:
    ran = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()
    assert ran == [sys.executable]


def test_the_session_that_runs_is_given_again_with_what_is_asked_of_it(spark: SparkSession) -> None:
    try:
        assert session("another", **{"spark.sql.shuffle.partitions": 3}) is spark
        assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
        spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
        session()
        assert spark.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo"
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", "2")
        spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize(
    "statement",
    [
        f"CREATE TEMPORARY VIEW shown USING json OPTIONS (path '/tmp/x', token '{SECRET}')",
        f"CREATE TEMPORARY VIEW shown USING json OPTIONS (path '/tmp/x', odd '{SECRET}')",
        f"SELECT id, '{SECRET}' AS odd FROM range(1) WHERE '{SECRET}' = concat('{SECRET}', id)",
    ],
)
@pytest.mark.parametrize("how", ["EXTENDED", "FORMATTED"])
def test_plans_show_no_token(spark: SparkSession, how: str, statement: str) -> None:
    [[plan]] = spark.sql(f"EXPLAIN {how} {statement}").collect()
    assert "redacted" in plan
    assert SECRET not in plan


# The token is in settings and in a source's options; what Spark's pages show is recorded in the event log. In the text
# of a query it would be recorded: Spark leaves it out only where a plan is explained.
ONE_JOB = """
import os, sys
from millpond.spark.session import session
from pyspark.sql.datasource import DataSource, DataSourceReader

class Three(DataSource, DataSourceReader):
    name = classmethod(lambda cls: "three")
    schema = lambda self: "id long"
    reader = lambda self, schema: self
    read = lambda self, partition: iter([(0,), (1,), (2,)])

secret, log = sys.argv[1:]
before = {*os.environ.items()}
spark = session("quiet", **{
    "spark.eventLog.enabled": True,
    "spark.eventLog.compress": False,
    "spark.eventLog.dir": log,
    "spark.millpond.token": secret,
    "spark.odd": f"http://127.0.0.1/?{secret}",
})
# pyspark sets two of its own
changed = {name for name, _ in before ^ {*os.environ.items()}} - {"SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE"}
spark.dataSource.register(Three)
spark.read.format("three").option("token", secret).option("odd", secret).load().createOrReplaceTempView("three")
rows = spark.sql("SELECT id % 3 AS k, count(*) FROM three GROUP BY k").collect()
spark.stop()
print(changed, len(rows), session().range(3).count())
"""


@pytest.fixture(scope="module")
def one_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A session from its start to its end, and the folder with what it left `here`, in `temporary` and in the `log`."""
    folder = tmp_path_factory.mktemp("one-job")
    for name in ("here", "temporary", "log"):
        (folder / name).mkdir()
    temporary = str(folder / "temporary")
    ran = subprocess.run(
        [sys.executable, "-c", ONE_JOB, SECRET, folder / "log"],
        cwd=folder / "here",
        env=os.environ | {"TMPDIR": temporary, "JDK_JAVA_OPTIONS": f"-Djava.io.tmpdir={temporary}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=DRIVER_TIMEOUT_S,
    )
    return ran, folder


def test_a_session_is_quiet(one_job: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ran, _ = one_job
    assert ran.stdout == "set() 3 3\n"
    assert [line for line in ran.stderr.splitlines() if not re.match("WARNING: |NOTE: ", line)] == []  # save Java's own


def test_a_session_leaves_nothing_behind(one_job: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = one_job
    assert [*(folder / "here").iterdir(), *(folder / "temporary").iterdir()] == []


def test_what_spark_records_of_a_session_has_no_token(
    one_job: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    ran, folder = one_job
    recorded = "".join(file.read_text() for file in (folder / "log").rglob("*") if file.is_file())
    assert "spark.millpond.token" in recorded
    assert SECRET not in recorded
    assert SECRET not in ran.stderr


def test_without_pyspark_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['pyspark'] = None; import millpond.spark.session"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stderr.rstrip().endswith("; install millpond[spark]")


def test_the_package_itself_imports_neither_pyspark_nor_pyarrow() -> None:
    code = (
        "import sys, millpond.spark, millpond.spark.java; print({'pyspark', 'pyarrow', 'numpy'} & sys.modules.keys())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
