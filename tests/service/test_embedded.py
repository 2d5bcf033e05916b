"""The engine inside a process: blocking and async alike, any number of threads, one owner a directory."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import AsyncPond, LeasedItem, NewItem, Pond, Verdict
from millpond.api import Api
from millpond.clock import ManualClock
from millpond.directory import DirectoryLock
from millpond.errors import Closed, Conflict, InternalError, InvalidRequest, MillpondError, Unavailable
from millpond.queue.logical import LogicalQueue
from millpond.queue.requests import Lease
from millpond.service.service import Service
from millpond.store.base import Turn
from millpond.store.sqlite import SqliteStore
from tests.service.looks import files_open_below, threads, until, until_parked, until_parked_async

OPERATIONS = [name for name, member in vars(Api).items() if inspect.iscoroutinefunction(member)]


@pytest.fixture(params=["memory", "directory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ":memory:" if request.param == "memory" else str(tmp_path / "data")


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


# ---- closing ----------------------------------------------------------------------------------------------


def test_close_answers_parked_leases_with_nothing(path: str) -> None:
    async def scenario() -> None:
        pond = millpond.open_async(path)
        await pond.open()
        for name in ("q", "other"):
            await pond.create_queue(name)
        waiting = [asyncio.create_task(pond.lease(name, wait="15m")) for name in ("q", "q", "other")]
        await until_parked_async(pond, "q", 2)
        await until_parked_async(pond, "other")
        await pond.close()
        assert await asyncio.gather(*waiting) == [[], [], []]

    asyncio.run(scenario())


def test_close_answers_leases_that_other_threads_wait_for(path: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        pond = millpond.open(path)
        pond.create_queue("q")
        waiting = [pool.submit(pond.lease, "q", wait="15m") for _ in range(8)]
        until_parked(pond, "q", 8)
        pond.close()
        assert [one.result() for one in waiting] == [[]] * 8


def calls_of(pond: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "create_queue", partial(pond.create_queue, "new")
    yield "update_queue", partial(pond.update_queue, "q", max_attempts=2)
    yield "list_queues", pond.list_queues
    for name in (
        "queue_info",
        "delete_queue",
        "pause",
        "resume",
        "stats",
        "lease",
        "clear",
        "redrive",
        "list_items",
        "rebalance",
    ):
        for queue in ("q", "unknown"):
            yield name, partial(getattr(pond, name), queue)
    yield "produce", partial(pond.produce, "q", ["x"])
    for name in ("complete", "retry", "extend"):
        for given in ("q", None):
            yield name, partial(getattr(pond, name), ["token"], queue=given)
    yield "write_state", partial(pond.write_state, "token", "doc", version=0)
    yield "cancel", partial(pond.cancel, "q", ["id"])
    yield "get_item", partial(pond.get_item, "q", "id")
    yield "bury", partial(pond.bury, "q", ["id"])
    yield "make_ready", partial(pond.make_ready, "q", ["id"])
    yield "open_consumer", partial(pond.open_consumer, "q", "reader")
    for name in ("claim", "read_claim", "complete_claim", "release_claim", "abort_stage"):
        yield name, partial(getattr(pond, name), "q", "name")
    yield "give_verdicts", partial(pond.give_verdicts, "q", "name", [Verdict(id="id", verdict="dead")])
    yield "stage", partial(pond.stage, "q", "txn", "chunk", ["x"])
    yield "publish_stage", partial(pond.publish_stage, "q", "txn", ["chunk"])
    for name in ("list_claims", "read_journal", "audit"):
        yield name, partial(getattr(pond, name), "q")


def test_calls_after_close_say_so(path: str) -> None:
    pond = millpond.open(path)
    pond.create_queue("q")
    pond.close()
    assert {name for name, _ in calls_of(pond)} == set(OPERATIONS)
    for _, call in calls_of(pond):
        with pytest.raises(Closed, match="; ") as caught:
            call()
        assert (caught.value.status, caught.value.retryable) == (503, True)
    pond.close()


def test_async_calls_before_open_and_after_close_say_so(path: str) -> None:
    async def refuses_all(pond: AsyncPond) -> None:
        for _, call in calls_of(pond):
            with pytest.raises(Closed, match="; "):
                await call()

    async def scenario() -> None:
        pond = millpond.open_async(path)
        await refuses_all(pond)
        await pond.close()
        await pond.open()
        await pond.create_queue("q")
        await pond.close()
        await refuses_all(pond)
        await pond.close()
        await pond.open()
        assert [queue.name for queue in (await pond.list_queues()).queues] == ["q"]
        with pytest.raises(Conflict):
            await pond.open()
        assert (await pond.queue_info("q")).loaded
        await pond.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("closers", [1, 3])
def test_calls_that_race_with_close_are_all_answered(closers: int, tmp_path: Path) -> None:
    """None hangs, and what was acknowledged is there afterwards."""
    for round_ in range(10):
        path = tmp_path / str(round_)
        pond = millpond.open(path)
        pond.create_queue("q")
        start = threading.Barrier(8 + closers)

        def work(pond: Pond = pond, start: threading.Barrier = start) -> int:
            start.wait()
            acknowledged = 0
            try:
                while True:
                    pond.produce("q", ["x"])
                    acknowledged += 1
            except Closed:
                return acknowledged

        def close(pond: Pond = pond, start: threading.Barrier = start) -> None:
            start.wait()
            pond.close()

        with ThreadPoolExecutor(8 + closers) as pool:
            working = [pool.submit(work) for _ in range(8)]
            closing = [pool.submit(close) for _ in range(closers)]
            for one in closing:
                one.result()
            acknowledged = sum(one.result() for one in working)
        with millpond.open(path) as pond:
            found = pond.stats("q").counts["ready"]
        assert acknowledged <= found <= acknowledged + 8  # of each thread one produce may have been cut off


def test_nothing_is_left_behind_after_close(tmp_path: Path) -> None:
    threads_before, files_before = threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with millpond.open(tmp_path) as pond:
            for number in range(5):
                pond.create_queue(f"q{number}", partitions=3)
                pond.produce(f"q{number}", ["x"])
            assert len(threads() - threads_before) > 5
            assert files_open_below(tmp_path)
            for number in range(5):
                pond.delete_queue(f"q{number}", force=True)
        assert threads() == threads_before
        assert files_open_below(tmp_path) == []
        assert len(os.listdir("/proc/self/fd")) == files_before


def test_nothing_is_left_behind_after_a_failed_open(tmp_path: Path) -> None:
    (tmp_path / "meta.db").write_bytes(b"no database" * 1_000)
    threads_before, files_before = threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(Unavailable, match="damaged"):
            millpond.open(tmp_path)
        assert threads() == threads_before
        assert len(os.listdir("/proc/self/fd")) == files_before


# ---- one owner --------------------------------------------------------------------------------------------


def test_a_pond_that_was_never_opened_owns_nothing(tmp_path: Path) -> None:
    idle = millpond.open_async(tmp_path / "data")
    assert not (tmp_path / "data").exists()
    with millpond.open(tmp_path / "data"):
        pass
    assert idle is not None


@pytest.mark.parametrize("below", ["", "data", "deep/er/data"])
def test_a_file_in_the_way_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidRequest, match=r"as data directory .*; choose another"):
        millpond.open(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("name", ["lock", "meta.db", "queues"])
def test_something_else_in_place_of_our_files_is_refused(name: str, tmp_path: Path) -> None:
    if name == "queues":
        (tmp_path / name).write_text("a file")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(MillpondError) as caught:
        millpond.open(tmp_path)
    assert not isinstance(caught.value, InternalError)
    assert "; " in caught.value.message


def test_a_forked_child_does_not_keep_the_directory(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    inherited = os.dup(lock._file)  # as a child has it
    try:
        lock.release()
        DirectoryLock(tmp_path).release()
    finally:
        os.close(inherited)


# ---- commits ----------------------------------------------------------------------------------------------


def test_concurrent_produces_share_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = 0
    commit = SqliteStore.commit

    def counting(store: SqliteStore, turn: Turn) -> None:
        nonlocal commits
        commits += 1
        commit(store, turn)

    async def scenario() -> None:
        async with millpond.open_async(tmp_path) as pond:
            await pond.create_queue("q")
            await pond.stats("q")
            monkeypatch.setattr(SqliteStore, "commit", counting)
            await asyncio.gather(*(pond.produce("q", [f"{number}"]) for number in range(1_000)))
            assert commits <= 10
            items = await pond.lease("q", batch=1_000)
            await asyncio.gather(*(pond.complete([item]) for item in items))
            assert commits <= 20

    asyncio.run(scenario())


def test_produces_of_many_threads_share_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one commit is under way, what the others want gathers for the next."""
    entered, release, commits = threading.Event(), threading.Event(), 0
    commit = SqliteStore.commit

    def gated(store: SqliteStore, turn: Turn) -> None:
        nonlocal commits
        commits += 1
        entered.set()
        assert release.wait(60)
        commit(store, turn)

    with millpond.open(tmp_path) as pond, ThreadPoolExecutor(64) as pool:
        pond.create_queue("q")
        pond.stats("q")
        monkeypatch.setattr(SqliteStore, "commit", gated)
        first = pool.submit(pond.produce, "q", ["first"])
        assert entered.wait(60)
        submitted: list[int] = []
        submit = LogicalQueue.submit

        def counted(queue: LogicalQueue, request: Any, now: int) -> None:
            submit(queue, request, now)
            submitted.append(1)
            if len(submitted) == 63:
                release.set()

        monkeypatch.setattr(LogicalQueue, "submit", counted)
        rest = [pool.submit(pond.produce, "q", [str(number)]) for number in range(63)]
        for one in [first, *rest]:
            one.result()
        assert commits == 2


