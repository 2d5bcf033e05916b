"""What time it is for the server, as a worker knows it."""

from __future__ import annotations

from datetime import datetime, timedelta

from millpond.model import LeasedItem


def by_lease(item: LeasedItem, now: datetime, lease_timeout: float) -> datetime:
    """The worker's clock, within what the lease says of the server's: it was made less than `lease_timeout` ago."""
    end = item.lease_deadline
    return min(max(now, end - timedelta(seconds=lease_timeout)), end)
