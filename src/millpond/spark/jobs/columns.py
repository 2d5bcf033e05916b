"""The words of the lake as columns: what a row means, when it happened, how long it took."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from millpond.history.reader import Why
from millpond.model import State

ITEM = ("queue", "incarnation", "partition", "number")  # what names an item: ids may be used again
ORDER = ("turn", "seq")  # of the rows of one item

ENTRIES = (Why.PRODUCED, Why.ARRIVED, Why.PUBLISHED)
LEASES = (Why.LEASED, Why.CLAIMED)
DEATHS = (Why.MAX_ATTEMPTS, Why.EXPIRED, Why.REJECTED)
RETRIES = (Why.FAILURE, Why.DEFER)
FAILURES = (Why.FAILURE, Why.LEASE_EXPIRED, Why.MAX_ATTEMPTS, Why.REJECTED, Why.EXPIRED)
BURIED = "buried"  # stands for the `why` of a death that an operator made: see `is_burial`
RUNS = (Why.COMPLETED, Why.FAILURE, Why.MAX_ATTEMPTS, Why.REJECTED)  # a lease that ran out says nothing of the work

HELD = (State.LEASED, State.CLAIMED)
RELEASES = (Why.RELEASED, Why.CLAIM_RELEASED)  # held, but nobody worked on it
LIVE = (State.SCHEDULED, State.READY, State.RETRYING, *HELD)

BUCKET_BITS = 7  # leading bits of a duration that are kept: exact below 128 ms, else within 1/128 of it
DURATION_ERROR = 2.0**-BUCKET_BITS


def begins_attempt() -> Column:
    return F.col("why").isin(*LEASES)


def ends_attempt() -> Column:
    return F.col("from_state").isin(*HELD)


def ran_out() -> Column:
    """A lease that ended without a word from its holder. By the last one its item dies, and leaves no error."""
    died = (F.col("why") == Why.MAX_ATTEMPTS) & (F.col("from_state") == State.LEASED) & F.col("error").isNull()
    return F.coalesce((F.col("why") == Why.LEASE_EXPIRED) | died, F.lit(False))


def is_burial() -> Column:
    """An operator made it, say to undo a redrive: by itself an item dies in an attempt, or expires without an error."""
    waited = F.col("why").isin(*DEATHS) & ~ends_attempt()
    return F.coalesce(waited & ((F.col("why") != Why.EXPIRED) | F.col("error").isNotNull()), F.lit(False))


def is_failure() -> Column:
    return F.col("why").isin(*FAILURES) & ~is_burial()


def window_start(window_ms: int) -> Column:
    """Windows are counted from 1970, so that every run cuts the same ones."""
    at = "unix_millis(at)"
    return F.expr(f"timestamp_millis({at} - pmod({at}, {window_ms}L))").alias("window")


def bucket(ms: Column) -> Column:
    """The middle of the few milliseconds around a duration, so that equal ones can be counted together."""
    octave = F.floor(F.log2(F.greatest(ms, F.lit(1))))
    width = F.pow(F.lit(2), F.greatest(octave - (BUCKET_BITS - 1), F.lit(0)))
    return (F.floor(ms / width) * width + F.floor(width / 2)).cast("long")


def total(of: Column | None = None, where: Column | None = None) -> Column:
    """Rows that fit are counted by their `n`; none is 0."""
    n = F.col("n") if of is None else of
    return F.coalesce(F.sum(n if where is None else F.when(where, n)), F.lit(0))


def change_of_live() -> Column:
    """By how many a row changes what is in the queue and not done with."""
    return _live("to_state") - _live("from_state")


def _live(state: str) -> Column:
    return F.coalesce(F.col(state).isin(*LIVE), F.lit(False)).cast("int")
