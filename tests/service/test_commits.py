"""Commits: shared by those who come together, each partition for itself; and the loop in spite of our own bugs."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import NewItem
from millpond.clock import ManualClock
from millpond.errors import InternalError, MillpondError
from millpond.queue.logical import LogicalQueue
from millpond.store.base import Turn
from millpond.store.sqlite import SqliteStore
from tests.service.looks import until, until_parked_async

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
