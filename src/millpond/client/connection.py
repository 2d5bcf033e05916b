"""A blocking connection.

What went wrong is told by what it means: Unavailable, nothing was done; OutcomeUnknown, the server may have done it.
"""

from __future__ import annotations

import select
import socket
import ssl
import time

from millpond.client.base import IDLE_MAX_S, Settings
from millpond.client.http1 import Reply, ReplyParser
from millpond.errors import BadReply, OutcomeUnknown, Unavailable

READ_BYTES = 256 << 10  # a lease of a thousand small items in one read
CONNECT_MIN_S = 1e-3  # 0 would not wait at all, and never connect


class Connection:
    def __init__(self, settings: Settings, deadline: float) -> None:
        self._url = settings.address.url
        self._tls = settings.tls is not None
        self._parser = ReplyParser(settings.reply_bytes_max)
        self.idle_since = 0.0
        timeout = min(settings.connect_timeout, max(CONNECT_MIN_S, deadline - time.monotonic()))
        try:
            self._socket = _connected(settings, timeout)
        except ssl.SSLCertVerificationError as error:
            raise BadReply(f"{self._url} has no certificate to trust ({_words(error)}); check ca=") from error
        except OSError as error:
            raise Unavailable(f"cannot connect to {self._url} ({_words(error)}); is the server up?") from error
        self._socket.setblocking(False)  # a timeout would cost a system call a step
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._writable.register(self._socket, select.POLLOUT)

    def exchange(self, request: bytes, deadline: float) -> Reply:
        try:
            self._send(request, deadline)
        except OSError as error:
            early = self._early_reply()
            if early is None:
                raise Unavailable(f"{self._url} did not take the request ({_words(error)}); try again") from error
            return early
        while True:
            reply = self._parser.feed(self.read(deadline))
            if reply is not None:
                return reply

    def _send(self, request: bytes, deadline: float) -> None:
        rest = memoryview(request)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                _wait(self._writable, deadline)
            except ssl.SSLWantReadError:
                _wait(self._readable, deadline)

    def _receive(self, deadline: float) -> bytes:
        if not self._tls:
            _wait(self._readable, deadline)
        while True:
            try:
                return self._socket.recv(READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                _wait(self._readable, deadline)
            except ssl.SSLWantWriteError:
                _wait(self._writable, deadline)

    def _early_reply(self) -> Reply | None:
        """A server that will not read all of a request may have said why before it closed."""
        try:
            return self._parser.feed(self._socket.recv(READ_BYTES))
        except OSError:
            return None

    def start(self, request: bytes, deadline: float) -> Reply | None:
        """For a stream: returns when the headers are there; with the reply, if that is whole already."""
        try:
            self._send(request, deadline)
        except OSError as error:
            raise Unavailable(f"{self._url} did not take the request ({_words(error)}); try again") from error
        reply = None
        while reply is None and self._parser.status != 200:
            reply = self._parser.feed(self.read(deadline))
        return reply

    def more(self, silence: float) -> tuple[bytes, bool]:
        """What has come of a stream's body, and whether that was the end."""
        data = self._parser.drain()
        if data:
            return data, False
        ended = self._parser.feed(self.read(time.monotonic() + silence))
        return (self._parser.drain(), False) if ended is None else (ended.body, True)

    def read(self, deadline: float) -> bytes:
        try:
            data = self._receive(deadline)
        except TimeoutError as error:
            raise OutcomeUnknown(f"{self._url} did not answer in time; raise timeout=, or look there") from error
        except OSError as error:
            raise OutcomeUnknown(f"the connection to {self._url} broke ({_words(error)}); try again") from error
        if not data:
            what = "in the middle of a reply" if self._parser.begun else "without a reply"
            raise OutcomeUnknown(f"{self._url} closed the connection {what}; try again")
        return data

    @property
    def is_stale(self) -> bool:
        """Closed by the server, or about to be. Nothing may have come while nothing was asked."""
        return time.monotonic() - self.idle_since > IDLE_MAX_S or bool(self._readable.poll(0))

    def abort(self) -> None:
        """From another thread: whoever waits for a reply is woken."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._socket.close()


def _wait(poll: select.poll, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1_000):
        raise TimeoutError("time is up")


def _connected(settings: Settings, timeout: float) -> socket.socket:
    address = settings.address
    if address.path:
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unix.settimeout(timeout)
            unix.connect(address.path)
        except BaseException:
            unix.close()
            raise
        return unix
    plain = socket.create_connection((address.host, address.port), timeout)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # long polls outlive a router's patience
        return plain if settings.tls is None else settings.tls.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
