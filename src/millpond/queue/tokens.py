"""Names that carry their meaning: item ids, correlation ids and lease tokens.

A plain item's id and correlation id follow from its number and its chunk's creation, so neither is stored. A
lease token holds partition, grant, creation and number, so that any operation on it can answer with the
correlation id even when the item is long gone; a checksum seeded by the queue's incarnation refuses what was
mangled. A correlation id of the item's own follows in clear.
"""

from __future__ import annotations

import re
import struct
from binascii import hexlify
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from zlib import crc32

import msgspec

from millpond.history.format import NUMBER_MAX
from millpond.model import PARTITION_NUMBER_MAX, LeasedFields, LeasedItem, LeaseLike, to_datetime

Token = tuple[int, int, int, int, str | None]  # partition, number, grant, created, own correlation id
Head = tuple[int, int, int, int]  # partition, grant, created, and the checksum so far

_HEAD = struct.Struct(">HQQ")  # partition, grant, created
_BODY = struct.Struct(">HQQHI")  # partition, grant, created, and the number's 48 bits
_SEALED = struct.Struct(">HQQHII")  # … and the checksum
_TAIL = struct.Struct(">HII")  # the number and the checksum
_NUMBER_BYTES = 6
_SEAL_BYTES = 4
_BLOCK = 1_024  # neighbours that are sealed at a time: few batches need more than one
HEADS_KEPT = 64  # beginnings of tokens, a queue: those that come back now were mostly granted in the last few turns
_FORM = re.compile(rf"[a-z0-9]{{1,32}}\.[0-9a-f]{{{2 * _SEALED.size}}}(\.[\x20-\x7e]{{1,128}})?")


class Mint:
    """Makes the names of one partition's items."""

    __slots__ = ("_partition", "_salt", "_seed", "_stamp", "_token_prefix", "id_prefix")

    def __init__(self, incarnation: str, partition: int) -> None:
        self._stamp = (
            -1,
            "",
        )  # the last creation and its prefix: the next is mostly the same. Read by other threads too
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
        last, prefix = self._stamp
        if created != last:
            stamp = f"{created:012x}"
            prefix = f"{stamp[:8]}-{stamp[8:]}-{self._salt}"
            self._stamp = (created, prefix)
        return prefix

    def correlation_id(self, number: int, created: int) -> str:
        last, prefix = self._stamp
        if created != last:
            prefix = self.correlation_prefix(created)
        return prefix + number.to_bytes(6, "big").hex()  # in half the time of a format

    def token(self, number: int, grant: int, created: int, correlation_id: str | None) -> str:
        body = _BODY.pack(self._partition, grant, created, number >> 32, number & 0xFFFFFFFF)
        check = crc32(body, self._seed)
        if correlation_id is None:
            return f"{self._token_prefix}{body.hex()}{check:08x}"
        return f"{self._token_prefix}{body.hex()}{crc32(correlation_id.encode(), check):08x}.{correlation_id}"

    def names(self, first: int, count: int, grant: int, created: int) -> list[tuple[str, str, str]]:
        """Id, lease token and correlation id of neighbours, at a third of the price."""
        token, check = self.granted(grant, created)
        ids, correlation = self.id_prefix, self.correlation_prefix(created)
        named: list[tuple[str, str, str]] = []
        numbers = range(first, first + count)
        for number, end in zip(numbers, sealed(numbers, check).hex(" ", _TAIL.size).split(), strict=True):
            named.append((f"{ids}{number}", f"{token}{end}", f"{correlation}{end[: 2 * _NUMBER_BYTES]}"))
        return named

    def granted(self, grant: int, created: int) -> tuple[str, int]:
        """What the tokens of one grant begin with, and the checksum so far."""
        head = _HEAD.pack(self._partition, grant, created)
        return f"{self._token_prefix}{head.hex()}", crc32(head, self._seed)


class ChunkGrant(msgspec.Struct, gc=False):
    """The items of one chunk leased in one turn for the first time, by whomever."""

    incarnation: str
    partition: int
    turn: int
    created: int
    deadline: int
    fence: int
    mint: Mint
    holding: Any = None
    form: Any = None

    def held_by(self, holding: Any) -> ChunkGrant:
        return msgspec.structs.replace(self, holding=holding)

    @property
    def fencing_token(self) -> int:
        return self.fence + self.turn

    @property
    def lease_deadline(self) -> datetime:
        return to_datetime(self.deadline)

    @property
    def created_at(self) -> datetime:
        return to_datetime(self.created)

    def token(self, number: int) -> str:
        return self.mint.token(number, self.turn, self.created, None)

    def names(self, first: int, count: int) -> list[tuple[str, str, str]]:
        return self.mint.names(first, count, self.turn, self.created)

    def beginnings(self) -> tuple[str, str, int, str]:
        token, check = self.mint.granted(self.turn, self.created)
        return self.mint.id_prefix, token, check, self.mint.correlation_prefix(self.created)

    def end(self, number: int, check: int) -> tuple[bytes, bytes]:
        tail = number.to_bytes(6, "big")
        return hexlify(tail), hexlify(crc32(tail, check).to_bytes(4, "big"))

    def ends(self, numbers: range, check: int) -> list[bytes]:
        return hexlify(sealed(numbers, check), b" ", _TAIL.size).split()

    def fields(self, number: int, payload: bytes) -> LeasedFields:
        mint = self.mint
        return LeasedFields(
            id=mint.id(number),
            lease=self.token(number),
            payload=payload,
            correlation_id=mint.correlation_id(number, self.created),
            attempts=1,
            deliveries=1,
            fencing_token=self.fencing_token,
            lease_deadline=self.lease_deadline,
            created_at=self.created_at,
        )


