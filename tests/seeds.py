"""Seeds of random tests: a few in the fast set, all of them in CI."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int, *, fast: int) -> list[Any]:
    return [*range(fast), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(fast, count))]
