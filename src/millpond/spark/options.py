"""The options of the data sources: what each may be, and what to say of one that is wrong.

Spark hands them over with their names in lower case. A token is a Secret from here on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from urllib.parse import urlsplit

from millpond.spark.transport import Secret, Transport

URL_ENVIRONMENT = "MILLPOND_SERVER"
TOKEN_ENVIRONMENT = "MILLPOND_TOKEN"
STATES = ("ready", "scheduled", "leased", "retrying", "claimed", "completed", "dead", "cancelled")
ANY_STATE = "any"
PAYLOADS = ("binary", "string")

ITEMS_PER_BATCH = 100_000  # a micro-batch costs a third of a second whatever it holds: many rows share it
ITEMS_PER_BATCH_MAX = 10_000_000  # as many as the server puts into a claim
BYTES_PER_BATCH_MAX = 1 << 40
PARTS = 4  # tasks that read a claim at a time; small claims are read by fewer
PARTS_MAX = 1_000  # as many as the server cuts a claim into
NAME_MAX = 200  # of a transaction or a claim, on the server
CONSUMER_MAX = NAME_MAX - 20  # its claims have a number at the end
TIMEOUT_S = 60.0  # for one reply: a server that commits to a slow disk still answers
RETRY_S = 60.0  # a server that restarts is back by then
SECONDS_MAX = 86_400.0

_SERVER = ("url", "queue", "token", "tokenFile", "caFile", "timeout", "retryFor")
STREAM_NAMES = (*_SERVER, "consumer", "maxItemsPerBatch", "maxBytesPerBatch", "parts", "payload")
PEEK_NAMES = (*_SERVER, "state", "kind", "payload")
SINK_NAMES = (*_SERVER, "txn", "rejects")
STREAM_SINK_NAMES = (*_SERVER, "rejects")
VERDICT_NAMES = (*_SERVER, "consumer")
READ_NAMES = tuple(dict.fromkeys(STREAM_NAMES + PEEK_NAMES))
_SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})  # of a streaming write, given to every sink

_QUEUE = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhdw]))+", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_ISO_DURATION = re.compile(
    r"P(?:(?P<w>\d+(?:\.\d+)?)W)?(?:(?P<d>\d+(?:\.\d+)?)D)?"
    r"(?:T(?:(?P<h>\d+(?:\.\d+)?)H)?(?:(?P<m>\d+(?:\.\d+)?)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?",
    re.ASCII,
)
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


class WrongOption(ValueError):
    """An option that no server need be asked about."""


@dataclass(frozen=True)
class Server:
    """Where and as whom. `ca` is the text of the certificates, read on the driver: executors need no file."""

    url: str
    token: Secret | None
    ca: str | None
    timeout_s: float
    retry_s: float

    def transport(self) -> Transport:
        return Transport(self.url, self.token, ca=self.ca, timeout_s=self.timeout_s, retry_s=self.retry_s)


@dataclass(frozen=True)
class StreamOptions:
    server: Server
    queue: str
    consumer: str
    items_max: int
    bytes_max: int | None
    parts: int


@dataclass(frozen=True)
class PeekOptions:
    """`state` and `kind` are None for any."""

    server: Server
    queue: str
    state: str | None
    kind: str | None


@dataclass(frozen=True)
class SinkOptions:
    server: Server
    queue: str
    txn: str | None
    rejects: str | None


@dataclass(frozen=True)
class VerdictOptions:
    server: Server
    queue: str
    consumer: str


# ---- one use each -------------------------------------------------------------------------------------------------


def payload_is_text(options: Mapping[str, str]) -> bool:
    """For the schema, which is asked for before it is known whether the read streams."""
    given = _Given(options, READ_NAMES, "reading")
    return given.choice("payload", PAYLOADS, "binary") == "string"


def stream_options(options: Mapping[str, str]) -> StreamOptions:
    given = _Given(options, STREAM_NAMES, "readStream")
    return StreamOptions(
        server=_server(given),
        queue=_queue(given),
        consumer=_consumer(given, "the server keeps the query's place under it; use another one for every query"),
        items_max=given.whole("maxItemsPerBatch", 1, ITEMS_PER_BATCH_MAX, ITEMS_PER_BATCH),
        bytes_max=given.whole("maxBytesPerBatch", 1, BYTES_PER_BATCH_MAX, 0) or None,
        parts=given.whole("parts", 1, PARTS_MAX, PARTS),
    )


def peek_options(options: Mapping[str, str]) -> PeekOptions:
    given = _Given(options, PEEK_NAMES, "read")
    state = given.choice("state", (*STATES, ANY_STATE), "ready")
    return PeekOptions(
        server=_server(given),
        queue=_queue(given),
        state=None if state == ANY_STATE else state,
        kind=given.text("kind"),
    )


def sink_options(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    names, use = (STREAM_SINK_NAMES, "writeStream") if streaming else (SINK_NAMES, "write")
    given = _Given(options, names, use)
    txn = None if streaming else given.text("txn")
    if txn is not None:
        _check_name("txn", txn, NAME_MAX)
    return SinkOptions(server=_server(given), queue=_queue(given), txn=txn, rejects=_directory(given, "rejects"))


def verdict_options(options: Mapping[str, str]) -> VerdictOptions:
    given = _Given(options, VERDICT_NAMES, "verdicts")
    consumer = _consumer(given, "it is the one of the readStream whose items are judged")
    return VerdictOptions(server=_server(given), queue=_queue(given), consumer=consumer)


# ---- values -------------------------------------------------------------------------------------------------------


class _Given:
    """The options of one use. An option that it does not know is refused at once: it would have no effect."""

    def __init__(self, options: Mapping[str, str], names: tuple[str, ...], use: str) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        known = {name.lower(): name for name in names}
        for name in self._values:
            if name not in known and name not in _SPARKS_OWN:
                raise WrongOption(_unknown(name, known, use))

    def text(self, name: str) -> str | None:
        value = self._values.get(name.lower())
        if value is not None and not value.strip():
            raise WrongOption(f"the option {name} is empty; give it a value or leave it out")
        return value

    def whole(self, name: str, low: int, high: int, default: int) -> int:
        value = self.text(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise WrongOption(f"the option {name} is {value!r:.60}; give a whole number from {low} to {high}")
        return number

    def seconds(self, name: str, default: float) -> float:
        value = self.text(name)
        if value is None:
            return default
        seconds = seconds_of(value)
        if seconds is None or not 0 < seconds <= SECONDS_MAX:
            raise WrongOption(
                f"the option {name} is {value!r:.60}; give a duration such as 30s or 2m, at most {SECONDS_MAX:g}s"
            )
        return seconds

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in choices:
            near = get_close_matches(value.lower(), choices, 1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(choices)}"
            raise WrongOption(f"the option {name} is {value!r:.60}; {hint}")
        return value.lower()


def _unknown(name: str, known: Mapping[str, str], use: str) -> str:
    if name == "path":
        return "a queue has no path: name it with the option queue, and call load, save or start without a path"
    if name == "txn" and use == "writeStream":
        return "the option txn is for batch writes; a streaming write is known by its query and batch, leave it out"
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {known[near[0]]}?" if near else f"the options are {', '.join(known.values())}"
    return f"{use} has no option {name!r:.60}; {hint}"


def seconds_of(text: str) -> float | None:
    """`90s`, `1m30s`, `500ms`, `PT1M30S`, or a number of seconds; None for what is no duration."""
    text = text.strip()
    if _DURATION.fullmatch(text):
        return round(sum(float(n) * _UNIT_MS[unit] for n, unit in _DURATION_PART.findall(text))) / 1000
    iso = _ISO_DURATION.fullmatch(text)
    if iso and any(iso.groups()):
        return round(sum(float(n) * _UNIT_MS[unit] for unit, n in iso.groupdict().items() if n)) / 1000
    try:
        return float(text)
    except ValueError:
        return None


# ---- the server ---------------------------------------------------------------------------------------------------


def _server(given: _Given) -> Server:
    return Server(
        url=_url(given),
        token=_token(given),
        ca=_file(given, "caFile"),
        timeout_s=given.seconds("timeout", TIMEOUT_S),
        retry_s=given.seconds("retryFor", RETRY_S),
    )


def _url(given: _Given) -> str:
    url = given.text("url") or os.environ.get(URL_ENVIRONMENT)
    if url is None:
        raise WrongOption(
            f"the option url is missing; give the server's address as driver and executors reach it, such as"
            f" http://10.0.0.5:7410, or set {URL_ENVIRONMENT} for the driver"
        )
    try:
        parts = urlsplit(url)
        host = parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        raise WrongOption("the option url is no URL; write it like http://host:port or https://host") from None
    if "@" in parts.netloc:  # not shown: it may be a secret
        raise WrongOption("the option url has a user name or password; give a secret as token or tokenFile")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or not url.isascii():
        raise WrongOption(f"the option url is {url!r:.100}; write it like http://host:port or https://host")
    return url.rstrip("/")


def _token(given: _Given) -> Secret | None:
    """From the option, the file or the environment of the driver, in that order. Never shown, not even a wrong one."""
    token, where = given.text("token"), "the option token"
    if token is not None and given.text("tokenFile") is not None:
        raise WrongOption("the options token and tokenFile exclude each other; give one")
    if token is None:
        token, where = _file(given, "tokenFile"), "the file of the option tokenFile"
    if token is None:
        token, where = os.environ.get(TOKEN_ENVIRONMENT), TOKEN_ENVIRONMENT
    if token is None:
        return None
    if not _PRINTABLE.fullmatch(token.strip()):
        raise WrongOption(f"{where} holds no token; give the one line that `millpond token create` printed")
    return Secret(token.strip())


def _file(given: _Given, name: str) -> str | None:
    path = given.text(name)
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise WrongOption(f"{name} {path!r:.200} cannot be read on the driver ({why}); give a file that can") from None


def _directory(given: _Given, name: str) -> str | None:
    directory = given.text(name)
    if directory is not None and "://" not in directory and not os.path.isabs(directory):
        raise WrongOption(
            f"the option {name} is {directory!r:.100}; give a whole path or a URI: the processes of Spark run in many"
            " places"
        )
    return directory


def _queue(given: _Given) -> str:
    queue = given.text("queue")
    if queue is None:
        raise WrongOption("the option queue is missing; name the queue")
    if not _QUEUE.fullmatch(queue):
        raise WrongOption(
            f"the option queue is {queue!r:.60}, which is no queue name; use letters, digits, '.', '_' and '-' in"
            " parts joined by '/'"
        )
    return queue


def _consumer(given: _Given, why: str) -> str:
    consumer = given.text("consumer")
    if consumer is None:
        raise WrongOption(f"the option consumer is missing; choose a name: {why}")
    _check_name("consumer", consumer, CONSUMER_MAX)
    return consumer


def _check_name(name: str, value: str, limit: int) -> None:
    if not _PRINTABLE.fullmatch(value) or len(value) > limit:
        raise WrongOption(f"the option {name} is {value!r:.60}; use 1 to {limit} printable ASCII characters, no spaces")
