"""Whether the engine works, told from memory: asking waits for nothing and names nobody's queue.

Live: a restart would not help. Ready: requests should come here. What hurts some requests but is no reason to send all
of them elsewhere is a warning, and the engine stays ready: on a full disk completes still work, and make room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from millpond.model import Check, Health
from millpond.queue.readings import AWAY, lane_status
from millpond.queue.runner import Runner

OK = Check(status="ok")


def liveness(runners: Iterable[Runner], registry_thread_alive: bool) -> Health:
    dead = sum(runner.dead_threads for runner in runners)
    return _health(
        "ok",
        "failed",
        {
            "commit_threads": _failed(f"{dead} commit threads have died; restart the server") if dead else OK,
            "registry_thread": OK
            if registry_thread_alive
            else _failed("the thread of the registry has died; restart the server"),
        },
    )


def readiness(*, is_open: bool, draining: bool, registry: Check, runners: Iterable[Runner], now: int) -> Health:
    statuses: Counter[str] = Counter()
    for runner in runners:
        statuses.update(lane_status(lane, now) for lane in runner.queue.state.lanes.values())
    return _health(
        "ready",
        "not_ready",
        {
            "open": OK if is_open else _failed("the engine is not open, or is being closed"),
            "draining": _draining(draining),
            "registry": registry,
            "partitions": _partitions(statuses),
            "disk": _disk(statuses),
        },
    )


def guest_readiness(*, draining: bool, owner_answers: bool) -> Health:
    """Of a server without an engine: another process owns its data directory."""
    return _health(
        "ready",
        "not_ready",
        {
            "draining": _draining(draining),
            "owner": OK
            if owner_answers
            else _failed("the process that owns the data directory does not answer; look at that one"),
        },
    )


def without_directory(health: Health) -> Health:
    """What is written goes to files that nobody finds again."""
    lost = _failed("the data directory was removed or replaced; stop this server")
    return _health("ready", "not_ready", {**health.checks, "directory": lost})


def registry_check(*, failed: bool, full: bool, stalled: bool) -> Check:
    """`failed` and `full`: so its last call ended. `stalled`: one is under way for too long."""
    if stalled:
        return _failed("the registry of queues does not answer; check the disk")
    if not failed:
        return OK
    if full:
        return Check(status="warning", detail="the disk is full, so no queue can be created or changed")
    return _failed("the registry of queues cannot be read or written; see the log and check the disk")


def _draining(draining: bool) -> Check:
    return _failed("the server is shutting down") if draining else OK


def _partitions(statuses: Counter[str]) -> Check:
    """A partition that is away is no reason: others take what is produced, and it is tried again all the time."""
    total, away = statuses.total(), sum(statuses[status] for status in AWAY)
    if not away:
        return OK
    detail = f"{away} of {total} loaded partitions are away; see the log and check the disk"
    return _failed(detail) if away == total else Check(status="warning", detail=detail)


def _disk(statuses: Counter[str]) -> Check:
    full = statuses["full"]
    if not full:
        return OK
    return Check(status="warning", detail=f"the disk is full: {full} partitions take no new items; make room")


def _failed(detail: str) -> Check:
    return Check(status="failed", detail=detail)


def _health(good: str, bad: str, checks: dict[str, Check]) -> Health:
    failed = any(check.status == "failed" for check in checks.values())
    return Health(status=bad if failed else good, checks=checks)
