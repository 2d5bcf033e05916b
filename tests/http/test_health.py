"""What /health and /ready say of a real engine, and what metrics show when a store fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from millpond.clock import ManualClock
from millpond.embedded import AsyncPond
from millpond.errors import Unavailable
from millpond.queue.lane import STALL_MS
from millpond.service.registry import AGAIN_MS
from millpond.store.base import StoreFailed, StoreFull, Turn
from millpond.store.sqlite import SqliteStore
from millpond.store.sqlite_registry import SqliteRegistry
from tests.http.scrape import Scrape, run
from tests.service.looks import until


@pytest.fixture(scope="module", autouse=True)
def way() -> str:
    """Once is enough: nothing here depends on which way a call goes."""
    return "lean"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# ---- stores -----------------------------------------------------------------------------------------------


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Commits wait until the event is set."""
    release, commit = threading.Event(), SqliteStore.commit

    def waiting(store: SqliteStore, turn: Turn) -> None:
        assert release.wait(60)
        commit(store, turn)

    monkeypatch.setattr(SqliteStore, "commit", waiting)
    yield release
    release.set()


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_partition_that_hangs_is_shown_and_not_waited_for(
    tmp_path: Path, clock: ManualClock, hung: threading.Event
) -> None:
    async def scenario(pond: AsyncPond) -> None:
        await pond.create_queue("q")
        await pond.stats("q")
        produce = asyncio.ensure_future(pond.produce("q", [b"x"]))
        lane = pond._manager._runners["q"].queue.state.lanes[0]

        async def under_way() -> bool:
            return lane.job is not None

        await until(under_way)
        clock.advance(STALL_MS)
        assert Scrape(pond)("partitions", store="default", status="stalled") == 0
        assert pond.ready().status == "ready"
        clock.advance(1)
        scrape = Scrape(pond)
        assert scrape("partitions", store="default", status="stalled") == 1
        assert scrape("queue_partitions_away", queue="q") == 1
        assert scrape("store_job_age_seconds", store="default") == (STALL_MS + 1) / 1000
        assert scrape.items("q") == {"ready": 1}
        assert pond.ready().reason == "1 of 1 loaded partitions are away; see the log and check the disk"
        assert pond.live().status == "ok"  # a restart would not mend the disk
        hung.set()
        await produce
        assert Scrape(pond)("partitions", store="default", status="open") == 1
        assert pond.ready().status == "ready"

    run(scenario, tmp_path, clock)


def test_failures_of_a_store_are_counted_and_one_partition_less_is_a_warning(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(pond: AsyncPond) -> None:
        await pond.create_queue("whole")
        await pond.stats("whole")
        monkeypatch.setattr(SqliteStore, "recover", failing(StoreFailed("no such disk")))
        await pond.create_queue("broken")
        await pond.stats("broken")
        scrape = Scrape(pond)
        assert scrape("store_failures_total", store="default", job="load", reason="failed") >= 1
        assert scrape("queue_partitions_away", queue="broken") == 1
        assert 'transitions_total{queue="whole"' in scrape.text
        assert 'transitions_total{queue="broken"' not in scrape.text  # what it has done is not known yet
        ready = pond.ready()
        assert (ready.status, ready.checks["partitions"].status) == ("ready", "warning")
        assert "broken" not in msgspec.json.encode(ready).decode()
        monkeypatch.undo()

    run(scenario, tmp_path, clock)


def test_a_full_disk_is_a_warning(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = SqliteStore.commit

    def without_room(store: SqliteStore, turn: Turn) -> None:
        if turn.chunks:
            store.close()  # after a failed commit nothing works until it is recovered
            raise StoreFull("no room")
        commit(store, turn)

    async def scenario(pond: AsyncPond) -> None:
        await pond.create_queue("q")
        await pond.produce("q", [b"x"])
        [item] = await pond.lease("q")
        monkeypatch.setattr(SqliteStore, "commit", without_room)
        refused = asyncio.ensure_future(pond.produce("q", [b"y"]))

        async def full() -> bool:
            return pond.ready().checks["disk"].status == "warning"

        await until(full)
        assert pond.ready().status == "ready"
        assert (await pond.complete([item]))[0].ok
        scrape = Scrape(pond)
        assert scrape("partitions", store="default", status="full") == 1
        assert scrape("store_failures_total", store="default", job="turn", reason="full") == 1
        monkeypatch.undo()
        refused.cancel()
        await asyncio.gather(refused, return_exceptions=True)

    run(scenario, tmp_path, clock)


# ---- health -----------------------------------------------------------------------------------------------


def test_an_engine_is_ready_from_open_to_close(tmp_path: Path) -> None:
    async def scenario() -> None:
        pond = AsyncPond(tmp_path)
        assert pond.ready().checks["open"].status == "failed"
        async with pond:
            assert msgspec.to_builtins(pond.ready()) == {
                "status": "ready",
                "checks": {name: {"status": "ok"} for name in ("open", "draining", "registry", "partitions", "disk")},
            }
            assert pond.live().status == "ok"
            assert pond.ready(draining=True).reason == "the server is shutting down"
        assert pond.ready().status == "not_ready"

    asyncio.run(scenario())


def test_a_registry_that_fails_is_tried_again_for_whoever_asks(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(pond: AsyncPond) -> None:
        await pond.create_queue("q")
        monkeypatch.setattr(SqliteRegistry, "put", failing(StoreFailed("no such disk")))
        with pytest.raises(Unavailable):
            await pond.create_queue("r")
        assert pond.ready().checks["registry"].status == "failed"
        assert Scrape(pond)("registry_failures_total") == 1
        monkeypatch.undo()

        async def well() -> bool:
            clock.advance(AGAIN_MS)
            return pond.ready().status == "ready"

        await until(well)

    run(scenario, tmp_path, clock)


def test_a_registry_without_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pond: AsyncPond) -> None:
        monkeypatch.setattr(SqliteRegistry, "put", failing(StoreFull("no room")))
        await asyncio.gather(pond.create_queue("r"), return_exceptions=True)
        ready = pond.ready()
        assert (ready.status, ready.checks["registry"].status) == ("ready", "warning")

    run(scenario, tmp_path)


def test_a_registry_that_hangs_is_not_waited_for(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release, put = threading.Event(), threading.Event(), SqliteRegistry.put

    def waiting(*arguments: object) -> None:
        entered.set()
        assert release.wait(60)
        put(*arguments)  # type: ignore[arg-type]

    async def scenario(pond: AsyncPond) -> None:
        monkeypatch.setattr(SqliteRegistry, "put", waiting)
        create = asyncio.ensure_future(pond.create_queue("q"))
        await asyncio.to_thread(entered.wait, 60)
        assert pond.ready().status == "ready"
        clock.advance(STALL_MS + 1)
        assert pond.ready().checks["registry"].status == "failed"
        release.set()
        await create
        assert pond.ready().status == "ready"

    run(scenario, tmp_path, clock)


def test_a_commit_thread_that_died_is_a_reason_to_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        pond = AsyncPond(tmp_path)
        await pond.open()
        await pond.create_queue("q")
        await pond.stats("q")
        thread = pond._manager._runners["q"]._threads[0]
        assert pond.live().status == "ok"
        thread._jobs.put(None)  # it ends, as after something that is no Exception
        thread._thread.join()
        assert pond.live().status == "failed"
        assert pond.live().reason == "1 commit threads have died; restart the server"
        del pond._manager._runners["q"]._threads[0]  # so that there is one to close with
        await pond.close()

    asyncio.run(scenario())
