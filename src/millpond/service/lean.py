"""The hot calls without a coroutine: what `millpond.api.Begin` asks for, on the queues that are awake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from millpond.clock import Clock
from millpond.model import Duration, Items, LeaseLike, OnConflict, Retry
from millpond.queue.requests import Complete, Extend, Request, RetryItems
from millpond.queue.runner import Runner
from millpond.service import validate
from millpond.service.manager import QueuesManager
from millpond.service.service import lease_request, produce_request

Done = Callable[[Any], None]


class Begun:
    """A request on its way."""

    __slots__ = ("_request", "_runner")

    def __init__(self, runner: Runner, request: Request) -> None:
        self._runner = runner
        self._request = request

    def withdraw(self) -> None:
        self._runner.withdraw(self._request)


class LeanService:
    def __init__(self, manager: QueuesManager, clock: Clock) -> None:
        self._manager = manager
        self._clock = clock

    def begin_produce(
        self, queue: str, items: Items, on_conflict: OnConflict, request_id: str | None, done: Done
    ) -> Begun | None:
        return self._begin(queue, produce_request(items, on_conflict, request_id, self._clock), done)

    def begin_lease(
        self, queue: str, batch: int, wait: Duration, lease_timeout: Duration | None, client_id: str, done: Done
    ) -> Begun | None:
        return self._begin(queue, lease_request(batch, wait, lease_timeout, client_id), done)

    def begin_complete(self, queue: str, leases: Sequence[LeaseLike], done: Done) -> Begun | None:
        return self._begin(queue, Complete(validate.leases(leases)), done)

    def begin_retry(self, queue: str, items: Sequence[Retry], done: Done) -> Begun | None:
        return self._begin(queue, RetryItems(validate.retries(items, self._clock.now())), done)

    def begin_extend(
        self, queue: str, leases: Sequence[LeaseLike], lease_timeout: Duration | None, done: Done
    ) -> Begun | None:
        timeout = validate.lease_timeout_ms(lease_timeout, low=0)
        return self._begin(queue, Extend(validate.leases(leases), timeout), done)

    def _begin(self, queue: str, request: Request, done: Done) -> Begun | None:
        runner = self._manager.awake(queue)
        if runner is None:
            return None
        runner.accept(request, done)
        return Begun(runner, request)
