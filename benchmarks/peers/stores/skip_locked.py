"""A queue in a table, as pgmq and many others have it: rows are inserted, found with SKIP LOCKED, hidden for a while by
an update, and deleted. Clients go round produce, lease, complete; each call takes a connection from the pool.

`skip_locked.py URL '{"batch": 100, "clients": 64, "connections": 16, "way": "async", "lean": false, "seconds": 1}'`

`lean`: without an index on the visibility, and with room in each page, so that a lease need not touch any index. That
is faster as long as few items are hidden, and not what pgmq does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from benchmarks.meter import Meter, payloads

TABLE = """
    CREATE TABLE IF NOT EXISTS item (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        visible_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        leases integer NOT NULL DEFAULT 0,
        payload bytea NOT NULL
    )
"""
INDEX = "CREATE INDEX IF NOT EXISTS item_visible_at ON item (visible_at)"
LEAN = "ALTER TABLE item SET (fillfactor = 50)"
PRODUCE = "INSERT INTO item (payload) SELECT * FROM unnest(%b::bytea[])"
LEASE = """
    WITH found AS (
        SELECT id FROM item WHERE visible_at <= clock_timestamp() ORDER BY id LIMIT %b FOR UPDATE SKIP LOCKED
    )
    UPDATE item SET visible_at = clock_timestamp() + interval '6 hours', leases = leases + 1
        FROM found WHERE item.id = found.id RETURNING item.id, item.payload
"""
COMPLETE = "DELETE FROM item WHERE id = ANY (%b::bigint[])"


class Asked:
    def __init__(
        self, url: str, batch: int, clients: int, connections: int, way: str, lean: bool, seconds: float
    ) -> None:
        self.batch, self.clients, self.way, self.lean = batch, clients, way, lean
        self.bodies = payloads(batch)
        self.meter = Meter(seconds, adds_first=clients)
        self.pool: dict[str, Any] = {
            "conninfo": url,
            "min_size": connections,
            "max_size": connections,
            "timeout": 60,
            "kwargs": {"autocommit": True, "prepare_threshold": 0},
        }


# ---- clients that are coroutines ------------------------------------------------------------------------------


async def work_async(asked: Asked) -> None:
    async with AsyncConnectionPool(**asked.pool, open=False) as pool:
        await pool.wait()
        await asyncio.gather(*(client_async(asked, pool) for _ in range(asked.clients)))


async def client_async(asked: Asked, pool: AsyncConnectionPool) -> None:
    while not asked.meter.is_done():
        async with pool.connection() as connection:
            await connection.execute(PRODUCE, (asked.bodies,), binary=True)
        async with pool.connection() as connection:
            cursor = await connection.execute(LEASE, (asked.batch,), binary=True)
            items = await cursor.fetchall()
        if items:
            async with pool.connection() as connection:
                await connection.execute(COMPLETE, ([number for number, _ in items],), binary=True)
            asked.meter.add(len(items))


# ---- clients that are threads ---------------------------------------------------------------------------------


def work_threads(asked: Asked) -> None:
    lock = threading.Lock()
    with ConnectionPool(**asked.pool, open=False) as pool:
        pool.wait()
        clients = [threading.Thread(target=client_thread, args=(asked, pool, lock)) for _ in range(asked.clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()


def client_thread(asked: Asked, pool: ConnectionPool, lock: threading.Lock) -> None:
    while not asked.meter.is_done():
        with pool.connection() as connection:
            connection.execute(PRODUCE, (asked.bodies,), binary=True)
        with pool.connection() as connection:
            items = connection.execute(LEASE, (asked.batch,), binary=True).fetchall()
        if items:
            with pool.connection() as connection:
                connection.execute(COMPLETE, ([number for number, _ in items],), binary=True)
            with lock:
                asked.meter.add(len(items))


def main() -> None:
    url = sys.argv[1]
    asked = Asked(url, **json.loads(sys.argv[2]))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)
        connection.execute(LEAN if asked.lean else INDEX)
    if asked.way == "async":
        asyncio.run(work_async(asked))
    else:
        work_threads(asked)
    print(json.dumps(asked.meter.result()))


if __name__ == "__main__":
    main()
