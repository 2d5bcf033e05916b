"""Which failures there are: errors that differ only in numbers, names and places are one signature."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millpond.spark.jobs.columns import DEATHS, is_failure, total, window_start

SIGNATURE_MAX = 200  # characters: a trace of a hundred lines is told from another by its beginning
ERROR_MAX = 1_000  # characters that are looked at for it
KEYS = ("window", "queue", "why", "signature")

# In this order: what was replaced is not looked at again. Each is a regular expression of Java's, made to fail at the
# first character of most words, and without a way back into what it has taken, so that no text takes long.
_HEX = "[0-9a-fA-F]"
RULES = (
    (r"[\x00-\x1f\x7f]++", " "),
    (r"  ++", " "),
    (r"""["'`](?<![a-zA-Z]{2}.)(?:(?<=")[^"]*+"|(?<=')[^']*+'|(?<=`)[^`]*+`)""", "<text>"),  # and not what don't quotes
    (r"://[^\s<>]++", "://<url>"),
    (r"[\\/](?<![\w<.].)[\w.@+~%-]++(?:[\\/][\w.@+~%-]++)++[\\/]?", "<path>"),  # of two names at least; and/or is none
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d++)?)?(?:Z|[+-]\d\d:?\d\d)?", "<time>"),
    (
        # What begins with a digit (also addresses, versions, UUIDs), and hexadecimal of 8 digits or more.
        rf"{_HEX}(?:(?<=\d)(?:{_HEX}|[xX])*+(?:[.,:]\d++|-{_HEX}{{4,}}+)*+"
        rf"|(?<![a-zA-Z].)(?=[a-fA-F]*+\d){_HEX}{{7,}}+(?:-{_HEX}{{4,}}+)*+)",
        "<n>",
    ),
)


def signature(error: Column) -> Column:
    text = F.substring(error, 1, ERROR_MAX)
    for pattern, placeholder in RULES:
        text = F.regexp_replace(text, pattern, placeholder)
    return F.substring(F.trim(text), 1, SIGNATURE_MAX)


def partial(events: DataFrame, window_ms: int) -> DataFrame:
    """Where nobody gave an error, what happened stands in for it, in brackets."""
    error = F.coalesce("error", F.concat(F.lit("("), "why", F.lit(")")))
    failed = events.where(is_failure()).withColumn("error", error)
    example = F.struct("at", "item_id", "error")
    return failed.groupBy(window_start(window_ms), "queue", "why", signature(F.col("error")).alias("signature")).agg(
        F.count("*").alias("n"), F.min(example).alias("first"), F.max(example).alias("last")
    )


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


def signatures(events: DataFrame, window_ms: int) -> DataFrame:
    return result(partial(events, window_ms))
