"""The worker: N slots in one process, jobs of several queues by weight.

    worker = Worker(api, [commands, tasks], queues={"jobs": 1}, slots=4)
    ended = await worker.run()          # until a signal, `drain()`, or a limit of its own

The event loop that runs it belongs to leases, reports and services; no code of a job runs there. The first SIGTERM,
SIGINT or SIGHUP drains: what runs is finished, what was only leased goes back. The second forces: what runs is ended,
and goes back with its attempt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millpond.api import Api
from millpond.clock import Clock
from millpond.durations import checked_seconds
from millpond.errors import InvalidRequest
from millpond.jobs.names import JOBS_QUEUE
from millpond.jobs.queues import refuse_own
from millpond.model import Duration
from millpond.worker.boss import Reason
from millpond.worker.crew import Crew
from millpond.worker.executors import Executor, Running
from millpond.worker.hooks import Hooks
from millpond.worker.leases import Leases
from millpond.worker.memory import resident_bytes
from millpond.worker.queues import Sources
from millpond.worker.services import Services
from millpond.worker.signals import Signals
from millpond.worker.slots import Slots

log = logging.getLogger("millpond.worker")
LEASE_TIMEOUT_S = 20.0  # the jobs of a worker that dies run again after so long
LEASE_S_MIN = 0.2  # shorter ones cannot be kept
FORCE_GRACE_S = 10.0  # for what is ended by force: commands have 5 s of their own; what is left then is left behind
NAME_CHARS_MAX = 80  # of a worker's name in an id of 128
RSS_LOOK_S = 1.0  # between looks at the memory
LIMITS = ("max_jobs", "max_rss")  # reasons of its own


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker came to its end. `left` jobs could not be ended: only the end of the process does."""

    incarnation: str
    reason: Reason
    forced: bool
    finished: int
    left: int = 0

    @property
    def recycle(self) -> bool:
        """It reached a limit of its own: another is to take its place (`recycle.Program`)."""
        return self.reason in LIMITS and not self.forced


