"""Locks of the logging module that an interruption has left taken.

Before Python 3.13 logging takes its locks just before a `try`. An exception that is raised in a thread from outside
comes right there if the thread had to wait for the lock, and nobody else could log any more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any


def let_go_of_logging() -> None:
    """For a thread that is not logging just now: what it holds of these locks it holds by mistake."""
    for lock in _locks():
        while lock._is_owned():
            lock.release()


def _locks() -> Iterator[Any]:
    """Those of all handlers, and the module's own."""
    module: Any = logging
    for reference in list(module._handlerList):
        lock = getattr(reference(), "lock", None)
        if hasattr(lock, "_is_owned"):
            yield lock
    yield module._lock
