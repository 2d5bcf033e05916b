"""Code moves between the engine and a client by changing one line: they have the same methods."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from millpond import AsyncClient, AsyncPond, Client, LeasedItem, Pond
from millpond.api import Api
from millpond.client.held import AsyncHeldItem, HeldItem

OPERATIONS = sorted(name for name in vars(Api) if not name.startswith("_"))


def parameters(kind: type, name: str) -> list[tuple[Any, ...]]:
    signature = inspect.signature(getattr(kind, name))
    return [(one.name, one.kind, one.default, one.annotation) for one in signature.parameters.values()]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("client", "engine"), [(Client, Pond), (AsyncClient, AsyncPond)])
def test_a_client_has_the_engines_method(client: type, engine: type, name: str) -> None:
    assert parameters(client, name) == parameters(engine, name)
    assert inspect.iscoroutinefunction(getattr(client, name)) == inspect.iscoroutinefunction(getattr(engine, name))


@pytest.mark.parametrize("name", OPERATIONS)
def test_replies_have_the_same_types_save_for_leased_items(name: str) -> None:
    blocking, returned = (inspect.signature(getattr(kind, name)).return_annotation for kind in (Client, Pond))
    expected = {"lease": "Sequence[HeldItem]"}.get(name, returned)
    assert blocking == expected


def test_the_async_client_is_an_api() -> None:
    def takes(api: Api) -> Api:
        return api

    client = AsyncClient()
    assert takes(client) is client


def test_held_items_are_leased_items() -> None:
    assert issubclass(HeldItem, LeasedItem)
    assert issubclass(AsyncHeldItem, LeasedItem)
