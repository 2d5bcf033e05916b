"""Fixtures for the tests of tasks, in every pytest that has millpond installed.

    def test_it_is_sent(millpond_testing):
        handle = send.enqueue("a@b.c")
        assert handle.result() == "sent"

Which app: `millpond_app = "shop.jobs:app"` in pytest's settings, or a fixture `millpond_app` of your own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from millpond.tasks.app import App
    from millpond.tasks.testing import Testing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("millpond_app", "the millpond App that is tested, as MODULE:APP", default="")


@pytest.fixture
def millpond_app(pytestconfig: pytest.Config) -> App:
    """The app of the settings; without one a new app, in memory."""
    place: str = pytestconfig.getini("millpond_app")
    if not place:
        from millpond.tasks.app import App

        return App(data=":memory:")
    from millpond.tasks.loading import load_app

    return load_app(place)


@pytest.fixture
def millpond_testing(millpond_app: App) -> Iterator[Testing]:
    """`millpond_app.testing()`, for the length of the test."""
    with millpond_app.testing() as testing:
        yield testing
