"""What a leased item is to this worker: whose job, or why it is nobody's. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.errors import InvalidRequest
from millpond.jobs.names import COMMAND, TASK
from millpond.jobs.spec import JobSpec, checked, decode
from millpond.model import LeasedItem
from millpond.worker.executors import Outcome, Running
from millpond.worker.slots import Place

UNWANTED_S = 1.0  # until another worker may look at what this one cannot run; twice as long each time
UNWANTED_S_MAX = 30.0


def judged(item: LeasedItem, queue: str, deadline: float, places: Sequence[Place]) -> Running:
    """With its place; or with its outcome, if no executor has a place for it."""
    kind = item.kind
    spec, problem = _spec_of(item, kind) if kind in (COMMAND, TASK) else (None, None)
    job = Running(item, queue, spec, deadline)
    for place in places:
        if place.executor.accepts(job):
            job.place = place
            return job
    if problem is not None:
        job.outcome = Outcome(ok=False, error=problem, dead=True)
    else:
        delay = min(UNWANTED_S_MAX, UNWANTED_S * 2.0 ** min(item.deliveries - 1, 10))
        job.outcome = Outcome(ok=False, error=_unwanted(kind, spec), defer=True, delay=delay)
    return job


def _spec_of(item: LeasedItem, kind: str) -> tuple[JobSpec | None, str | None]:
    """Or None and what is wrong: that will not get better, so the job dies of it at once."""
    try:
        spec = checked(decode(item.payload, item.encoding))
        if spec.kind != kind:
            raise InvalidRequest(f"an item of the kind {kind} holds a {spec.kind}; enqueue it again")
    except InvalidRequest as error:
        return None, str(error)
    return spec, None


def _unwanted(kind: str, spec: JobSpec | None) -> str:
    """Another worker may want it, so it is put off for a while, and its attempt does not count."""
    if kind == COMMAND:
        return "the worker that had it does not run commands; start one that does (--allow-commands)"
    if kind == TASK and spec is not None:
        return f"no task {spec.task!r:.100} in the app of the worker that had it; start one that has it"
    return f"the worker that had it has nothing for items of the kind {kind!r:.100}; start one that has"
