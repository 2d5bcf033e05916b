"""Text cut to what a table has room for."""

from __future__ import annotations

SHOWN_MAX = 60  # characters


def short(text: str | None) -> str:
    line = (text or "-").strip().partition("\n")[0]
    return line if len(line) <= SHOWN_MAX else f"{line[: SHOWN_MAX - 1]}…"
