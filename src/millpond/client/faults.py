"""From an error on the wire to its class in errors.py."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.client.http1 import WRONG, Reply
from millpond.errors import BadReply, InvalidRequest, MillpondError, made
from millpond.wire import codec_of
from millpond.wire.replies import ErrorReply

TEXT_SHOWN_MAX = 200  # of a reply that is not ours: enough to see whose it is
OF_PROXIES = {401, 403, 413, 429, 502, 503, 504}  # what one before our server says of itself; the rest is a stranger's


def error_of(reply: Reply) -> MillpondError:
    if reply.status < 400:
        return BadReply(f"the reply has status {reply.status}; {WRONG}")
    codec = codec_of(reply.media_type)
    if codec is not None:
        try:
            body = codec.decode(reply.body, ErrorReply).error
        except InvalidRequest:
            pass
        else:
            return made(body.code, body.message, reply.status, body.details, reply.retry_after)
    text = reply.body[:TEXT_SHOWN_MAX].decode(errors="replace")
    if reply.status in OF_PROXIES:
        return made("", f"status {reply.status}, and no word of millpond's: {text!r}; {WRONG}", reply.status)
    return BadReply(f"what answers is not a millpond server (status {reply.status}: {text!r}); check its address")


def twin(error: MillpondError) -> MillpondError:
    """The same for another caller: an exception that is raised in two places mixes up their tracebacks."""
    other = type(error).__new__(type(error), *error.args)
    other.args = error.args
    other.__dict__.update(error.__dict__)
    return other


def decoded(reply: Reply, kind: type[Any]) -> Any:
    codec = codec_of(reply.media_type)
    if codec is None:
        raise BadReply(f"the reply is {reply.media_type[:60] or 'of no type'}; {WRONG}")
    try:
        return codec.decode(reply.body, kind)
    except InvalidRequest as error:
        raise BadReply(
            f"the reply is not what this call answers ({error.message.partition(';')[0]}); {WRONG}"
        ) from None


def encoded(encode: Any, request: Any) -> bytes:
    try:
        body: bytes = encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the request cannot be sent ({error}); use plain values") from None
    return body
