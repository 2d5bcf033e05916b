"""Failure signatures, and consumers that are slow or do not finish what they take."""

from __future__ import annotations

import random
import re
from datetime import timedelta

import pytest
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.testing import assertDataFrameEqual

from millpond.spark.jobs import consumers, signatures
from millpond.spark.lake import aware
from tests.spark.told import NOON, Told, frame

HOUR = 3_600_000


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        (["timeout after 30 s", "timeout after 1.5 s"], "timeout after <n> s"),
        (["no route to 10.0.0.7:5432", "no route to 192.168.1.20:80"], "no route to <n>"),
        (["KeyError: 'ann'", "KeyError: 'bob'"], "KeyError: <text>"),
        (['bad "it\'s"\n\tin  row 7', 'bad "" in row 8'], "bad <text> in row <n>"),
        (["cannot open /var/data/7/a-b.csv: gone", "cannot open /tmp/x: gone"], "cannot open <path>: gone"),
        (["cannot open C:\\data\\x.csv", "cannot open C:\\y\\z"], "cannot open C:<path>"),
        (["GET https://a.example/v1/9?x=1 gave 503", "GET https://b/ gave 502"], "GET https://<url> gave <n>"),
        (["item 018f3c2e-0b3a-7abc-8def-00000000002a", "item ab3a018f-bbbb-4abc-8def-aa000000002a"], "item <n>"),
        (["at 0xdeadBEEF", "at 0x1"], "at <n>"),
        (["sum 9f86d081884c7d65 differs", "sum aaaaaaa1aaaaaaaa differs"], "sum <n> differs"),
        (["order 1234567 is gone", "order 1234567890 is gone"], "order <n> is gone"),
        (["since 2031-05-07T12:00:01.5Z", "since 2031-05-07 12:00:01,123+02:00"], "since <time>"),
        (["from b'x' in S3, EC2, node7"], "from b<text> in S<n>, EC<n>, node<n>"),
        (["deadbeef, decade and a1 are words"], "deadbeef, decade and a<n> are words"),
        (["don't stop, won't stop"], "don't stop, won't stop"),
        (["can't open the user's file"], "can't open the user's file"),
        (["I'm sure it's node7's or node8's"], "I'm sure it's node<n>'s or node<n>'s"),
        (["le café's l'eau n'a d'été"], "le café's l'eau n'a d'été"),
        (["can't find b'x' in the user's 'y'"], "can't find b<text> in the user's <text>"),
        (["a/b and 5/7"], "a/b and <n>/<n>"),
        (["\x1b[31mred\x07"], "[<n>mred"),
        (["  out of memory "], "out of memory"),
        (["x" * 5_000], "x" * signatures.SIGNATURE_MAX),
    ],
)
def test_errors_that_differ_in_details_are_one_signature(spark: SparkSession, errors: list[str], expected: str) -> None:
    frame = spark.createDataFrame([(error,) for error in errors], "error string")
    assert [row[0] for row in frame.select(signatures.signature(F.col("error"))).collect()] == [expected] * len(errors)


OLD_RULES = (  # as they were before some were left out where they have nothing to find
    (r"[\x00-\x1f\x7f]++", " "),
    (r"  ++", " "),
    (r"""["'`](?<![a-zA-Z]{2}.)(?:(?<=")[^"]*+"|(?<=')[^']*+'|(?<=`)[^`]*+`)""", "<text>"),
    *signatures.RULES[2:-1],
    (
        r"[0-9a-fA-F](?:(?<=\d)(?:[0-9a-fA-F]|[xX])*+(?:[.,:]\d++|-[0-9a-fA-F]{4,}+)*+"
        r"|(?<![a-zA-Z].)(?=[a-fA-F]*+\d)[0-9a-fA-F]{7,}+(?:-[0-9a-fA-F]{4,}+)*+)",
        "<n>",
    ),
)
PIECES = (
    *("x", "word", "7", "-1.5e3", " ", "  ", "\t", "\n  ", "\x00", "\x7f", "\x1b[0m", "é", "日本", "<n>", "$1", "\\1"),
    *(
        "'a'",
        " 'b c'",
        "b'x'",
        '"q"',
        "`z`",
        '"',
        "`",
        "/",
        "\\",
        "/a/b",
        "C:\\d\\e",
        "../up",
        "and/or",
        "://",
        "http://h/p?q=1",
    ),
    *(
        "2031-05-07",
        "2031-05-07 12:00",
        "2031-05-07\t12:00:01Z",
        "12:30",
        "-",
        ":",
        "0xdeadbeef",
        "deadbeef1",
        "a1b2c3d4-e5f6",
    ),
    *("10.0.0.7:80", "1,000", "<text>", "don't", " can't", "018f3c2e-0b3a-7abc-8def-00000000002a", "\u00a0", "\u2028"),
)


