"""A pond is opened and closed: everybody is answered, nothing is left behind, one owner a directory."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import AsyncPond, Pond, Verdict
from millpond.directory import DirectoryLock
from millpond.errors import Closed, Conflict, InternalError, InvalidRequest, MillpondError, Unavailable
from tests.service.looks import OPERATIONS, files_open_below, threads, until_parked, until_parked_async

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
    with millpond.open(":memory:"):  # what the event loop's library opens once in a process
        pass
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


@pytest.mark.parametrize("name", ["", "meta.db", "queues"])
def test_a_directory_that_another_user_has_left_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whoever runs the tests may be allowed everything, so the system's word is taken from it."""
    with millpond.open(tmp_path) as pond:
        pond.create_queue("q")
        pond.produce("q", ["a"])
    place = tmp_path / name
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place and may(path, mode))
    with pytest.raises(InvalidRequest, match="may not write to"):
        millpond.open(tmp_path)
    monkeypatch.undo()
    with millpond.open(tmp_path) as pond:
        assert [queue.name for queue in pond.list_queues().queues] == ["q"]


def test_a_forked_child_does_not_keep_the_directory(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    inherited = os.dup(lock._file)  # as a child has it
    try:
        lock.release()
        DirectoryLock(tmp_path).release()
    finally:
        os.close(inherited)
