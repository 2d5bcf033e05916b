"""What the crew and the services of a worker know of it."""

from __future__ import annotations

from typing import Literal, Protocol

from millpond.api import Api
from millpond.clock import Clock
from millpond.worker.executors import Running
from millpond.worker.hooks import Hooks

Reason = Literal["stopped", "signal", "asked", "max_jobs", "max_rss", "failed"]


class Boss(Protocol):
    api: Api
    clock: Clock
    hooks: Hooks
    host: str
    pid: int
    name: str
    incarnation: str
    replaces: str
    pool: str
    queues: dict[str, float]
    slots: int

    @property
    def running(self) -> int: ...

    @property
    def finished(self) -> int: ...

    @property
    def failed(self) -> int: ...

    @property
    def draining(self) -> bool: ...

    def jobs(self) -> list[Running]: ...

    def drain(self, reason: Reason = "stopped") -> None: ...

    def stir(self) -> None: ...
