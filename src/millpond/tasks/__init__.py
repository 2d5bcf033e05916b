"""Python tasks: functions that workers call. `millpond.App` is where they are registered."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.tasks.app import App
    from millpond.tasks.context import Context, current
    from millpond.tasks.errors import (
        GiveUp,
        Interrupted,
        ResultGone,
        RetryLater,
        TaskCancelled,
        TaskFailed,
        WrongArguments,
    )
    from millpond.tasks.handle import AsyncHandle, Handle
    from millpond.tasks.task import Task

# Imported when they are asked for: pytest loads our plugin whatever it tests, and the watchers of processes need none.
_MODULES = {
    "millpond.tasks.app": ("App",),
    "millpond.tasks.context": ("Context", "current"),
    "millpond.tasks.errors": (
        "GiveUp",
        "Interrupted",
        "ResultGone",
        "RetryLater",
        "TaskCancelled",
        "TaskFailed",
        "WrongArguments",
    ),
    "millpond.tasks.handle": ("AsyncHandle", "Handle"),
    "millpond.tasks.task": ("Task",),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "App",
    "AsyncHandle",
    "Context",
    "GiveUp",
    "Handle",
    "Interrupted",
    "ResultGone",
    "RetryLater",
    "Task",
    "TaskCancelled",
    "TaskFailed",
    "WrongArguments",
    "current",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'millpond.tasks' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_WHERE[name]), name)
    return value
