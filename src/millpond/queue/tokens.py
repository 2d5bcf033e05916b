"""Names that carry their meaning: item ids, correlation ids and lease tokens.

A plain item's id and correlation id follow from its number and its chunk's creation, so neither is stored. A
lease token holds partition, number, grant and creation, so that any operation on it can answer with the
correlation id even when the item is long gone; a checksum seeded by the queue's incarnation refuses what was
mangled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

from millpond.history.format import NUMBER_MAX

_TOKEN = struct.Struct(">HQQQ")
_SEALED = struct.Struct(">HQQQI")
_PARTITION_MAX = 0xFFFF


class Token(NamedTuple):
    partition: int
    number: int
    grant: int
    created: int
    correlation_id: str | None


class Mint:
    """Makes and reads the names of one partition's items."""

    __slots__ = ("_partition", "_salt", "_seed", "_token_prefix", "id_prefix")

    def __init__(self, incarnation: str, partition: int) -> None:
        self._partition = partition
        self.id_prefix = f"{incarnation}-{partition}-"
        self._token_prefix = f"{incarnation}."
        self._seed = _seed(incarnation)
        salt = f"{crc32(self.id_prefix.encode()):08x}"
        self._salt = f"7{salt[:3]}-8{salt[3:6]}-"

    def id(self, number: int) -> str:
        return f"{self.id_prefix}{number}"

    def correlation_prefix(self, created: int) -> str:
        """All of a derived correlation id (a UUIDv7) but the last 12 digits, which are the item's number."""
        stamp = f"{created:012x}"
        return f"{stamp[:8]}-{stamp[8:]}-{self._salt}"

    def correlation_id(self, number: int, created: int) -> str:
        return f"{self.correlation_prefix(created)}{number:012x}"

    def token(self, number: int, grant: int, created: int, correlation_id: str | None) -> str:
        body = _TOKEN.pack(self._partition, number, grant, created)
        if correlation_id is None:
            return f"{self._token_prefix}{body.hex()}{crc32(body, self._seed):08x}"
        check = crc32(correlation_id.encode(), crc32(body, self._seed))
        return f"{self._token_prefix}{body.hex()}{check:08x}.{correlation_id}"

    def tokens(self, grant: int, created: int) -> Callable[[int], str]:
        """`token` for many plain items of one grant and chunk."""
        pack, prefix, seed, partition = _TOKEN.pack, self._token_prefix, self._seed, self._partition

        def token(number: int) -> str:
            body = pack(partition, number, grant, created)
            return f"{prefix}{body.hex()}{crc32(body, seed):08x}"

        return token


def _seed(incarnation: str) -> int:
    return crc32(incarnation.encode())


class TokenReader:
    """Reads the tokens of one queue."""

    __slots__ = ("_length", "_prefix", "_seed")

    def __init__(self, incarnation: str) -> None:
        self._prefix = f"{incarnation}."
        self._seed = _seed(incarnation)
        self._length = len(self._prefix) + 2 * _SEALED.size

    def read(self, token: str) -> Token | None:
        """None for what is not a token of this queue."""
        if not token.startswith(self._prefix):
            return None
        correlation_id = None
        try:
            sealed = bytes.fromhex(token[len(self._prefix) : self._length])
            partition, number, grant, created, check = _SEALED.unpack(sealed)
            expected = crc32(sealed[:-4], self._seed)
            if len(token) > self._length:
                correlation_id = token[self._length + 1 :]
                expected = crc32(correlation_id.encode(), expected)
        except (ValueError, struct.error):
            return None
        return Token(partition, number, grant, created, correlation_id) if check == expected else None


def token_incarnation(token: str) -> str:
    """Which queue's incarnation a token speaks of; checks nothing."""
    return token.partition(".")[0]


def read_id(incarnation: str, item_id: str) -> tuple[int, int] | None:
    """Partition and number of an id that this incarnation of the queue assigned, else None."""
    prefix, _, rest = item_id.partition("-")
    if prefix != incarnation:
        return None
    partition, _, number = rest.partition("-")
    if not (partition.isdecimal() and number.isdecimal() and partition.isascii() and number.isascii()):
        return None
    if len(partition) > 5 or len(number) > 14 or rest != f"{int(partition)}-{int(number)}":
        return None
    found = int(partition), int(number)
    return found if found[0] <= _PARTITION_MAX and found[1] < NUMBER_MAX else None
