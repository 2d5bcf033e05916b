"""Structured logs on stderr: JSON lines, or text for people. Through the logging module, so that libraries join in.

    log = logging.getLogger(__name__)
    log.info("queue created", extra={"queue": name})

What is in `extra` becomes a field. The correlation id of the request is added by itself. Secrets and payloads never
get out: fields of such names are masked, and whatever looks like a secret is masked wherever it stands.
"""

from __future__ import annotations

import logging
import os
import re
import select
import stat
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec

correlation_id: ContextVar[str | None] = ContextVar("correlation_id", default=None)
"""Set where a request begins; tasks that it starts inherit it."""

MASK: Final = "[redacted]"
FIELD_CHARS_MAX = 8_192  # a longer text is cut: a log line is read, not stored
PIECE_CHARS = 1_000  # of a line, at a time: a pipe that has any room has it for so many, in UTF-8 too
READER_MS = 500  # for a reader that is behind; one that takes longer is taken for none
DEPTH_MAX = 5  # of nested fields; what lies deeper is shown as text

_SECRET = re.compile(r"\b(mp_[0-9A-Za-z]{8}_)[0-9A-Za-z]{8,}")
_BEARER = re.compile(r"(?i)\b(bearer\s+)(?!mp_)[^\s\"',;\\]{8,}")
_HEADER = re.compile(r"(?i)\b(authorization|cookie)(['\"]?\s*[:=,]\s*(?:b?['\"])?)(?!bearer )[^\s'\"][^\r\n'\"]*")
_SECRET_FIELDS = {"authorization", "proxy-authorization", "cookie", "set-cookie", "token", "secret", "password"}
_ITEM_FIELDS = {"payload", "body", "text", "bytes", "json", "state_doc", "result"}  # what users put into items
_MASKED_FIELDS = _SECRET_FIELDS | _ITEM_FIELDS
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_FIRST = ("time", "level", "logger", "message")  # in every line; no `extra` takes their place
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {9: "\t"}
_CONTROL_BUT_LINES = {code: text for code, text in _CONTROL.items() if code != 10}


def configure(format: str = "auto", level: str = "info", stream: TextIO | None = None) -> None:
    """For the whole process, in place of what was there. `auto` is console on a terminal, else JSON."""
    stream = stream or sys.stderr
    console = format == "console" or (format == "auto" and stream.isatty())
    handler = _Handler(stream)
    handler.setFormatter(ConsoleFormatter() if console else JsonFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


class _Handler(logging.StreamHandler[TextIO]):
    """Takes its lock as Python 3.13 does: a task that is interrupted while it logs must not leave it taken.

    Who does not read the log (a pager, a terminal after Ctrl-S) stops no work: lines for which there is no room are
    left out, and the next one for which there is says how many.
    """

    lock: threading.RLock

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._poll = _poll_of(stream)
        self._left_out = 0
        self._torn = False  # the last line that was begun has no end

    def handle(self, record: logging.LogRecord) -> Any:
        found: Any = self.filter(record)
        if found:
            with self.lock:
                self.emit(found if isinstance(found, logging.LogRecord) else record)
        return found

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._left_out and self._has_room():
                said = self.format(_said_of(self._left_out))
                self._left_out = 0
                self._write(f"\n{said}" if self._torn else said)
            self._write(self.format(record))
        except Exception:
            self.handleError(record)

    def _write(self, line: str) -> None:
        line += self.terminator
        size = PIECE_CHARS if self._poll else len(line)
        for at in range(0, len(line), size):
            if not self._has_room():
                self._left_out += 1
                self._torn = at > 0 or self._torn
                return
            self.stream.write(line[at : at + size])
            self.flush()
        self._torn = False

    def flush(self) -> None:
        with self.lock:
            self.stream.flush()

    def handleError(self, record: logging.LogRecord) -> None:
        """A log that cannot be written must not stop the work; and logging's own report would show all unmasked."""

    def _has_room(self) -> bool:
        """Once a line was left out nobody waits any more, until there is room again."""
        return self._poll is None or bool(self._poll.poll(0 if self._left_out else READER_MS))


def _poll_of(stream: TextIO) -> select.poll | None:
    """None for what always has room: files, and what is not of the system at all."""
    try:
        file = stream.fileno()
        if stat.S_ISREG(os.fstat(file).st_mode):
            return None
    except (OSError, ValueError):
        return None
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    return poll


def _said_of(left_out: int) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": __name__,
            "levelname": "WARNING",
            "msg": "%d lines of the log were left out, for nobody read it",
            "args": (left_out,),
        }
    )


def redact(text: str) -> str:
    """A secret of ours keeps its id, which is no secret and finds the token that leaked."""
    text = _BEARER.sub(rf"\1{MASK}", text)
    text = _HEADER.sub(rf"\1\2{MASK}", text)
    return _SECRET.sub(rf"\1{MASK}", text)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a record says, safe to show. A correlation id in `extra` goes before the request's."""
    moment = datetime.fromtimestamp(record.created, UTC)
    fields: dict[str, Any] = {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": _text(_said(record)),
    }
    if (current := correlation_id.get()) is not None:
        fields["correlation_id"] = _text(current)
    given = {name: _safe(name, value) for name, value in vars(record).items() if name not in _OWN}
    return fields | {name: value for name, value in given.items() if name not in _FIRST}


def _said(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a slip in a log call must not cost the line
        return f"{record.msg} (its arguments do not fit)"


def trace_of(record: logging.LogRecord) -> str | None:
    parts = [logging.Formatter().formatException(record.exc_info)] if record.exc_info else []
    parts += [record.stack_info] if record.stack_info else []
    return redact("\n".join(parts)).encode(errors="backslashreplace").decode() if parts else None


def _safe(name: object, value: Any, depth: int = 0) -> Any:
    if str(name).lower() in _MASKED_FIELDS:
        return MASK
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth < DEPTH_MAX and isinstance(value, dict):
        return {_text(str(key)): _safe(key, inner, depth + 1) for key, inner in value.items()}
    if depth < DEPTH_MAX and isinstance(value, list | tuple | set | frozenset):
        return [_safe("", inner, depth + 1) for inner in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return f"[{len(value)} bytes]"  # bytes are payloads, until somebody decodes them on purpose
    return _text(str(value))


def _text(text: str) -> str:
    text = redact(text)  # before it is cut: half a secret looks like none
    text = text.encode(errors="backslashreplace").decode()  # lone surrogates: a file's name may hold them
    return text if len(text) <= FIELD_CHARS_MAX else text[:FIELD_CHARS_MAX] + "…"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        trace = trace_of(record)
        fields = fields_of(record) | ({} if trace is None else {"trace": trace})
        return msgspec.json.encode(fields, enc_hook=str).decode()


class ConsoleFormatter(logging.Formatter):
    """`12:00:00.000 INFO    millpond.server: listening address=127.0.0.1:7410`, a trace on the lines below it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = fields_of(record)
        time, level, logger, text = (str(fields.pop(name)) for name in _FIRST)
        pairs = "".join(f" {name}={_shown(value)}" for name, value in fields.items())
        line = f"{time[11:-1]} {level.upper():<7} {logger}: {text}{pairs}".translate(_CONTROL)
        trace = trace_of(record)
        return line if trace is None else f"{line}\n{trace.translate(_CONTROL_BUT_LINES)}"


def _shown(value: Any) -> str:
    if isinstance(value, str) and " " not in value:
        return value
    return msgspec.json.encode(value, enc_hook=str).decode()
