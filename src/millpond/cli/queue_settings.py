"""The settings of a queue as flags, for `queue create` and `queue update`."""

from __future__ import annotations

import argparse
from typing import Any

from millpond.cli.flags import Arguments, duration, number, whole

PLAIN = (
    "lease_timeout",
    "expire_timeout",
    "max_attempts",
    "dead_queue",
    "dead",
    "dedup_window",
    "completed_retention",
    "reference",
)
BACKOFF = ("base", "cap", "jitter")


def add_create(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--jobs", action="store_true", help="for jobs: those are its defaults; `jobs` is so anyway")
    verb.add_argument("--partitions", type=whole(1), metavar="N", help="more for throughput, one for strict order (1)")
    verb.add_argument("--durability", choices=("full", "relaxed"), help="relaxed: no fsync, a crash may lose items")
    verb.add_argument("--if-missing", action="store_true", help="a queue that is there is no error, and stays as it is")
    _add_shared(verb)


def add_update(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--no-dead-queue", action="store_true", help="dead items stay where they died")
    _add_shared(verb)


def _add_shared(verb: argparse.ArgumentParser) -> None:
    times: dict[str, Any] = {"type": duration, "metavar": "TIME"}
    verb.add_argument("--lease-timeout", **times, help="how long a consumer has an item (30s)")
    verb.add_argument("--expire-timeout", **times, help="how old an item may get (14d)")
    verb.add_argument("--max-attempts", type=whole(0), metavar="N", help="including the first; 0 is unlimited (5)")
    verb.add_argument("--dead-queue", metavar="QUEUE", help="where dead items go; it must exist")
    verb.add_argument(
        "--dead", choices=("keep", "delete"), help="without a dead queue: what becomes of the dead (keep)"
    )
    verb.add_argument("--backoff-base", type=number(0), metavar="N", help="a retry waits N ** attempts seconds (2)")
    verb.add_argument("--backoff-cap", **times, help="but at most so long (1h)")
    verb.add_argument("--backoff-jitter", type=number(0, 1), metavar="SHARE", help="more or less by up to so much (0)")
    verb.add_argument("--dedup-window", **times, help="how long keys and ids of ended items count (5m)")
    verb.add_argument("--completed-retention", **times, help="how long completed items are kept (0s)")
    verb.add_argument("--reference", metavar="TEXT", help="anything that you want to find with it")


def of_create(asked: Arguments) -> dict[str, Any]:
    names = (*PLAIN, "partitions", "durability")
    settings = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    backoff = _backoff(asked)
    return _for_jobs(asked) | settings | ({"backoff": backoff} if backoff else {})


def _for_jobs(asked: Arguments) -> dict[str, Any]:
    from millpond.errors import InvalidRequest
    from millpond.jobs.names import JOBS_QUEUE
    from millpond.jobs.queues import for_jobs

    if asked.jobs and asked.reference is not None:
        raise InvalidRequest("--jobs and --reference do not go together: that a queue is for jobs is noted there")
    return for_jobs() if asked.jobs or asked.queue == JOBS_QUEUE else {}


def of_update(asked: Arguments) -> dict[str, Any]:
    from millpond.errors import InvalidRequest

    settings = {name: getattr(asked, name) for name in PLAIN if getattr(asked, name) is not None}
    if asked.no_dead_queue:
        if asked.dead_queue is not None:
            raise InvalidRequest("--dead-queue and --no-dead-queue do not go together; give one of them")
        settings["dead_queue"] = None
    backoff = _backoff(asked)
    return settings | ({"backoff": backoff} if backoff else {})


def _backoff(asked: Arguments) -> dict[str, float]:
    given = {name: getattr(asked, f"backoff_{name}") for name in BACKOFF}
    return {name: value for name, value in given.items() if value is not None}