def old_signature(error: Column) -> Column:
    text = F.substring(error, 1, signatures.ERROR_MAX)
    for pattern, placeholder in OLD_RULES:
        text = F.regexp_replace(text, pattern, placeholder)
    return F.substring(F.trim(text), 1, signatures.SIGNATURE_MAX)


def test_rules_that_are_left_out_would_have_found_nothing(spark: SparkSession) -> None:
    rng = random.Random(7)
    errors = ["", *PIECES, *("".join(rng.choices(PIECES, k=rng.randint(2, 9))) for _ in range(6_000)), None]
    errors = [error for error in errors if error is None or not re.search(r"[^\W_]'(?<!(?<![^\W_])[bruf]')", error)]
    errors += ["can't open the user's file", "don't", "won't 'a' stop", "/x/y " * 400, "é" * 1_200 + "7"]
    table = spark.createDataFrame([(error,) for error in errors], "error string")
    found = table.select("error", old_signature(F.col("error")).alias("old"), signatures.signature(F.col("error")))
    assert len(errors) > 3_000
    assert [tuple(row) for row in found.collect() if row[1] != row[2]] == []


def test_a_signature_tells_how_often_where_when_and_an_example(spark: SparkSession) -> None:
    mail = Told().at(0).produce(1, 2, 3).lease(1, 2, 3)
    mail.at(10).fail(1, error="timeout after 1 s").at(20).fail(2, error="timeout after 2 s").at(30).lose_lease(3)
    bills = (
        Told(queue="bills", incarnation="second").at(0).produce(9).lease(9).at(5_000).die(9, error="timeout after 3 s")
    )
    found = signatures.signatures(frame(spark, mail, bills))
    first, last = NOON + timedelta(seconds=10), NOON + timedelta(seconds=5_000)
    lost = NOON + timedelta(seconds=30)
    examples = ["timeout after 1 s", "timeout after 3 s"]
    whys = ["failure", "max_attempts"]
    expected = [
        ("timeout after <n> s", 3, 1, ["bills", "mail"], whys, first, last, examples, ["i1", "i9"]),
        ("(lease_expired)", 1, 0, ["mail"], ["lease_expired"], lost, lost, ["(lease_expired)"], ["i3"]),
    ]
    assertDataFrameEqual(found, spark.createDataFrame(expected, found.schema), checkRowOrder=True)


def test_what_did_not_fail_has_no_signature(spark: SparkSession) -> None:
    told = Told().at(0).produce(1, 2).lease(1, 2).complete(1).at(5).remove(2)
    assert signatures.signatures(frame(spark, told)).count() == 0


@pytest.mark.parametrize("text", ["'" * 1_000, "/a" * 500, "a" * 1_000 + "://", "0-" * 500, "9" * 1_000])
def test_no_error_takes_long_to_normalise(spark: SparkSession, text: str) -> None:
    frame = spark.createDataFrame([(text,)] * 200, "error string")
    assert len(frame.select(signatures.signature(F.col("error"))).collect()) == 200


def test_a_signature_is_its_own_signature(spark: SparkSession) -> None:
    texts = [*(placeholder for _, placeholder in signatures.RULES), "HTTP <n> from https://<url>: <path>, <time>"]
    frame = spark.createDataFrame([(text,) for text in texts], "error string")
    found = frame.select("error", signatures.signature(F.col("error")).alias("signature")).collect()
    assert [row.signature for row in found] == [row.error.strip() for row in found]


