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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, overload
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
from millpond.client.consume import WAIT_S, Consumer, Consuming, idle_seconds
from millpond.client.durations import seconds
from millpond.client.gather import Gather
from millpond.client.held import Held, HeldItem
from millpond.client.keeper import Keeper
from millpond.client.merging import Part
from millpond.client.operations import Operations
from millpond.client.pool import Abort, Pool
from millpond.client.retrying import Pauses, Tries, closed
from millpond.client.subscribe import subscription
from millpond.client.watch import period
from millpond.errors import Forbidden, MillpondError
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


class Client(Operations):
    """`timeout` is for a whole call, its repeats included; a lease's `wait` comes on top.

    What fails for a reason that passes is tried again until then; nothing is produced twice by it. `token` is sent
    as `Authorization: Bearer`. `ca` and `cert` are files for TLS, `tls` a context for all else. `linger` is how long,
    in seconds, a small call may wait for company: it needs none to be sent with what gathers behind another.
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
        tries = Tries(ask, now, deadline, self._rng)
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
        return [self._held(item, queue, lease_timeout) for item in self._call(ask, abort)]

    def _held(self, item: LeaseItem, queue: str, lease_timeout: Duration | None) -> HeldItem:
        fields = asks.leased_fields(item)
        held = HeldItem(fields.payload, 0, None, fields, self, queue, lease_timeout)
        held.keep, held.drop = self._keep, self._core.keeper.drop
        return held

    def _keep(self, item: Held) -> None:
        """While a `with` has it."""
        self._core.keeper.keep(item, period(item, item.lease_timeout))

    @overload
    def consume(
        self,
        queue: str,
        *,
        batch: int = 1,
        wait: Duration = WAIT_S,
        lease_timeout: Duration | None = None,
        client_id: str = "",
        idle_timeout: Duration | None = None,
    ) -> Consumer: ...

    @overload
    def consume(
        self,
        queue: str,
        handler: Callable[[HeldItem], Any],
        *,
        batch: int = 1,
        wait: Duration = WAIT_S,
        lease_timeout: Duration | None = None,
        client_id: str = "",
        idle_timeout: Duration | None = None,
    ) -> None: ...

    def consume(
        self,
        queue: str,
        handler: Callable[[HeldItem], Any] | None = None,
        *,
        batch: int = 1,
        wait: Duration = WAIT_S,
        lease_timeout: Duration | None = None,
        client_id: str = "",
        idle_timeout: Duration | None = None,
    ) -> Consumer | None:
        """Items for ever, or until none came for `idle_timeout`. See `millpond.client.consume` for how they end.

        `batch` items are leased at a time, and their leases kept alive in the background until it is their turn.
        """
        abort = Abort()
        consuming = Consuming(
            queue=queue,
            wait=seconds(wait) or 0.0,
            idle=idle_seconds(idle_timeout),
            lease_timeout=self._lease_timeout(queue) if lease_timeout is None else lease_timeout,
        )
        lease = partial(self._lease, queue, batch, lease_timeout=lease_timeout, client_id=client_id, abort=abort)
        consumer = Consumer(consuming, lease, self._core.keeper, Pauses(self._rng), abort.abort)
        if handler is None:
            return consumer
        consumer.run(handler)
        return None

    def _lease_timeout(self, queue: str) -> float | None:
        try:
            return self.queue_info(queue).lease_timeout
        except Forbidden:  # then the leases' deadlines must do
            return None

    def subscribe(
        self, queue: str, *, prefetch: int = 10, lease_timeout: Duration | None = None, client_id: str = ""
    ) -> Iterator[HeldItem]:
        """Items as they come, over one connection, at most `prefetch` of them unfinished.

        The server keeps their leases alive; finish them with `item.complete()`, `item.retry()` or `with item:`. When
        the stream breaks, it is opened again, and what was unfinished comes anew.
        """
        request = self._subscription(queue, prefetch, lease_timeout, client_id)
        core, timeout = self._core, self._options.timeout
        for item in subscription(core.pool, request, timeout, core.closing, Pauses(self._rng)):
            held = self._held(item, queue, lease_timeout)
            held.keep = None
            yield held
