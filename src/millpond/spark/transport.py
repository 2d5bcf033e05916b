"""Calls to a millpond server from Spark's processes: JSON and Arrow over http.client, tried again while it is away.

Self-contained, as all of the connector is: it travels by value to machines that have PySpark but no millpond. Every
call that is made from here may be made twice.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import time
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import pyarrow as pa

JSON_TYPE = "application/json"
ARROW_TYPE = "application/vnd.apache.arrow.stream"
NEXT_HEADER = "x-millpond-next"  # where the next page of an Arrow reply begins
RETRY_STATUSES = frozenset({429, 502, 503, 504, 507})  # busy, starting, ending, behind a proxy, out of disk: for now
PAUSE_FIRST_S = 0.05  # a server that restarts is away for longer, a lost connection is not
PAUSE_MAX_S = 2.0  # a server that is back is noticed within this time
TEXT_SHOWN_MAX = 200  # of a reply that is not millpond's: enough to see whose it is


class Refused(Exception):
    """The server's own word: `code` says what kind, the text what is wrong and what to do."""

    def __init__(self, code: str, text: str, status: int = 0, details: dict[str, Any] | None = None) -> None:
        super().__init__(code, text, status, details)
        self.code = code
        self.text = text
        self.status = status
        self.details = details or {}

    def __str__(self) -> str:
        return f"{self.text} ({self.code})" if self.code else self.text


class NoAnswer(Exception):
    """The server was away for as long as the options let us wait."""


class Secret:
    """Text that shows itself to nobody who prints it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "***"


class Transport:
    """One connection to one server, for one thread. Pickled, it leaves the connection behind."""

    def __init__(
        self, url: str, token: Secret | None = None, *, ca: str | None = None, timeout_s: float, retry_s: float
    ) -> None:
        self.url = url
        self._token = token
        self._ca = ca
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._connection: http.client.HTTPConnection | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # ---- the calls --------------------------------------------------------------------------------------------

    def call(self, name: str, /, **fields: Any) -> dict[str, Any]:
        """JSON there and back. A field that is None is left out."""
        body = json.dumps({field: value for field, value in fields.items() if value is not None}).encode()
        _, reply = self._ask(name, body, {"Content-Type": JSON_TYPE, "Accept": JSON_TYPE})
        return _decoded(reply, self.url)

    def page(self, name: str, /, **fields: Any) -> tuple[list[pa.RecordBatch], str | None]:
        """Items as Arrow, and where the next page begins; None at the end."""
        body = json.dumps({field: value for field, value in fields.items() if value is not None}).encode()
        headers, reply = self._ask(name, body, {"Content-Type": JSON_TYPE, "Accept": ARROW_TYPE})
        try:
            with pa.ipc.open_stream(pa.py_buffer(reply)) as stream:
                return list(stream), headers.get(NEXT_HEADER)
        except pa.ArrowInvalid as error:
            raise Refused(
                "bad_reply", f"{self.url} answered {name} with what is no Arrow ({error}); {_WRONG}"
            ) from None

    def send(self, name: str, stream: bytes | pa.Buffer, /, **fields: str) -> dict[str, Any]:
        """Items as an Arrow stream; what else there is to say goes into the address."""
        headers = {"Content-Type": ARROW_TYPE, "Accept": JSON_TYPE}
        _, reply = self._ask(f"{name}?{urlencode(fields)}", stream, headers)
        return _decoded(reply, self.url)

    # ---- tries ------------------------------------------------------------------------------------------------

    def _ask(self, path: str, body: bytes | pa.Buffer, headers: dict[str, str]) -> tuple[Mapping[str, str], bytes]:
        give_up_at: float | None = None
        pause = PAUSE_FIRST_S
        while True:
            retry_after = 0.0
            try:
                status, found, reply = self._once(path, body, headers)
                if status == 200:
                    return found, reply
                failure: Exception = _refusal(status, reply, self.url)
                if status not in RETRY_STATUSES:
                    raise failure
                retry_after = _seconds(found.get("retry-after"))
            except ssl.SSLCertVerificationError as error:
                self.close()
                raise NoAnswer(
                    f"{self.url} is not trusted ({error.verify_message}); name its authority's certificate with the"
                    " option caFile"
                ) from None
            except (OSError, http.client.HTTPException) as error:
                self.close()
                failure = error
            now = time.monotonic()
            give_up_at = now + self._retry_s if give_up_at is None else give_up_at
            wait = max(min(retry_after, PAUSE_MAX_S), pause * random.uniform(0.5, 1.0))
            if now + wait > give_up_at:
                raise self._told(path.partition("?")[0], failure)
            time.sleep(wait)
            pause = min(pause * 2, PAUSE_MAX_S)

    def _once(
        self, path: str, body: bytes | pa.Buffer, headers: dict[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        if self._connection is None:
            self._connection = self._connect()
        named = dict(headers)
        if self._token is not None:
            named["Authorization"] = f"Bearer {self._token.reveal()}"
        prefix = urlsplit(self.url).path.rstrip("/")
        self._connection.request("POST", f"{prefix}/v1/{path}", memoryview(body), named)
        response = self._connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.headers.items()}, response.read()

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            context = ssl.create_default_context(cadata=self._ca)
            return http.client.HTTPSConnection(
                str(parts.hostname), parts.port, timeout=self._timeout_s, context=context
            )
        return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=self._timeout_s)

    def _told(self, name: str, failure: Exception) -> Exception:
        if isinstance(failure, Refused) and failure.code:
            return failure
        why = str(failure) or type(failure).__name__
        return NoAnswer(
            f"no answer from {self.url} to {name} in {self._retry_s:g} s ({why}); see that `millpond serve` runs there"
            " and that this machine reaches it, then start again: nothing is lost (the option retryFor sets how long"
            " to wait)"
        )


_WRONG = "is it a millpond server of this version?"


def _decoded(reply: bytes, url: str) -> dict[str, Any]:
    try:
        value = json.loads(reply)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Refused("bad_reply", f"{url} answered with what is no JSON object ({_shown(reply)}); {_WRONG}")
    return value


def _refusal(status: int, reply: bytes, url: str) -> Refused:
    try:
        error = json.loads(reply)["error"]
        return Refused(str(error["code"]), str(error["message"]), status, error.get("details"))
    except (ValueError, KeyError, TypeError):
        return Refused("", f"{url} answered with status {status} ({_shown(reply)}); {_WRONG}", status)


def _shown(reply: bytes) -> str:
    return repr(reply[:TEXT_SHOWN_MAX].decode(errors="replace"))


def _seconds(header: str | None) -> float:
    try:
        return float(header or 0)
    except ValueError:
        return 0.0