def test_a_slow_disk_does_not_hold_up_other_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, stuck = threading.Event(), threading.Event()
    commit = SqliteStore.commit

    async def scenario() -> None:
        async with millpond.open_async(tmp_path) as pond:
            slow = await pond.create_queue("slow")
            await pond.create_queue("quick")
            for name in ("slow", "quick"):
                await pond.stats(name)

            def blocking(store: SqliteStore, turn: Turn) -> None:
                if slow.incarnation in str(store._path):
                    stuck.set()
                    assert release.wait(60)
                commit(store, turn)

            monkeypatch.setattr(SqliteStore, "commit", blocking)
            held = asyncio.create_task(pond.produce("slow", ["x"]))
            behind = asyncio.create_task(pond.lease("slow", wait="15m"))
            await asyncio.get_running_loop().run_in_executor(None, stuck.wait, 60)
            for number in range(20):
                await pond.produce("quick", [str(number)])
                await pond.complete(await pond.lease("quick"))
            await pond.create_queue("new")
            assert len((await pond.list_queues()).queues) == 3
            assert not held.done()
            release.set()
            await held
            assert [item.text for item in await behind] == ["x"]

    try:
        asyncio.run(scenario())
    finally:
        release.set()


def test_partitions_commit_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=60)
    commit = SqliteStore.commit

    def meeting(store: SqliteStore, turn: Turn) -> None:
        together.wait()
        commit(store, turn)

    async def scenario() -> None:
        async with millpond.open_async(tmp_path) as pond:
            await pond.create_queue("q", partitions=2)
            await pond.stats("q")
            with monkeypatch.context() as patch:
                patch.setattr(SqliteStore, "commit", meeting)
                await asyncio.gather(pond.produce("q", ["a"]), pond.produce("q", ["b"]))

    asyncio.run(scenario())


