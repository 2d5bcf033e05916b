"""The hot calls without a coroutine: what `millpond.api.Begin` asks for, on the queues that are awake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from millpond.clock import Clock
from millpond.model import Duration, Items, LeaseLike, OnConflict, Retry
from millpond.queue.requests import Complete, Extend, Request, RetryItems
from millpond.service import validate
from millpond.service.manager import QueuesManager
from millpond.service.service import lease_request, produce_request

Done = Callable[[Any], None]


class LeanService:
    def __init__(self, manager: QueuesManager, clock: Clock) -> None:
        self._manager = manager
        self._clock = clock

    def begin_produce(
        self, queue: str, items: Items, on_conflict: OnConflict, request_id: str | None, done: Done
    ) -> Request | None:
        return self._begin(queue, produce_request(items, on_conflict, request_id, self._clock), done)

    def begin_lease(
        self, queue: str, batch: int, wait: Duration, lease_timeout: Duration | None, client_id: str, done: Done
    ) -> Request | None:
        return self._begin(queue, lease_request(batch, wait, lease_timeout, client_id), done)

    def begin_complete(self, queue: str, leases: Sequence[LeaseLike], done: Done) -> Request | None:
        return self._begin(queue, Complete(validate.leases(leases)), done)

    def begin_retry(self, queue: str, items: Sequence[Retry], done: Done) -> Request | None:
        return self._begin(queue, RetryItems(validate.retries(items, self._clock.now())), done)

    def begin_extend(
        self, queue: str, leases: Sequence[LeaseLike], lease_timeout: Duration | None, done: Done
    ) -> Request | None:
        return self._begin(
            queue, Extend(validate.leases(leases), validate.lease_timeout_ms(lease_timeout, low=0)), done
        )

    def _begin(self, queue: str, request: Request, done: Done) -> Request | None:
        runner = self._manager.awake(queue)
        return None if runner is None else runner.accept(request, done)
