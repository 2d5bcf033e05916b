"""The calls of the HTTP API as types, and their JSON and MessagePack: what the server and the clients share."""

from millpond.wire.calls import CALLS, Call
from millpond.wire.codec import CODECS, JSON, MSGPACK, Codec, codec_of

__all__ = ["CALLS", "CODECS", "JSON", "MSGPACK", "Call", "Codec", "codec_of"]
