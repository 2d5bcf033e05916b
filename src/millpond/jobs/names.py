"""The queues and kinds of jobs, and the defaults of a queue that holds jobs. Each number with its reason."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

# ---- queues -----------------------------------------------------------------------------------------------

JOBS_QUEUE: Final = "jobs"  # where a job goes that names no queue
SYSTEM_PREFIX: Final = "millpond/"  # queues of our own: never searched for jobs
WORKERS_QUEUE: Final = "millpond/workers"  # an item a worker: its last heartbeat
SCHEDULES_QUEUE: Final = "millpond/schedules"  # an item a schedule: due at its next tick
LINKS_QUEUE: Final = "millpond/links"  # an item a job that waits for others

# ---- kinds ------------------------------------------------------------------------------------------------

COMMAND: Final = "command"
TASK: Final = "task"
KINDS: Final = (COMMAND, TASK)
"""The same words as `access.roles.COMMAND_KINDS`, which guards who may produce them.

Schedules and links carry a job that is produced later on, so they are of the kind of that job: who may not enqueue
a command may not schedule one.
"""
WORKER: Final = "worker"  # kind of a heartbeat
LEASH: Final = "leash"  # kind of the item by which a worker is asked to stop

# ---- how long ---------------------------------------------------------------------------------------------

FOR_EVER: Final = "3600d"  # the engine's ten years less a bit: jobs do not expire unless told to
HELD: Final = datetime(2200, 1, 1, tzinfo=UTC)
"""When an item is due that waits for something else than time: other jobs, or to be resumed."""

MAX_RETRIES: Final = 3
BACKOFF_BASE: Final = 2.0
BACKOFF_CAP: Final = 3_600.0  # the engine's own: an hour
POLL_INTERVAL: Final = 1.0  # QueueCTL's; kept and shown, but nothing polls

JOB_QUEUE: Final[dict[str, Any]] = {
    "max_attempts": MAX_RETRIES,
    "backoff": {"base": BACKOFF_BASE, "cap": BACKOFF_CAP, "jitter": 0},
    "lease_timeout": "20s",  # a worker that dies holds its jobs up for so long; leases are extended at half time
    "completed_retention": "1d",  # results, and what `after` looks at
    "dedup_window": "1d",  # a schedule's tick is never fired twice within it
    "expire_timeout": FOR_EVER,
    "dead": "keep",
}

SYSTEM_QUEUES: Final[dict[str, dict[str, Any]]] = {
    WORKERS_QUEUE: {
        "dead": "delete",  # a heartbeat that nobody renewed is a worker that has gone
        "durability": "relaxed",  # the next heartbeat tells the same
        "completed_retention": "5m",  # a worker must see that its leash was cut
        "dedup_window": "5m",
        "expire_timeout": "1m",
        "max_attempts": 0,
    },
    SCHEDULES_QUEUE: {
        "dead": "delete",
        "dedup_window": "5m",
        "expire_timeout": FOR_EVER,
        "lease_timeout": "10s",  # to fire takes milliseconds
        "max_attempts": 0,  # a schedule never gives up
    },
    LINKS_QUEUE: {
        "dead": "delete",
        "dedup_window": "1d",  # as long as that of jobs: the job of a link is never produced twice
        "expire_timeout": FOR_EVER,
        "max_attempts": 0,
    },
}
