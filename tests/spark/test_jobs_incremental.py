"""Runs that take what is new end where one run over everything ends, whatever happened to the files in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from millpond.history.lake import Span
from millpond.spark import lake as lakes
from millpond.spark.jobs import consumers, counts, durations, incremental, items, metrics, signatures
from millpond.spark.jobs.incremental import Sums
from millpond.spark.jobs.plans import Turns, joined, plan_after, without
from tests.spark.told import Told, write_file

pytestmark = pytest.mark.timeout(300)  # dozens of Spark's jobs in a test: a minute on a machine that is busy
WINDOW = 60_000
ANSWERS: dict[str, Callable[[Sums], DataFrame]] = {
    "metrics": lambda sums: metrics.result(sums.counts, sums.durations, WINDOW),
    "totals": lambda sums: metrics.totals(sums.counts, sums.durations),
    "failures": lambda sums: signatures.result(sums.signatures),
    "consumers": lambda sums: consumers.result(sums.consumers),
    "items": lambda sums: items.result(sums.items),
}


def story(queue: str = "mail", incarnation: str = "first") -> Told:
    """Some minutes of work, with attempts and items that span any cut."""
    told = Told(queue, incarnation)
    for number in range(30):
        start = number * 7.0
        told.at(start).produce(number)
        told.at(start + 1).lease(number, who=f"worker-{number % 3}")
        if number % 5 == 0:
            told.at(start + 2.5).fail(number, error=f"timeout after {number} s", who=f"worker-{number % 3}")
            told.at(start + 4).due(number).at(start + 5).lease(number, who="worker-0").at(start + 5.5).die(number)
        elif number % 7 == 0:
            told.at(start + 6).lose_lease(number)
        else:
            told.at(start + 1 + number / 100).complete(number, who=f"worker-{number % 3}")
    return told


def at_once(spark: SparkSession, lake: Path) -> Sums:
    events = lakes.events(spark, lake)
    return Sums(
        counts.partial(events, WINDOW),
        durations.partial(events, WINDOW),
        signatures.partial(events, WINDOW),
        consumers.partial(events, WINDOW),
        items.partial(events),
    )


def run(spark: SparkSession, lake: Path, out: Path) -> None:
    incremental.run(spark, lake, out, WINDOW).awaitTermination()


def rows_of(answer: DataFrame) -> list[str]:
    return sorted(map(repr, answer.collect()))


def assert_the_same(spark: SparkSession, lake: Path, out: Path) -> None:
    bit_by_bit, whole = incremental.sums(spark, out, WINDOW), at_once(spark, lake)
    for name, answer in ANSWERS.items():
        expected = rows_of(answer(whole))
        assert expected, name
        assert rows_of(answer(bit_by_bit)) == expected, name


def test_what_came_bit_by_bit_equals_what_came_at_once(spark: SparkSession, tmp_path: Path) -> None:
    """Files come, and are merged after they were taken and before."""
    lake, out = tmp_path / "lake", tmp_path / "out"
    mail, bills = story(), story("team/bills", "second")
    first = write_file(lake, mail.rows[:40])
    run(spark, lake, out)
    write_file(lake, mail.rows[:60])  # what was taken, and what came since
    write_file(lake, bills.rows)
    first.unlink()
    run(spark, lake, out)
    write_file(lake, mail.rows[60:])
    write_file(lake, mail.rows)
    run(spark, lake, out)
    assert_the_same(spark, lake, out)


def test_a_batch_that_is_done_again_takes_the_same_turns(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails when half of it is written; before it is tried again, files are merged and others come."""
    lake, out = tmp_path / "lake", tmp_path / "out"
    rows = story().rows
    small = write_file(lake, rows[:60])

    def fail(*_: object) -> DataFrame:
        raise RuntimeError("the machine has gone")

    with monkeypatch.context() as broken:
        broken.setattr(consumers, "partial", fail)
        with pytest.raises(StreamingQueryException, match="the machine has gone"):
            run(spark, lake, out)
    small.unlink()
    write_file(lake, rows)
    run(spark, lake, out)  # the batch again, and the rest in another
    assert sorted(path.name for path in (out / f"window-{WINDOW}ms/items").iterdir()) == ["batch=0", "batch=1"]
    assert_the_same(spark, lake, out)


# ---- turns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("span", "others", "left"),
    [
        ((1, 9), [], [(1, 9)]),
        ((1, 9), [(1, 9)], []),
        ((1, 9), [(0, 20)], []),
        ((1, 9), [(1, 4)], [(5, 9)]),
        ((1, 9), [(3, 4), (6, 7)], [(1, 2), (5, 5), (8, 9)]),
        ((5, 9), [(1, 3), (20, 30)], [(5, 9)]),
        ((5, 9), [(1, 5), (9, 30)], [(6, 8)]),
    ],
)
def test_what_is_left_of_a_span(span: tuple[int, int], others: list[tuple[int, int]], left: list[object]) -> None:
    assert list(without(span, others)) == left


def test_neighbours_are_joined() -> None:
    assert joined([(5, 7), (1, 2), (3, 4), (10, 11), (6, 8)]) == [(1, 8), (10, 11)]


def test_a_plan_takes_what_no_earlier_one_took() -> None:
    file = lakes.EventFile("mail", "2031-05-07", Span("first", 0, 1, 20), "somewhere")
    first = plan_after([], [file._replace(span=Span("first", 0, 1, 10))])
    place = ("mail", "2031-05-07", "first", 0)
    assert first == [Turns(*place, 1, 10, True)]
    second = plan_after(first, [file])
    assert second == [Turns(*place, 1, 10, False), Turns(*place, 11, 20, True)]
    assert plan_after(second, [file]) == [Turns(*place, 1, 20, False)]
