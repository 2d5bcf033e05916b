"""The blocking client, for any number of threads.

with millpond.Client("http://127.0.0.1:7410") as client:
    client.produce("jobs", [b"work"])
"""

from __future__ import annotations

import copy
import os
import ssl
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

from millpond.client import asks
from millpond.client.address import DEFAULT_URL, PathLike
from millpond.client.asks import Ask
from millpond.client.base import (
    CLOSE_GRACE_S,
    CONNECT_TIMEOUT_S,
    CONNECTIONS_MAX,
    REPLY_BYTES_MAX,
    TIMEOUT_S,
    Encoding,
    Options,
    Settings,
    options,
    settings,
)
from millpond.client.gather import Gather
from millpond.client.merging import Part
from millpond.client.operations import Operations
from millpond.client.pool import Abort, Pool
from millpond.client.retrying import Tries, closed
from millpond.client.subscribe import Stream, subscription
from millpond.consuming.calls import Consumes, Wake
from millpond.consuming.consume import Lease
from millpond.consuming.held import Hand, HeldItem, Holding
from millpond.consuming.keeper import Keeper
from millpond.consuming.pauses import Pauses
from millpond.consuming.subscribe import PREFETCH, Subscription
from millpond.errors import MillpondError
from millpond.model import Duration
from millpond.wire.replies import LeaseItem

T = TypeVar("T")


class Core:
    """What the views of one client share. A forked child begins anew: its parent's connections are not its own."""

    def __init__(self, settings: Settings, client: Client) -> None:
        self._settings = settings
        self._client = client
        self.renew()
        _cores.add(self)

    def renew(self) -> None:
        self.closing = threading.Event()
        self.pool = Pool(self._settings)
        self.gather = Gather(self._settings.linger)
        self.keeper = Keeper(self._client)

    def close(self) -> None:
        self.keeper.close(CLOSE_GRACE_S)
        self.closing.set()
        self.pool.close()
        self.keeper.join()


_cores: WeakSet[Core] = WeakSet()


def _after_fork() -> None:
    for core in list(_cores):
        core.pool.forget()
        if not core.closing.is_set():
            core.renew()


os.register_at_fork(after_in_child=_after_fork)


class Client(Operations, Consumes):
    """`timeout` is for a whole call, its repeats included; a lease's `wait` comes on top.

    What fails for a reason that passes is tried again until then; nothing is produced twice by it. `token` is sent
    as `Authorization: Bearer`. `ca` and `cert` are files for TLS, `tls` a context for all else. `linger` is how long,
    in seconds, a small call may wait for company: it needs none to be sent with what gathers behind another. Without
    `patient` a full disk is told at once: somebody waits who can mend it.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout: Duration = TIMEOUT_S,
        client_id: str = "",
        correlation_id: str | None = None,
        ca: PathLike | None = None,
        cert: PathLike | tuple[PathLike, PathLike] | None = None,
        tls: ssl.SSLContext | None = None,
        connect_timeout: Duration = CONNECT_TIMEOUT_S,
        connections: int = CONNECTIONS_MAX,
        linger: float = 0.0,
        encoding: Encoding = "msgpack",
        reply_bytes_max: int = REPLY_BYTES_MAX,
        patient: bool = True,
    ) -> None:
        made = settings(
            url,
            token=token,
            ca=ca,
            cert=cert,
            tls=tls,
            connect_timeout=connect_timeout,
            connections=connections,
            linger=linger,
            encoding=encoding,
            reply_bytes_max=reply_bytes_max,
            patient=patient,
        )
        self._set_up(made, options(Options(), timeout, correlation_id, client_id))
        self._core = Core(made, self)

    def with_options(
        self,
        *,
        timeout: Duration | None = None,
        correlation_id: str | None = None,
        client_id: str | None = None,
    ) -> Self:
        """The same client for some calls: `client.with_options(timeout=2).stats("jobs")`. Connections are shared."""
        view = copy.copy(self)
        view._options = options(self._options, timeout, correlation_id, client_id)
        view._heads = {}
        return view

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """What loops left is handed back, calls under way end with an error, connections are closed. Twice is once."""
        self._core.close()

    # ---- calls --------------------------------------------------------------------------------------------

    def _call(self, ask: Ask[T], abort: Abort | None = None) -> T:
        return self._call_until(ask, time.monotonic() + ask.wait + self._options.timeout, abort)

    def _call_until(self, ask: Ask[T], deadline: float, abort: Abort | None = None) -> T:
        core = self._core
        now = time.monotonic()
        tries = Tries(ask, now, deadline, self._rng, patient=self._settings.patient)
        while True:
            request = self._request(ask.name, tries.request(now))
            try:
                return tries.answer(core.pool.exchange(request, deadline, abort))
            except MillpondError as error:
                if core.closing.is_set():
                    raise closed() from error
                if abort is not None and abort.aborted:
                    raise
                pause = tries.pause(error, time.monotonic())
            if core.closing.wait(pause):
                raise closed()
            now = time.monotonic()

    def _gather(self, part: Part) -> Sequence[Any]:
        deadline = time.monotonic() + self._options.timeout
        if not part.small:
            return self._call_until(part.ask(), deadline)
        return self._core.gather.submit(part, deadline, self._call_until)

    # ---- items --------------------------------------------------------------------------------------------

    def _lease(
        self,
        queue: str,
        batch: int,
        wait: Duration,
        lease_timeout: Duration | None,
        client_id: str,
        abort: Abort | None = None,
    ) -> Sequence[HeldItem]:
        ask = asks.lease(queue, batch, wait, lease_timeout, client_id or self._options.client_id)
        holding = Holding(self, queue, lease_timeout, self._core.keeper)
        return [_held(item, holding) for item in self._call(ask, abort)]

    def _keeper_of_leases(self) -> Keeper:
        return self._core.keeper

    def _leasing(self, queue: str, lease_timeout: Duration | None, client_id: str) -> tuple[Lease, Wake]:
        abort = Abort()

        def lease(batch: int, wait: float) -> Sequence[HeldItem]:
            return self._lease(queue, batch, wait, lease_timeout, client_id, abort)

        return lease, abort.abort

    def subscribe(
        self, queue: str, *, prefetch: int = PREFETCH, lease_timeout: Duration | None = None, client_id: str = ""
    ) -> Subscription:
        """Items as they come, over one connection, at most `prefetch` of them unfinished.

        The server keeps their leases alive; finish them with `item.complete()`, `item.retry()` or `with item:`. When
        the stream breaks, it is opened again, and what was unfinished comes anew.
        """
        request = self._subscription(queue, prefetch, lease_timeout, client_id)
        core = self._core
        holding = Holding(self, queue, lease_timeout, core.keeper, kept=True)
        items = subscription(core.pool, request, self._options.timeout, core.closing, Pauses(self._rng))
        return Stream(_held(item, holding) for item in items)


def _held(item: LeaseItem, holding: Holding) -> HeldItem:
    fields = asks.leased_fields(item)
    return HeldItem(fields.payload, 0, None, fields, Hand(holding))
