"""`millpond worker start`: from flags to a worker with its executors, on a data directory or a server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.cli.flags import Arguments, load_or_exit
from millpond.cli.output import DONE, FAILED, say
from millpond.cli.pond import LOGS_FOLDER, data_of, open_async_pond, server_of, token_of

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.tasks import App
    from millpond.worker.executors import Executor
    from millpond.worker.logs import Logs
    from millpond.worker.runner import Ended, Worker
    from millpond.worker.signals import Signals

MEMORY = ":memory:"  # no place that a worker could share
KNOCK_S = 1.0  # between two tries of a server that is waited for
TIDY_S = 3_600.0  # between looks at which logs are too old
log = logging.getLogger("millpond.worker")


def start(asked: Arguments) -> int:
    from millpond.log import configure
    from millpond.worker.recycle import Program
    from millpond.worker.signals import Signals

    program = Program()
    config = load_or_exit(asked).config
    configure(config.log.format, config.log.level)
    _make_absolute(asked)
    app = _app(asked)
    _follow(asked, app)
    signals = Signals()
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        ended = runner.run(_run(asked, app, signals, program.replaces))
    if ended.recycle and not signals.count:
        program.restart(ended.incarnation)
    if ended.left:  # threads that nothing ends but the end of the process
        say(f"millpond: {ended.left} jobs could not be ended; they run again when their leases are over")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)
    return DONE


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def _app(asked: Arguments) -> App | None:
    """Before anything is opened: what the module prints or raises is the user's to see."""
    if asked.app is None:
        return None
    from millpond.errors import InvalidRequest, MillpondError
    from millpond.tasks.loading import load_app

    try:
        return load_app(asked.app)
    except MillpondError:
        raise
    except (Exception, SystemExit) as error:
        log.debug("the app cannot be loaded", exc_info=error)
        why = _in_a_line(error)
        raise InvalidRequest(f"{asked.app} cannot be loaded: {why}; --log-level debug tells more") from None


def _make_absolute(asked: Arguments) -> None:
    """The app may go to another directory when it is loaded."""
    for name in ("data", "config", "logs"):
        given = getattr(asked, name)
        setattr(asked, name, given and os.path.abspath(os.path.expanduser(given)))


def _follow(asked: Arguments, app: App | None) -> None:
    """Without --data and --server to where the app enqueues, if it names a place."""
    if app is None or app.place is None or asked.data is not None or asked.server is not None:
        return
    if app.place.data != MEMORY:
        asked.data, asked.server = app.place.data, app.place.server


def _token(asked: Arguments, app: App | None) -> str | None:
    """Of the server: the app's own is for the app's own server alone."""
    place = None if app is None else app.place
    return token_of() or (place.token if place is not None and place.server == server_of(asked) else None)


def _in_a_line(error: BaseException) -> str:
    """And where in the user's code it comes from."""
    import traceback

    words = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename:
        return f"{words} ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    return f"{words} ({frames[-1].filename}:{frames[-1].lineno})" if frames else words


async def _run(asked: Arguments, app: App | None, signals: Signals, replaces: str) -> Ended:
    from millpond.model import to_datetime
    from millpond.tasks.declared import declare
    from millpond.worker.runner import Worker

    queues = _queues(asked, app)
    async with open_async_pond(asked, create=True, listen=True, token=_token(asked, app)) as pond:
        worker = Worker(
            pond,
            _executors(asked, pond, app),
            queues=queues,
            slots=asked.count,
            lease_timeout=asked.lease_timeout,
            max_jobs=asked.max_jobs,
            max_rss=asked.max_rss,
            name=asked.name,
            pool=asked.pool if app is not None else "",
            hooks=None if app is None else app.hooks(),
            recycles=True,
            replaces=replaces,
        )
        if worker.replaces:
            signals.take(worker)  # it may have to wait
        await _knock(pond, worker)
        if app is not None and not worker.draining:
            await declare(pond, app.schedules.values(), to_datetime(worker.clock.now()))
        jobs = "one job" if asked.count == 1 else f"{asked.count} jobs"
        say(f"worker {worker.incarnation} runs {jobs} at a time from {', '.join(queues)}; Ctrl-C ends it")
        signals.take(worker)  # until the pond is closed
        tidy = asyncio.create_task(_tidy(_logs(asked))) if _runs_commands(asked) else None
        try:
            ended = await worker.run(signals=False)
        finally:
            if tidy is not None:
                tidy.cancel()
    signals.hold()
    return ended


async def _knock(pond: Api, worker: Worker) -> None:
    """A server that is not there when the worker starts is told at once; one that goes away later is waited for, by a
    worker that has replaced itself too.
    """
    from millpond.errors import Forbidden, NotFound, Unavailable

    for name in worker.queues:
        while not worker.draining:
            try:
                await pond.queue_info(name)
            except (NotFound, Forbidden):
                pass
            except Unavailable as error:
                if not worker.replaces:
                    raise
                log.warning("the server is waited for: %s", error)
                await asyncio.sleep(KNOCK_S)
                continue
            break


def _queues(asked: Arguments, app: App | None) -> dict[str, float]:
    from millpond.jobs.names import JOBS_QUEUE

    if asked.queues:
        return dict(asked.queues)
    names = [] if app is None else app.queues
    return dict.fromkeys(names or [JOBS_QUEUE], 1.0)


def _executors(asked: Arguments, pond: Api, app: App | None) -> list[Executor]:
    from millpond.errors import InvalidRequest

    found: list[Executor] = []
    if app is not None:
        from millpond.tasks.connection import where
        from millpond.tasks.pools import executors

        server = server_of(asked)
        place = where(None if server else data_of(asked), server, _token(asked, app) if server else None)
        found += executors(
            app, pond, slots=asked.count, pool=asked.pool, place=asked.app, where=place, process_rss_max=asked.max_rss
        )
    if _runs_commands(asked):
        from millpond.worker.commands import CommandExecutor

        found.append(CommandExecutor(_logs(asked), slots=asked.count))
    if not found:
        raise InvalidRequest(
            "this worker would run nothing: from a server commands need --allow-commands; or give --app"
        )
    return found


def _logs(asked: Arguments) -> Logs:
    from millpond.worker.logs import Logs

    return Logs(Path(asked.logs).absolute() if asked.logs else data_of(asked) / LOGS_FOLDER)


async def _tidy(logs: Logs) -> None:
    """Old logs go. A disk that refuses is no reason to stop working."""
    while True:
        try:
            await asyncio.to_thread(logs.run_once, time.time())
        except OSError as error:
            log.warning("old logs could not be removed: %s", error)
        await asyncio.sleep(TIDY_S)


def _runs_commands(asked: Arguments) -> bool:
    return not asked.no_commands and (server_of(asked) is None or asked.allow_commands)
