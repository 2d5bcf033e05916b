"""What must not happen twice in a partition: keys, own ids, requests and transfers, all as digests."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Generic, TypeVar

import msgspec

from millpond.queue.columns import Column

DIGEST_BYTES = 15  # 120 bits never collide by chance, and 15 bytes fill one 48-byte object


def digest(kind: str, name: str) -> bytes:
    return blake2b(f"{kind}:{name}".encode(), digest_size=DIGEST_BYTES).digest()


def key_digest(key: str) -> bytes:
    return digest("key", key)


def id_digest(item_id: str) -> bytes:
    return digest("id", item_id)


def request_digest(request_id: str) -> bytes:
    return digest("request", request_id)


def transfer_digest(incarnation: str, partition: int, number: int, turn: int) -> bytes:
    """Names one move of one item: the same move sent again has the same digest, a later one has another."""
    return digest("transfer", f"{incarnation}/{partition}/{number}/{turn}")


class Ended(msgspec.Struct, array_like=True, gc=False):
    """An item that has ended but still guards its key: enough to answer a duplicate with."""

    at: int
    number: int
    created: int
    name: str | None
    moved: bool = False  # to another queue, from where it may come back to its names


class Request(msgspec.Struct, array_like=True, gc=False):
    """A produce request that was carried out: its reply follows from the numbers, or is kept whole."""

    at: int
    first: int
    count: int
    reply: bytes | None


T = TypeVar("T", Ended, Request)


class Window(Generic[T]):
    """Remembers entries for at least a time window, in two generations, and asks each for its age."""

    __slots__ = ("_old", "_turned_at", "_young")

    def __init__(self) -> None:
        self._young: dict[bytes, T] = {}
        self._old: dict[bytes, T] = {}
        self._turned_at = 0

    def put(self, name: bytes, entry: T, window: int) -> None:
        if entry.at - self._turned_at > window:
            self._old, self._young, self._turned_at = self._young, {}, entry.at
        self._young[name] = entry

    def get(self, name: bytes, now: int, window: int) -> T | None:
        entry = self._young.get(name) or self._old.get(name)
        return entry if entry is not None and now - entry.at < window else None

    def discard(self, name: bytes) -> bool:
        """Whether there was such an entry."""
        young, old = self._young.pop(name, None), self._old.pop(name, None)
        return young is not None or old is not None

    def dump(self, now: int, window: int) -> dict[bytes, T]:
        entries = self._old | self._young
        for name in [name for name, entry in entries.items() if now - entry.at >= window]:
            del entries[name]
        return entries

    def load(self, entries: dict[bytes, T], now: int) -> None:
        self._young, self._turned_at = dict(entries), now


class Dedup:
    __slots__ = ("arrivals", "digests", "ended", "live", "names", "requests", "uncommitted")

    def __init__(self) -> None:
        self.live: dict[bytes, int] = {}  # digest of a key or own id -> number
        self.digests: Column[bytes] = Column()  # the other way: number -> those of its digests that it has in `live`
        self.names: Column[str] = Column()  # number -> "own id\nown correlation id", where a keyed item has either
        self.ended: Window[Ended] = Window()
        self.requests: Window[Request] = Window()
        self.arrivals: dict[bytes, int] = {}  # transfers taken in, until their source confirms
        self.uncommitted: set[bytes] = set()  # names that the running turn gave up: a failed commit revives them

    def add(self, number: int, item_id: str | None, key: str | None, correlation_id: str | None) -> None:
        joined = b""
        if item_id is not None:
            joined += id_digest(item_id)
        if key is not None:
            joined += key_digest(key)
        for name in split(joined):
            if name in self.live:
                self._give_up(name)
            self.live[name] = number
            if self.ended.discard(name):
                self.uncommitted.add(name)
        self.digests[number] = joined
        if item_id is not None or correlation_id is not None:
            self.names[number] = f"{item_id or ''}\n{correlation_id or ''}"

    def retire(self, number: int, at: int, created: int, window: int) -> None:
        """The item has ended but is kept: it can be found by its id, and guards its names only for the window."""
        entry = Ended(at, number, created, self.names.get(number))
        for name in split(self.digests.get(number, b"")):
            self.uncommitted.add(name)
            if window:
                self.ended.put(name, entry, window)

    def end(self, number: int, at: int, created: int, window: int, *, moved: bool = False) -> None:
        entry = Ended(at, number, created, self.names.pop(number, None), moved)
        for name in split(self.digests.pop(number, b"")):
            del self.live[name]
            self.uncommitted.add(name)
            if window:
                self.ended.put(name, entry, window)

    def release(self, number: int) -> None:
        """Give up the item's keys at once: another item takes them over."""
        for name in split(self.digests.pop(number, b"")):
            del self.live[name]
            self.uncommitted.add(name)
        self.names.pop(number, None)

    def disown(self, names: Iterable[bytes]) -> None:
        """A turn that brought these in came to nothing."""
        for name in names:
            self._give_up(name)
            self.arrivals.pop(name, None)
            self.requests.discard(name)

    def dump(self) -> tuple[bytes, bytes, bytes, list[str]]:
        """The names in use and who has them, then the numbers and texts of `names`."""
        owners, named = array("q", self.live.values()), array("q", self.names.numbers())
        return b"".join(self.live), owners.tobytes(), named.tobytes(), self.names.values()

    def load(self, dumped: tuple[bytes, bytes, bytes, list[str]]) -> None:
        joined, owners, named, texts = dumped
        for name, number in zip(split(joined), array("q", owners), strict=True):
            self.live[name] = number
            self.digests[number] = self.digests.get(number, b"") + name  # of one name the very object: half the memory
        for number, text in zip(array("q", named), texts, strict=True):
            self.names[number] = text
            if number not in self.digests:
                self.digests[number] = b""

    def _give_up(self, name: bytes) -> None:
        """Nobody has the name any more; an item that was kept only to be looked at may have had it."""
        number = self.live.pop(name, None)
        if number is not None:
            self.digests[number] = b"".join(other for other in split(self.digests[number]) if other != name)


def split(joined: bytes) -> list[bytes]:
    return [joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES)]
