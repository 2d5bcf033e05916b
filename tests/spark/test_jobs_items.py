"""Items as they are and as they were, their timelines and attempts, and what is dead."""

from __future__ import annotations

from datetime import timedelta

from pyspark.sql import SparkSession
from pyspark.testing import assertDataFrameEqual

from millpond.spark.jobs import attempts, dead, items, timelines
from tests.spark.told import NOON, Told, frame


def after(seconds: float) -> object:
    return NOON + timedelta(seconds=seconds)


def troubled() -> Told:
    """Item 1 fails, then is done; 2 is lost by bob and dies; 3 was cleared."""
    told = Told().at(0).produce(1, 2, 3, kind="letter", priority=3)
    told.at(10).lease(1, 2, who="ann").at(12).fail(1, error="no route", who="ann")
    told.at(20).due(1).at(21).lease(1, who="bob").at(25).complete(1, who="bob")
    return told.at(40).lose_lease(2).at(41).lease(2, who="bob").at(50).die(2, error="gone").remove(3)


def test_an_item_is_as_its_last_row_left_it(spark: SparkSession) -> None:
    found = items.items(frame(spark, troubled())).select(
        *("item_id", "state", "why", "changed_at", "created_at", "attempts", "last_error", "dead_reason", "died_at"),
        *("kind", "priority", "correlation_id"),
    )
    expected = [
        ("i1", "completed", "completed", after(25), NOON, 2, "no route", None, None, "letter", 3, "c1"),
        ("i2", "dead", "max_attempts", after(50), NOON, 2, "gone", "max_attempts", after(50), "letter", 3, "c2"),
        ("i3", "removed", "cleared", after(50), NOON, 0, None, None, None, "letter", 3, "c3"),
    ]
    assertDataFrameEqual(found, spark.createDataFrame(expected, found.schema))


def test_time_travel_shows_the_queue_as_it_was(spark: SparkSession) -> None:
    events = frame(spark, troubled())
    for seconds, expected in {
        -1: {},
        0: {("i1", "ready"), ("i2", "ready"), ("i3", "ready")},
        15: {("i1", "retrying"), ("i2", "leased"), ("i3", "ready")},
        40: {("i1", "completed"), ("i2", "ready"), ("i3", "ready")},
        60: {("i1", "completed"), ("i2", "dead")},
    }.items():
        found = items.items_at(events, NOON + timedelta(seconds=seconds))
        assert {(row.item_id, row.state) for row in found.collect()} == set(expected), seconds
    states = items.states(items.items_at(events, NOON))
    assertDataFrameEqual(states, spark.createDataFrame([("mail", "ready", 3)], states.schema))


def test_a_queue_that_was_made_anew_does_not_show_the_items_of_the_old_one(spark: SparkSession) -> None:
    old = Told(incarnation="zz-old").at(0).produce(1, 2)
    new = Told(incarnation="aa-new").at(100).produce(1)
    elsewhere = Told(queue="other", incarnation="mm").at(5).produce(7)
    events = frame(spark, old, new, elsewhere)
    before, later = (items.states(items.items_at(events, NOON + timedelta(seconds=at))).collect() for at in (50, 150))
    assert {(row.queue, row["items"]) for row in before} == {("mail", 2), ("other", 1)}
    assert {(row.queue, row["items"]) for row in later} == {("mail", 1), ("other", 1)}


def test_a_timeline_has_all_steps_in_order(spark: SparkSession) -> None:
    found = timelines.timelines(frame(spark, troubled()).orderBy("at", ascending=False)).where("item_id = 'i1'")
    [row] = found.collect()
    assert [(step.why, step.who, step.attempt, step.error) for step in row.steps] == [
        ("produced", "", None, None),
        ("leased", "ann", 1, None),
        ("failure", "ann", 1, "no route"),
        ("due", "", None, None),
        ("leased", "bob", 2, None),
        ("completed", "bob", 2, None),
    ]
    assert (row.began_at.timestamp(), row.state) == (NOON.timestamp(), "completed")
    assert (row.attempts, row.waited_ms, row.ran_ms) == (2, 11_000, 6_000)


def test_steps_of_one_turn_keep_their_order(spark: SparkSession) -> None:
    told = Told().at(0).produce(1).at(1).lease(1, who="ann").complete(1, who="ann")
    for seq, step in enumerate(told.rows):
        step |= {"turn": 1, "seq": seq}
    [row] = timelines.timelines(frame(spark, told)).collect()
    assert [step.why for step in row.steps] == ["produced", "leased", "completed"]


def test_an_attempt_that_ended_without_a_word_is_its_holders(spark: SparkSession) -> None:
    found = attempts.attempts(frame(spark, troubled())).select(
        "item_id", "attempt", "who", "started_at", "ended_at", "run_ms", "outcome", "state", "error"
    )
    expected = [
        ("i1", 1, "ann", after(10), after(12), 2_000, "failure", "retrying", "no route"),
        ("i1", 2, "bob", after(21), after(25), 4_000, "completed", "completed", None),
        ("i2", 1, "ann", after(10), after(40), 30_000, "lease_expired", "ready", None),
        ("i2", 2, "bob", after(41), after(50), 9_000, "max_attempts", "dead", "gone"),
    ]
    assertDataFrameEqual(found, spark.createDataFrame(expected, found.schema))


def test_two_leases_within_a_millisecond_make_no_third_attempt(spark: SparkSession) -> None:
    told = Told().at(0).produce(1).at(1).lease(1, who="ann").lose_lease(1).lease(1, who="bob").lose_lease(1)
    assert attempts.attempts(frame(spark, told)).count() == 2


def test_what_was_dead_in_a_queue_that_was_made_anew_is_not_dead_in_the_new_one(spark: SparkSession) -> None:
    old = Told(incarnation="zz-old").at(0).produce(1).lease(1).die(1, error="no")
    new = Told(incarnation="aa-new").at(100).produce(1, 2).lease(2).die(2, error="no")
    found = dead.dead(items.items(frame(spark, old, new))).select("queue", "id").collect()
    assert [tuple(row) for row in found] == [("mail", "i2")]


def test_the_dead_are_those_that_lie_and_the_letters(spark: SparkSession) -> None:
    source = troubled().at(60).produce(4).lease(4).die(4, why="rejected", error="bad 7").remove(4, why="moved")
    source.produce(5).at(70).die(5, why="expired").at(80).redrive(5)
    letters = Told(queue="mail-dead", incarnation="second")
    letters.at(61).produce(1, why="arrived", source_queue="mail", source_id="i4").produce(2)
    found = dead.dead(items.items(frame(spark, source, letters))).select(
        *("queue", "id", "reason", "error", "ended_at", "source_attempts", "source_queue", "source_id"),
        *("signature", "payload", "text", "kind"),
    )
    expected = [
        ("mail", "i2", "max_attempts", "gone", after(50), None, None, None, "gone", None, None, "letter"),
        ("mail-dead", "i1", "rejected", "bad 7", after(60), 1, "mail", "i4", "bad <n>", None, None, ""),
    ]
    assertDataFrameEqual(found, spark.createDataFrame(expected, found.schema))
