"""The engine inside a process: blocking and async alike, any number of threads, callers that go."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import AsyncPond, LeasedItem, Pond
from millpond.api import Api
from millpond.queue.logical import LogicalQueue
from millpond.queue.requests import Lease
from millpond.service.service import Service
from tests.service.looks import OPERATIONS, until_parked, until_parked_async


@pytest.fixture
def pond(tmp_path: Path) -> Iterator[Pond]:
    with millpond.open(tmp_path / "data") as made:
        made.create_queue("q")
        yield made


# ---- one API ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_forms_of_an_operation_have_one_signature(operation: str) -> None:
    wanted = inspect.signature(getattr(Api, operation))
    for form in (Service, AsyncPond, Pond):
        method = getattr(form, operation)
        found = inspect.signature(method)
        assert inspect.iscoroutinefunction(method) is (form is not Pond)
        assert list(found.parameters) == list(wanted.parameters)
        items = {AsyncPond: "AsyncHeldItem", Pond: "HeldItem"}.get(form, "LeasedItem")  # these finish themselves
        assert found.return_annotation == wanted.return_annotation.replace("LeasedItem", items)
        for name, parameter in wanted.parameters.items():
            same = parameter.replace(default=found.parameters[name].default) if parameter.default is ... else parameter
            assert found.parameters[name] == same, f"{form.__name__}.{operation}({name})"


def test_no_form_has_an_operation_that_the_others_lack() -> None:
    def public(form: type) -> set[str]:
        return {name for name, member in inspect.getmembers(form, inspect.isfunction) if not name.startswith("_")}

    assert public(Service) == set(OPERATIONS)
    loops = {"consume", "subscribe"}
    assert public(AsyncPond) == {
        *OPERATIONS,
        *loops,
        "open",
        "close",
        "change_stores",
        "has_directory",
        "leased_count",
        "queue_of",
        "reading",
        "live",
        "ready",
    }
    assert public(Pond) == {*OPERATIONS, *loops, "close"}


def test_blocking_and_async_calls_see_the_same_queues(tmp_path: Path) -> None:
    with millpond.open(tmp_path) as blocking:
        blocking.create_queue("q", max_attempts=2)
        blocking.produce("q", ["a"])

    async def scenario() -> Sequence[LeasedItem]:
        async with millpond.open_async(tmp_path) as pond:
            assert (await pond.queue_info("q")).max_attempts == 2
            await pond.produce("q", ["b"])
            return await pond.lease("q", batch=9)

    items = asyncio.run(scenario())
    assert [item.text for item in items] == ["a", "b"]
    with millpond.open(str(tmp_path)) as blocking:
        assert [result.ok for result in blocking.complete(items)] == [True, True]


@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_list_that_its_caller_changes_meanwhile_is_completed_as_it_was(as_tokens: bool) -> None:
    async def scenario() -> None:
        async with millpond.open_async(":memory:") as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"a", b"b", b"c"])
            items = list(await pond.lease("q", batch=3))
            leases: list[Any] = [item.lease for item in items] if as_tokens else items
            completing = asyncio.ensure_future(pond.complete(leases, queue="q"))
            await asyncio.sleep(0)  # it has been asked, and nothing was done yet
            leases[:] = ["something else"]
            assert [result.ok for result in await completing] == [True] * 3

    asyncio.run(scenario())


# ---- threads ----------------------------------------------------------------------------------------------


def test_many_threads_share_a_pond(path: str) -> None:
    produced, consumed = 16 * 25, []
    with millpond.open(path) as pond, ThreadPoolExecutor(32) as pool:
        pond.create_queue("q", partitions=2)

        def produce(thread: int) -> None:
            for number in range(25):
                pond.produce("q", [f"{thread}-{number}"])

        def consume(_: int) -> list[str]:
            done = []
            while items := pond.lease("q", batch=7, wait="10s"):
                work = [item for item in items if item.text != "stop"]
                assert all(result.ok for result in pond.complete(items))
                done += [item.text for item in work]
                if len(work) < len(items):
                    break
            return done

        consumers = [pool.submit(consume, number) for number in range(8)]
        for producer in [pool.submit(produce, number) for number in range(16)]:
            producer.result()
        while any(not consumer.done() for consumer in consumers):
            pond.produce("q", ["stop"])
        for consumer in consumers:
            consumed += consumer.result()
    assert sorted(consumed) == sorted(f"{thread}-{number}" for thread in range(16) for number in range(25))
    assert len(consumed) == produced


def test_a_parked_lease_is_woken_by_another_thread(path: str) -> None:
    with millpond.open(path) as pond, ThreadPoolExecutor(1) as pool:
        pond.create_queue("q")
        waiting = pool.submit(pond.lease, "q", wait="15m")
        until_parked(pond, "q")
        assert not waiting.done()
        pond.produce("q", ["x"])
        assert [item.text for item in waiting.result()] == ["x"]


MAIN_ENDS = """
import sys, threading, millpond
pond = millpond.open(sys.argv[1])
ended = threading.Event()

