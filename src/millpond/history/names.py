"""The names of items that have none of their own, for many items at a time.

`queue.tokens.Mint` makes the same names one by one; a test compares the two.
"""

from __future__ import annotations

import re
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers = npt.NDArray[np.int64]

_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype=np.uint16)  # a byte -> its two digits
_CORRELATION_BYTES = 36  # a UUID as text
_DASH = ord("-")
_DERIVED = re.compile(r"([a-z0-9]{1,32})-(0|[1-9][0-9]{0,4})-([1-9][0-9]{0,13})")


class Namer:
    """Names the items of one partition."""

    def __init__(self, incarnation: str, partition: int) -> None:
        self._prefix = f"{incarnation}-{partition}-"
        salt = f"{crc32(self._prefix.encode()):08x}"
        self._salt = np.frombuffer(f"-7{salt[:3]}-8{salt[3:6]}-".encode(), dtype=np.uint8)

    def ids(self, numbers: Numbers) -> Any:
        """As an Arrow array of strings."""
        digits = pc.cast(pa.array(numbers), pa.string())
        return pc.binary_join_element_wise(pa.scalar(self._prefix), digits, "")

    def correlation_ids(self, numbers: Numbers, created: Numbers) -> Any:
        """As an Arrow array of strings; where the creation is not known they mean nothing."""
        text = np.empty((len(numbers), _CORRELATION_BYTES), dtype=np.uint8)
        stamps = _digits(created)
        text[:, 0:8] = stamps[:, :8]
        text[:, 8] = _DASH
        text[:, 9:13] = stamps[:, 8:]
        text[:, 13:24] = self._salt
        text[:, 24:] = _digits(numbers)
        offsets = np.arange(0, text.size + 1, _CORRELATION_BYTES, dtype=np.int32)
        return pa.StringArray.from_buffers(len(numbers), pa.py_buffer(offsets), pa.py_buffer(text))


def _digits(numbers: Numbers) -> npt.NDArray[np.uint8]:
    """The low 48 bits of each as 12 hexadecimal digits."""
    octets = numbers.astype(">i8").view(np.uint8).reshape(-1, 8)[:, 2:]
    return _HEX[octets].view(np.uint8)


def parse_id(item_id: str) -> tuple[str, int, int] | None:
    """Incarnation, partition and number of an id that a queue may have assigned; None for one that none has."""
    found = _DERIVED.fullmatch(item_id)
    return (found[1], int(found[2]), int(found[3])) if found else None
