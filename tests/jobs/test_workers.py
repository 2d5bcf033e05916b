"""Workers as others see them."""

from __future__ import annotations

import argparse
import asyncio
import os
from datetime import datetime
from typing import Any

import pytest

from millpond import NewItem
from millpond.cli import worker_stop
from millpond.jobs import processes
from millpond.jobs.names import WORKERS_QUEUE
from millpond.jobs.workers import (
    LEASH_TIMEOUT,
    LOST_AFTER,
    RUNNING_MAX,
    RunningJob,
    WorkerInfo,
    ask_to_stop,
    farewell,
    heartbeat,
    list_workers,
    stop_asked,
)
from tests.jobs.conftest import Mill, Run
from tests.jobs.trouble import Late


def info_of(incarnation: str, now: datetime, **more: Any) -> WorkerInfo:
    given: dict[str, Any] = {"host": "h", "pid": 1, "name": "w", "queues": {"jobs": 1}, **more}
    return WorkerInfo(incarnation=incarnation, started_at=now, heartbeat_at=now, **given)


def worker(mill: Mill, incarnation: str = "w1", **more: Any) -> WorkerInfo:
    return info_of(incarnation, mill.now, **more)


def test_a_worker_is_listed_while_its_heart_beats(run: Run) -> None:
    async def act(mill: Mill) -> None:
        assert await list_workers(mill.pond) == []
        running = [RunningJob(id=f"j{n}", queue="jobs", since=mill.now) for n in range(RUNNING_MAX + 5)]
        await heartbeat(mill.pond, worker(mill))
        mill.pass_(1)
        await heartbeat(mill.pond, worker(mill, "w2", running=running, running_count=len(running)))
        mill.pass_(LOST_AFTER - 2)
        await heartbeat(mill.pond, worker(mill, "w2", running=running, running_count=len(running), done=7))
        first, second = await list_workers(mill.pond)
        assert (first.incarnation, second.incarnation, second.done) == ("w1", "w2", 7)
        assert (len(second.running), second.running_count) == (RUNNING_MAX, RUNNING_MAX + 5)
        await mill.pass_in(WORKERS_QUEUE, 2)
        assert [one.incarnation for one in await list_workers(mill.pond)] == ["w2"]
        await farewell(mill.pond, "w2")
        assert await list_workers(mill.pond) == []

    run(act)


def test_a_worker_that_waits_hears_at_once_that_it_is_to_stop(run: Run) -> None:
    async def act(mill: Mill) -> None:
        assert await ask_to_stop(mill.pond, ["w1"]) == []
        await heartbeat(mill.pond, worker(mill))
        assert not await stop_asked(mill.pond, "w1", wait=0)
        hearing = asyncio.create_task(stop_asked(mill.pond, "w1"))
        assert await ask_to_stop(mill.pond, ["w1", "w2"]) == ["w1"]
        assert await hearing

    run(act)


def test_a_worker_that_was_asked_while_it_was_busy_hears_it_later(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await stop_asked(mill.pond, "w1", wait=0)
        await ask_to_stop(mill.pond, ["w1"])
        mill.pass_(60)
        assert await stop_asked(mill.pond, "w1", wait=0)

    run(act)


def test_one_that_was_asked_twice_knows_of_it(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await stop_asked(mill.pond, "w1", wait=0)
        for _ in range(2):
            assert await ask_to_stop(mill.pond, ["w1", "not yet"]) == ["w1"]

    run(act)


def test_a_worker_that_has_only_just_registered_is_asked_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_stop, "LOOK_S", 0.0)
    looks: list[None] = []

    async def act(mill: Mill) -> None:
        async def work() -> None:
            assert await stop_asked(mill.pond, "w1")
            await farewell(mill.pond, "w1")

        async def look() -> None:
            looks.append(None)
            if len(looks) == 2:  # they were asked before
                working.append(asyncio.create_task(work()))

        working: list[asyncio.Task[None]] = []
        await heartbeat(mill.pond, worker(mill))
        pond: Any = Late(mill.pond, "list_items", look, queue=WORKERS_QUEUE)
        asked = argparse.Namespace(workers=[], all=True, force=False, no_wait=False, timeout=5.0, json=True)
        assert await worker_stop._stop(pond, asked) == 0
        await working[0]

    run(act)


def test_the_leash_of_a_worker_that_died_goes_with_time(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await stop_asked(mill.pond, "w1", wait=0)
        await mill.pass_in(WORKERS_QUEUE, LEASH_TIMEOUT + 1)
        assert await ask_to_stop(mill.pond, ["w1"]) == []
        assert (await mill.pond.list_items(WORKERS_QUEUE, kind="leash")).items == []

    run(act)


@pytest.mark.parametrize("payload", [b"", b"{}", b'{"incarnation": 3}', b"\xff"])
def test_what_no_worker_has_written_is_passed_over(run: Run, payload: bytes) -> None:
    async def act(mill: Mill) -> None:
        await heartbeat(mill.pond, worker(mill))
        await mill.pond.produce(WORKERS_QUEUE, [NewItem(payload=payload, kind="worker", expire_timeout=60)])
        assert len(await list_workers(mill.pond)) == 1

    run(act)


def test_a_worker_whose_process_was_killed_on_this_machine_is_lost(run: Run) -> None:
    async def act(mill: Mill) -> None:
        own = processes.name_of(os.getpid())
        earlier = f"{own.rpartition('/')[0]}/1"  # the number is another's by now
        for name, pid, process in (("here", os.getpid(), own), ("gone", os.getpid(), earlier), ("far", 1, "x/y/1")):
            more = {"pid": pid, "process": process, "slots": 2, "running_count": 1}
            await heartbeat(mill.pond, worker(mill, name, **more))
        found = {one.incarnation: one for one in await list_workers(mill.pond)}
        assert {name: one.status for name, one in found.items()} == {
            "far": "running",
            "gone": "lost",
            "here": "running",
        }
        assert (found["gone"].active, found["gone"].serves("jobs"), found["gone"].running_count) == (False, False, 0)

    run(act)
