"""How many items are ahead of one that is ready, in the order in which the engine leases.

That is by priority, then first come, first served, where an item comes when it is produced, falls due, is revived or
goes back to the tail: what the engine tells as `updated_at`. They are listed as they were produced, which settles ties.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from millpond.api import Api
from millpond.model import LIST_LIMIT_MAX, Item, State

READY_LOOKED_AT = 10_000  # items: some seconds with a server far away

How = Literal["exactly", "about", "at least"]


class Ahead(msgspec.Struct, frozen=True):
    count: int
    how: How = "exactly"


async def ahead_of(api: Api, queue: str, item: Item) -> Ahead:
    """`about`: it stands in one of several partitions, and a lease takes from all. `at least`: there are too many."""
    mine = item.priority, item.updated_at
    count, looked_at, passed = 0, 0, False
    after: str | None = None
    partitions = {item.partition}
    while True:
        page = await api.list_items(queue, state=State.READY, after=after, limit=LIST_LIMIT_MAX)
        for other in page.items:
            partitions.add(other.partition)
            place = other.priority, other.updated_at
            if other.id == item.id and other.partition == item.partition:
                passed = True
            elif place < mine or (place == mine and not passed):
                count += 1
        looked_at += len(page.items)
        after = page.next
        if after is None:
            return Ahead(count, "exactly" if len(partitions) == 1 else "about")
        if looked_at >= READY_LOOKED_AT:
            return Ahead(count, "at least")
