"""Tells the queue how jobs ended: what ends together, or while a call is under way, goes with one call.

A lease is kept, and extended by who keeps it, until the report of its end has arrived. To complete the same lease twice
is success twice, so a call whose answer was lost is made again, until the leases have run out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from random import Random
from typing import Any

from millpond.api import Api
from millpond.consuming.pauses import Pauses
from millpond.errors import InvalidRequest, MillpondError
from millpond.model import TOKEN_BATCH_MAX, Batch, Result, Retry
from millpond.worker.executors import Outcome, Running
from millpond.worker.leases import Leases

log = logging.getLogger("millpond.worker")
CALL_S = 10.0  # for one call: then it is made anew, lest a dead connection holds a report for ever
AT_ONCE_MAX = 200  # calls, each with one job's result: more of them would be no faster, and time out

Back = tuple[Running, Retry]
Send = Callable[[str, list[Any]], Coroutine[Any, Any, None]]


class Reports:
    def __init__(self, api: Api, leases: Leases, rng: Random) -> None:
        self._api = api
        self._leases = leases
        self._rng = rng
        self._sending: set[asyncio.Task[None]] = set()
        self._completed = Gathered(self._complete, TOKEN_BATCH_MAX)
        self._with_result = Gathered(self._complete_with_results, AT_ONCE_MAX)
        self._back = Gathered(self._hand_back, TOKEN_BATCH_MAX)
        self.settled: Callable[[], None] = _nobody  # called when nothing is left to be told

    @property
    def idle(self) -> bool:
        return not self._sending

    async def settle(self, patience: float | None) -> None:
        """Until all that was to be told is told, or too late; or for so many seconds."""
        try:
            async with asyncio.timeout(patience):
                while self._sending:
                    await asyncio.wait(self._sending)
        except TimeoutError:
            log.error("the ends of some jobs were not told in time; they run again when their leases are over")
            for task in self._sending:
                task.cancel()
            await asyncio.gather(*self._sending, return_exceptions=True)

    def complete(self, queue: str, jobs: list[Running]) -> None:
        self._add(self._completed, queue, jobs)

    def complete_with(self, queue: str, jobs: list[Running]) -> None:
        """Those whose outcome has a result."""
        self._add(self._with_result, queue, jobs)

    def hand_back(self, queue: str, ends: list[Back]) -> None:
        self._add(self._back, queue, ends)

    def _add(self, gathered: Gathered, queue: str, ends: list[Any]) -> None:
        if gathered.add(queue, ends):
            task = asyncio.get_running_loop().create_task(gathered.send_all(queue))
            self._sending.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("the ends of some jobs could not be told: %r", bug, exc_info=bug)
        if not self._sending:
            self.settled()

    # ---- calls ------------------------------------------------------------------------------------------------

    async def _complete(self, queue: str, jobs: list[Running]) -> None:
        items = [job.item for job in jobs]
        try:
            await self._told(jobs, lambda: self._api.complete(items, queue=queue))
        except InvalidRequest as error:
            log.error("%d jobs could not be completed, and may be run again: %s", len(jobs), error)
            self._leases.drop_all(jobs)

    async def _complete_with_results(self, queue: str, jobs: list[Running]) -> None:
        """A call each, for a result goes with one lease; all at a time, and alone only those that it failed for."""
        calls = [self._api.complete([job.item], queue=queue, result=_result(job)) for job in jobs]
        try:
            async with asyncio.timeout(CALL_S):
                answers = await asyncio.gather(*calls, return_exceptions=True)
        except TimeoutError:
            answers = [TimeoutError("no answer came in time")] * len(jobs)
        told: list[Running] = []
        again: list[Running] = []
        for job, answer in zip(jobs, answers, strict=True):
            (again if isinstance(answer, BaseException) else told).append(job)
            if not isinstance(answer, BaseException):
                _look_at([job], answer)
        self._leases.drop_all(told)
        await asyncio.gather(*[self._complete_alone(queue, job) for job in again])

    async def _complete_alone(self, queue: str, job: Running) -> None:
        try:
            await self._told([job], lambda: self._api.complete([job.item], queue=queue, result=_result(job)))
        except InvalidRequest as error:  # it was done, and would end no other way another time
            text = f"it was done, but its result cannot be kept: {error}"
            await self._hand_back(queue, [(job, Retry(lease=job.item, error=text, dead=True))])

    async def _hand_back(self, queue: str, ends: list[Back]) -> None:
        jobs, retries = [job for job, _ in ends], [retry for _, retry in ends]
        try:
            await self._told(jobs, lambda: self._api.retry(retries, queue=queue))
        except InvalidRequest as error:  # one spoils it for all: each by itself, and the wrong one without its details
            if len(ends) > 1:
                await asyncio.gather(*[self._hand_back(queue, [end]) for end in ends])
                return
            log.error("the end of a job could not be told as it was: %s", error, extra=_about(jobs[0]))
            await self._told(jobs, lambda: self._api.retry([jobs[0].item], queue=queue))

    async def _told(self, jobs: Sequence[Running], call: Callable[[], Awaitable[Sequence[Result]]]) -> None:
        """Calls until it is answered, or all the leases have run out. A call that is wrong raises."""
        pauses = Pauses(self._rng)
        while True:
            try:
                async with asyncio.timeout(CALL_S):
                    results = await call()
            except InvalidRequest:
                raise
            except (MillpondError, TimeoutError) as error:
                if await self._is_too_late(jobs, error, pauses.next()):
                    break
            else:
                _look_at(jobs, results)
                break
        self._leases.drop_all(jobs)

    async def _is_too_late(self, jobs: Sequence[Running], error: Exception, pause: float) -> bool:
        left = max(job.deadline for job in jobs) - asyncio.get_running_loop().time()
        lost = isinstance(error, MillpondError) and not error.retryable
        why = str(error) or f"no answer in {CALL_S:g} s"
        if left <= 0 or lost:
            for job in jobs:
                log.error("the end of a job could not be told, it may be run again: %s", why, extra=_about(job))
            return True
        log.warning("the ends of %d jobs could not be told, and are again soon: %s", len(jobs), why)
        await asyncio.sleep(min(pause, left))
        return False


class Gathered:
    """What is to be told, by queue, while a call for that queue is under way."""

    def __init__(self, send: Send, batch_max: int) -> None:
        self._send = send
        self._batch_max = batch_max
        self._waiting: dict[str, list[Any]] = {}

    def add(self, queue: str, ends: list[Any]) -> bool:
        """Whether somebody is to send them: no call is under way."""
        waiting = self._waiting.get(queue)
        if waiting is not None:
            waiting += ends
            return False
        self._waiting[queue] = ends
        return True

    async def send_all(self, queue: str) -> None:
        try:
            while ends := self._waiting[queue]:
                self._waiting[queue] = ends[self._batch_max :]
                await self._send(queue, ends[: self._batch_max])
        finally:
            del self._waiting[queue]


def _result(job: Running) -> Any:
    return None if job.outcome is None else job.outcome.result


def _look_at(jobs: Sequence[Running], results: Sequence[Result]) -> None:
    if isinstance(results, Batch):  # which has no errors in it
        return
    for job, result in zip(jobs, results, strict=True):
        if result.error is not None:
            log.warning("a job ended, but its lease had: %s", result.error.message, extra=_about(job))


def _about(job: Running) -> dict[str, Any]:
    return {"queue": job.queue, "id": job.item.id, "correlation_id": job.item.correlation_id}


def retry_of(job: Running, outcome: Outcome, delay: float | None) -> Retry:
    """How an attempt that was not successful is told. `delay`: by the job's own spec, if it says."""
    error = None if outcome.error is None else outcome.error.encode(errors="backslashreplace").decode()
    chosen = outcome.delay if outcome.delay is None or math.isfinite(outcome.delay) else None
    if outcome.defer or job.ending == "stopping":
        return Retry(lease=job.item, intent="defer", delay=chosen, error=error)
    return Retry(lease=job.item, delay=delay if chosen is None else max(0.0, chosen), error=error, dead=outcome.dead)


def _nobody() -> None:
    """Until somebody wants to know."""
