"""Arrays as PostgreSQL's binary protocol has them, of one type whatever is in them: a statement whose types change is
prepared anew.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format
from psycopg.types import TypeInfo


class Numbers:
    """A bigint[]."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[int]) -> None:
        self.values = values


class Bodies:
    """A bytea[]."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[bytes]) -> None:
        self.values = values


def type_of(name: str) -> TypeInfo:
    found = psycopg.adapters.types[name]
    assert isinstance(found, TypeInfo)
    return found


class ArrayDumper(Dumper):
    """PostgreSQL's binary array: dimensions, nulls, type of the elements, how many, from which index; the elements."""

    format = Format.BINARY
    element: ClassVar[int]

    def head(self, count: int) -> bytes:
        return struct.pack("!iiIii", 1, 0, self.element, count, 1) if count else struct.pack("!iiI", 0, 0, self.element)


class NumbersDumper(ArrayDumper):
    oid = type_of("int8").array_oid
    element = type_of("int8").oid

    def dump(self, obj: Any) -> bytes:
        values = obj.values
        return self.head(len(values)) + struct.pack("!" + "iq" * len(values), *chain(*((8, value) for value in values)))


class BodiesDumper(ArrayDumper):
    oid = type_of("bytea").array_oid
    element = type_of("bytea").oid

    def dump(self, obj: Any) -> bytes:
        bodies = chain(*((len(body).to_bytes(4, "big"), body) for body in obj.values))
        return b"".join([self.head(len(obj.values)), *bodies])
