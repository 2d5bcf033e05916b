"""Leased items to executors, and their ends to the reports: what happens to every job, so it costs little each.

    arrived -> waiting, by queue -> fill: a slot, an executor -> done -> flush: all that ended in a turn of the loop

All of it is on the runner's event loop, and none of it waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from random import Random

from millpond.model import LeasedItem, Retry
from millpond.worker.delays import retry_delay
from millpond.worker.executors import DEFERRED, Outcome, Running, TakesBacklog, Why
from millpond.worker.hooks import Hooks
from millpond.worker.judging import judged
from millpond.worker.leases import Leases
from millpond.worker.queues import Source, Sources
from millpond.worker.reports import Reports, retry_of
from millpond.worker.slots import Place, Slots

log = logging.getLogger("millpond.worker")
UNWANTED_MAX = 1_000  # different ones that are told


class Dispatch:
    """`moved` is called when there may be room for more, `enough` when so many have begun as ever may, `crashed` with
    an executor that is to be started again.
    """

    def __init__(
        self, places: Sequence[Place], sources: Sources, slots: Slots, leases: Leases, reports: Reports, hooks: Hooks
    ) -> None:
        self.places = places
        self.sources = sources
        self.slots = slots
        self.leases = leases
        self.reports = reports
        self.begun = 0
        self.finished = 0
        self.failed = 0
        self.begun_max = math.inf
        self.open = True  # to new jobs
        self.moved: Callable[[], None] = _nobody
        self.enough: Callable[[], None] = _nobody
        self.crashed: Callable[[Place, Exception], None] = _crash_ignored
        self._hooks = hooks
        self._rng = Random()
        self._loop = asyncio.get_running_loop()
        self._ended: list[Running] = []
        self._flush_asked = False
        self._unwanted: set[str] = set()  # what was said of jobs that nobody here can run

    @property
    def idle(self) -> bool:
        """Nothing runs, and nothing is left to be told."""
        return self.slots.running == 0 and not self._ended and self.reports.idle

    @property
    def left(self) -> float:
        """So many may still begin."""
        return max(0.0, self.begun_max - self.begun)

    # ---- in -------------------------------------------------------------------------------------------------

    def judge(self, queue: str, items: Iterable[LeasedItem], deadline: float) -> list[Running]:
        jobs = [judged(item, queue, deadline, self.places) for item in items]
        self.leases.add_all(jobs)
        return jobs

    def take_in(self, source: Source, jobs: list[Running]) -> None:
        if not self.open:
            self.give_back(jobs)
            return
        wanted = [job for job in jobs if job.outcome is None]
        if len(wanted) < len(jobs):
            for job in jobs:
                if job.outcome is not None:
                    self._refuse(job, job.outcome)
        self.sources.add(source, wanted)
        self.fill()

    def _refuse(self, job: Running, outcome: Outcome) -> None:
        """Nobody here can run it. It is said once, for there may be many of the kind, again and again."""
        if not outcome.defer:
            self._note_end(job)
            return
        if outcome.error not in self._unwanted and len(self._unwanted) < UNWANTED_MAX:
            self._unwanted.add(outcome.error or "")
            about = {"queue": job.queue, "id": job.item.id}
            log.warning("a job is left to other workers: %s", outcome.error, extra=about)
        self.reports.hand_back(job.queue, [(job, retry_of(job, outcome, None))])

    def fill(self) -> None:
        """Jobs to slots, as long as there are both. One that needs a free slot holds up those after it."""
        sources, slots = self.sources, self.slots
        while self.open and (source := sources.next()) is not None:
            place = source.waiting[0].place
            if place.down:
                self.give_back([sources.take(source)], delay=1.0)
            elif source.waiting[0].deadline <= self._loop.time():  # it could not be extended, and another may have it
                self.give_back([sources.take(source)])
            elif not slots.fits(place):
                return
            else:
                self._begin(sources.take(source), place)

    def _begin(self, job: Running, place: Place) -> None:
        job.started_at = now = self._loop.time()
        self.slots.begin(place, now)
        self.begun += 1
        if self.begun >= self.begun_max:
            self.open = False
            self._loop.call_soon(self.enough)
        if self._hooks.of_jobs:
            self._hooks.began(job)
        try:
            place.executor.run(job, self._done)
        except Exception as error:
            self._crash(job, error)
            if job.outcome is None:
                self._done(job, Outcome(ok=False, error=f"the executor crashed: {type(error).__name__}: {error}"))

    # ---- out ------------------------------------------------------------------------------------------------

    def _done(self, job: Running, outcome: Outcome) -> None:
        if job.outcome is not None:
            log.error("the end of a job was told twice", extra={"queue": job.queue, "id": job.item.id})
            return
        job.outcome = outcome
        self.slots.end(job.place)
        self._note_end(job)

    def _note_end(self, job: Running) -> None:
        self._ended.append(job)
        if not self._flush_asked:
            self._flush_asked = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_asked = False
        ended, self._ended = self._ended, []
        self.finished += len(ended)
        self.slots.ended(len(ended), self._loop.time())
        completed: dict[str, list[Running]] = {}
        with_result: dict[str, list[Running]] = {}
        for job in ended:
            outcome = job.outcome
            assert outcome is not None, "it has ended"
            if self._hooks.of_jobs:
                self._hooks.ended(job, outcome)
            if job.ending == "lease_lost" or not outcome.ok:
                self._failed(job, outcome)
            elif outcome.result is not None:
                with_result.setdefault(job.queue, []).append(job)
            else:
                completed.setdefault(job.queue, []).append(job)
        for queue, jobs in completed.items():
            self.reports.complete(queue, jobs)
        for queue, jobs in with_result.items():
            self.reports.complete_with(queue, jobs)
        self.fill()
        self.moved()

    def _failed(self, job: Running, outcome: Outcome) -> None:
        if job.ending == "lease_lost":
            self.leases.drop(job)
            return
        retry = retry_of(job, outcome, retry_delay(job.spec, job.item.attempts, self._rng))
        if retry.intent == "failure" and job.ending is None:
            self.failed += 1
            log.warning("a job failed: %s", outcome.error, extra={"queue": job.queue, "id": job.item.id})
        self.reports.hand_back(job.queue, [(job, retry)])

    def give_back(self, jobs: Iterable[Running], delay: float | None = None) -> None:
        """Those that were not begun: as if they had never been leased."""
        lots: dict[str, list[tuple[Running, Retry]]] = {}
        for job in jobs:
            job.outcome = DEFERRED
            lots.setdefault(job.queue, []).append((job, Retry(lease=job.item, intent="defer", delay=delay)))
        for queue, ends in lots.items():
            self.reports.hand_back(queue, ends)

    def give_back_waiting(self) -> None:
        self.give_back(self.sources.take_all())

    def give_back_backlogs(self) -> None:
        """What executors keep and have not begun."""
        for place in self.places:
            if isinstance(place.executor, TakesBacklog) and place.load:
                jobs = place.executor.take_back()
                for _ in jobs:
                    self.slots.end(place)
                self.begun -= len(jobs)
                self.give_back(jobs)

    # ---- leases ---------------------------------------------------------------------------------------------

    def lose(self, job: Running) -> None:
        """Its lease is over, or will be before anybody looks again."""
        if job.outcome is not None:  # somebody is just telling its end
            return
        log.warning("the lease of a job is lost; it is ended here", extra={"queue": job.queue, "id": job.item.id})
        job.ending = "lease_lost"
        if job.started_at:
            self._end(job, "lease_lost")
        else:
            self._drop_waiting(job)
            self.leases.drop(job)

    def cancel(self, job: Running) -> None:
        if job.outcome is not None or job.ending is not None:
            return
        log.info("a job was cancelled; it is ended here", extra={"queue": job.queue, "id": job.item.id})
        job.ending = "cancelled"
        if job.started_at:
            self._end(job, "cancelled")
        else:
            self._drop_waiting(job)
            self.give_back([job])  # the queue ends it

    def begun_jobs(self) -> list[Running]:
        return [job for job in self.leases if job.started_at and job.outcome is None]

    def end_all(self) -> None:
        """What runs is told to stop."""
        for job in self.begun_jobs():
            if job.ending is None:
                job.ending = "stopping"
                self._end(job, "stopping")

    def extended(self, job: Running) -> None:
        """Its deadline has moved."""
        if job.started_at:
            try:
                job.place.executor.extended(job)
            except Exception as error:
                self._crash(job, error)

    def _end(self, job: Running, why: Why) -> None:
        try:
            job.place.executor.end(job, why)
        except Exception as error:
            self._crash(job, error)

    def _crash(self, job: Running, error: Exception) -> None:
        """Who has its jobs hears of it; the others go on."""
        log.error("an executor crashed: %s", error, exc_info=error, extra={"queue": job.queue, "id": job.item.id})
        self.crashed(job.place, error)

    def _drop_waiting(self, job: Running) -> None:
        for source in self.sources:
            if job in source.waiting:
                source.waiting.remove(job)


def _nobody() -> None:
    """Until somebody wants to know."""


def _crash_ignored(place: Place, error: Exception) -> None:
    """Until somebody starts it again."""
