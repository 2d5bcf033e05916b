"""How far long work is: a bar on a terminal, a line now and then elsewhere. On stderr: it is for people.

with Progress(total, "redriven") as progress:
    progress(done)
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from millpond.cli.output import say

LINE_S = 5.0  # between lines that say how far it is


class Progress:
    """`total` None: nobody knows how much there is. Called with how much is done, of all."""

    def __init__(self, total: int | None, what: str) -> None:
        self._total = total
        self._what = what
        self._begun = self._told = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = _bar(self._what)
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            return
        now = time.monotonic()
        if now - self._told >= LINE_S:
            self._told = now
            of = "" if self._total is None else f" of {self._total:,}"
            say(f"{done:,}{of} {self._what}, {done / (now - self._begun):,.0f} a second")


def _bar(what: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), f"{what}", TimeElapsedColumn())
    return Bar(*columns, console=Console(stderr=True), transient=True)
