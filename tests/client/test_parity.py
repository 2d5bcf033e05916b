"""Code moves between the engine and a client by changing one line: they have the same methods, and so have items."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from millpond import AsyncClient, AsyncPond, Client, Pond
from millpond.api import Api
from millpond.consuming.held import AsyncHeldItem, HeldItem
from millpond.sharing import SharedPond

OPERATIONS = sorted(name for name in vars(Api) if not name.startswith("_"))
LOOPS = ["consume", "subscribe"]
OF_ITEMS = ["complete", "retry", "extend", "write_state"]


def parameters(kind: type, name: str) -> list[tuple[Any, ...]]:
    signature = inspect.signature(getattr(kind, name))
    return [(one.name, one.kind, one.default) for one in signature.parameters.values()]


def returned(kind: type, name: str) -> Any:
    return inspect.signature(getattr(kind, name)).return_annotation


@pytest.mark.parametrize("name", OPERATIONS + LOOPS)
@pytest.mark.parametrize(("client", "engine"), [(Client, Pond), (AsyncClient, AsyncPond)])
def test_a_client_has_the_engines_method(client: type, engine: type, name: str) -> None:
    assert inspect.signature(getattr(client, name)) == inspect.signature(getattr(engine, name))
    assert inspect.iscoroutinefunction(getattr(client, name)) == inspect.iscoroutinefunction(getattr(engine, name))


@pytest.mark.parametrize("name", LOOPS)
def test_a_shared_pond_has_the_engines_loops(name: str) -> None:
    assert inspect.signature(getattr(SharedPond, name)) == inspect.signature(getattr(AsyncPond, name))


@pytest.mark.parametrize("name", OPERATIONS)
def test_with_and_without_await_calls_take_and_return_the_same(name: str) -> None:
    assert parameters(AsyncPond, name) == parameters(Pond, name)
    assert returned(AsyncPond, name).replace("Async", "") == returned(Pond, name)


@pytest.mark.parametrize("name", LOOPS)
def test_with_and_without_await_loops_take_the_same(name: str) -> None:
    assert parameters(AsyncPond, name) == parameters(Pond, name)


@pytest.mark.parametrize("name", OF_ITEMS)
def test_with_and_without_await_items_do_the_same(name: str) -> None:
    assert inspect.signature(getattr(AsyncHeldItem, name)) == inspect.signature(getattr(HeldItem, name))


def test_the_async_client_is_an_api() -> None:
    def takes(api: Api) -> Api:
        return api

    client = AsyncClient()
    assert takes(client) is client
