"""millpond: a durable work queue with Spark downstream."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import AsyncClient, Client
    from millpond.embedded import AsyncPond
    from millpond.errors import MillpondError
    from millpond.model import (
        Item,
        LeasedItem,
        NewItem,
        Produced,
        RedriveFilter,
        Result,
        Retry,
        State,
        StoreSettings,
        Verdict,
    )
    from millpond.sharing import open, open_async
    from millpond.tasks.app import App

# Imported when they are asked for: a command line that only wants its help should not wait for an engine.
_MODULES = {
    "millpond.blocking": ("Pond",),
    "millpond.client": ("AsyncClient", "Client"),
    "millpond.embedded": ("AsyncPond",),
    "millpond.errors": ("MillpondError",),
    "millpond.model": (
        "Item",
        "LeasedItem",
        "NewItem",
        "Produced",
        "RedriveFilter",
        "Result",
        "Retry",
        "State",
        "StoreSettings",
        "Verdict",
    ),
    "millpond.sharing": ("open", "open_async"),
    "millpond.tasks.app": ("App",),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "App",
    "AsyncClient",
    "AsyncPond",
    "Client",
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
    "StoreSettings",
    "Verdict",
    "open",
    "open_async",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'millpond' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_WHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
