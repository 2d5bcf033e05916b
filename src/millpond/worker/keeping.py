"""Keeps the leases of a worker's jobs alive, and tells of those that are cancelled or lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from millpond.api import Api
from millpond.errors import MillpondError, NotFound
from millpond.model import Result
from millpond.worker.executors import Running
from millpond.worker.leases import Leases

log = logging.getLogger("millpond.worker")


class Told(Protocol):
    def lose(self, job: Running) -> None: ...

    def cancel(self, job: Running) -> None: ...

    def extended(self, job: Running) -> None: ...


class Keeper:
    def __init__(self, api: Api, leases: Leases, told: Told) -> None:
        self._api = api
        self._leases = leases
        self._told = told
        self._calls: dict[str, asyncio.Task[None]] = {}  # one at a time for each queue
        self.looked: Callable[[], None] = _nobody

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                await asyncio.sleep(self._leases.look_every)
                self.look(asyncio.get_running_loop().time())
                self.looked()
        finally:
            for call in list(self._calls.values()):
                call.cancel()

    def look(self, now: float) -> None:
        for job in self._leases.lost(now):
            self._told.lose(job)
        for queue, lots in self._leases.due(now).items():
            if queue not in self._calls:
                self._calls[queue] = asyncio.ensure_future(self._extend_all(queue, lots))

    async def _extend_all(self, queue: str, lots: list[list[Running]]) -> None:
        try:
            for lot in lots:
                await self.extend(queue, lot)
        finally:
            del self._calls[queue]

    async def extend(self, queue: str, jobs: Sequence[Running]) -> None:
        """If it fails, the next look tries again; a lease counts from when it was asked for, never from the answer."""
        asked_at = asyncio.get_running_loop().time()
        timeout = self._leases.timeout
        try:
            async with asyncio.timeout(timeout / 4):
                results = await self._api.extend([job.item for job in jobs], queue=queue, lease_timeout=timeout)
        except NotFound:  # the queue is gone, and all leases with it
            for job in jobs:
                self._told.lose(job)
        except (MillpondError, TimeoutError) as error:
            log.warning("extending %d leases of %s failed, and is tried again: %r", len(jobs), queue, error)
        else:
            for job, result in zip(jobs, results, strict=True):
                self._learn(job, result, asked_at + timeout)

    def _learn(self, job: Running, result: Result, deadline: float) -> None:
        if job.outcome is not None or job.ending == "lease_lost":
            job.deadline = deadline if result.ok else job.deadline
            return
        if result.error is not None:
            self._told.lose(job)
            return
        job.deadline = deadline
        self._told.extended(job)
        if result.cancelled:
            self._told.cancel(job)


def _nobody() -> None:
    """Until somebody wants to know."""
