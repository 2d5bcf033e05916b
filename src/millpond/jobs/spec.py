"""What a job is: the payload of its item, and the checks on it.

A job's item has the kind `command` or `task`, its payload is a `JobSpec` in JSON (MessagePack where the item's
`encoding` is "msgpack"), and of a task `reference` holds the name too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal

import msgspec

from millpond.errors import InvalidRequest
from millpond.jobs.names import COMMAND, TASK
from millpond.model import PAYLOAD_BYTES_MAX, STRING_MAX

MSGPACK: Final = "msgpack"  # an item's encoding; any other is JSON
COMMAND_MAX: Final = 128 << 10  # bytes: what Linux takes as one argument of a program
AFTER_MAX: Final = 100  # jobs that one waits for: each is looked at in turn
ENV_MAX: Final = 1_000  # names
TIMEOUT_MAX: Final = 365 * 86_400.0  # seconds: longer is a unit mistake
BASE_MAX: Final = 1_000.0  # the engine's: one beyond it reaches any cap at once

IfDead = Literal["cancel", "hold"]


class JobSpec(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One of `command` and `task`. Durations in seconds; None is the queue's policy, or no limit.

    `after` names the jobs that this one waits for: "ID" in the same queue, or "QUEUE/ID" (ids have no "/").
    `schedule` and `due` say of which schedule's tick it is. `max_retries` is there only where it was given as 0, which
    means one execution, as 1 does.
    """

    command: str | None = None
    task: str | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None
    backoff_base: float | None = None
    backoff_cap: float | None = None
    backoff_jitter: float | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    after: list[str] = []
    if_dead: IfDead = "cancel"
    schedule: str | None = None
    due: str | None = None
    max_retries: int | None = None

    @property
    def kind(self) -> str:
        return COMMAND if self.command is not None else TASK


_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(JobSpec).decode
_encode_msgpack = msgspec.msgpack.Encoder().encode
_decode_msgpack = msgspec.msgpack.Decoder(JobSpec).decode


def encode(spec: JobSpec, encoding: str = "") -> bytes:
    """The payload of a job. What JSON cannot say is an error, as is what is too large."""
    try:
        payload = _encode_msgpack(spec) if encoding == MSGPACK else _encode_json(spec)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the job cannot be written down ({error}); use plain JSON values") from None
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidRequest(f"the job has {len(payload)} bytes, over {PAYLOAD_BYTES_MAX}; store its data elsewhere")
    return payload


def decode(payload: bytes, encoding: str = "") -> JobSpec:
    try:
        return _decode_msgpack(payload) if encoding == MSGPACK else _decode_json(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the payload is not a job ({error}); enqueue it again") from None


def try_decode(payload: bytes, encoding: str = "") -> JobSpec | None:
    """None for what is no job."""
    try:
        return decode(payload, encoding)
    except InvalidRequest:
        return None


# ---- checks -----------------------------------------------------------------------------------------------


def checked(spec: JobSpec) -> JobSpec:
    """The same, or an InvalidRequest that says what to mend."""
    if (spec.command is None) == (spec.task is None):
        raise InvalidRequest("a job has a command or a task; give one of them")
    if spec.command is not None:
        _check_command(spec)
    else:
        _text(spec.task, "task", STRING_MAX)
    _number(spec.timeout, "timeout", 0.001, TIMEOUT_MAX)
    _number(spec.backoff_base, "backoff_base", 0, BASE_MAX)
    _number(spec.backoff_cap, "backoff_cap", 0, TIMEOUT_MAX)
    _number(spec.backoff_jitter, "backoff_jitter", 0, 1)
    _check_env(spec.env)
    if spec.cwd is not None:
        _text(spec.cwd, "cwd", 4_096)
    if spec.if_dead not in ("cancel", "hold"):
        raise InvalidRequest(f"if_dead is {spec.if_dead!r:.60}; use 'cancel' or 'hold'")
    if len(spec.after) > AFTER_MAX:
        raise InvalidRequest(f"after names {len(spec.after)} jobs; wait for at most {AFTER_MAX}")
    for parent in spec.after:
        _text(parent, "after", STRING_MAX)
    return spec


def _check_command(spec: JobSpec) -> None:
    command = _text(spec.command, "command", COMMAND_MAX)
    if not command.strip():
        raise InvalidRequest("command is blank; say what to run")
    if len(command.encode()) > COMMAND_MAX:
        raise InvalidRequest(f"command is longer than {COMMAND_MAX} bytes; put it into a file and run that")
    if spec.args or spec.kwargs:
        raise InvalidRequest("args and kwargs go with a task; write a command's into the command")


def _check_env(env: Mapping[Any, Any]) -> None:
    if len(env) > ENV_MAX:
        raise InvalidRequest(f"env has {len(env)} names; use at most {ENV_MAX}")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise InvalidRequest(f"env has the name {name!r:.60}; use one without '=' and NUL")
        if not isinstance(value, str) or "\0" in value:
            raise InvalidRequest(f"env {name!r:.60} is not text, or has a NUL in it; give a string")


def _text(value: Any, name: str, limit: int) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {type(value).__name__}; give a string")
    if not value:
        raise InvalidRequest(f"{name} is empty; give it, or leave it out")
    if "\0" in value:
        raise InvalidRequest(f"{name} has a NUL in it; take it out")
    if len(value) > limit:
        raise InvalidRequest(f"{name} has {len(value)} characters; use at most {limit}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} is not valid Unicode; mend the text") from None
    return value


def _number(value: Any, name: str, low: float, high: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value!r:.60}; give a number")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value:.15g}; use {low:.15g} to {high:.15g}")


def unknown_field(name: str, known: list[str], what: str = "a job") -> InvalidRequest:
    """Names the nearest right one."""
    near = get_close_matches(name[:STRING_MAX], known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
    return InvalidRequest(f"{what} has no field {name!r:.60}; {hint}")


# ---- names of other jobs ----------------------------------------------------------------------------------


def parent_of(name: str, queue: str) -> tuple[str, str]:
    """Queue and id of a job that `after` names, for a job in `queue`."""
    there, _, item_id = name.rpartition("/")
    return there or queue, item_id
