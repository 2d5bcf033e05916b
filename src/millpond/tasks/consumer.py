"""Handlers of a queue's plain items: what is no job, but is worked on by a worker all the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
C = TypeVar("C")


class Consumer(Generic[P, C]):
    """It is given the LeasedItem. To return completes the item, with a result if there is one; to raise retries it."""

    def __init__(self, queue: str, function: Callable[P, C], timeout: float | None) -> None:
        update_wrapper(self, function)
        self.queue = queue
        self.function = function
        self.timeout = timeout
        self.arguments = None
        self.is_async = inspect.iscoroutinefunction(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<consumer of {self.queue}>"


AnyConsumer = Consumer[Any, Any]
