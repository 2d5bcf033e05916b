"""An app's connection: to a data directory or a server, opened when it is first needed; or a worker's own."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import msgspec

from millpond.api import Api
from millpond.errors import InvalidRequest
from millpond.jobs.enqueue import NewJob, enqueue_many
from millpond.jobs.queues import JobSettings, ensure_queue, settings_of
from millpond.model import OnConflict, Produced
from millpond.tasks.portal import OwnPortal, Portal

DATA: Final = "~/.local/share/millpond"  # the command line's own default
SETTINGS_S: Final = 1.0  # for how long a queue's settings are taken as known: jobs are enqueued in loops


class Where(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A data directory, or a server and its token."""

    data: str | None = None
    server: str | None = None
    token: str | None = None

    def __repr__(self) -> str:
        return f"Where({self.server or self.data})"

    def open(self) -> AbstractAsyncContextManager[Any]:
        """For `async with`: an `Api`."""
        if self.server is not None:
            from millpond.client import AsyncClient

            return AsyncClient(self.server, token=self.token)
        from millpond.sharing import open_async

        assert self.data is not None, "one of the two is given"
        return open_async(self.data)


def where(
    data: str | Path | None, server: str | None, token: str | None, environment: Mapping[str, str] = os.environ
) -> Where:
    """What is not given is looked for where the command line looks too."""
    if data is not None and server is not None:
        raise InvalidRequest("data and server name two places to work on; give one of them")
    if data is None and server is None:
        server = environment.get("MILLPOND_SERVER") or None
    if server is not None:
        return Where(server=server, token=token or environment.get("MILLPOND_TOKEN") or None)
    if token is not None:
        raise InvalidRequest("a token is for a server; give its address, or leave the token out")
    found = str(data or environment.get("MILLPOND_DATA") or DATA)
    return Where(data=found if found == ":memory:" else str(Path(found).expanduser().absolute()))


class Connection:
    """For any number of threads and event loops. A forked child opens one of its own."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self._gate = threading.Lock()
        self._bound: tuple[Portal, ...] = ()
        self._own: OwnPortal | None = None
        self._settings: dict[str, tuple[float, JobSettings | None]] = {}
        _connections.add(self)

    @property
    def portal(self) -> Portal:
        bound, own = self._bound, self._own
        if bound:
            return bound[-1]
        if own is not None:
            return own
        with self._gate:
            if self._own is None:
                self._own = OwnPortal(self.where.open)
                atexit.register(self.close)
            return self._own

    def bind(self, portal: Portal) -> None:
        """All calls go through this portal, until it is unbound."""
        self._bound = (*self._bound, portal)
        self._settings.clear()

    def unbind(self, portal: Portal) -> None:
        self._bound = tuple(one for one in self._bound if one is not portal)
        self._settings.clear()

    def close(self) -> None:
        """Used again, it opens again."""
        with self._gate:
            own, self._own = self._own, None
        if own is not None:
            atexit.unregister(self.close)
            own.close()

    def forget(self) -> None:
        """The portal's thread has stayed with the parent, and so has whoever held the gate."""
        self._gate = threading.Lock()
        self._own, self._bound = None, ()

    # ---- enqueueing -------------------------------------------------------------------------------------------

    def enqueue(
        self, queue: str, jobs: Sequence[NewJob], whole: bool, on_conflict: OnConflict = "ignore"
    ) -> Sequence[Produced]:
        """`whole`: the jobs leave nothing to the queue's settings."""
        portal = self.portal
        produced = portal.call(lambda api: self._enqueue(api, queue, jobs, whole, on_conflict))
        portal.enqueued()
        return produced

    async def enqueue_async(
        self, queue: str, jobs: Sequence[NewJob], whole: bool, on_conflict: OnConflict = "ignore"
    ) -> Sequence[Produced]:
        portal = self.portal
        produced = await portal.call_async(lambda api: self._enqueue(api, queue, jobs, whole, on_conflict))
        await portal.enqueued_async()
        return produced

    async def _enqueue(
        self, api: Api, queue: str, jobs: Sequence[NewJob], whole: bool, on_conflict: OnConflict
    ) -> Sequence[Produced]:
        settings = JobSettings() if whole else await self._settings_of(api, queue)
        return await enqueue_many(api, queue, jobs, settings=settings, on_conflict=on_conflict)

    async def _settings_of(self, api: Api, queue: str) -> JobSettings | None:
        known = self._settings.get(queue)
        now = time.monotonic()
        if known is not None and now < known[0]:
            return known[1]
        info = await ensure_queue(api, queue)
        settings = None if info is None else settings_of(info)
        self._settings[queue] = now + SETTINGS_S, settings
        return settings


_connections: WeakSet[Connection] = WeakSet()


def _after_fork() -> None:
    for connection in list(_connections):
        connection.forget()


os.register_at_fork(after_in_child=_after_fork)
