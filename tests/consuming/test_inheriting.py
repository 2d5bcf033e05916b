"""A guest's loop goes on when the guest inherits the directory."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import millpond
from tests.service.looks import until_parked


def test_a_guests_loop_outlives_the_owner(tmp_path: Path) -> None:
    async def main() -> list[bytes]:
        owner = millpond.open_async(tmp_path)
        await owner.open()
        await owner.create_queue("q")
        await owner.produce("q", [b"1", b"2"])
        seen = []
        async with millpond.open_async(tmp_path) as guest:
            async for item in guest.consume("q", idle_timeout=0):
                seen.append(item.payload)
                if len(seen) == 1:
                    await item.complete()
                    await owner.close()
            assert not (await guest.list_items("q")).items
        return seen

    assert asyncio.run(main()) == [b"1", b"2"]


def test_a_blocking_guests_loop_outlives_the_owner_while_it_waits(tmp_path: Path) -> None:
    owner = millpond.open(tmp_path)
    owner.create_queue("q")
    owner.produce("q", [b"1"])
    seen: list[bytes] = []
    with millpond.open(tmp_path) as guest, ThreadPoolExecutor(1) as threads:
        consumer = guest.consume("q", wait="10m")
        loop = threads.submit(lambda: seen.extend(item.payload for item in consumer))
        while owner.list_items("q").items:
            pass
        until_parked(owner, "q")
        owner.close()
        guest.produce("q", [b"2"])
        while guest.list_items("q").items:
            pass
        consumer.stop()
        loop.result(10)
    assert seen == [b"1", b"2"]
