"""`millpond job logs`: what a command has printed, and what it prints."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments
from millpond.cli.output import DONE, NOT_FOUND, fail, print_json, say
from millpond.cli.pond import LOGS_FOLDER, data_of, on_pond, open_pond
from millpond.cli.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from millpond.api import Api
    from millpond.model import Item
    from millpond.worker.logs import Log, Logs

LOOK_S = 0.3  # between looks at whether the next attempt has begun


def logs(asked: Arguments) -> int:
    from millpond.errors import InvalidRequest
    from millpond.worker.logs import Logs

    if asked.follow and asked.json:
        raise InvalidRequest("--json is one value, and -f has no end; choose one")
    here = Logs(Path(asked.logs) if asked.logs else data_of(asked) / LOGS_FOLDER)
    queue, shelf, id, item = on_pond(asked, lambda pond: _find(pond, asked, here))
    if asked.follow and item is not None:
        return _follow(asked, here, queue, shelf, id)
    log = here.latest(shelf, id, asked.attempt)
    if log is None:
        return _missing(asked, id, item)
    if asked.json:
        text = log.path.read_bytes().decode(errors="replace")
        print_json({"id": id, "queue": queue, "attempt": log.attempt, "path": str(log.path), "output": text})
    else:
        _show(log)
    return DONE


async def _find(pond: Api, asked: Arguments, here: Logs) -> tuple[str, str, str, Item | None]:
    """Queue, shelf, id. A log outlives its job: then there is no item."""
    from millpond.errors import NotFound
    from millpond.jobs.control import find_item
    from millpond.jobs.names import JOBS_QUEUE

    try:
        queue, item = await find_item(pond, asked.id, asked.queue)
    except NotFound:
        queue, _, id = asked.id.rpartition("/")
        queue = asked.queue or queue or JOBS_QUEUE
        shelf = await _shelf(pond, queue)
        if not here.attempts(shelf, id):
            raise
        return queue, shelf, id, None
    return queue, await _shelf(pond, queue), item.id, item


async def _shelf(pond: Api, queue: str) -> str:
    from millpond.errors import NotFound
    from millpond.worker.logs import shelf_of

    try:
        return shelf_of(queue, (await pond.queue_info(queue)).incarnation)
    except NotFound:
        return shelf_of(queue, "gone")


def _show(log: Log) -> None:
    from millpond.worker.logs import read

    for chunk in read(log.path):
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def _missing(asked: Arguments, id: str, item: Item | None) -> int:
    """No log may be well, or not."""
    import socket

    from millpond.jobs.names import COMMAND

    if item is not None and item.kind != COMMAND:
        return fail(f"job {id} is a Python task: its output is in the worker's own", NOT_FOUND)
    if item is not None and not item.deliveries:
        return fail(f"job {id} has not run yet; see `millpond job explain {id}`", NOT_FOUND)
    if item is not None and asked.attempt is not None and asked.attempt > item.deliveries:
        ran = counted(item.deliveries, "time")
        return fail(f"job {id} has no attempt {asked.attempt}: it was begun {ran}", NOT_FOUND)
    told: dict[str, Any] = item.result if item is not None and isinstance(item.result, dict) else {}
    if told.get("log"):
        where = "" if told.get("host") == socket.gethostname() else f" on {told.get('host')}"
        return fail(f"the output of job {id} was in {told['log']}{where}; it is not here", NOT_FOUND)
    attempt = "" if asked.attempt is None else f" in attempt {asked.attempt}"
    if asked.json:
        print_json({"id": id, "attempt": asked.attempt, "path": None, "output": ""})
    say(f"job {id} has printed nothing{attempt}, as far as is known here")
    return DONE


# ---- follow -------------------------------------------------------------------------------------------------------


def _follow(asked: Arguments, here: Logs, queue: str, shelf: str, id: str) -> int:
    """Attempt after attempt, until the job ends; or that attempt, if one was named."""
    from millpond.worker.logs import follow

    with open_pond(asked, listen=True) as pond:
        is_over = _is_over(pond, queue, id)
        seen: list[Path] = []
        while True:
            over = is_over()  # looked at before the logs, so that none is missed
            log = _next(here, shelf, id, asked.attempt, seen)
            if log is not None:
                for chunk in follow(log.path):
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
            elif over or (seen and asked.attempt is not None):
                break
            else:
                time.sleep(LOOK_S)
    if not seen:
        say(f"job {id} has printed nothing, as far as is known here")
    return DONE


def _next(here: Logs, shelf: str, id: str, attempt: int | None, seen: list[Path]) -> Log | None:
    """The latest at first, then each that came after it; they are noted in `seen`."""
    fresh = [log for log in here.attempts(shelf, id) if attempt in (None, log.attempt) and log.path not in seen]
    chosen = fresh[:1] if seen else fresh[-1:]
    seen += [log.path for log in (chosen if seen else fresh)]
    return chosen[0] if chosen else None


def _is_over(pond: Any, queue: str, id: str) -> Callable[[], bool]:
    from millpond.errors import NotFound
    from millpond.model import ENDED

    def look() -> bool:
        try:
            return pond.get_item(queue, id).state in ENDED
        except NotFound:
            return True

    return look
