"""What must not happen twice in a partition: keys, own ids, requests and transfers, all as digests."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

import msgspec

from millpond.queue.columns import Column

DIGEST_BYTES = 15  # 120 bits never collide by chance, and 15 bytes fill one 48-byte object


def digest(kind: str, name: str) -> bytes:
    return blake2b(f"{kind}:{name}".encode(), digest_size=DIGEST_BYTES).digest()


_KEY, _ID = (blake2b(f"{kind}:".encode(), digest_size=DIGEST_BYTES) for kind in ("key", "id"))


def key_digest(key: str) -> bytes:
    """As `digest`, at half the price: what all have in common is hashed once."""
    hashed = _KEY.copy()
    hashed.update(key.encode())
    return hashed.digest()


def id_digest(item_id: str) -> bytes:
    hashed = _ID.copy()
    hashed.update(item_id.encode())
    return hashed.digest()


def digests_of(item_id: str | None, key: str | None) -> bytes:
    """Of an item's names, joined."""
    if item_id is None:
        return b"" if key is None else key_digest(key)
    return id_digest(item_id) if key is None else id_digest(item_id) + key_digest(key)


def request_digest(request_id: str) -> bytes:
    return digest("request", request_id)


def transfer_digest(incarnation: str, partition: int, number: int, turn: int) -> bytes:
    """Names one move of one item: the same move sent again has the same digest, a later one has another."""
    return transfer_digests(incarnation, partition, [(number, turn)])[0]


def transfer_digests(incarnation: str, partition: int, moves: Iterable[tuple[int, int]]) -> list[bytes]:
    """Of many, by number and turn."""
    shared = blake2b(f"transfer:{incarnation}/{partition}/".encode(), digest_size=DIGEST_BYTES)
    digests = []
    for number, turn in moves:
        hashed = shared.copy()
        hashed.update(b"%d/%d" % (number, turn))
        digests.append(hashed.digest())
    return digests


class Ended(msgspec.Struct, array_like=True, gc=False):
    """An item that has ended but still guards its key: enough to answer a duplicate with."""

    at: int
    number: int
    created: int
    name: str | None
    moved: bool = False  # to another queue, from where it may come back to its names
    partition: int = -1  # that it was an item of, if not of this one


class Request(msgspec.Struct, array_like=True, gc=False):
    """A produce request that was carried out: its reply follows from the numbers, or is kept whole."""

    at: int
    first: int
    count: int
    reply: bytes | None
    partition: int = -1  # as above


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

    def put_older(self, name: bytes, entry: T, window: int) -> None:
        """One from elsewhere, which counts only where nothing newer is known."""
        known = self._young.get(name) or self._old.get(name)
        if known is None or known.at < entry.at:
            self.put(name, entry, window)

    def get(self, name: bytes, now: int, window: int) -> T | None:
        entry = self._young.get(name) or self._old.get(name)
        return entry if entry is not None and now - entry.at < window else None

    def put_all(self, names: Iterable[bytes], entries: Sequence[T], window: int) -> None:
        """Of one instant."""
        if entries and entries[0].at - self._turned_at > window:
            self._old, self._young, self._turned_at = self._young, {}, entries[0].at
        self._young.update(zip(names, entries, strict=True))

    def has_any(self, names: Iterable[bytes]) -> bool:
        """Of whatever age."""
        return any(not one.keys().isdisjoint(names) for one in (self._young, self._old) if one)

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

    def has_any(self, names: Collection[bytes]) -> bool:
        """Whether anything is known of any of these."""
        if not self.live.keys().isdisjoint(names) or self.ended.has_any(names):
            return True
        return bool(self.uncommitted) and not self.uncommitted.isdisjoint(names)

    def add_all(
        self, first: int, joined: list[bytes], own: Iterable[tuple[int, str | None, str | None]], *, single: bool
    ) -> None:
        """Neighbours whose names nobody has; `own`: places of ids and correlation ids. `single`: one name each."""
        if single:
            self.live.update(zip(joined, range(first, first + len(joined)), strict=True))
            self.digests.put(first, joined)
        else:
            for number, names in enumerate(joined, first):
                if names:
                    self.live.update(dict.fromkeys(split(names), number))
                    self.digests[number] = names
        for place, item_id, correlation_id in own:
            if joined[place]:
                self.names[first + place] = f"{item_id or ''}\n{correlation_id or ''}"

    def add(
        self, number: int, item_id: str | None, key: str | None, correlation_id: str | None, joined: bytes | None = None
    ) -> None:
        """`joined`: their digests, if they are at hand."""
        if joined is None:
            joined = digests_of(item_id, key)
        for name in split(joined):
            if name in self.live:
                self._give_up(name)
            self.live[name] = number
            if self.ended.discard(name):
                self.uncommitted.add(name)
        self.digests[number] = joined
        if item_id is not None or correlation_id is not None:
            self.names[number] = f"{item_id or ''}\n{correlation_id or ''}"

    def add_kept(self, number: int, item_id: str, key: str | None, correlation_id: str) -> None:
        """An item that has ended, and is only kept: it has those of its names that no other has by now."""
        free = [name for name in split(digests_of(item_id, key)) if name not in self.live]
        self.live.update(dict.fromkeys(free, number))
        self.digests[number] = b"".join(free)
        self.names[number] = f"{item_id}\n{correlation_id}"

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

    def end_all(self, first: int, count: int, at: int, created: int, window: int) -> None:
        """Of these neighbours, made at one instant, those that have names end: as `end` of each."""
        gone = self.digests.discard(first, count)
        named = bool(self.names)
        entries = [Ended(at, number, created, self.names.pop(number, None) if named else None) for number, _ in gone]
        if {len(joined) for _, joined in gone} == {DIGEST_BYTES}:
            names = [joined for _, joined in gone]
        else:
            entries = [entry for entry, (_, joined) in zip(entries, gone, strict=True) for _ in split(joined)]
            names = [name for _, joined in gone for name in split(joined)]
        for name in names:
            del self.live[name]
        self.uncommitted.update(names)
        if window:
            self.ended.put_all(names, entries, window)

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
