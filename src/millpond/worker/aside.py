"""Calls that block for a while, made from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def aside(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """In a thread; or here, if the system has no room for one: a job of whose end nobody tells would keep its slot for
    ever. The call may be made twice.
    """
    try:
        return await asyncio.to_thread(call, *args, **kwargs)
    except RuntimeError:  # "can't start new thread"
        return call(*args, **kwargs)
