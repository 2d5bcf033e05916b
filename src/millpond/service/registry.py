"""The registry of queues as the manager asks it: in a thread of its own, with errors that callers are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from millpond.clock import Clock
from millpond.errors import DiskFull, MillpondError, Unavailable
from millpond.meters import EngineMeter
from millpond.model import AuditEntry, Check, QueueDefinition
from millpond.queue.lane import STALL_MS
from millpond.service.call_thread import CallThread
from millpond.service.health import registry_check
from millpond.store.base import Registry, StoreFailed, StoreFull

T = TypeVar("T")
AGAIN_MS = 1_000  # after it failed: at most so often is it tried for the sake of readiness


class RegistryDesk:
    """Between `open` and `close`; one call at a time, in the order in which they were made."""

    def __init__(self, registry: Registry, clock: Clock, meter: EngineMeter) -> None:
        self._registry = registry
        self._clock = clock
        self._meter = meter
        self._thread: CallThread | None = None
        self._asked: dict[object, int] = {}  # when each call that is under way was made
        self._error: MillpondError | None = None  # of the last call
        self._tried_at = 0

    @property
    def is_open(self) -> bool:
        return self._thread is not None

    @property
    def alive(self) -> bool:
        """False: its thread has ended though it should not have."""
        return self._thread is None or self._thread.alive

    def open(self) -> None:
        self._thread = CallThread("millpond-registry")

    async def close(self) -> None:
        await self.run(self._registry.close)
        assert self._thread is not None
        self._thread.stop()
        self._thread = None

    async def load(self) -> list[QueueDefinition]:
        return await self.run(self._registry.load)

    async def put(self, definitions: Sequence[QueueDefinition], entries: Sequence[AuditEntry] = ()) -> None:
        await self.run(self._registry.put, definitions, entries)

    async def remove(self, name: str, incarnation: str, entries: Sequence[AuditEntry]) -> None:
        await self.run(self._registry.remove, name, incarnation, entries)

    async def gone(self, incarnations: Sequence[str]) -> list[str]:
        return await self.run(self._registry.gone, incarnations)

    async def audit(self, name: str, before: int | None, limit: int) -> list[tuple[int, AuditEntry]]:
        return await self.run(self._registry.audit, name, before, limit)

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """In the registry's thread: also for what lies beside it on the same disk."""
        assert self._thread is not None, "checked by whoever was asked"
        asked = object()
        self._asked[asked] = self._clock.now()
        try:
            value = await self._thread.run(call, *arguments)
        except StoreFull as error:
            text = f"the disk is full, so no queue can be changed ({error}); make room, then retry"
            raise self._failed(DiskFull(text)) from error
        except (StoreFailed, OSError) as error:
            text = f"the registry of queues fails ({error}); check the disk, then retry"
            raise self._failed(Unavailable(text)) from error
        finally:
            del self._asked[asked]
        self._error = None
        return value

    def _failed(self, error: MillpondError) -> MillpondError:
        self._error = error
        self._meter.registry_failures += 1
        return error

    def check(self, now: int) -> Check:
        return registry_check(
            failed=self._error is not None,
            full=isinstance(self._error, DiskFull),
            stalled=any(now - asked > STALL_MS for asked in self._asked.values()),
        )

    def is_to_be_tried(self, now: int) -> bool:
        """Its last call failed, and it is time for another. Tells so once."""
        if self._error is None or now - self._tried_at < AGAIN_MS:
            return False
        self._tried_at = now
        return True
