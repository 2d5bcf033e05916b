"""A queue is deleted: only by force if it has items, with its files, and whole even if the delete was cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import MillpondError, NewItem, Pond, Retry
from millpond.errors import Conflict, InvalidRequest, NotFound, QueueInUse
from millpond.store.sqlite import SqliteStores
from millpond.store.sqlite_registry import SqliteRegistry
from tests.service.looks import DEFAULTS, files_open_below, picture, settings_of, until_parked_async

# ---- delete -----------------------------------------------------------------------------------------------

FILLED: dict[str, Callable[[Pond], object]] = {
    "ready": lambda pond: pond.produce("q", ["x"]),
    "scheduled": lambda pond: pond.produce("q", [NewItem(payload="x", delay="1h")]),
    "leased": lambda pond: (pond.produce("q", ["x"]), pond.lease("q")),
    "retrying": lambda pond: (pond.produce("q", ["x"]), pond.retry(pond.lease("q"))),
    "dead": lambda pond: (pond.produce("q", ["x"]), pond.retry([Retry(lease=pond.lease("q")[0], dead=True)])),
}


@pytest.mark.parametrize("asleep", [True, False])
@pytest.mark.parametrize("state", FILLED)
def test_a_queue_with_items_is_deleted_only_by_force(state: str, asleep: bool, reopen: Callable[[], Pond]) -> None:
    pond = reopen()
    pond.create_queue("q", partitions=4)
    FILLED[state](pond)
    if asleep:
        pond = reopen()
    with pytest.raises(QueueInUse, match="1 items"):
        pond.delete_queue("q")
    assert pond.stats("q").counts[state] == 1
    pond.delete_queue("q", force=True)
    assert pond.list_queues().queues == []
    assert reopen().list_queues().queues == []


def test_an_empty_queue_is_deleted_with_its_files(tmp_path: Path, reopen: Callable[[], Pond]) -> None:
    pond = reopen()
    queue = pond.create_queue("q", completed_retention="1h")
    pond.produce("q", ["x"])
    pond.complete(pond.lease("q"))
    files = tmp_path / "queues" / queue.incarnation
    assert files.exists()
    pond.delete_queue("q")
    assert not files.exists()
    assert files_open_below(files) == []
    for call in (pond.stats, pond.queue_info, pond.delete_queue, pond.pause, pond.lease):
        with pytest.raises(NotFound):
            call("q")


def test_nothing_produced_in_time_is_deleted_without_force(tmp_path: Path) -> None:
    """However produce and delete meet, either the delete or the produce is refused."""

    async def scenario() -> None:
        async with millpond.open_async(tmp_path) as pond:
            for round_ in range(30):
                await pond.create_queue("q")
                if round_ % 2:
                    await pond.stats("q")
                deleting = asyncio.create_task(pond.delete_queue("q"))
                producing = []
                for _ in range(1 + round_ % 5):
                    await asyncio.sleep(0)
                    producing.append(asyncio.create_task(pond.produce("q", ["x"])))
                [deleted, *produced] = await asyncio.gather(deleting, *producing, return_exceptions=True)
                took = [one for one in produced if not isinstance(one, BaseException)]
                assert all(isinstance(one, MillpondError) for one in produced if isinstance(one, BaseException))
                if took:
                    assert isinstance(deleted, QueueInUse)
                    assert (await pond.stats("q")).counts["ready"] == len(took)
                    await pond.delete_queue("q", force=True)
                else:
                    assert deleted is None

    asyncio.run(scenario())


@pytest.mark.parametrize("token", ["token", "item"])
@pytest.mark.parametrize("queue", ["q", None])
def test_tokens_of_a_deleted_queue_are_void(queue: str | None, token: str, reopen: Callable[[], Pond]) -> None:
    pond = reopen()
    pond.create_queue("q")
    pond.produce("q", ["old"])
    [old] = pond.lease("q")
    pond.delete_queue("q", force=True)
    pond.create_queue("q")
    pond.produce("q", ["new"])
    [new] = pond.lease("q")
    assert old.id != new.id
    before = picture(pond)
    lease: Any = old.lease if token == "token" else old
    for results in (
        pond.complete([lease], queue=queue),
        pond.retry([lease], queue=queue),
        pond.retry([Retry(lease=lease, dead=True)], queue=queue),
        pond.extend([lease], queue=queue),
        pond.extend([lease], queue=queue, lease_timeout=0),
    ):
        [result] = results
        assert not result.ok
        assert result.error is not None
        assert result.error.code in ("lease_lost", "invalid")
    with pytest.raises((Conflict, InvalidRequest)):
        pond.write_state(lease, "doc", version=0, queue=queue)
    assert picture(pond) == before
    assert [result.ok for result in reopen().complete([new.lease])] == [True]


def test_a_recreated_queue_starts_anew(reopen: Callable[[], Pond]) -> None:
    pond = reopen()
    first = pond.create_queue("q", max_attempts=9)
    pond.pause("q")
    pond.produce("q", [NewItem(payload="x", id="mine", key="k")], request_id="r")
    pond.delete_queue("q", force=True)
    second = pond.create_queue("q")
    assert first.incarnation != second.incarnation
    assert settings_of(second) == DEFAULTS
    assert not second.paused
    [produced] = pond.produce("q", [NewItem(payload="y", id="mine", key="k")], request_id="r")
    assert not produced.duplicate
    assert [item.text for item in reopen().lease("q", batch=9)] == ["y"]


def test_those_who_wait_at_a_queue_are_answered_when_it_is_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with millpond.open_async(tmp_path) as pond:
            await pond.create_queue("q", partitions=2)
            waiting = [asyncio.create_task(pond.lease("q", wait="10m")) for _ in range(5)]
            await until_parked_async(pond, "q", 5)
            await pond.delete_queue("q")
            assert await asyncio.gather(*waiting) == [[]] * 5
            with pytest.raises(NotFound):
                await pond.lease("q", wait="10m")

    asyncio.run(scenario())


# ---- what a delete that was cut short leaves --------------------------------------------------------------


@contextmanager
def cut_short(monkeypatch: pytest.MonkeyPatch, where: type, step: str) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise OSError("cut short")

    with monkeypatch.context() as patch:
        patch.setattr(where, step, fail)
        yield


def test_files_that_a_delete_left_behind_are_removed_at_open(
    tmp_path: Path, reopen: Callable[[], Pond], monkeypatch: pytest.MonkeyPatch
) -> None:
    pond = reopen()
    kept, gone = (pond.create_queue(name, partitions=2) for name in ("kept", "gone"))
    for name in ("kept", "gone"):
        pond.produce(name, ["x"])
    with cut_short(monkeypatch, SqliteStores, "destroy"):
        pond.delete_queue("gone", force=True)
    assert (tmp_path / "queues" / gone.incarnation).exists()
    with pytest.raises(NotFound):
        pond.stats("gone")
    pond = reopen()
    assert {path.name for path in (tmp_path / "queues").iterdir()} == {kept.incarnation}
    assert pond.stats("kept").counts["ready"] == 1


def test_a_delete_that_failed_leaves_the_queue_as_it_was(
    reopen: Callable[[], Pond], monkeypatch: pytest.MonkeyPatch
) -> None:
    pond = reopen()
    pond.create_queue("q")
    pond.produce("q", ["x"])
    with cut_short(monkeypatch, SqliteRegistry, "remove"), pytest.raises(MillpondError) as caught:
        pond.delete_queue("q", force=True)
    assert (caught.value.status, caught.value.retryable) == (503, True)
    assert pond.stats("q").counts["ready"] == 1
    assert [item.text for item in reopen().lease("q")] == ["x"]


def test_what_is_not_ours_is_left_alone_at_open(tmp_path: Path, reopen: Callable[[], Pond]) -> None:
    reopen().create_queue("q")
    strangers = [tmp_path / "queues" / name for name in ("lost+found", ".trash", "Backup-2026", "notes")]
    for folder in strangers:
        folder.mkdir(parents=True)
        (folder / "0.db").write_text("mine")
    (tmp_path / "queues" / ".DS_Store").write_text("mine")
    (tmp_path / "queues" / "abcdefgh").write_text("a file where a folder should be")
    assert [queue.name for queue in reopen().list_queues().queues] == ["q"]
    assert all((folder / "0.db").read_text() == "mine" for folder in strangers)
    assert (tmp_path / "queues" / ".DS_Store").exists()
