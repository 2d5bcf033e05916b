"""JSON and MessagePack: bytes to requests and replies, and back.

Whatever is wrong with the bytes is an InvalidRequest that says where: there is no body that makes a decoder of ours
raise anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from millpond.errors import InvalidRequest, MillpondError
from millpond.wire.replies import ErrorBody, ErrorReply
from millpond.wire.requests import Produce, ProducePlain, Stage, StagePlain

T = TypeVar("T")
Decode = Callable[[Any], Any]

NAME_SHOWN_MAX = 60  # of a wrong name in an error: enough to find it by
_MALFORMED = (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError, TypeError, OverflowError)
_PLACE = re.compile(r"^(.*?)(?: - at `(.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[[^\]]*\]")


class Codec:
    """One of the two encodings. `binary` ones carry bytes as they are."""

    def __init__(self, name: str, media_type: str, decoder: Any, encoder: Any, *, binary: bool) -> None:
        self.name = name
        self.media_type = media_type
        self.media_type_bytes = media_type.encode()
        self.binary = binary
        self.encode: Callable[[Any], bytes] = encoder.encode
        self._make = decoder
        self._decoders: dict[Any, Decode] = {}
        self._plain = self._decoder(ProducePlain)
        self._plain_stage = self._decoder(StagePlain)

    def __repr__(self) -> str:
        return f"<codec {self.name}>"

    def decode(self, body: bytes | bytearray, kind: type[T]) -> T:
        try:
            value: T = self.decoder(kind)(body)
        except _MALFORMED as error:
            raise self._refusal(body, kind, error) from None
        return value

    def decode_produce(self, body: bytes | bytearray) -> Produce | ProducePlain:
        """Plain items are by far the most, and are read in a third of the time; others fail at the first field."""
        try:
            plain: ProducePlain = self._plain(body)
        except _MALFORMED:
            return self.decode(body, Produce)
        return plain

    def decode_stage(self, body: bytes | bytearray) -> Stage | StagePlain:
        """The same for what is staged."""
        try:
            plain: StagePlain = self._plain_stage(body)
        except _MALFORMED:
            return self.decode(body, Stage)
        return plain

    def encode_error(self, error: MillpondError) -> bytes:
        try:
            return self.encode(ErrorReply(ErrorBody(error.code, error.message, error.details)))
        except (TypeError, ValueError):  # lone surrogates, or details that no JSON can hold
            message = error.message.encode(errors="backslashreplace").decode()
            return self.encode(ErrorReply(ErrorBody(error.code, message, {})))

    def decoder(self, kind: Any) -> Decode:
        """What is wrong with a body, it says in its own words."""
        return self._decoders.get(kind) or self._decoder(kind)

    def _decoder(self, kind: Any) -> Decode:
        decode: Decode = self._make(kind).decode
        self._decoders[kind] = decode
        return decode

    def _refusal(self, body: bytes | bytearray, kind: Any, error: Exception) -> InvalidRequest:
        if not body:
            return InvalidRequest(f"the body is empty; send one {self.name} object")
        if isinstance(error, RecursionError):
            return InvalidRequest("the body is nested too deeply; flatten it")
        if isinstance(error, UnicodeError):
            return InvalidRequest("the body holds text that is not UTF-8; send bytes as `bytes`")
        if not isinstance(error, msgspec.ValidationError):
            return InvalidRequest(f"the body is not {self.name} ({_lowered(str(error))}); send one {self.name} object")
        return _wrong_field(kind, str(error))


def _wrong_field(kind: Any, text: str) -> InvalidRequest:
    match = _PLACE.match(text)
    assert match is not None, "the pattern takes any text"
    what, path = match[1], match[2] or "$"
    place = path.removeprefix("$").removeprefix(".") or "the body"
    unknown = _UNKNOWN.fullmatch(what)
    found = _type_at(kind, path)
    if unknown is not None:
        return _unknown_field(unknown[1], place, path, found)
    if isinstance(found, msgspec.inspect.LiteralType):
        choices = ", ".join(map(str, found.values))
        return InvalidRequest(f"{place}: {_lowered(what)}; use one of {choices}", path=path)
    return InvalidRequest(f"{place}: {_lowered(what)}; mend it and send it again", path=path)


def _unknown_field(name: str, place: str, path: str, found: Any) -> InvalidRequest:
    fields = [one.encode_name for one in found.fields] if isinstance(found, msgspec.inspect.StructType) else []
    near = get_close_matches(name[:NAME_SHOWN_MAX], fields, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(fields)}"
    inside = "" if path == "$" else f" in {place}"
    details = {"path": path, "field": name[:NAME_SHOWN_MAX]} | ({"nearest": near[0]} if near else {})
    return InvalidRequest(f"unknown field {name[:NAME_SHOWN_MAX]!r}{inside}; {hint}", **details)


def _type_at(kind: Any, path: str) -> Any:
    """The type that a path such as `$.items[0]` leads to; None where it leads nowhere."""
    found: Any = msgspec.inspect.type_info(kind)
    for step in _STEP.finditer(path):
        found = _struct_or_list(found)
        if step[1] is None:
            found = getattr(found, "item_type", None)
        else:
            fields = getattr(found, "fields", ())
            found = next((one.type for one in fields if one.encode_name == step[1]), None)
    return _struct_or_list(found)


def _struct_or_list(found: Any) -> Any:
    """An optional thing is the thing."""
    if isinstance(found, msgspec.inspect.UnionType):
        wanted = (msgspec.inspect.StructType, msgspec.inspect.ListType, msgspec.inspect.LiteralType)
        return next((one for one in found.types if isinstance(one, wanted)), found)
    return found


def _lowered(text: str) -> str:
    return text if text[:4] == "JSON" else text[:1].lower() + text[1:]


JSON = Codec("JSON", "application/json", msgspec.json.Decoder, msgspec.json.Encoder(), binary=False)
MSGPACK = Codec("MessagePack", "application/msgpack", msgspec.msgpack.Decoder, msgspec.msgpack.Encoder(), binary=True)

CODECS: dict[str, Codec] = {
    "application/json": JSON,
    "application/msgpack": MSGPACK,
    "application/x-msgpack": MSGPACK,  # what it was called before it was registered
    "application/vnd.msgpack": MSGPACK,
}


def codec_of(media_type: str) -> Codec | None:
    """The codec for a Content-Type or one entry of Accept, parameters aside."""
    return CODECS.get(media_type.partition(";")[0].strip().lower())
