"""Another process has had a partition: its turns are not taken for our own, though they have the same numbers."""

from __future__ import annotations

import asyncio
from random import Random

from millpond.clock import ManualClock
from millpond.service.manager import QueuesManager
from millpond.service.service import Service
from millpond.store.memory import MemoryRegistry, MemoryStores


def test_what_another_owner_has_written_is_not_acknowledged_as_ours() -> None:
    async def scenario() -> None:
        clock, stores, registries = ManualClock(), MemoryStores(), (MemoryRegistry(), MemoryRegistry())
        managers = [QueuesManager(registry, {"default": stores}, clock, Random(0)) for registry in registries]
        one, two = (Service(manager, clock) for manager in managers)
        await managers[0].open()
        await one.create_queue("q", lease_timeout="1h")
        registries[1].put(registries[0].load())
        await managers[1].open()
        ids = []
        for service, text in ((one, "a"), (two, "b"), (one, "c"), (two, "d")):
            await service.stats("q")
            ids += [made.id for made in await service.produce("q", [text])]
            clock.advance(1)
        assert len(set(ids)) == 4
        leased = list(await one.lease("q", batch=2))
        clock.advance(1)
        leased += await two.lease("q", batch=2)
        assert sorted(item.text for item in leased) == ["a", "b", "c", "d"]
        for manager in managers:
            await manager.close()

    asyncio.run(scenario())
