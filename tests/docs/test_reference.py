"""docs/reference/cli.md and tasks.md are what the code says today."""

from __future__ import annotations

import pytest

from docs.generate import PAGES, REFERENCE, made


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_as_the_code_is(name: str) -> None:
    assert (REFERENCE / name).read_text() == made(name), f"{name} is stale; `make reference` writes it again"
