"""Who may do what: the roles and the calls of each, as plain data.

A call is named as in its address (`queue.produce` of `/v1/queue.produce`; `metrics` and `dashboard` for the pages). A
call that is in no role is made by nobody. The docs (docs/howto/secure-a-server.md) and a test hold this table too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

PRODUCER: Final = frozenset({"queue.produce", "queue.stage", "stage.publish", "stage.abort"})

CONSUMER: Final = frozenset(
    {
        "queues.info",  # lease timeouts and the like: what a consumer sets itself up with
        "queue.lease",
        "queue.subscribe",
        "queue.complete",
        "queue.retry",
        "queue.extend",
        "queue.state",
        "queue.claim",
        "claim.read",
        "claim.verdict",
        "claim.complete",
        "claim.release",  # a reader gives up its own claim
        "claims.list",  # what its own runs left behind
        "consumer.open",
    }
)

VIEWER: Final = frozenset(
    {
        "queues.info",
        "queues.list",
        "queue.stats",
        "queue.audit",
        "items.get",
        "items.list",
        "claims.list",
        "metrics",
        "dashboard",
    }
)

OPERATOR: Final = (
    VIEWER
    | PRODUCER
    | CONSUMER
    | {"queue.pause", "queue.resume", "queue.clear", "queue.redrive", "queue.cancel", "queue.bury", "queue.ready"}
    | {"queue.rebalance"}
    | {"journal.read"}  # every change of every item, errors and all: for who keeps the history
)

ADMIN: Final = OPERATOR | {"queues.create", "queues.update", "queues.delete"}

ROLES: Final = {"producer": PRODUCER, "consumer": CONSUMER, "viewer": VIEWER, "operator": OPERATOR, "admin": ADMIN}

CALLS: Final = ADMIN  # everything that needs a token

LISTS: Final = frozenset({"queues.list", "dashboard"})
"""Of no one queue: they answer with the queues that the token matches."""

WHOLE: Final = frozenset({"metrics"})
"""Of no one queue and not to be cut to some: only for tokens of all queues."""

COMMAND_KINDS: Final = frozenset({"command", "task"})
"""Kinds of jobs. A worker runs what these items say, so producing them is a permission of its own, in any role."""

# ---- queues of our own ------------------------------------------------------------------------------------

WORKERS_QUEUE: Final = "millpond/workers"  # the same names as in `jobs.names`
OWN_QUEUES: Final = frozenset({WORKERS_QUEUE, "millpond/schedules", "millpond/links"})
WORKER_KINDS: Final = frozenset({"worker", "leash"})
REGISTERING: Final = frozenset({"queues.create", "queues.info", "queue.produce", "items.get"})


def may_make(calls: frozenset[str], call: str, queue: str | None) -> bool:
    """Queues of our own are made when they are first needed, by whoever works with them."""
    return call == "queues.create" and queue in OWN_QUEUES and not calls.isdisjoint({"queue.lease", "queue.produce"})


def may_register(calls: frozenset[str], call: str, queue: str | None, kinds: Collection[str]) -> bool:
    """Who may lease may work, and tell of it, whatever the token's queues; not read of or stop other workers."""
    if queue != WORKERS_QUEUE or "queue.lease" not in calls or call not in REGISTERING:
        return False
    return call != "queue.produce" or (bool(kinds) and WORKER_KINDS.issuperset(kinds))


def roles_with(call: str) -> list[str]:
    return [role for role, calls in ROLES.items() if call in calls]
