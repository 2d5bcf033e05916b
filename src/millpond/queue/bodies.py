"""Chunk bodies kept in memory from produce to lease, within a budget of bytes that all queues share."""

from __future__ import annotations

from millpond.history.format import Record

Records = list[bytes | Record | None]

BODY_BYTES_MAX = 64 << 20  # a few seconds of full load; beyond that bodies are read back from the store


_RECORD_BYTES = 64  # what a payload costs in memory beyond its bytes,
_FULL_RECORD_BYTES = 400  # and an item with more than a payload


def weigh(records: Records, body: int, *, plain: bool = False) -> int:
    """Bytes that a chunk takes in memory, from the size of its packed body. `plain`: nothing but payloads in it."""
    full = 0 if plain else list(map(type, records)).count(Record)
    return body + _RECORD_BYTES * len(records) + _FULL_RECORD_BYTES * full


class Budget:
    __slots__ = ("left",)

    def __init__(self, total: int = BODY_BYTES_MAX) -> None:
        self.left = total


class Bodies:
    """One partition's share. The newest chunk goes first when room is needed: it is leased last."""

    __slots__ = ("_budget", "_chunks", "_sizes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._chunks: dict[int, Records] = {}
        self._sizes: dict[int, int] = {}

    def get(self, first: int) -> Records | None:
        return self._chunks.get(first)

    def offer(self, first: int, records: Records, size: int) -> None:
        """Keep it if there is room."""
        if size <= self._budget.left and first not in self._chunks:
            self._keep(first, records, size)

    def insist(self, first: int, records: Records, size: int) -> None:
        """Keep it, for its neighbours are asked for next, and let newer chunks go to make room.

        It is kept even if others have used up the budget: a chunk a partition is the least that works well.
        """
        while size > self._budget.left and self._chunks:
            self.drop(next(reversed(self._chunks)))
        if first not in self._chunks:
            self._keep(first, records, size)

    def drop(self, first: int) -> None:
        if self._chunks.pop(first, None) is not None:
            self._budget.left += self._sizes.pop(first)

    def clear(self) -> None:
        self._budget.left += sum(self._sizes.values())
        self._chunks.clear()
        self._sizes.clear()

    def _keep(self, first: int, records: Records, size: int) -> None:
        self._chunks[first] = records
        self._sizes[first] = size
        self._budget.left -= size