def test_windows_add_up_to_the_whole(spark: SparkSession) -> None:
    told = Told().at(0).produce(1, 2, 3).lease(1, 2, 3).at(10).fail(1, error="timeout after 1 s").lose_lease(3)
    events = frame(spark, told.at(9_000).die(2, error="timeout after 3 s"))
    assertDataFrameEqual(
        signatures.result(signatures.partial(events, HOUR)), signatures.signatures(events), checkRowOrder=True
    )


def test_an_undone_redrive_is_no_failure(spark: SparkSession) -> None:
    told = Told().at(0).produce(1).lease(1).at(1).die(1, error="no").at(2).redrive(1).at(3).die(1, error="no")
    [row] = signatures.signatures(frame(spark, told)).collect()
    assert (row.failures, row.dead, aware(row.last_seen)) == (1, 1, NOON + timedelta(seconds=1))


def test_what_was_released_is_no_attempt(spark: SparkSession) -> None:
    told = Told().at(0).produce(1, 2, 3).lease(1, 2, who="ann", why="claimed").at(1).release(1, 2)
    told.at(2).lease(1, 2, 3, who="ann").at(3).complete(1, 2, who="ann").release(3, why="released")
    [row] = consumers.consumers(frame(spark, told), HOUR).collect()
    assert (row.who, row.attempts, row.completed, row.bad_share) == ("ann", 2, 2, 0.0)


def test_a_lease_that_ran_out_is_lost_also_if_the_item_died_of_it(spark: SparkSession) -> None:
    told = Told().at(0).produce(1, 2, 3, 4).lease(1, 2, 3, who="ann").lease(4, who="ann", why="claimed")
    told.at(0.005).complete(1, who="ann").die(2, error="no").die(4).at(30).die(3)
    [row] = consumers.consumers(frame(spark, told), HOUR).collect()
    assert (row.completed, row.failed, row.lease_expired, row.run_p95_ms) == (1, 2, 1, 5.0)


def worked(told: Told, who: str, numbers: range, run: float, fails: int = 0, loses: int = 0) -> None:
    """Each item is leased, then done after `run` seconds; the first ones fail, or are lost."""
    for place, number in enumerate(numbers):
        start = number * 100
        told.at(start).produce(number).lease(number, who=who)
        if place < fails:
            told.at(start + run).fail(number, error="no", who=who)
        elif place < fails + loses:
            told.at(start + 30).lose_lease(number)
        else:
            told.at(start + run).complete(number, who=who)


def test_slow_and_flapping_consumers_are_found(spark: SparkSession) -> None:
    told = Told()
    worked(told, "good", range(40), 0.1, fails=1)
    worked(told, "better", range(40, 80), 0.1)
    worked(told, "slow", range(80, 100), 0.4)
    worked(told, "flaps", range(100, 120), 0.1, fails=3, loses=5)
    worked(told, "new", range(120, 125), 0.9, fails=5)
    found = consumers.consumers(frame(spark, told), HOUR).select(
        *("who", "attempts", "completed", "failed", "lease_expired", "bad_share", "others_bad_share"),
        *("run_p50_ms", "slow", "flapping"),
    )
    expected = [
        ("flaps", 20, 12, 3, 5, 0.4, 0.0571, 100.0, False, True),
        ("slow", 20, 20, 0, 0, 0.0, 0.1333, 402.0, True, False),
        ("new", 5, 0, 5, 0, 1.0, 0.075, 900.0, False, False),
        ("good", 40, 39, 1, 0, 0.025, 0.1529, 100.0, False, False),
        ("better", 40, 40, 0, 0, 0.0, 0.1647, 100.0, False, False),
    ]
    assertDataFrameEqual(found, spark.createDataFrame(expected, found.schema), checkRowOrder=True)


def test_where_all_fail_alike_nobody_flaps(spark: SparkSession) -> None:
    told = Told()
    for place, who in enumerate(("ann", "bob")):
        worked(told, who, range(place * 20, place * 20 + 20), 0.1, fails=10)
    assert [row.flapping for row in consumers.consumers(frame(spark, told), HOUR).collect()] == [False, False]
