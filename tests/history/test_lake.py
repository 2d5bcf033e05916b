"""The lake's layout: names that tell what a file holds, and which files count."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.history.lake import (
    FLAT_SCHEMA,
    ITEM_EVENT_SCHEMA,
    LAKE_VERSION,
    About,
    Lake,
    Span,
    date_of,
    open_writer,
    parse_span,
    read_about,
    whole,
    write_about,
)


def put(lake: Lake, name: str, date: str = "2031-05-07", queue: str = "q") -> Path:
    folder = lake.folder(date, queue)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(b"parquet")
    return path


def span(first: int, last: int, incarnation: str = "i", partition: int = 0) -> Span:
    return Span(incarnation, partition, first, last)


def spans(lake: Lake) -> list[tuple[str, str, int, int]]:
    return [(file.date, file.queue, file.span.from_turn, file.span.to_turn) for file in lake.files()]


def test_a_name_tells_incarnation_partition_and_turns() -> None:
    one = Span("a1b2", 7, 12, 3_000_000_000_000)
    assert one.name("parquet") == "a1b2-p00007-000000000012-3000000000000.parquet"
    assert parse_span(one.name("parquet")) == one


@pytest.mark.parametrize(
    "name",
    [
        "_SUCCESS",
        ".a1b2-p00007-000000000012-000000000013.parquet",
        ".export-a1b2-p00007-000000000012-000000000013.parquet",
        "a1b2-p7-000000000012-000000000013.parquet",
        "a1b2-p00007-12-13.parquet",
        "a1b2-p00007-000000000012-000000000013.parquet.crc",
        "part-00000.parquet",
    ],
)
def test_other_names_are_not_the_lakes(tmp_path: Path, name: str) -> None:
    lake = Lake(tmp_path)
    put(lake, name)
    assert lake.files() == []


def test_files_are_listed_by_date_queue_and_turn(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for date, queue, first in (("2031-05-08", "q", 9), ("2031-05-07", "q", 5), ("2031-05-07", "a/b c", 1)):
        put(lake, span(first, first).name("parquet"), date, queue)
    assert lake.folder("2031-05-07", "a/b c").name == "queue=a%2Fb%20c"
    assert lake.dates() == ["2031-05-07", "2031-05-08"]
    assert lake.queues("2031-05-07") == ["a/b c", "q"]
    assert spans(lake) == [("2031-05-07", "a/b c", 1, 1), ("2031-05-07", "q", 5, 5), ("2031-05-08", "q", 9, 9)]
    assert [file.queue for file in lake.files(queues=["q"], until="2031-05-07")] == ["q"]
    assert [file.date for file in lake.files(since="2031-05-08")] == ["2031-05-08"]
    assert lake.files(lane=("i", 1)) == []


def test_a_lake_that_is_not_there_is_empty(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "none")
    assert (lake.files(), lake.dates(), lake.gaps()) == ([], [], [])
    assert not lake.path.exists()


def test_a_file_within_another_does_not_count(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for first, last in ((1, 5), (6, 9), (1, 9), (10, 12), (12, 12)):
        put(lake, span(first, last).name("parquet"))
    put(lake, span(2, 3, partition=1).name("parquet"))
    put(lake, span(2, 3, incarnation="j").name("parquet"))
    assert [(file.lane, file.span.from_turn, file.span.to_turn) for file in lake.files()] == [
        (("i", 0), 1, 9),
        (("i", 0), 10, 12),
        (("i", 1), 2, 3),
        (("j", 0), 2, 3),
    ]
    [(_, covered)] = lake.folders()
    assert sorted((file.span.from_turn, file.span.to_turn) for file in covered) == [(1, 5), (6, 9), (12, 12)]


def test_the_same_turns_on_another_date_count(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    put(lake, span(1, 9).name("parquet"), "2031-05-07")
    put(lake, span(2, 3).name("parquet"), "2031-05-08")
    assert len(lake.files()) == 2


def test_of_nested_spans_the_widest_is_kept() -> None:
    kept, covered = whole([span(3, 4), span(1, 10), span(2, 5), span(11, 11), span(1, 9)])
    assert kept == [span(1, 10), span(11, 11)]
    assert sorted(covered) == [span(1, 9), span(2, 5), span(3, 4)]


def test_dates_are_in_utc() -> None:
    assert date_of(0) == "1970-01-01"
    assert date_of(86_400_000 - 1) == "1970-01-01"
    assert date_of(1_999_987_200_000) == "2033-05-18"


# ---- the format -----------------------------------------------------------------------------------------------


def written(path: Path, version: int = LAKE_VERSION) -> Path:
    about = About(version=version, queue="q", incarnation="i", partition=0, from_turn=1, to_turn=2, counts={})
    with open_writer(path) as writer:
        writer.write_table(FLAT_SCHEMA.empty_table())
        write_about(writer, about)
    return path


def test_the_schema_is_the_one_that_readers_were_promised() -> None:
    """A change here is a new version of the lake's format."""
    assert LAKE_VERSION == 1
    assert {field.name: (str(field.type), field.nullable) for field in ITEM_EVENT_SCHEMA} == {
        "incarnation": ("string", False),
        "partition": ("int32", False),
        "turn": ("int64", False),
        "seq": ("int32", False),
        "number": ("int64", False),
        "item_id": ("string", False),
        "correlation_id": ("string", True),
        "at": ("timestamp[us, tz=UTC]", False),
        "from_state": ("string", True),
        "to_state": ("string", True),
        "why": ("string", False),
        "who": ("string", False),
        "attempt": ("int32", True),
        "kind": ("string", False),
        "priority": ("int32", False),
        "error": ("string", True),
        "source_queue": ("string", True),
        "source_id": ("string", True),
        "since_ms": ("int64", True),
        "age_ms": ("int64", True),
    }


def test_what_is_written_reads_back_with_plain_types(tmp_path: Path) -> None:
    assert pq.read_schema(written(tmp_path / "f")).equals(ITEM_EVENT_SCHEMA)


def test_a_file_says_its_version_and_what_it_holds(tmp_path: Path) -> None:
    about = read_about(pq.read_metadata(written(tmp_path / "f")))
    assert (about.version, about.queue, about.from_turn, about.to_turn) == (1, "q", 1, 2)


def test_a_file_of_a_version_to_come_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="version 99"):
        read_about(pq.read_metadata(written(tmp_path / "f", version=99)))


def test_another_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "f")
    with pytest.raises(ValueError, match="not of a history lake"):
        read_about(pq.read_metadata(tmp_path / "f"))
