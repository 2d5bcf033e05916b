"""A Spark session with the settings that millpond's jobs, reports and examples want."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; install millpond[spark]", name=error.name) from error

from millpond.spark.java import find_java_home

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway

SUBMITTED = "PYSPARK_GATEWAY_PORT"  # spark-submit started this process, and has a JVM for it
LOOPBACK = "127.0.0.1"
JVM_END_S = 20.0  # it ends as soon as its stdin does; then it is killed
QUIET = Path(__file__).with_name("log4j2.properties")

# Spark shows no option or setting whose name or value matches: its own words, and what a token travels as.
TOKEN = "mp_[0-9A-Za-z]{8}_[0-9A-Za-z]{43}"  # as access/tokens_file.py makes them
SECRET = f"(?i)secret|password|token|access[.]?key|credential|authorization|api[.]?key|{TOKEN}"

Setting = str | int | bool


def session(app_name: str = "millpond", /, **conf: Setting) -> SparkSession:
    """The session that runs, with `conf` where it can still be set; else a new one, on this machine's cores unless
    `spark.master` or spark-submit says otherwise.

    What spark-submit was told stays as it is; `conf` counts above all. Names have dots: `session("report",
    **{"spark.driver.memory": "4g"})`. Tables that are saved without a path last as long as the process.
    """
    if SparkContext._active_spark_context is not None:
        return _built(conf)
    if SUBMITTED in os.environ:
        SparkContext._ensure_initialized()
        told: dict[str, Setting] = dict(SparkConf().getAll())
        return _built(_settings(str(told["spark.master"])) | told | conf)
    master = str(conf.get("spark.master", "local[*]"))
    with _environment(_variables(master)):
        return _built({"spark.master": master, "spark.app.name": app_name} | _settings(master) | conf)


def _built(settings: Mapping[str, Setting]) -> SparkSession:
    return SparkSession.builder.config(map=dict(settings)).getOrCreate()


def _is_here(master: str) -> bool:
    """local, local[4] and local-cluster[2,1,1024] run on this machine alone."""
    return master.startswith("local")


def _settings(master: str) -> dict[str, Setting]:
    settings: dict[str, Setting] = {
        "spark.redaction.regex": SECRET,
        "spark.redaction.string.regex": TOKEN,
        "spark.sql.execution.arrow.pyspark.enabled": True,
        "spark.sql.session.timeZone": "UTC",
        # A driver that is killed as it writes a checkpoint's first file leaves a temporary one, from which Spark would
        # never go on. What else may be in a checkpoint the source sees for itself.
        "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": False,
        "spark.ui.showConsoleProgress": False,
    }
    if _is_here(master):
        settings |= {
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.host": LOOPBACK,
            "spark.sql.shuffle.partitions": cores_of(master),  # 200 by default; each costs some ms a batch
            "spark.sql.warehouse.dir": _folder_until_exit(),  # else spark-warehouse, wherever the caller happens to be
            "spark.ui.enabled": False,
        }
    return settings


def _folder_until_exit() -> str:
    folder = tempfile.mkdtemp(prefix="millpond-spark-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def cores_of(master: str) -> int:
    """Of a master on this machine: how many tasks run at once."""
    if cluster := re.fullmatch(r"local-cluster\[(\d+),\s*(\d+),.*\]", master):
        return int(cluster[1]) * int(cluster[2])
    if some := re.match(r"local\[(\d+)", master):
        return int(some[1])
    return 1 if master == "local" else os.cpu_count() or 1


def _variables(master: str) -> dict[str, str]:
    """What the JVM and its children find in their environment, where the caller has said nothing."""
    variables = {"JAVA_HOME": str(find_java_home())}  # the caller's own, where that will do
    if _is_here(master):
        variables |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": LOOPBACK}
    if "SPARK_HOME" not in os.environ and "SPARK_CONF_DIR" not in os.environ:  # else it may have settings of its own
        variables["LOG4J_CONFIGURATION_FILE"] = str(QUIET)
    said = {name: value for name, value in os.environ.items() if name in variables and name != "JAVA_HOME"}
    return variables | said


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """For as long as the JVM starts: other children of this process are none of our business."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def end_java(gateway: JavaGateway) -> None:
    """Of a session that was stopped: the JVM would else live as long as this process."""
    gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None  # the next session starts another
    jvm = gateway.proc
    jvm.stdin.close()
    try:
        jvm.wait(JVM_END_S)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()
