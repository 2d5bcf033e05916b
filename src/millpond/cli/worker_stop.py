"""`millpond worker stop`: asks workers to end, and waits until they have.

They are asked by way of the pond, wherever they are. On this machine --force also signals their processes, once it is
sure that the process is that worker and not another that got its number. Those that were killed need not be stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

from millpond.cli.flags import Arguments
from millpond.cli.output import DONE, FAILED, print_json, say
from millpond.cli.pond import on_pond
from millpond.cli.text import counted

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.jobs.workers import WorkerInfo

LOOK_S = 0.1  # between looks at whether they are gone
SIGNAL_S = 0.5  # between two signals: the first may only drain


def stop(asked: Arguments) -> int:
    return on_pond(asked, lambda pond: _stop(pond, asked), listen=True, empty=True)


async def _stop(pond: Api, asked: Arguments) -> int:
    from millpond.jobs.workers import ask_to_stop

    chosen = await _choose(pond, asked)
    heard = await ask_to_stop(pond, [one.incarnation for one in chosen])
    left = [one for one in chosen if one.incarnation not in heard]
    if not asked.no_wait and chosen:
        busy = sum(one.running_count for one in chosen)
        say(f"waiting for {counted(len(chosen), 'worker')} with {counted(busy, 'running job')}; Ctrl-C leaves them")
        left = await _wait(pond, asked, chosen)
    elif asked.force:
        _signal(chosen)
    _tell(asked, chosen, left)
    return FAILED if left else DONE


async def _choose(pond: Api, asked: Arguments) -> list[WorkerInfo]:
    from millpond.errors import NotFound
    from millpond.jobs.workers import list_workers

    listed = await list_workers(pond)
    found = {one.incarnation: one for one in listed if one.active}
    if asked.workers:
        for name in asked.workers:
            if name not in [one.incarnation for one in listed]:
                raise NotFound(f"there is no worker {name!r:.100}; see `millpond worker list`")
        return [found[name] for name in dict.fromkeys(asked.workers) if name in found]
    host = socket.gethostname()
    chosen = [one for one in found.values() if asked.all or one.host == host]
    if len(chosen) < len(found):
        say(f"{counted(len(found) - len(chosen), 'worker')} on other machines go on; stop them with --all")
    return chosen


async def _wait(pond: Api, asked: Arguments, chosen: list[WorkerInfo]) -> list[WorkerInfo]:
    """Until they have said goodbye, or were silent for too long, and their processes here are gone. Who is left."""
    give_up_at = None if asked.timeout is None else time.monotonic() + asked.timeout
    signal_at = time.monotonic()
    left = chosen
    while left and (give_up_at is None or time.monotonic() < give_up_at):
        if asked.force and time.monotonic() >= signal_at:
            _signal(left)
            signal_at = time.monotonic() + SIGNAL_S
        await asyncio.sleep(LOOK_S)
        left = await _left(pond, left)
    return left


async def _left(pond: Api, workers: list[WorkerInfo]) -> list[WorkerInfo]:
    """Asks again: one that has only just registered may not have listened, and one may have replaced itself."""
    from millpond.jobs.workers import ask_to_stop, list_workers

    alive = [one for one in await list_workers(pond) if one.active]
    names = {one.incarnation for one in alive}
    processes = {(one.host, one.pid) for one in workers}
    await ask_to_stop(pond, [one.incarnation for one in alive if (one.host, one.pid) in processes])
    return [one for one in workers if one.incarnation in names or _is_here(one)]


def _tell(asked: Arguments, chosen: list[WorkerInfo], left: list[WorkerInfo]) -> None:
    names = {one.incarnation for one in left}
    if asked.json:
        stopped = [one.incarnation for one in chosen if one.incarnation not in names and not asked.no_wait]
        print_json({"asked": [one.incarnation for one in chosen], "stopped": stopped})
    elif not chosen:
        say("no worker is running")
    elif asked.no_wait:
        say(f"asked {counted(len(chosen) - len(left), 'worker')} to stop")
        for one in left:
            say(f"millpond: worker {one.incarnation} does not listen yet; ask again")
    else:
        say(f"stopped {counted(len(chosen) - len(left), 'worker')}")
        for one in left:
            say(f"millpond: worker {one.incarnation} still has {counted(one.running_count, 'job')}")


# ---- processes of this machine --------------------------------------------------------------------------------------


def _signal(workers: list[WorkerInfo]) -> None:
    for one in workers:
        if _is_here(one):
            try:
                os.kill(one.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
            except PermissionError:
                say(f"millpond: worker {one.incarnation} is another user's; it was only asked to stop")
        elif one.host != socket.gethostname():
            say(f"millpond: worker {one.incarnation} is on {one.host}; it was only asked to stop")


def _is_here(worker: WorkerInfo) -> bool:
    """Whether its process lives, on this machine."""
    from millpond.jobs.processes import name_of

    return worker.process != "" and name_of(worker.pid) == worker.process
