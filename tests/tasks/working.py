"""A worker on a pond in memory, for tests of the pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from millpond import App, AsyncPond
from millpond.tasks.pools import executors
from millpond.tasks.portal import Portal
from millpond.worker.runner import Worker


@asynccontextmanager
async def working(
    app: App, *, pond: AsyncPond | None = None, slots: int = 2, lease_timeout: str | None = None
) -> AsyncIterator[Worker]:
    """The app is bound to the worker's pond before the worker starts. Drained at the end."""
    async with AsyncExitStack() as stack:
        if pond is None:
            pond = await stack.enter_async_context(AsyncPond(":memory:"))
        portal = Portal(asyncio.get_running_loop(), pond)
        app.connection.bind(portal)
        pools = executors(app, pond, slots=slots)
        queues = dict.fromkeys(app.queues, 1.0)
        for queue in app.consumers:
            await pond.create_queue(queue, completed_retention="1d", backoff={"base": 0})
        worker = Worker(
            pond, pools, queues=queues, slots=slots, services=False, lease_timeout=lease_timeout, hooks=app.hooks()
        )
        run = asyncio.create_task(worker.run(signals=False))
        try:
            yield worker
        finally:
            worker.drain()
            await run
            app.connection.unbind(portal)


def run(act: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await act()

    return asyncio.run(limited())
