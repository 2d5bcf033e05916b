"""millpond with its partitions in PostgreSQL, through the embedded API, in a process of its own.

`cycle` is one measurement. `python -m benchmarks.on_postgres '{"held": …}'` keeps ponds open for several: it is asked
on standard input, a line of JSON each, and answers on standard output.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

import millpond
from benchmarks.engine import LEASE_TIMEOUT, QUEUE, WAIT, work
from benchmarks.meter import Meter, payloads
from millpond.embedded import AsyncPond
from millpond.model import StoreSettings


class Place(msgspec.Struct, frozen=True):
    """A data directory, and the database that its partitions are in."""

    path: str
    url: str


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many clients in one of the ponds."""

    pond: str
    batch: int
    clients: int
    seconds: float


@asynccontextmanager
async def opened(place: Place, partitions: int) -> AsyncIterator[AsyncPond]:
    stores = [
        StoreSettings(name="default", affinity=0.0),
        StoreSettings(name="postgres", driver="postgres", url=place.url),
    ]
    async with millpond.open_async(place.path, stores=stores) as pond:
        await pond.create_queue(QUEUE, lease_timeout=LEASE_TIMEOUT, partitions=partitions)
        yield pond


async def clients_in(pond: AsyncPond, batch: int, clients: int, seconds: float) -> dict[str, Any]:
    """Each goes round produce, lease, complete of `batch` items, as the peers' clients do."""
    meter = Meter(seconds, adds_first=clients)
    bodies = payloads(batch)

    async def client() -> None:
        while not meter.is_done():
            await pond.produce(QUEUE, bodies)
            if items := await pond.lease(QUEUE, batch=batch, wait=WAIT):
                work(items)
                await pond.complete(items, queue=QUEUE)
                meter.add(len(items))

    await asyncio.gather(*(client() for _ in range(clients)))
    return meter.result()


async def cycle(path: str, url: str, batch: int, clients: int, seconds: float, partitions: int) -> dict[str, Any]:
    async with opened(Place(path, url), partitions) as pond:
        return await clients_in(pond, batch, clients, seconds)


async def answer(places: Mapping[str, Place]) -> None:
    async with AsyncExitStack() as stack:
        ponds = {name: await stack.enter_async_context(opened(place, 1)) for name, place in places.items()}
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = msgspec.json.decode(line, type=Ask)
            found = await clients_in(ponds[asked.pond], asked.batch, asked.clients, asked.seconds)
            print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(answer(msgspec.json.decode(sys.argv[1], type=dict[str, Place])))
