"""For peers that import what they run by name."""

from __future__ import annotations

from counting import tick


def noop(count: int) -> None:
    tick(count)
