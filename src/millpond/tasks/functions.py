"""Which functions can be tasks: what cannot is refused where it is defined, and not when it is first run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Final

from millpond.errors import InvalidRequest
from millpond.jobs.queues import refuse_own
from millpond.model import QUEUE_NAME_MAX, QUEUE_NAME_PATTERN

_QUEUE: Final = re.compile(QUEUE_NAME_PATTERN)


def check_function(function: Callable[..., Any], *, named: bool) -> None:
    """`named`: it was given a name of its own."""
    given: Any = function
    name = getattr(given, "__qualname__", "")
    if not callable(given) or not name:
        raise InvalidRequest(f"a task is a function, not a {type(given).__name__}; decorate one")
    if inspect.isclass(given):
        raise InvalidRequest(f"{name} is a class; decorate a function that makes one")
    if inspect.isgeneratorfunction(given) or inspect.isasyncgenfunction(given):
        raise InvalidRequest(f"{name} yields, and nobody would take what it yields; return a list, or enqueue each")
    if given.__name__ == "<lambda>" and not named:
        raise InvalidRequest("a lambda has no name that a worker could find it by; define a function, or give name=")
    if _is_method(given, name):
        raise InvalidRequest(f"{name} is a method, and a worker has no object to call it on; decorate a plain function")


def _is_method(function: Any, name: str) -> bool:
    """Of a class: one of an object has lost its `self`."""
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # of something built in
        return False
    return first == "self" and "." in name.rpartition("<locals>.")[2]


def check_queue(queue: Any) -> str:
    if not isinstance(queue, str) or len(queue) > QUEUE_NAME_MAX or not _QUEUE.fullmatch(queue):
        raise InvalidRequest(
            f"{queue!r:.60} is not a queue name; use letters, digits, '.', '_' and '-', in parts joined by '/'"
        )
    refuse_own(queue)
    return queue