# ---- bugs of ours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place", ["assign_tokens", "assign_produces", "assign_leases", "run_lifecycle", "answer_stats", "start_operation"]
)
def test_a_bug_in_the_loop_answers_everyone_and_loses_nothing(
    place: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async def scenario() -> None:
        async with millpond.open_async(path) as pond:
            await pond.create_queue("q")
            await pond.produce("q", ["a"])
            [held] = await pond.lease("q")
            parked = asyncio.create_task(pond.lease("q", wait="15m"))
            await until_parked_async(pond, "q")
            with monkeypatch.context() as patch:
                patch.setattr(f"millpond.queue.logical.{place}", broken)
                calls = [
                    *(pond.produce("q", ["b"]), pond.complete([held]), pond.stats("q"), pond.get_item("q", held.id)),
                    *(pond.lease("q", wait="15m"), pond.extend([held]), pond.clear("q"), parked),
                ]
                answers = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(answer, MillpondError) for answer in answers if isinstance(answer, BaseException))
            assert any(isinstance(answer, InternalError) for answer in answers)

            async def back() -> bool:
                try:
                    return (await pond.stats("q")).partitions[0].status == "open"
                except InternalError:
                    return False

            await until(back)
            counts = (await pond.stats("q")).counts
            assert counts["leased"] + counts["ready"] >= 1 or isinstance(answers[1], list)
            await pond.produce("q", [NewItem(payload="after")])

    asyncio.run(scenario())


def test_a_bug_while_closing_does_not_hold_up_the_close(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async def scenario() -> None:
        pond = millpond.open_async(path, clock=ManualClock())
        await pond.open()
        await pond.create_queue("q")
        await pond.stats("q")
        producing = asyncio.create_task(pond.produce("q", ["a"]))
        for _ in range(3):
            await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(LogicalQueue, "_finish_parts", broken)
            await pond.close()
        [answer] = await asyncio.gather(producing, return_exceptions=True)
        assert isinstance(answer, MillpondError) or [one.duplicate for one in answer] == [False]  # type: ignore[union-attr]

    asyncio.run(scenario())


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
