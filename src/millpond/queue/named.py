"""What a partition has to know of a chunk's records besides their number, told once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.history.format import Record, decode_meta
from millpond.queue.dedup import DIGEST_BYTES, digests_of, key_digest, split

Records = Sequence[bytes | Record | None]


class Named:
    """The names in a chunk, as digests.

    `joined` has those of each record, `names` all of them; `own` are the places of records that have an id or a
    correlation id, with both. `priorities` of each, if any has another than 0. `simple`: no record has more than that
    for a partition to know. `free`: nobody else has any of the names, as was seen in the running turn.
    """

    __slots__ = ("_meta", "_records", "distinct", "free", "joined", "names", "own", "priorities", "simple")

    def __init__(self, meta: bytes, records: Records) -> None:
        self.simple = True
        self.priorities: list[int] = []
        self.own: list[tuple[int, str | None, str | None]] = []
        self.joined: list[bytes] = []
        keys = _keys_alone(records)
        if keys is None:
            self._look_at_each(records)
        else:
            self.joined = [b"" if key is None else key_digest(key) for key in keys]
        single = {*map(len, self.joined)} == {DIGEST_BYTES}
        self.names = self.joined if single else [name for joined in self.joined for name in split(joined)]
        self.distinct = len(set(self.names)) == len(self.names)
        self.free = False
        self._meta = meta
        self._records: list[Record | None] | None = None

    def _look_at_each(self, records: Records) -> None:
        full = [(place, record) for place, record in enumerate(records) if isinstance(record, Record)]
        self.simple = not any(_is_set_aside(record) for _, record in full)
        own = [(place, record.id, record.correlation_id) for place, record in full]
        self.own = [one for one in own if one[1:] != (None, None)]
        self.joined = [digests_of(record.id, record.key) if isinstance(record, Record) else b"" for record in records]
        if any(record.priority for _, record in full):
            self.priorities = [record.priority if isinstance(record, Record) else 0 for record in records]

    @classmethod
    def read(cls, meta: bytes) -> Named:
        records = decode_meta(meta)
        named = cls(meta, records)
        named._records = records
        return named

    @property
    def records(self) -> list[Record | None]:
        """Without their payloads."""
        return decode_meta(self._meta) if self._records is None else self._records


def _keys_alone(records: Records) -> list[str | None] | None:
    """The keys, if all have nothing else of what is told here: the usual case."""
    keys = [
        record.key
        for record in records
        if isinstance(record, Record)
        and (record.id is None and record.correlation_id is None and record.source is None)
        and not (record.priority or record.enqueue_at or record.expire_deadline)
        and record.max_attempts < 0
    ]
    return keys if len(keys) == len(records) else None


def _is_set_aside(record: Record) -> bool:
    """It does not just lie in the queue, behind the others."""
    return bool(record.enqueue_at or record.expire_deadline or record.max_attempts >= 0 or record.source is not None)
