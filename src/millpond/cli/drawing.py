"""Tables on a terminal, with rich: colours for states, and long text cut to what is left of the line.

The layout is our own, since what people copy (the first column, tokens) must never be cut: a line that is too long even
so is broken by the terminal. Cells are text and no markup: what a producer wrote is shown, not obeyed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

STYLES = {  # of a word that is a whole cell
    "completed": "green",
    "processing": "cyan",
    "leased": "cyan",
    "failed": "yellow",
    "retrying": "yellow",
    "dead": "red",
    "lost": "red",
    "cancelled": "dim",
    "paused": "yellow",
    "draining": "yellow",
}
COPIED = ("LEASE",)  # columns that are for other commands
TEXTS = ("COMMAND", "ERROR", "PAYLOAD", "WHAT", "WHY", "SIGNATURE")  # columns that give way first
TEXT_MIN = 10  # cells that are left of those
WORD_MIN = 24  # cells that are left of the others: an instant, a name, a host
GAP = 2


def draw(head: Sequence[str], rows: Sequence[Sequence[str]], console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    columns = list(zip(head, *rows, strict=True))
    widths = fitted([max(map(cell_len, column)) for column in columns], list(map(_least, head)), console.width)
    numbers = [bool(rows) and all(map(_is_number, column[1:])) for column in columns]
    console.print(_line(head, widths, numbers, "bold"), soft_wrap=True)
    for row in rows:
        console.print(_line(row, widths, numbers), soft_wrap=True)


def fitted(widths: list[int], least: list[int], room: int) -> list[int]:
    """The widest of those that may be cut gives way, a cell at a time. A `least` of 0: it is never cut."""
    widths = list(widths)
    for _ in range(sum(widths) + GAP * (len(widths) - 1) - room):
        spare = [place for place, width in enumerate(widths) if place and least[place] and width > least[place]]
        if not spare:
            break
        widths[max(spare, key=lambda place: widths[place])] -= 1
    return widths


def _least(name: str) -> int:
    return 0 if name in COPIED else TEXT_MIN if name in TEXTS else WORD_MIN


def _line(row: Sequence[str], widths: Sequence[int], numbers: Sequence[bool], style: str = "") -> Text:
    line = Text()
    for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
        cut = cell if cell_len(cell) <= width else set_cell_size(cell, width - 1) + "…"
        room = " " * (width - cell_len(cut))
        text = room + cut if numbers[place] else cut + room
        line.append(text if place < len(row) - 1 else text.rstrip(), style or STYLES.get(cell, ""))
        line.append(" " * GAP if place < len(row) - 1 else "")
    return line


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").removeprefix("-").isdigit()