def _seed(incarnation: str) -> int:
    return crc32(incarnation.encode())


def _steps() -> bytes:
    """In which bits a block's tokens differ from its first one, which ends with zeros: number and checksum of each."""
    numbers = [number.to_bytes(_NUMBER_BYTES, "big") for number in range(_BLOCK)]
    return b"".join([one + (crc32(one) ^ crc32(numbers[0])).to_bytes(_SEAL_BYTES, "big") for one in numbers])


_STEPS = _steps()


def sealed(numbers: range, check: int) -> bytes:
    """What the tokens of neighbours end with: number and checksum of each.

    A CRC is linear: which bits of it a number changes does not depend on what came before. So the numbers of a block
    change the same ones in every grant, and all of them are changed at once.
    """
    place, count = numbers.start % _BLOCK, len(numbers)
    if place + count > _BLOCK:
        return sealed(numbers[: _BLOCK - place], check) + sealed(numbers[_BLOCK - place :], check)
    first = (numbers.start - place).to_bytes(_NUMBER_BYTES, "big")
    alike = (first + crc32(first, check).to_bytes(_SEAL_BYTES, "big")) * count
    steps = _STEPS[place * _TAIL.size : (place + count) * _TAIL.size]
    return (int.from_bytes(alike, "big") ^ int.from_bytes(steps, "big")).to_bytes(len(alike), "big")


class TokenReader:
    """Reads the tokens of one queue. All of one grant begin alike, and what they begin with is read once."""

    __slots__ = ("_cut", "_heads", "_incarnation", "_length", "_prefix", "_seed")

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._prefix = f"{incarnation}."
        self._seed = _seed(incarnation)
        self._cut = len(self._prefix) + 2 * _HEAD.size
        self._length = len(self._prefix) + 2 * _SEALED.size
        self._heads: dict[str, Head] = {}

    def read(self, token: str) -> Token | None:
        """None for what is not a token of this queue."""
        cut, length = self._cut, self._length
        head = self._heads.get(token[:cut]) or self._read_head(token[:cut])
        if head is None:
            return None
        correlation_id = None
        try:
            tail = bytes.fromhex(token[cut:length])
            high, low, check = _TAIL.unpack(tail)
            expected = crc32(tail[:_NUMBER_BYTES], head[3])
            if len(token) > length:
                separator, correlation_id = token[length], token[length + 1 :]
                if separator != "." or not correlation_id:
                    return None
                expected = crc32(correlation_id.encode(), expected)
        except (ValueError, struct.error):
            return None
        return (head[0], high << 32 | low, head[1], head[2], correlation_id) if check == expected else None

    def read_all(self, leases: Sequence[LeaseLike]) -> list[Token | None]:
        """As `read`, for many, and for items too, which know what their token says."""
        return [self.read(one) if isinstance(one, str) else self._of_item(one) for one in leases]

    def read_together(self, tokens: Sequence[str]) -> tuple[Head, Sequence[int]] | None:
        """What tokens of one grant begin with, and their numbers; None if they are not all plain ones of one."""
        cut, first = self._cut, self.read(tokens[0])
        if first is None or len(tokens[0]) != self._length:
            return None
        text = tokens[0][:cut]
        head, run = self._heads[text], range(first[1], first[1] + len(tokens))
        if run.stop <= NUMBER_MAX and "\n".join(tokens) == _neighbours(text, run, head[3]):
            return head, run
        if {token[:cut] for token in tokens} != {text} or set(map(len, tokens)) != {self._length}:
            return None
        try:
            tails = bytes.fromhex("".join([token[cut:] for token in tokens]))
        except ValueError:
            return None
        if len(tails) != len(tokens) * _TAIL.size:  # white space, which fromhex passes over
            return None
        check = head[3]
        numbers: list[int] = []
        for at, (high, low, seal) in zip(range(0, len(tails), _TAIL.size), _TAIL.iter_unpack(tails), strict=True):
            if crc32(tails[at : at + _NUMBER_BYTES], check) != seal:
                return None
            numbers.append(high << 32 | low)
        return head, numbers

    def _read_head(self, text: str) -> Head | None:
        if not text.startswith(self._prefix):
            return None
        try:
            packed = bytes.fromhex(text[len(self._prefix) :])
            partition, grant, created = _HEAD.unpack(packed)
        except (ValueError, struct.error):
            return None
        if len(self._heads) >= HEADS_KEPT:
            self._heads.clear()
        head = self._heads[text] = partition, grant, created, crc32(packed, self._seed)
        return head

    def _of_item(self, item: LeasedItem) -> Token | None:
        grant = item.grant
        if grant is None:
            return self.read(item.lease)
        if grant.incarnation != self._incarnation:
            return None
        own = None if item.known is None else item.known.correlation_id
        return grant.partition, item.number, grant.turn, grant.created, own


def _neighbours(beginning: str, numbers: range, check: int) -> str:
    """Their tokens, a line each, as they were made: who leased side by side mostly hands back so."""
    return beginning + sealed(numbers, check).hex("\n", _TAIL.size).replace("\n", f"\n{beginning}")


def is_token(text: str) -> bool:
    """Whether it has the form of a token, of whatever queue."""
    return _FORM.fullmatch(text) is not None


def lease_incarnation(lease: LeaseLike) -> str:
    """Which queue's incarnation a token or item speaks of; checks nothing."""
    if isinstance(lease, LeasedItem):
        if lease.grant is not None:
            return lease.grant.incarnation
        lease = lease.lease
    return lease.partition(".")[0]


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
    return found if found[0] <= PARTITION_NUMBER_MAX and found[1] < NUMBER_MAX else None
