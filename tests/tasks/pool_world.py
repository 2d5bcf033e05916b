"""A world for a pool of processes, by a seed: the real pool and dispatch on simulated processes, and a simulated clock.

All is in one thread, so a seed always leads to the same. `python -m tests.tasks.pool_world 1 1000` runs the seeds from
1 on, and prints those whose worlds break a promise.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import sys
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.model import LeasedFields, LeasedItem
from millpond.tasks.connection import Where
from millpond.tasks.process import Process
from millpond.tasks.processes import ProcessPool
from millpond.worker.dispatch import Dispatch
from millpond.worker.executors import Running
from millpond.worker.hooks import Hooks
from millpond.worker.leases import Leases
from millpond.worker.queues import Sources
from millpond.worker.slots import Place, Slots
from tests.tasks.pool_child import FIRST_PID, Child, Plan, Run

FOREVER_S = 2_000.0  # longer than all jobs of a world, one after the other, and all pauses after crashes
TIMEOUTS = {"calm": None, "hasty": 0.5, "patient": 7.0}  # of the jobs of each queue
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Violation(AssertionError): ...


class Late(selectors.DefaultSelector):
    """What the worker can read it reads now, or some turns later. Where nothing else is left to do, time passes."""

    world: World

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        rng, ready = self.world.rng, super().select(0)
        found = [one for one in ready if one[0].fd in self.world.childrens or rng.random() < self.world.promptness]
        if ready and not found:
            self.world.now += min(timeout or 0.0, rng.random() * self.world.pace)
        elif not ready and timeout != 0:
            self.world.expect(timeout is not None, "nothing will ever happen again")
            self.world.look_at_rest()
            self.world.now += timeout or 0.0
        return found


class Loop(asyncio.SelectorEventLoop):
    def __init__(self, world: World) -> None:
        self.world = world
        selector = Late()
        selector.world = world
        super().__init__(selector)

    def time(self) -> float:
        return self.world.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        async def later() -> Any:
            await self.world.moment()
            return func(*args)

        return self.create_task(later())


class Reports:
    """What they would tell is with the jobs."""

    idle = True

    def complete(self, queue: str, ends: list[Any]) -> None: ...

    complete_with = hand_back = complete


class World:
    """`troubles` happen whenever they can; without a seed nothing else goes wrong."""

    def __init__(
        self, seed: int | None = None, processes: int = 1, troubles: Iterable[str] = (), **limits: Any
    ) -> None:
        self._files = _open_files()
        self.rng = rng = Random(seed or 0)
        stormy = seed is not None
        self.troubles = set(troubles)
        self.promptness = rng.choice((0.1, 0.5, 0.9)) if stormy else 1.0
        self.chance = rng.choice((0.0, 0.02, 0.1)) if stormy else 0.0  # of each trouble, each time
        self.pace = rng.choice((0.0001, 0.001, 0.1)) if stormy else 0.001  # seconds that a step takes
        self.started = False
        self.now = 1_000.0
        self.loop = Loop(self)
        self.loop.set_exception_handler(lambda _, context: self.errors.append(str(context)))
        self.children: list[Child] = []
        self.childrens: set[int] = set()  # files that they read
        self.plans: dict[str, Plan] = {}
        self.errors: list[str] = []
        self.processes = rng.randint(1, 3) if stormy else processes
        if stormy:
            limits = {"process_jobs_max": rng.choice((None, 1, 5)), "process_rss_max": rng.choice((None, None, 95))}
        consumers = {queue: SimpleNamespace(timeout=timeout, is_async=False) for queue, timeout in TIMEOUTS.items()}
        connection = SimpleNamespace(bind=lambda _: None, unbind=lambda _: None)
        app: Any = SimpleNamespace(tasks={}, consumers=consumers, schedules={}, connection=connection)
        api: Any = SimpleNamespace(write_state=self._write_state)
        self.pool = ProcessPool(app, api, self.processes, "a:b", Where(), **limits)
        self.place, self.sources = Place(self.pool), Sources(dict.fromkeys(TIMEOUTS, 1.0))
        self.slots = Slots(rng.randint(self.processes, 20) if stormy else 20)

    def run(self, act: Callable[[], Awaitable[None]] | None = None) -> None:
        """`act`, or a storm; then the pool is stopped, and all promises are looked at."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", self._spawn)
            patch.setattr("millpond.tasks.process.end_tree", lambda pid: self.children[pid - FIRST_PID].end_tree())
            patch.setattr("millpond.tasks.process.signal_group", lambda *_: None)
            patch.setattr("millpond.tasks.process.end_leftovers", self._end_leftovers)
            patch.setattr("millpond.tasks.processes.end_leftovers", lambda *_: [])
            patch.setattr("millpond.tasks.processes.resident_bytes", lambda _: self.rng.randrange(100))
            try:
                self.loop.run_until_complete(self._all(act or self._storm))
            finally:
                for task in asyncio.all_tasks(self.loop):
                    task.cancel()
                self.loop.call_soon(self.loop.stop)
                self.loop.run_forever()
                self.loop.close()
                for child in self.children:
                    if child.leftover is not None:
                        child.leftover.close()
        self.expect(_open_files() == self._files, "files are left open")

    async def _all(self, act: Callable[[], Awaitable[None]]) -> None:
        reports: Any = Reports()
        self.dispatch = Dispatch([self.place], self.sources, self.slots, Leases(20.0), reports, Hooks())
        self.dispatch.crashed = lambda place, error: self.errors.append(repr(error))
        await self.pool.start()
        self.started = True
        await act()
        await self.stop(force=False)
        await asyncio.sleep(1)
        self._look()

    # ---- what happens -------------------------------------------------------------------------------------------

    def has_trouble(self, what: str, times: int = 1) -> bool:
        return self.started and (what in self.troubles or self.rng.random() < times * self.chance)

    async def moment(self) -> None:
        await asyncio.sleep(self.rng.choice((0.0, self.rng.random() * self.pace)))

    def add(self, queue: str = "calm", seconds: float = 0.0, **what: Any) -> Plan:
        name = str(len(self.plans))
        item = LeasedItem(b"", 0, None, LeasedFields(name, name, b"", name, 1, 1, 1, EPOCH, EPOCH))
        job = Running(item, queue, None, float("inf"), place=self.place)
        plan = self.plans[name] = Plan(job, seconds, **what)
        self.dispatch.leases.add(job)
        self.dispatch.take_in(next(one for one in self.sources if one.name == queue), [job])
        return plan

    def end(self, plan: Plan) -> None:
        plan.unwanted = not plan.runs
        if plan.job.started_at and self.rng.random() < 0.5:
            self.dispatch.lose(plan.job)
        else:
            self.dispatch.cancel(plan.job)

    async def until(self, reached: Callable[[], Any], otherwise: str = "waited in vain", seconds: float = 10.0) -> None:
        latest = self.now + seconds
        while not reached():
            self.expect(self.now < latest, otherwise)
            await asyncio.sleep(min(seconds / 100, 0.5))

    async def stop(self, *, force: bool) -> None:
        for plan in self.plans.values():
            plan.unwanted = plan.unwanted or not plan.runs
        if self.pool._processes:
            async with asyncio.timeout(60):
                await self.pool.stop(force=force)

    async def _storm(self) -> None:
        for _ in range(self.rng.randint(3, 12)):
            self._something()
            await asyncio.sleep(
                self.pace * self.rng.expovariate(1) if self.rng.random() < 0.9 else self.rng.random() * 8
            )
        how = self.rng.choice(("done", "drain", "force"))
        if how != "done":
            self.dispatch.open = False
            self.dispatch.give_back_waiting()
            self.dispatch.give_back_backlogs()
        if how != "force":
            await self.until(lambda: not self.slots.running + self.sources.waiting, "jobs are left", FOREVER_S)
        if how == "done":
            await self.until(self.all_ready, "a process has no successor", FOREVER_S)
        await self.stop(force=how == "force")

    def all_ready(self) -> bool:
        return sum(process.ready for process in self.pool._processes) == self.processes

    def _something(self) -> None:
        rng = self.rng
        what = rng.choices(("add", "end", "extend", "stop", "kill", "late", "give back"), (40, 10, 5, 9, 8, 2, 1))[0]
        living = [child for child in self.children if child.lives]
        left = [plan for plan in self.plans.values() if plan.job.outcome is None]
        if what == "add":
            for _ in range(rng.randint(1, 12)):
                seconds = self.pace * rng.expovariate(1) if rng.random() < 0.95 else rng.choice((0.1, 2.0, 10.0))
                fate = rng.choices(("ok", "fail", "crash"), (20, 3, 1))[0]
                queue, stubborn, asks = rng.choice(list(TIMEOUTS)), rng.random() < 0.2, rng.random() < 0.1
                self.add(queue, seconds, fate=fate, stubborn=stubborn, asks=asks)
        elif what == "late":
            self.now += rng.random() * 10  # the worker itself was stopped
        elif what == "give back":
            self.dispatch.give_back_backlogs()
            self.dispatch.fill()
        elif what == "stop" and living:
            child = rng.choice(living)
            child.stop()
            self.loop.call_later(rng.random() * 20, child.resume)
        elif what == "kill" and living:
            rng.choice(living).kill()
        elif what == "extend" and left:
            self.dispatch.extended(rng.choice(left).job)
        elif what == "end" and left:
            self.end(rng.choice(left))

    # ---- processes ----------------------------------------------------------------------------------------------

    async def _spawn(self, *_: Any, pass_fds: Iterable[int], **__: Any) -> Child:
        self.children.append(Child(self, pass_fds))
        return self.children[-1]

    def _end_leftovers(self, wanted: Any, patience: float) -> None:
        leftover = self.children[wanted.__self__._process.pid - FIRST_PID].leftover
        if leftover is not None and not self.has_trouble("is not found", times=5):
            leftover.close()

    async def _write_state(self, *_: Any, **__: Any) -> Any:
        await self.moment()
        return SimpleNamespace(version=1, cancelled=False)

    def begin(self, name: str, child: Child) -> tuple[Plan, Run]:
        plan, run = self.plans[name], Run(child)
        self.expect(all(one.told or not one.child.lives for one in plan.runs), f"job {name} runs twice at a time")
        plan.runs.append(run)
        return plan, run

    # ---- promises -----------------------------------------------------------------------------------------------

    def expect(self, kept: Any, otherwise: str) -> None:
        if not kept:
            self.errors.append(otherwise)
            raise Violation("; ".join(self.errors[:5]))

    def look_at_rest(self) -> None:
        waiting = self.pool._open and self.pool._waiting and not self.errors
        free = waiting and [one for one in self.pool._processes if not one.count and self.pool._is_free(one)]
        self.expect(not free, "a job waits, and a process has nothing to do")

    def _look(self) -> None:
        for name, plan in self.plans.items():
            broken = plan.broken()
            self.expect(broken is None, f"job {name} {broken}")
        self.expect(not self.errors, "something else went wrong")
        self.expect(self.slots.running == self.place.load == 0, "a slot is lost")
        self.expect(all(child.returncode is not None for child in self.children), "a process is left")
        self.expect(len(asyncio.all_tasks(self.loop)) == 1, "a task of the loop is left")
        timers: list[asyncio.TimerHandle] = [one for one in self.loop._scheduled if not one.cancelled()]  # type: ignore[attr-defined]
        left = [one for one in timers if isinstance(getattr(one._callback, "__self__", None), Process)]  # type: ignore[attr-defined]
        self.expect(not left, f"timers are left: {left}")


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


def main(first: int, count: int) -> int:
    logging.disable()
    broken = 0
    for seed in range(first, first + count):
        try:
            World(seed).run()
        except Exception as error:
            broken += 1
            print(f"seed {seed}: {type(error).__name__}: {error!s:.400}", flush=True)
    print(f"{count} worlds, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
