"""The stores by name: where partitions are, where new ones go, and what of that can change while the engine runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from millpond.errors import Unavailable
from millpond.model import StoreSettings
from millpond.service.call_thread import CallThread
from millpond.store.base import DEFAULT, StoreFailed, Stores
from millpond.store.drivers import AbsentStores, open_stores, prepare
from millpond.store.placement import place

log = logging.getLogger("millpond.service")
QUEUES_NAMED = 3  # in an error about a store that is in use

T = TypeVar("T")


class Places:
    """`stores` are there already, at least the default one; those of `settings` that are not are made here.

    Each but the default one has a thread of its own, as one that does not answer must not hold up the others.
    """

    def __init__(self, stores: Mapping[str, Stores], settings: Sequence[StoreSettings] = ()) -> None:
        self._stores = dict(stores)
        self._threads: dict[str, CallThread] = {}
        self._settings = _in_order(stores, settings)
        for one in settings:
            if one.name not in self._stores:
                self._stores[one.name] = open_stores(one)

    def __getitem__(self, name: str) -> Stores:
        """Of a name that nobody configured: stores that are away."""
        return self._stores.get(name) or AbsentStores(name, partial(self._stores.get, name))

    @property
    def names(self) -> list[str]:
        return list(self._stores)

    def affinity(self, name: str) -> float:
        return self._settings[name].affinity

    def place(self, count: int) -> list[str]:
        """The store of each of so many new partitions."""
        return place(count, {name: one.affinity for name, one in self._settings.items()})

    # ---- calls that may take long ---------------------------------------------------------------------------

    async def prepare(self, name: str, stores: Stores, *, unused: bool) -> None:
        """Before partitions are placed there. The default store's files are made with the registry's: it is there."""
        if name == DEFAULT:
            return
        try:
            await self.call(name, prepare, stores, unused=unused)
        except (StoreFailed, OSError) as error:
            raise Unavailable(
                f"store {name!r} cannot take partitions ({str(error).replace(';', ',')}); bring it back, or set its"
                " affinity to 0 and `millpond config reload`",
                store=name,
            ) from error

    async def call(self, name: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        if name not in self._threads:
            self._threads[name] = CallThread(f"millpond-store-{name}")
        return await self._threads[name].run(partial(call, *arguments, **named))

    def close(self) -> None:
        """They can be used again."""
        threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.stop()
        for stores in self._stores.values():
            let_go(stores)

    # ---- changes --------------------------------------------------------------------------------------------

    def refusals(self, settings: Sequence[StoreSettings], used: Mapping[str, Sequence[str]]) -> list[str]:
        """What cannot change. `used`: the queues that have partitions in each store."""
        wanted = {one.name: one for one in settings}
        problems = []
        for name, old in self._settings.items():
            new = wanted.get(name)
            if name == DEFAULT or not used.get(name):
                continue
            if new is None:
                problems.append(
                    f"store {name!r} cannot be removed, {_holds(used[name])}; set its affinity to 0, rebalance them"
                    " off it, then remove it"
                )
            elif _where(new) != _where(old):
                problems.append(
                    f"store {name!r} cannot have another driver, path or url while the server runs,"
                    f" {_holds(used[name])}; restart the server for that"
                )
        return problems

    def make(self, settings: Sequence[StoreSettings]) -> dict[str, Stores]:
        """Those that are new, or in another place than before."""
        old = self._settings
        return {
            one.name: open_stores(one)
            for one in settings
            if one.name != DEFAULT and (one.name not in old or _where(old[one.name]) != _where(one))
        }

    def change(self, settings: Sequence[StoreSettings], made: Mapping[str, Stores]) -> list[str]:
        """To these, which were not refused, and of which those were made; tells what has changed."""
        old, wanted = self._settings, _in_order([DEFAULT], settings)
        told = _told(old, wanted)
        for name in [name for name in old if name not in wanted or name in made]:
            let_go(self._stores.pop(name))
        self._stores.update(made)
        self._settings = wanted
        return told


def _in_order(there: Iterable[str], settings: Sequence[StoreSettings]) -> dict[str, StoreSettings]:
    """Those that are there anyway come first, but where the settings name them."""
    named = {one.name: one for one in settings}
    return {name: StoreSettings(name=name) for name in there if name not in named} | named


def _where(settings: StoreSettings) -> tuple[str, str, str]:
    return settings.driver, settings.path, settings.url


def _told(old: Mapping[str, StoreSettings], new: Mapping[str, StoreSettings]) -> list[str]:
    told = [f"store {name!r} is removed" for name in old if name not in new]
    for name, one in new.items():
        before = old.get(name)
        if before is None:
            told.append(f"store {name!r} is new, affinity {one.affinity:g}")
        elif _where(before) != _where(one):
            told.append(f"store {name!r} is another one, affinity {one.affinity:g}")
        elif before.affinity != one.affinity:
            told.append(f"store {name!r} has affinity {one.affinity:g}, not {before.affinity:g}")
    return told


def _holds(queues: Sequence[str]) -> str:
    some = ", ".join(map(repr, sorted(queues)[:QUEUES_NAMED]))
    more = f" and {len(queues) - QUEUES_NAMED} more" if len(queues) > QUEUES_NAMED else ""
    return f"as it has partitions of {some}{more}"


def let_go(stores: Stores) -> None:
    """Those that share connections can close them; files are closed with their stores."""
    close: Callable[[], None] | None = getattr(stores, "close", None)
    if close is not None:
        try:
            close()
        except (StoreFailed, OSError) as error:
            log.warning("a store was not closed: %s", error)