def work():
    main.join()
    pond.create_queue("late", partitions=2)
    pond.produce("late", ["x"])
    print([item.text for item in pond.lease("late", wait="10s")])
    pond.close()

main = threading.current_thread()
threading.Thread(target=work).start()
"""


def test_threads_that_outlive_the_main_thread_go_on(tmp_path: Path) -> None:
    script = [sys.executable, "-c", MAIN_ENDS, str(tmp_path)]
    ran = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "['x']\n", "")


def test_futures_are_what_threads_wait_for(pond: Pond) -> None:
    """A call's coroutine runs in the engine's thread, never in the caller's."""
    seen: Future[str] = Future()
    submit = LogicalQueue.submit

    def spying(queue: LogicalQueue, request: Any, now: int) -> None:
        if not seen.done():
            seen.set_result(threading.current_thread().name)
        submit(queue, request, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogicalQueue, "submit", spying)
        pond.produce("q", ["x"])
    assert seen.result() == "millpond-engine"


# ---- callers that go --------------------------------------------------------------------------------------


def test_a_cancelled_lease_leaves_no_waiter(path: str) -> None:
    async def scenario() -> None:
        async with millpond.open_async(path) as pond:
            await pond.create_queue("q")
            waiting = asyncio.create_task(pond.lease("q", wait="15m"))
            await until_parked_async(pond, "q")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await pond.stats("q")).waiters == 0
            await pond.produce("q", ["x"])
            [item] = await pond.lease("q")
            assert (item.attempts, item.deliveries) == (1, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(12))
def test_a_lease_cancelled_at_any_moment_gives_its_items_back(turns: int, path: str) -> None:
    """Before, during and after its commit; also when the reply is there but has not been received."""

    async def scenario() -> None:
        async with millpond.open_async(path) as pond:
            await pond.create_queue("q", partitions=2)
            await pond.produce("q", ["a", "b"])
            await pond.produce("q", ["c"])
            leasing = asyncio.create_task(pond.lease("q", batch=9))
            for _ in range(turns):
                await asyncio.sleep(0)
            taken = leasing.done()
            leasing.cancel()
            if taken:
                await pond.extend([item.lease for item in await leasing], lease_timeout=0)
            else:
                with pytest.raises(asyncio.CancelledError):
                    await leasing

            items: list[LeasedItem] = []
            while len(items) < 3:  # a partition that is in a commit hands out its own a little later
                items += await pond.lease("q", batch=9, wait="15m")
            assert sorted(item.text for item in items) == ["a", "b", "c"]
            assert {item.attempts for item in items} == {2 if taken else 1}

    asyncio.run(scenario())


def test_a_reply_that_was_delivered_but_not_received_goes_back(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with millpond.open_async(path) as pond:
            await pond.create_queue("q")
            leasing: asyncio.Task[Sequence[LeasedItem]]
            answer = Lease.answer

            def answer_and_cancel(request: Lease, value: Any) -> None:
                answer(request, value)
                if value:  # the future has its result, and the task has not run since
                    leasing.cancel()

            with monkeypatch.context() as patch:
                patch.setattr(Lease, "answer", answer_and_cancel)
                leasing = asyncio.create_task(pond.lease("q", batch=2, wait="15m"))
                await until_parked_async(pond, "q")
                await pond.produce("q", ["a", "b"])
                with pytest.raises(asyncio.CancelledError):
                    await leasing
            items = await pond.lease("q", batch=2, wait="15m")
            assert [(item.text, item.attempts, item.deliveries) for item in items] == [("a", 1, 2), ("b", 1, 2)]

    asyncio.run(scenario())


def test_a_timeout_around_a_lease_loses_nothing(path: str) -> None:
    async def scenario() -> None:
        async with millpond.open_async(path) as pond:
            await pond.create_queue("q")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pond.lease("q", wait="15m"), timeout=0.001)
            await pond.produce("q", ["x"])
            [item] = await pond.lease("q")
            assert item.attempts == 1

    asyncio.run(scenario())


def test_an_interrupt_ends_a_blocking_lease(pond: Pond) -> None:
    """As Ctrl-C does, in the main thread. Nobody waits in its name any more."""
    assert threading.current_thread() is threading.main_thread()

    def interrupt() -> None:
        until_parked(pond, "q")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            pond.lease("q", wait="15m")
        interrupting.result()
    while pond.stats("q").waiters:
        pass
    pond.produce("q", ["x"])
    [item] = pond.lease("q")
    assert (item.text, item.attempts, item.deliveries) == ("x", 1, 1)
