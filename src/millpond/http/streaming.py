"""`/v1/queue.subscribe`: items as lines of one response, at most `prefetch` of them unfinished.

The server leases for the stream and keeps the leases of what it sent alive. Clients finish items by ordinary calls;
the app tells the streams which tokens those ended, and a stream that has room leases again. A line is an item, `{}`
(nothing happens, but the stream is alive), or `{"error": …}` as the last. When the client goes away, what it had not
finished goes back at once; when the server drains, it stays the client's, to be finished by ordinary calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from millpond.api import Api
from millpond.errors import InvalidRequest, LeaseLost, MillpondError, TooManyRequests
from millpond.http.exchange import Exchange
from millpond.http.parked import RETRY_AFTER_S, Parked
from millpond.http.refusals import ClientGone
from millpond.model import LEASE_BATCH_MAX, LeasedItem, Result, to_ms
from millpond.wire import JSON
from millpond.wire.payloads import lease_item
from millpond.wire.requests import Subscribe

GiveBack = Callable[[str, Sequence[str]], Awaitable[None]]

MEDIA_TYPE = "application/x-ndjson"
IDLE_LINE = b"{}\n"
WRITE_BYTES = 256 << 10  # several items a write, but not the whole prefetch in memory twice
EXTEND_PAUSE_MIN_S = 0.05  # leases shorter than a few commits cannot be kept, and must not busy the engine
EXTEND_AGAIN_S = 1.0  # after a failure
LOOK_AGAIN_S = 3.0  # between looks at who asks: a revoke must count within 5 s

log = logging.getLogger(__name__)
_lines = msgspec.json.Encoder().encode_lines


class Streams:
    """The open streams, by the lease tokens that each holds."""

    def __init__(
        self,
        api: Api,
        parked: Parked,
        give_back: GiveBack,
        now: Callable[[], int],
        *,
        limit: int,
        keep_alive_s: float,
        stall_s: float,
    ) -> None:
        self.api = api
        self.parked = parked
        self.give_back = give_back
        self.now = now
        self.keep_alive_s = keep_alive_s
        self.stall_s = stall_s
        self._limit = limit
        self._open: set[Stream] = set()
        self._holders: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def serve(self, exchange: Exchange, request: Subscribe) -> None:
        if len(self._open) >= self._limit:
            raise TooManyRequests(
                f"{self._limit} streams are open already, the limit; come back later, or use queue.lease",
                retry_after=RETRY_AFTER_S,
            )
        if not 1 <= request.prefetch <= LEASE_BATCH_MAX:
            raise InvalidRequest(f"prefetch is {request.prefetch:.15g}; use 1 to {LEASE_BATCH_MAX}", path="$.prefetch")
        if request.batch is not None and request.batch < 1:
            raise InvalidRequest(f"batch is {request.batch:.15g}; use 1 or more, or leave it out", path="$.batch")
        stream = Stream(self, exchange, request)
        self._open.add(stream)
        try:
            await stream.run()
        finally:
            self._open.discard(stream)

    def hold(self, tokens: Sequence[str], stream: Stream) -> None:
        for token in tokens:
            self._holders[token] = stream

    def drop(self, token: str) -> None:
        self._holders.pop(token, None)

    def settle(self, tokens: Sequence[str], results: Sequence[Result]) -> None:
        """After every call that may end leases (complete, retry, extend by 0): which of these tokens are over."""
        if not self._holders:
            return
        for token, result in zip(tokens, results, strict=True):
            if token in self._holders and is_over(result):
                self._holders.pop(token).finished(token)

    def drain(self) -> None:
        for stream in self._open:
            stream.drain()


def is_over(result: Result) -> bool:
    return result.ok or (result.error is not None and result.error.code == LeaseLost.code)


class Stream:
    def __init__(self, streams: Streams, exchange: Exchange, request: Subscribe) -> None:
        self._streams = streams
        self._exchange = exchange
        self._request = request
        self._held: dict[str, None] = {}
        self._gone = exchange.gone()
        self._drained = streams.parked.draining
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._pause_s = EXTEND_PAUSE_MIN_S

    async def run(self) -> None:
        self._gone.add_done_callback(lambda _: self._changed.set())
        try:
            await self._run()
        finally:
            if self._keeper is not None:
                self._keeper.cancel()
            await self._let_go()

    async def _run(self) -> None:
        items = await self._lease(wait=0)  # before the first byte: no such queue is still a 404
        await self._exchange.start(200, MEDIA_TYPE)
        try:
            while not self._gone.done():
                await self._write(items)
                if self._drained or self._gone.done():
                    break
                items = await self._next()
        except MillpondError as error:
            await self._exchange.write(JSON.encode_error(error) + b"\n")
        if not self._gone.done():
            await self._exchange.write(b"", last=True)

    def drain(self) -> None:
        self._drained = True
        self._changed.set()

    # ---- items --------------------------------------------------------------------------------------------

    async def _next(self) -> Sequence[LeasedItem]:
        """More items; none when the client should be shown that the stream lives, or when it is to end."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._streams.keep_alive_s
        while (left := until - loop.time()) > 0 and not self._drained and not self._gone.done():
            items = await self._more(min(left, LOOK_AGAIN_S))
            self._exchange.authenticate()
            if items:
                return items
        return ()

    async def _more(self, wait: float) -> Sequence[LeasedItem]:
        """After at most so long, and none as soon as there is room for some."""
        self._changed.clear()
        if len(self._held) < self._request.prefetch:
            return await self._lease(wait)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._changed.wait()
        return ()

    async def _lease(self, wait: float) -> Sequence[LeasedItem]:
        request, api = self._request, self._streams.api
        if self._drained:
            return ()
        items = await self._streams.parked.wait(
            lambda: api.lease(
                request.queue,
                batch=min(request.batch or LEASE_BATCH_MAX, request.prefetch - len(self._held)),
                wait=wait,
                lease_timeout=request.lease_timeout,
                client_id=request.client_id,
            ),
            self._gone,
            (),
        )
        if items:
            self._hold(items)
        return items

    def _hold(self, items: Sequence[LeasedItem]) -> None:
        tokens = [item.lease for item in items]
        self._held |= dict.fromkeys(tokens)
        self._streams.hold(tokens, self)
        self._set_pause(to_ms(items[0].lease_deadline))
        if self._keeper is None:
            self._keeper = asyncio.ensure_future(self._keep())

    def finished(self, token: str) -> None:
        self._held.pop(token, None)
        self._changed.set()

    async def _let_go(self) -> None:
        """A broken stream's items go back; a drained one's stay with the client, which may be at work on them."""
        tokens = list(self._held)
        for token in tokens:
            self._streams.drop(token)
        if tokens and not (self._drained and not self._gone.done()):
            await self._streams.give_back(self._request.queue, tokens)

    # ---- leases -------------------------------------------------------------------------------------------

    def _set_pause(self, deadline: int) -> None:
        """Half of the lease: each token is then extended when at most half of its time is over."""
        self._pause_s = max(EXTEND_PAUSE_MIN_S, (deadline - self._streams.now()) / 2_000)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            tokens = list(self._held)
            if tokens:
                await self._extend(tokens)

    async def _extend(self, tokens: list[str]) -> None:
        request, api = self._request, self._streams.api
        try:
            results = await api.extend(tokens, queue=request.queue, lease_timeout=request.lease_timeout)
        except MillpondError as error:
            log.warning("leases of a stream of %s were not extended: %s", request.queue, error.message)
            self._pause_s = min(self._pause_s, EXTEND_AGAIN_S)
            return
        for token, result in zip(tokens, results, strict=True):
            if result.lease_deadline is not None:
                self._set_pause(to_ms(result.lease_deadline))
            elif is_over(result):
                self._streams.drop(token)
                self.finished(token)

    # ---- lines --------------------------------------------------------------------------------------------

    async def _write(self, items: Sequence[LeasedItem]) -> None:
        """Waits for a client that is slow to read, up to a limit: its items are of use to others."""
        try:
            async with asyncio.timeout(self._streams.stall_s):
                if not items:
                    await self._exchange.write(IDLE_LINE)
                for some in in_writes(items):
                    await self._exchange.write(_lines([lease_item(item.fields, binary=False) for item in some]))
        except TimeoutError:
            log.warning("a stream of %s was not read for %g s and is ended", self._request.queue, self._streams.stall_s)
            raise ClientGone from None


def in_writes(items: Sequence[LeasedItem]) -> Iterator[list[LeasedItem]]:
    """The items in lots of about WRITE_BYTES."""
    lot: list[LeasedItem] = []
    size = 0
    for item in items:
        lot.append(item)
        size += len(item.payload)
        if size >= WRITE_BYTES:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot
