"""What the two clients share: their settings, and requests as bytes. No I/O."""

from __future__ import annotations

import ssl
import uuid
from random import Random, SystemRandom
from typing import Any, Literal

from msgspec import Struct

from millpond.client import asks
from millpond.client.address import Address, PathLike, read_url, tls_context
from millpond.client.asks import Ask, on_wire
from millpond.client.faults import encoded
from millpond.client.http1 import head, request
from millpond.client.merging import Part
from millpond.durations import seconds
from millpond.errors import InvalidRequest
from millpond.model import LEASE_BATCH_MAX, PAYLOAD_BYTES_MAX, Duration, Items, OnConflict
from millpond.wire import JSON, MSGPACK
from millpond.wire.requests import Subscribe

TIMEOUT_S = 30.0  # a restart of the server fits in
CONNECT_TIMEOUT_S = 5.0  # a host that is there answers within one; the rest is for lost packets
CONNECTIONS_MAX = 100  # per client: each costs the server some KiB
IDLE_MAX_S = 50.0  # proxies close after a minute, the server after 75 s: a request must not meet that
REPLY_BYTES_MAX = LEASE_BATCH_MAX * (PAYLOAD_BYTES_MAX + (128 << 10))  # the largest lease, state documents included
CLOSE_GRACE_S = 5.0  # for what loops left; a server that is away gets it back when the leases run out
TIMEOUT_MAX_S = 7 * 86_400.0  # a call that may take longer has no deadline worth the name
CORRELATION_MAX = 128  # as an item's
SUBSCRIBE_SILENCE_S = 60.0  # four keep-alives of the server's

Encoding = Literal["msgpack", "json"]


class Options(Struct, frozen=True, kw_only=True):
    """What may differ from call to call."""

    timeout: float = TIMEOUT_S
    correlation_id: str | None = None
    client_id: str = ""


class Settings(Struct, frozen=True, kw_only=True):
    """What holds for a client as long as it lives. `headers` has the token: it is never shown."""

    address: Address
    headers: dict[str, str]
    encoding: Encoding
    tls: ssl.SSLContext | None
    connect_timeout: float
    connections: int
    linger: float
    reply_bytes_max: int
    patient: bool

    def __repr__(self) -> str:
        return f"Settings({self.address.url!r})"


def settings(
    url: str,
    *,
    token: str | None,
    ca: PathLike | None,
    cert: PathLike | tuple[PathLike, PathLike] | None,
    tls: ssl.SSLContext | None,
    connect_timeout: Duration,
    connections: int,
    linger: float,
    encoding: Encoding,
    reply_bytes_max: int,
    patient: bool,
) -> Settings:
    address = read_url(url)
    if address.tls and tls is None:
        tls = tls_context(address, ca, cert)
    if encoding not in ("msgpack", "json"):
        raise InvalidRequest(f"encoding is {encoding!r:.60}; use 'msgpack' or 'json'")
    if connections < 1 or reply_bytes_max < 1 or not 0 <= linger <= 1:
        raise InvalidRequest("connections and reply_bytes_max are 1 or more, linger is 0 to 1 s; mend them")
    return Settings(
        address=address,
        headers={} if token is None else {"Authorization": f"Bearer {_printable(token, 'token')}"},
        encoding=encoding,
        tls=tls if address.tls else None,
        connect_timeout=timeout_seconds(connect_timeout, "connect_timeout"),
        connections=connections,
        linger=linger,
        reply_bytes_max=reply_bytes_max,
        patient=patient,
    )


def options(before: Options, timeout: Duration | None, correlation_id: str | None, client_id: str | None) -> Options:
    """What is None stays as it was."""
    return Options(
        timeout=before.timeout if timeout is None else timeout_seconds(timeout, "timeout"),
        correlation_id=before.correlation_id
        if correlation_id is None
        else _printable(correlation_id, "correlation_id")[:CORRELATION_MAX],
        client_id=before.client_id if client_id is None else client_id,
    )


def timeout_seconds(value: Duration, name: str) -> float:
    found = seconds(value)
    if found is None or not 0 < found <= TIMEOUT_MAX_S:
        raise InvalidRequest(f"{name} is {value!r:.60}; give a duration above 0, such as 10 or '30s', up to 7 days")
    return found


def _printable(value: str, name: str) -> str:
    """Into a header goes nothing that could end it. The value is not shown: it may be a secret."""
    given: object = value
    if not isinstance(given, str) or not value or not value.isascii() or not value.isprintable():
        raise InvalidRequest(f"{name} is empty or not printable ASCII; mend it")
    return value


class BaseClient:
    """A client's settings and options, and the bytes of its requests."""

    _settings: Settings
    _options: Options
    _heads: dict[str, bytes]

    def _set_up(self, settings: Settings, options: Options) -> None:
        self._settings = settings
        self._options = options
        self._heads = {}
        codec = MSGPACK if settings.encoding == "msgpack" else JSON
        self._encode, self._media_type = codec.encode, codec.media_type
        self._rng = Random(SystemRandom().random())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.address.url!r})"

    def _request(self, call: str, body: Any) -> bytes:
        before = self._heads.get(call)
        if before is None:
            headers = dict(self._settings.headers)
            if self._options.correlation_id is not None:
                headers["X-Correlation-Id"] = self._options.correlation_id
            address = self._settings.address
            before = head(address.prefix, call, address.host_header, self._media_type, headers)
            self._heads[call] = before
        return request(before, encoded(self._encode, body))

    def _subscription(self, queue: str, prefetch: int, lease_timeout: Duration | None, client_id: str) -> bytes:
        """Lines are JSON, whatever the client speaks else."""
        named = client_id or self._options.client_id
        asked = Subscribe(queue=queue, prefetch=prefetch, lease_timeout=on_wire(lease_timeout), client_id=named)
        return self._request("queue.subscribe", asked)

    # ---- calls that may travel together -------------------------------------------------------------------

    def _produce(self, queue: str, items: Items, on_conflict: OnConflict, request_id: str | None) -> Part:
        """Every produce has a request id: sent again it adds nothing."""

        def build(entries: list[Any]) -> Ask[Any]:
            return asks.produce(queue, entries, on_conflict, uuid.uuid4().hex if request_id is None else request_id)

        entries = asks.produce_items(items)
        key = ("produce", repr(queue), repr(on_conflict), self._options)
        return Part(key, entries, asks.size_of(entries), build, alone=request_id is not None)

    def _complete(self, leases: Any, queue: str | None, result: Any) -> Part:
        def build(entries: list[Any]) -> Ask[Any]:
            return asks.complete(entries, queue, result)

        key = ("complete", repr(queue), self._options)
        return Part(key, asks.tokens(leases), 0, build, alone=result is not None)

    def _extend(self, leases: Any, queue: str | None, lease_timeout: Duration | None) -> Part:
        def build(entries: list[Any]) -> Ask[Any]:
            return asks.extend(entries, queue, lease_timeout)

        key = ("extend", repr(queue), repr(lease_timeout), self._options)
        return Part(key, asks.tokens(leases), 0, build)
