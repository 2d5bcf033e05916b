"""One Spark session for all tests here. They are not run by xdist: a JVM for each of its processes is too much."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
JVM_END_S = 20  # it ends as soon as its stdin does; then it is killed


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """All here is slow. make test-fast does not even import it, and pyspark with it."""
    return True if config.option.markexpr == "not slow" else None


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Shared: a test that changes a setting sets it back, and stops its own queries."""
    from millpond.spark.session import session

    started = session("tests", **{"spark.master": "local[2]", "spark.default.parallelism": "2"})
    yield started
    stop(started)


def stop(started: SparkSession) -> None:
    """The session, and the JVM that would else live as long as this process."""
    from pyspark import SparkContext

    gateway = started.sparkContext._gateway
    assert gateway is not None
    started.stop()
    gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None  # the next session starts another
    jvm = gateway.proc
    jvm.stdin.close()
    try:
        jvm.wait(JVM_END_S)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()
