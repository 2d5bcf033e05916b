"""A worker in a process of its own: signals, and its replacement by a fresh one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import millpond
from millpond.model import State
from millpond.worker.signals import NUMBERS, Signals
from tests.worker.fakes import put, task

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, os, sys
import millpond
from millpond.worker import recycle
from millpond.worker.executors import DONE
from millpond.worker.runner import Worker
from tests.worker.fakes import FakeExecutor

class Telling(FakeExecutor):
    def run(self, job, done):
        super().run(job, done)
        print("begun", os.getpid(), flush=True)
        if job.spec.task == "short":
            self.finish(job)

    async def stop(self, *, force):
        if sys.argv[3] == "1":
            print("stopping", flush=True)
            await asyncio.to_thread(sys.stdin.read)
        await super().stop(force=force)

    def end(self, job, why):
        print("ended", why, flush=True)
        super().end(job, why)

async def main():
    executor = Telling()
    async with millpond.open_async(sys.argv[1]) as pond:
        worker = Worker(pond, [executor], max_jobs=int(sys.argv[2]) or None)
        if sys.argv[3] == "0":
            asyncio.get_running_loop().add_reader(0, lambda: executor.finish(next(iter(executor.running))))
        return await worker.run()

program = recycle.Program()
os.chdir("/")
os.environ.pop("PYTHONPATH")
over = asyncio.run(main())
print("over", over.reason, over.forced, flush=True)
if over.recycle:
    program.restart(over.incarnation)
"""


class Process:
    def __init__(self, directory: Path, max_jobs: int = 0, *, slow_stop: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(directory), str(max_jobs), str(int(slow_stop))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONPATH": "."},
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def finish_job(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        return self.process.wait(30)


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for one in processes:
        one.process.kill()
        one.process.wait()
        for stream in (one.process.stdin, one.process.stdout):
            if stream is not None:
                stream.close()


def fill(directory: Path, *names: str) -> None:
    async def go() -> None:
        async with millpond.open_async(directory) as pond:
            await put(pond, *[task(name) for name in names])

    asyncio.run(go())


def counts(directory: Path) -> dict[str, int]:
    async def go() -> dict[str, int]:
        async with millpond.open_async(directory) as pond:
            return {state: count for state, count in (await pond.stats("jobs")).counts.items() if count}

    return asyncio.run(go())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_drains(tmp_path: Path, started: list[Process], number: int) -> None:
    fill(tmp_path, "long", "long")
    started.append(worker := Process(tmp_path))
    assert worker.line().startswith("begun")
    worker.signal(number)
    worker.finish_job()
    assert worker.line() == "over signal False"
    assert worker.end() == 0
    assert counts(tmp_path) == {State.COMPLETED: 1, State.READY: 1}


def test_the_second_signal_ends_what_runs_and_it_goes_back(tmp_path: Path, started: list[Process]) -> None:
    fill(tmp_path, "long")
    started.append(worker := Process(tmp_path))
    assert worker.line().startswith("begun")
    worker.signal(signal.SIGTERM)
    worker.signal(signal.SIGINT)  # another one: the same signal twice at once may come as one
    assert worker.line() == "ended stopping"
    assert worker.line() == "over signal True"
    assert worker.end() == 0
    assert counts(tmp_path) == {State.READY: 1}


def test_a_worker_under_nohup_goes_on_when_its_terminal_is_closed(tmp_path: Path, started: list[Process]) -> None:
    fill(tmp_path, "short", "long")
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        started.append(worker := Process(tmp_path, max_jobs=1))
    finally:
        signal.signal(signal.SIGHUP, kept)
    assert worker.line().startswith("begun")
    assert worker.line() == "over max_jobs False"
    assert worker.line().startswith("begun")  # by the fresh one
    worker.signal(signal.SIGHUP)
    worker.finish_job()
    assert worker.line() == "over max_jobs False"


def test_a_signal_while_the_worker_stops_is_not_the_end_of_the_process(tmp_path: Path, started: list[Process]) -> None:
    fill(tmp_path, "short")
    started.append(worker := Process(tmp_path, max_jobs=1, slow_stop=True))
    assert worker.line().startswith("begun")
    assert worker.line() == "stopping"
    worker.signal(signal.SIGTERM)
    worker.finish_job()  # which lets it go on
    assert worker.line() == "over signal False"
    assert worker.end() == 0


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_comes_while_a_worker_is_replaced_is_for_the_fresh_one() -> None:
    async def go() -> str:
        asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        class Fresh:
            def drain(self, reason: str = "") -> None:
                asked.set_result(reason)

            force = drain

        Signals().hold()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        fresh = Signals()
        fresh.take(Fresh())
        try:
            return await asyncio.wait_for(asked, 5)
        finally:
            fresh.leave()

    assert asyncio.run(go()) == "signal"


@pytest.mark.usefixtures("handlers")
def test_a_terminal_that_is_closed_ends_nothing_that_runs_however_often_it_says_so() -> None:
    async def go() -> list[str]:
        asked: asyncio.Queue[str] = asyncio.Queue()

        class Told:
            def drain(self, reason: str = "") -> None:
                asked.put_nowait(f"drain {reason}")

            def force(self, reason: str = "") -> None:
                asked.put_nowait(f"force {reason}")

        signals = Signals()
        signals.take(Told())
        try:
            heard = []
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
                signal.raise_signal(number)
                heard.append(await asyncio.wait_for(asked.get(), 5))
            return heard
        finally:
            signals.leave()

    assert asyncio.run(go()) == ["drain signal", "drain signal", "force signal"]


def test_a_worker_that_reached_its_limit_becomes_a_fresh_one_under_the_same_number(
    tmp_path: Path, started: list[Process]
) -> None:
    fill(tmp_path, "short", "short", "long")
    started.append(worker := Process(tmp_path, max_jobs=2))
    first = worker.line()
    assert worker.line() == first
    assert worker.line() == "over max_jobs False"
    assert worker.line() == first
    worker.signal(signal.SIGTERM)
    worker.finish_job()
    assert worker.line() == "over signal False"
    assert counts(tmp_path) == {State.COMPLETED: 3}


FORKING = """
import asyncio, multiprocessing, os, signal, time, uvloop
from millpond.worker.signals import Signals

class Told(asyncio.Queue):
    drain = force = asyncio.Queue.put_nowait

def forked(target, argument):
    process = multiprocessing.get_context("fork").Process(target=target, args=(argument,), daemon=True)
    process.start()
    if target is time.sleep:
        process.terminate()
    process.join(5)
    return process.exitcode

async def go():
    signals = Signals()
    signals.take(told := Told())
    does = (time.sleep, 1000), (signal.raise_signal, signal.SIGTERM), (signal.raise_signal, signal.SIGINT)
    codes = [await asyncio.to_thread(forked, *what) for what in does]
    os.kill(os.getpid(), signal.SIGTERM)
    print(codes, await told.get(), signals.count)
    signals.leave()

asyncio.run(go())
uvloop.run(go())
"""


def test_a_signal_to_what_a_task_has_forked_is_not_for_the_worker() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.splitlines() == ["[-15, -15, 1] signal 1"] * 2, done.stderr
