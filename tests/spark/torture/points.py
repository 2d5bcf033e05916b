"""The points at which to kill: those of the order in which Spark calls a data source, and who may be killed at each."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Query(StrEnum):
    """By what it writes to."""

    PARQUET = "parquet"
    QUEUE = "queue"


class Victim(StrEnum):
    DRIVER = "driver"  # its two processes; what they have started goes on until it notices
    MACHINE = "machine"  # the driver and all that it has started, executors too, at once
    EXECUTOR = "executor"  # its JVM, on a cluster
    PYTHON = "python"  # the Python process that is at the point: the stream's reader, or that of a task, or of a commit
    SERVER = "server"


class Trigger(StrEnum):
    ALWAYS = "always"  # one run after the other, without an end
    NOW = "availableNow"


class Side(StrEnum):
    BEFORE = "before"
    MIDDLE = "middle"
    AFTER = "after"  # of a call: the server has done it, the caller does not learn of it


class Given(StrEnum):
    """What must be so for a point to come, or for it to be the one that is meant."""

    ANYTHING = ""
    NEW = "new"  # the checkpoint is new
    MADE = "made"  # a claim was made
    IDLE = "idle"  # there is nothing to claim
    LAST = "last"  # a run that was told to end has come to its last batch
    REPLAYED = "replayed"  # the run before was killed in the middle of its batch


class Where(StrEnum):
    DRIVER = "driver"  # in a Python process that works for the driver
    SINK = "sink"  # in the driver's own
    TASK = "task"
    OUTSIDE = "outside"  # seen in the checkpoint, or nowhere at all


class Point(NamedTuple):
    """`at` is a method of the connector, a call to the server (with a dot), or a log of the checkpoint."""

    name: str
    at: str
    side: Side
    where: Where = Where.DRIVER
    given: Given = Given.ANYTHING
    queries: tuple[Query, ...] = tuple(Query)
    triggers: tuple[Trigger, ...] = tuple(Trigger)

    def victims(self, executors: bool) -> list[Victim]:
        found = [Victim.DRIVER, Victim.MACHINE, Victim.SERVER]
        if self.where in (Where.DRIVER, Where.TASK) or self is ANY_INSTANT:
            found.append(Victim.PYTHON)
        if executors:
            found.append(Victim.EXECUTOR)
        return found


BEFORE, MIDDLE, AFTER = Side
TO_PARQUET, TO_QUEUE = (Query.PARQUET,), (Query.QUEUE,)
OFFSETS, COMMITS = "offsets", "commits"
LOOK = "claim.look"  # a reader sees whether the claim of a batch to replay is still there: it reads one item
LOGS = (OFFSETS, COMMITS)

ANY_INSTANT = Point("at a random instant", "", AFTER, Where.OUTSIDE)

POINTS = (
    Point("consumer opened, reply lost", "consumer.open", AFTER, triggers=(Trigger.NOW,)),
    Point("after initialOffset", "initialOffset", AFTER, given=Given.NEW),
    Point("in latestOffset, claim not made", "queue.claim", BEFORE),
    Point("claim made, reply lost", "queue.claim", AFTER, given=Given.MADE),
    Point("claim made, before the offset log", "latestOffset", AFTER, given=Given.MADE),
    Point("offset log written", OFFSETS, AFTER, Where.OUTSIDE),
    Point("before commit(end of N-1)", "commit", BEFORE),
    Point("after commit(end of N-1)", "commit", AFTER),
    Point("before partitions", "partitions", BEFORE),
    Point("after partitions", "partitions", AFTER),
    Point("before a page is read", "claim.read", BEFORE, Where.TASK),
    Point("page read, reply lost", "claim.read", AFTER, Where.TASK),
    Point("in the middle of read", "read", MIDDLE, Where.TASK),
    Point("read to the end", "read", AFTER, Where.TASK),
    Point("before rows go to Parquet", "foreachBatch", BEFORE, Where.SINK, queries=TO_PARQUET),
    Point("rows in Parquet, not committed", "foreachBatch", AFTER, Where.SINK, queries=TO_PARQUET),
    Point("before a chunk is staged", "queue.stage", BEFORE, Where.TASK, queries=TO_QUEUE),
    Point("chunk staged, reply lost", "queue.stage", AFTER, Where.TASK, queries=TO_QUEUE),
    Point("a task's chunks staged", "write", AFTER, Where.TASK, queries=TO_QUEUE),
    Point("all staged, before publish", "stage.publish", BEFORE, queries=TO_QUEUE),
    Point("published, reply lost", "stage.publish", AFTER, queries=TO_QUEUE),
    Point("published, before the commit log", "publish", AFTER, queries=TO_QUEUE),
    Point("commit log written", COMMITS, AFTER, Where.OUTSIDE),
    Point("between latestOffset calls", "latestOffset", BEFORE),
    Point("before the claim is completed", "claim.complete", BEFORE),
    Point("claim completed, reply lost", "claim.complete", AFTER),
    Point("idle", "latestOffset", AFTER, given=Given.IDLE, triggers=(Trigger.ALWAYS,)),
    Point("replay, claim not looked for", LOOK, BEFORE, given=Given.REPLAYED),
    Point("replay, claim found, reply lost", LOOK, AFTER, given=Given.REPLAYED),
    Point("last batch: commit log written", COMMITS, AFTER, Where.OUTSIDE, Given.LAST, triggers=(Trigger.NOW,)),
    Point("last batch: before complete", "claim.complete", BEFORE, given=Given.LAST, triggers=(Trigger.NOW,)),
    Point("last batch: after complete", "claim.complete", AFTER, given=Given.LAST, triggers=(Trigger.NOW,)),
    ANY_INSTANT,
)

NAMED = {point.name: point for point in POINTS}


class Kill(NamedTuple):
    point: Point
    victim: Victim
    query: Query

    def __str__(self) -> str:
        return f"{self.victim} | {self.point.name} | to {self.query}"


def kill_at(name: str, victim: Victim, query: Query) -> Kill:
    return Kill(NAMED[name], victim, query)
