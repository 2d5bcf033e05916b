"""Which failures there are: errors that differ only in numbers, names and places are one signature."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millpond.spark.jobs.columns import DEATHS, is_failure, total, window_start

SIGNATURE_MAX = 200  # characters: a trace of a hundred lines is told from another by its beginning
ERROR_MAX = 1_000  # characters that are looked at for it
KEYS = ("window", "queue", "why", "signature")

# In this order: what was replaced is not looked at again. Each is a regular expression of Java's, made to fail at the
# first character of most words, and without a way back into what it has taken, so that no text takes long.
_HEX = "[0-9a-fA-F]"
_SPACE = (r"[\x00-\x20\x7f](?:(?<! )|(?=[\x00-\x20\x7f]))[\x00-\x20\x7f]*+", " ")  # but not what is one space already
_QUOTED = (  # not what don't, it's and node7's quote; but b'…' is a text
    r"""["'`](?:(?<![a-zA-Z]{2}.)(?:(?<=")[^"]*+"|(?<=`)[^`]*+`)"""
    r"""|(?<=')(?:(?<![\p{L}\p{N}].)|(?<=(?<![\p{L}\p{N}])[bBrRuUfF].))[^']*+')""",
    "<text>",
)
_PLACES = (
    (r"://[^\s<>]++", "://<url>"),
    (r"[\\/](?<![\w<.].)[\w.@+~%-]++(?:[\\/][\w.@+~%-]++)++[\\/]?", "<path>"),  # of two names at least; and/or is none
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d++)?)?(?:Z|[+-]\d\d:?\d\d)?", "<time>"),
)
_NUMBER = (
    # What begins with a digit (also addresses, versions, UUIDs), and hexadecimal of 8 digits or more.
    rf"{_HEX}(?:(?<=\d)[0-9a-fA-FxX]*+(?:[.,:]\d++|-{_HEX}{{4,}}+)*+"
    rf"|(?={_HEX}{{7}})(?<![a-zA-Z].)(?=[a-fA-F]*+\d){_HEX}{{7,}}+(?:-{_HEX}{{4,}}+)*+)",
    "<n>",
)
RULES = (_SPACE, _QUOTED, *_PLACES, _NUMBER)


def signature(error: Column) -> Column:
    """Every rule costs a pass over the text: those that need a character that is not in it are left out."""
    text = F.substring(error, 1, ERROR_MAX)
    places = _has(error, "/", "\\") | (_has(error, "-") & _has(error, ":"))
    quotes = _has(error, '"', "'", "`")
    found = F.when(places, _by(RULES, text)).when(quotes, _by((_SPACE, _QUOTED, _NUMBER), text))
    return F.substring(F.trim(found.otherwise(_by((_SPACE, _NUMBER), text))), 1, SIGNATURE_MAX)


def _has(text: Column, *signs: str) -> Column:
    return reduce(Column.__or__, [text.contains(sign) for sign in signs])


def _by(rules: Sequence[tuple[str, str]], text: Column) -> Column:
    for pattern, placeholder in rules:
        text = F.regexp_replace(text, pattern, placeholder)
    return text


def failures(events: DataFrame) -> DataFrame:
    """Each as a sum of one. Where nobody gave an error, what happened stands in for it, in brackets."""
    error = F.coalesce("error", F.concat(F.lit("("), "why", F.lit(")")))
    example = F.struct("at", "item_id", "error")
    return (
        events.where(is_failure())
        .withColumn("error", error)
        .select(
            "at",
            "queue",
            "why",
            signature(F.col("error")).alias("signature"),
            F.lit(1).cast("long").alias("n"),
            example.alias("first"),
            example.alias("last"),
        )
    )


def partial(events: DataFrame, window_ms: int) -> DataFrame:
    return merged(failures(events).withColumn("window", window_start(window_ms)))


def merged(partials: DataFrame) -> DataFrame:
    return partials.groupBy(*KEYS).agg(total().alias("n"), F.min("first").alias("first"), F.max("last").alias("last"))


def result(partials: DataFrame) -> DataFrame:
    """Most frequent first. Examples are the first and the last error that made the signature."""
    found = partials.groupBy("signature").agg(
        total().alias("failures"),
        total(where=F.col("why").isin(*DEATHS)).alias("dead"),
        F.sort_array(F.collect_set("queue")).alias("queues"),
        F.sort_array(F.collect_set("why")).alias("whys"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
    )
    return found.select(
        "signature",
        "failures",
        "dead",
        "queues",
        "whys",
        F.col("first.at").alias("first_seen"),
        F.col("last.at").alias("last_seen"),
        F.array_distinct(F.array("first.error", "last.error")).alias("examples"),
        F.array_distinct(F.array("first.item_id", "last.item_id")).alias("items"),
    ).orderBy(F.desc("failures"), "signature")


def signatures(events: DataFrame) -> DataFrame:
    """Without windows, which do not change it: so few groups need no sorting."""
    return result(failures(events))
