"""Workers as each other and people see them: an item a worker, renewed with every heartbeat, gone soon after the last.

Beside it each worker has a *leash*: an item that it waits for. Who cancels it asks the worker to stop, and the worker
knows at once, without looking again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from millpond.api import Api
from millpond.errors import Forbidden, NotFound
from millpond.jobs import processes
from millpond.jobs.names import LEASH, WORKER, WORKERS_QUEUE
from millpond.jobs.queues import ensure_queue
from millpond.model import LIST_LIMIT_MAX, WAIT_MAX_MS, NewItem, Result, State

HEARTBEAT = 10.0  # seconds between two; each is a row in a journal that is kept for a week
LOST_AFTER = 30.0  # seconds without one: three were missed
LOST = "lost"  # the status of one whose process was killed, as who looks from its machine can tell
RUNNING_MAX = 50  # running jobs that a heartbeat names
LAST_WORD = 1.0  # seconds that an empty heartbeat lies about
LEASH_TIMEOUT = 3_600.0  # seconds: how long the leash of a worker that died lies about
LEASH_WAIT = WAIT_MAX_MS / 1000  # seconds that a worker waits at a time


class RunningJob(msgspec.Struct, kw_only=True):
    id: str
    queue: str
    since: datetime


class WorkerInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`incarnation` is the `client_id` of its leases. `queues`: their weights. `running` names the first few.

    `process` tells its process from others that had or get its number. `status`: running, draining or lost.
    """

    incarnation: str
    host: str
    pid: int
    name: str
    started_at: datetime
    heartbeat_at: datetime
    queues: dict[str, int] = {}
    slots: int = 1
    running: list[RunningJob] = []
    running_count: int = 0
    done: int = 0
    failed: int = 0
    status: str = "running"
    pool: str = ""
    version: str = ""
    process: str = ""

    @property
    def active(self) -> bool:
        """It lives, as far as is known."""
        return self.status != LOST

    def serves(self, queue: str) -> bool:
        return queue in self.queues and self.status == "running"


def leash_id(incarnation: str) -> str:
    return f"stop:{incarnation}"


# ---- what a worker does -----------------------------------------------------------------------------------


async def heartbeat(api: Api, info: WorkerInfo) -> None:
    """Tell that the worker lives, and what it does. The first one registers it."""
    if len(info.running) > RUNNING_MAX:
        info = msgspec.structs.replace(info, running=info.running[:RUNNING_MAX])
    item = NewItem(
        payload=msgspec.json.encode(info),
        id=info.incarnation,
        kind=WORKER,
        expire_timeout=LOST_AFTER,
    )
    try:
        await api.produce(WORKERS_QUEUE, [item], on_conflict="replace")
    except NotFound:
        await ensure_queue(api, WORKERS_QUEUE)
        await api.produce(WORKERS_QUEUE, [item], on_conflict="replace")


async def farewell(api: Api, incarnation: str) -> None:
    """The worker ends: nobody need wait for its heartbeat to run out. Who may not cancel says something empty last."""
    try:
        await api.cancel(WORKERS_QUEUE, [incarnation, leash_id(incarnation)])
    except Forbidden:
        last = NewItem(id=incarnation, kind=WORKER, expire_timeout=LAST_WORD)
        await api.produce(WORKERS_QUEUE, [last], on_conflict="replace")


async def stop_asked(api: Api, incarnation: str, wait: float = LEASH_WAIT) -> bool:
    """Wait for somebody to ask the worker to stop; False: nobody did so far."""
    name = leash_id(incarnation)
    try:
        leash = await api.get_item(WORKERS_QUEUE, name, wait=wait)
    except NotFound:
        await _put_leash(api, name)
        leash = await api.get_item(WORKERS_QUEUE, name, wait=wait)
    if leash.state == State.CANCELLED:
        return True
    await _put_leash(api, name)
    return False


async def succeed(api: Api, incarnation: str) -> bool:
    """Say for a worker that was replaced that it has gone. True: somebody had asked it to stop."""
    try:
        leash = await api.get_item(WORKERS_QUEUE, leash_id(incarnation))
        return leash.state == State.CANCELLED
    except NotFound:
        return False
    finally:
        await farewell(api, incarnation)


async def _put_leash(api: Api, name: str) -> None:
    await ensure_queue(api, WORKERS_QUEUE)
    item = NewItem(id=name, kind=LEASH, expire_timeout=LEASH_TIMEOUT)
    await api.produce(WORKERS_QUEUE, [item], on_conflict="replace")


# ---- what others do ---------------------------------------------------------------------------------------


async def list_workers(api: Api) -> list[WorkerInfo]:
    """Those whose last heartbeat counts still, the oldest first. One that was killed on this machine is `lost`."""
    found: list[WorkerInfo] = []
    after: str | None = None
    while True:
        try:
            page = await api.list_items(
                WORKERS_QUEUE, state=State.READY, kind=WORKER, after=after, limit=LIST_LIMIT_MAX
            )
        except NotFound:  # there never was a worker
            return []
        found += [info for item in page.items if (info := _read(item.payload)) is not None]
        after = page.next
        if after is None:
            return sorted(found, key=lambda info: (info.started_at, info.incarnation))


def _read(payload: bytes) -> WorkerInfo | None:
    """None for what no worker has written."""
    try:
        info = msgspec.json.decode(payload, type=WorkerInfo)
    except msgspec.DecodeError:
        return None
    if processes.is_gone(info.pid, info.process):
        return msgspec.structs.replace(info, status=LOST, running=[], running_count=0)
    return info


async def ask_to_stop(api: Api, incarnations: Sequence[str]) -> list[str]:
    """Returns those that will know of it; the others have gone already, or do not listen yet."""
    names = [leash_id(incarnation) for incarnation in incarnations]
    if not names:
        return []
    try:
        results = await api.cancel(WORKERS_QUEUE, names)
    except NotFound:
        return []
    return [one for one, result in zip(incarnations, results, strict=True) if not _is_missing(result)]


def _is_missing(leash: Result) -> bool:
    """One that was asked before has its leash cut, which is an error too."""
    return leash.error is not None and leash.error.code == NotFound.code