class Worker:
    """`queues`: name and weight. `max_jobs` and `max_rss` (bytes): after so many, or with so much memory, it drains.

    `recycles`: another takes its place then, so it stays listed. `replaces`: the incarnation whose place it takes.
    """

    def __init__(
        self,
        api: Api,
        executors: Sequence[Executor],
        *,
        queues: Mapping[str, float] | None = None,
        slots: int = 1,
        lease_timeout: Duration | None = None,
        max_jobs: int | None = None,
        max_rss: int | None = None,
        hooks: Hooks | None = None,
        name: str = "",
        clock: Clock | None = None,
        services: bool = True,
        pool: str = "",
        recycles: bool = False,
        replaces: str = "",
    ) -> None:
        self.api = api
        self.host = socket.gethostname()
        self.pid = os.getpid()
        self.name = name or f"{self.host}-{self.pid}"
        self.incarnation = f"{_plain(self.name)}-{secrets.token_hex(4)}"
        self.replaces = replaces
        self.pool = pool
        self.queues = dict(queues or {JOBS_QUEUE: 1})
        for name in self.queues:
            refuse_own(name)
        self.slots = slots
        self.clock = clock or Clock()
        self.hooks = hooks or Hooks()
        self._executors = list(executors)
        self._slots, self._sources = Slots(slots), Sources(self.queues)
        self._lease_timeout = _lease_timeout(lease_timeout)
        self._max_jobs = _limit(max_jobs, "max_jobs")
        self._max_rss = _limit(max_rss, "max_rss")
        self._with_services = services
        self._recycles = recycles
        self._crew: Crew | None = None
        self._services: Services | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reason: Reason | None = None
        self._forced = False
        self._stirred = asyncio.Event()

    # ---- what others may ask ----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return 0 if self._crew is None else self._crew.running

    def jobs(self) -> list[Running]:
        """Those that run."""
        return [] if self._crew is None else self._crew.dispatch.begun_jobs()

    @property
    def finished(self) -> int:
        return 0 if self._crew is None else self._crew.dispatch.finished

    @property
    def failed(self) -> int:
        return 0 if self._crew is None else self._crew.dispatch.failed

    @property
    def draining(self) -> bool:
        return self._reason is not None

    def drain(self, reason: Reason = "stopped") -> None:
        """No new jobs; `run` returns when those that run have ended. From any thread."""
        self._on_loop(self._drain, reason)

    def force(self, reason: Reason = "stopped") -> None:
        """What runs is ended, and goes back. From any thread."""
        self._on_loop(self._force, reason)

    # ---- life -------------------------------------------------------------------------------------------------

    async def run(self, *, signals: bool = True) -> Ended:
        """Once. Raises what keeps it from working at all: no such permission, an executor that does not start.

        Signals are taken until it has ended; who has more to do then takes them itself (`Signals`).
        """
        if self._loop is not None:
            raise InvalidRequest("a worker runs once; make another one")
        self._loop = asyncio.get_running_loop()
        leases = Leases(self._lease_timeout)
        crew = self._crew = Crew(self, self._executors, self._slots, self._sources, leases, self._max_jobs)
        taken = Signals()
        if signals:
            taken.take(self)
        try:
            await crew.start()
            await self.hooks.started(self)
            log.info("worker started", extra={"worker": self.incarnation, "slots": self.slots, "queues": self.queues})
            await self._work(crew)
        finally:
            try:
                await self._stop(crew)
            finally:
                taken.leave()
        return Ended(
            incarnation=self.incarnation,
            reason=self._reason or "stopped",
            forced=self._forced,
            finished=crew.dispatch.finished,
            left=crew.running,
        )

    async def _work(self, crew: Crew) -> None:
        if self._reason is None and self._with_services:
            self._services = Services(self)
            self._services.start()
            await self._services.registered()
        if self._reason is None:
            crew.begin()
        while not (self.draining and crew.idle):
            self._look_at_memory()
            self._stirred.clear()
            crew.raise_failure()
            try:
                async with asyncio.timeout(RSS_LOOK_S):
                    await self._stirred.wait()
            except TimeoutError:
                pass
            if self._forced and crew.ended_in_vain(FORCE_GRACE_S):
                break

    async def _stop(self, crew: Crew) -> None:
        if self._services is not None:
            await self._services.stop(farewell=not (self._recycles and self._reason in LIMITS and not self._forced))
        await crew.stop(force=self._forced or not self.draining)
        await self.hooks.stopped(self, self._reason or "failed")
        log.info("worker stopped", extra={"worker": self.incarnation, "reason": self._reason, "left": crew.running})

    def stir(self) -> None:
        """Something happened that may be the end."""
        self._stirred.set()

    # ---- drain and force --------------------------------------------------------------------------------------

    def _drain(self, reason: Reason) -> None:
        """A limit of its own counts less than that somebody wants it to end: it is not replaced then."""
        if self._reason is not None and (self._reason not in LIMITS or reason in LIMITS):
            return
        self._reason = reason
        log.info("worker drains", extra={"worker": self.incarnation, "reason": reason, "running": self.running})
        if self._crew is not None:
            self._crew.drain(backlogs=reason != "max_jobs")  # which counts them
        if self._services is not None:
            self._services.drain()
        self.stir()

    def _force(self, reason: Reason) -> None:
        self._drain(reason)
        if self._forced:
            return
        self._forced = True
        log.warning("worker ends its jobs", extra={"worker": self.incarnation, "running": self.running})
        if self._crew is not None:
            self._crew.end_all()
        self.stir()

    def _on_loop(self, call: Any, reason: Reason) -> None:
        if self._loop is None:
            call(reason)
        else:
            self._loop.call_soon_threadsafe(call, reason)

    def _look_at_memory(self) -> None:
        """One job a life, at least: a limit below what a worker has anyway does not keep it from working."""
        if self._max_rss is None or self.draining or not self.finished:
            return
        used = resident_bytes()
        if used > self._max_rss:
            log.info("worker has used its memory", extra={"worker": self.incarnation, "rss": used})
            self._drain("max_rss")


def _lease_timeout(given: Duration | None) -> float:
    timeout = LEASE_TIMEOUT_S if given is None else checked_seconds(given, "lease_timeout")
    if timeout < LEASE_S_MIN:
        raise InvalidRequest(f"lease_timeout is {timeout:g} s; use {LEASE_S_MIN:g} s or more, so that it can be kept")
    return timeout


def _plain(name: str) -> str:
    """As an item's id has it."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:NAME_CHARS_MAX]


def _limit(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequest(f"{name} is {value!r:.60}; use a whole number above 0, or leave it out")
    return value
