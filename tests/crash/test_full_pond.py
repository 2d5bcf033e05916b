"""A pond whose disk is full when it is opened: what is in it can be seen, ended and completed, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from millpond.embedded import AsyncPond
from tests.crash.fulldisk import FullDisk, full_disk

QUOTA = 40 << 20  # room for the reserve twice


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FullDisk]:
    made = FullDisk(tmp_path, QUOTA)
    monkeypatch.setattr(os, "posix_fallocate", made.allocate)
    with full_disk(made):
        yield made


def test_a_queue_is_used_though_the_disk_was_full_before_it_was_opened(tmp_path: Path, disk: FullDisk) -> None:
    async def go() -> None:
        async with AsyncPond(tmp_path) as pond:
            await pond.create_queue("q")
            await pond.produce("q", [Random(n).randbytes(1000) for n in range(5)])
        disk.quota -= disk.free()
        for _ in range(2):
            async with AsyncPond(tmp_path) as pond:
                assert (await pond.stats("q")).counts["ready"] == 5
        async with AsyncPond(tmp_path) as pond:
            [item] = await pond.lease("q")
            await pond.complete([item])
        async with AsyncPond(tmp_path) as pond:
            assert (await pond.stats("q")).counts["ready"] == 4

    asyncio.run(go())


def test_a_queue_without_a_mark_is_marked_when_there_is_room(tmp_path: Path, disk: FullDisk) -> None:
    async def go() -> None:
        async with AsyncPond(tmp_path) as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"x"])
        disk.quota -= disk.free()
        async with AsyncPond(tmp_path) as pond:
            await pond.stats("q")
            manager = pond._manager
            assert not manager.definition("q").dirty
            disk.quota = QUOTA
            manager.sweep()
            await asyncio.wait(list(manager._tasks))
            assert manager.definition("q").dirty
        async with AsyncPond(tmp_path) as pond:
            assert not pond._manager.definition("q").dirty

    asyncio.run(go())
