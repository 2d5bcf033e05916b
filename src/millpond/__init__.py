"""millpond: a durable work queue with Spark downstream."""

from millpond.embedded import AsyncPond, Pond, open, open_async
from millpond.errors import MillpondError
from millpond.model import Item, LeasedItem, NewItem, Produced, RedriveFilter, Result, Retry, State

__all__ = [
    "AsyncPond",
    "Item",
    "LeasedItem",
    "MillpondError",
    "NewItem",
    "Pond",
    "Produced",
    "RedriveFilter",
    "Result",
    "Retry",
    "State",
    "open",
    "open_async",
]
