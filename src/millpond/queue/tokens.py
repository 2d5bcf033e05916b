"""Names that carry their meaning: item ids, correlation ids and lease tokens.

A plain item's id and correlation id follow from its number and its chunk's creation, so neither is stored. A
lease token holds partition, grant, creation and number, so that any operation on it can answer with the
correlation id even when the item is long gone; a checksum seeded by the queue's incarnation refuses what was
mangled. A correlation id of the item's own follows in clear.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from zlib import crc32

from millpond.history.format import NUMBER_MAX

Token = tuple[int, int, int, int, str | None]  # partition, number, grant, created, own correlation id

_HEAD = struct.Struct(">HQQ")  # partition, grant, created
_SEALED = struct.Struct(">HQQHII")  # … and the number's 48 bits, then the checksum
_CHECKED = _SEALED.size - 4
_PARTITION_MAX = 0xFFFF


class Mint:
    """Makes the names of one partition's items."""

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

    def sealer(self, grant: int, created: int) -> Callable[[int, str], str]:
        """Makes the tokens of one grant on one chunk, from an item's number and the same in 12 hex digits."""
        head = _HEAD.pack(self._partition, grant, created)
        prefix, seed = f"{self._token_prefix}{head.hex()}", crc32(head, self._seed)

        def seal(number: int, digits: str) -> str:
            return f"{prefix}{digits}{crc32(number.to_bytes(6), seed):08x}"

        return seal

    def token(self, number: int, grant: int, created: int, correlation_id: str | None) -> str:
        token = self.sealer(grant, created)(number, f"{number:012x}")
        if correlation_id is None:
            return token
        check = crc32(correlation_id.encode(), int(token[-8:], 16))
        return f"{token[:-8]}{check:08x}.{correlation_id}"


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
            partition, grant, created, high, low, check = _SEALED.unpack(sealed)
            expected = crc32(sealed[:_CHECKED], self._seed)
            if len(token) > self._length:
                correlation_id = token[self._length + 1 :]
                expected = crc32(correlation_id.encode(), expected)
        except (ValueError, struct.error):
            return None
        return (partition, high << 32 | low, grant, created, correlation_id) if check == expected else None

    def read_all(self, tokens: Sequence[str]) -> Sequence[Token | None]:
        """As `read`, for many; those of plain items are unpacked in one go."""
        start, length = len(self._prefix), self._length
        if set(map(len, tokens)) != {length} or {token[:start] for token in tokens} != {self._prefix}:
            return [self.read(token) for token in tokens]
        try:
            sealed = bytes.fromhex("".join([token[start:] for token in tokens]))
        except ValueError:
            return [self.read(token) for token in tokens]
        if len(sealed) != len(tokens) * _SEALED.size:  # white space, which fromhex passes over
            return [self.read(token) for token in tokens]
        seed, at, step = self._seed, 0, _SEALED.size
        found: list[Token | None] = []
        for partition, grant, created, high, low, check in _SEALED.iter_unpack(sealed):
            good = crc32(sealed[at : at + _CHECKED], seed) == check
            found.append((partition, high << 32 | low, grant, created, None) if good else None)
            at += step
        return found


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
