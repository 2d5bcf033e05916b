"""What tests look at from outside: the operations, a queue's settings, the whole of a pond, what a process holds."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from millpond import AsyncPond, Pond
from millpond.api import Api
from millpond.model import QueueInfo

OPERATIONS = [name for name, member in vars(Api).items() if inspect.iscoroutinefunction(member)]
DEFAULTS: dict[str, Any] = {
    "lease_timeout": 30.0,
    "expire_timeout": 14 * 86_400.0,
    "max_attempts": 5,
    "dead_queue": None,
    "dead": "keep",
    "backoff": {"base": 2.0, "cap": 3600.0, "jitter": 0.0},
    "dedup_window": 300.0,
    "completed_retention": 0.0,
    "reference": "",
}


def settings_of(queue: QueueInfo) -> dict[str, Any]:
    return {name: getattr(queue, name) for name in DEFAULTS}


def picture(pond: Pond) -> dict[str, Any]:
    """All that can be seen of a pond's queues. On a clock that stands still it changes only with them."""
    seen: dict[str, Any] = {}
    after: str | None = ""
    while after is not None:
        page = pond.list_queues(after=after)
        for queue in page.queues:
            seen[queue.name] = (pond.stats(queue.name), pond.queue_info(queue.name), pond.list_items(queue.name))
        after = page.next
    return seen


def until_parked(pond: Pond, queue: str, waiters: int = 1) -> None:
    """Each look is a turn of the engine's loop, so this is no busy waiting for long."""
    while pond.stats(queue).waiters < waiters:
        pass


async def until_parked_async(pond: AsyncPond, queue: str, waiters: int = 1) -> None:
    while (await pond.stats(queue)).waiters < waiters:
        pass


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def files_open_below(directory: object) -> list[str]:
    """This process's open files in a directory."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(f"{directory}/"):
            found.append(target)
    return found


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Lets the event loop turn until it holds; a test that waits in vain ends with its timeout."""
    while not await condition():  # noqa: ASYNC110 - what is waited for sets no event
        await asyncio.sleep(0)


async def loaded(pond: AsyncPond) -> set[str]:
    """The queues that are awake, found without waking any."""
    found: set[str] = set()
    after: str | None = ""
    while after is not None:
        page = await pond.list_queues(after=after, limit=1_000)
        found.update(queue.name for queue in page.queues if queue.loaded)
        after = page.next
    return found
