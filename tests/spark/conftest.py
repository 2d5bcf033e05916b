"""One Spark session for all tests here. They are not run by xdist: a JVM for each of its processes is too much."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent


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
    """The session, and its JVM."""
    from millpond.spark.session import end_java

    gateway = started.sparkContext._gateway
    assert gateway is not None
    started.stop()
    end_java(gateway)
