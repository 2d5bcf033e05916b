"""The lake as a DataFrame: which files count, what comes from their paths, which of them are read."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.testing import assertDataFrameEqual

from millpond.errors import NotFound
from millpond.spark import lake as lakes
from tests.spark.told import NOON, Told, frame, write_file, write_lake

DAY = 86_400.0


def two_days(queue: str = "team-a/mail", incarnation: str = "first") -> Told:
    return Told(queue, incarnation).at(0).produce(1, 2).at(5).lease(1).at(DAY).complete(1)


@pytest.fixture(params=["path", "url"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """A URL is listed by Spark, a path by us."""
    folder = tmp_path / "a [lake], 100%"
    return folder if request.param == "path" else f"file://{folder}"


def folder_of(address: str | Path) -> Path:
    return Path(str(address).removeprefix("file://"))


def test_the_events_are_those_that_were_written(spark: SparkSession, address: str | Path) -> None:
    told = [two_days(), two_days("__HIVE_DEFAULT_PARTITION__", "second"), two_days("2031-05-07", "third")]
    write_lake(folder_of(address), *told)
    assertDataFrameEqual(lakes.events(spark, address), frame(spark, *told))


def test_a_file_that_was_merged_into_another_does_not_count(spark: SparkSession, address: str | Path) -> None:
    told = Told().at(0).produce(1, 2).lease(1).complete(1).lease(2)
    folder = folder_of(address)
    for rows in (told.rows[:2], told.rows[2:3], told.rows[:4], told.rows[4:]):
        write_file(folder, rows)
    assert len(lakes.files(spark, address)) == 2
    assertDataFrameEqual(lakes.events(spark, address), frame(spark, told))


def test_names_that_are_not_of_the_lake_are_left_alone(spark: SparkSession, address: str | Path) -> None:
    told = Told().at(0).produce(1)
    written = write_file(folder_of(address), told.rows)
    for name in (".export-x.parquet", "_notes.parquet", "readme.txt"):
        written.with_name(name).write_bytes(b"not parquet")
    assertDataFrameEqual(lakes.events(spark, address), frame(spark, told))


def test_only_what_is_asked_for_is_read(spark: SparkSession, tmp_path: Path) -> None:
    mail, bills = two_days(), two_days("bills", "second")
    write_lake(tmp_path, mail, bills)
    tomorrow = NOON + timedelta(hours=23)
    assert len(lakes.files(spark, tmp_path)) == 4
    assert {file.queue for file in lakes.files(spark, tmp_path, queues=["bills"])} == {"bills"}
    assert {file.date for file in lakes.files(spark, tmp_path, since="2031-05-08")} == {"2031-05-08"}
    assert [row.why for row in lakes.events(spark, tmp_path, queues=["bills"], since=tomorrow).collect()] == [
        "completed"
    ]
    assert lakes.events(spark, tmp_path, until=NOON).count() == 0
    assert lakes.events(spark, tmp_path, until=NOON + timedelta(seconds=5)).count() == 4
    assert lakes.events(spark, tmp_path, queues=["nobody's"]).count() == 0


def test_a_lake_without_files_says_how_to_fill_it(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="millpond history sync"):
        lakes.events(spark, tmp_path / "nowhere")
