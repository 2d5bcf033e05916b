"""Pages with console blocks tell the truth: every command runs, and shows what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.session import ROOT, pattern, play

PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "\n```console\n$ millpond " in page.read_text())


@pytest.mark.slow
@pytest.mark.timeout(240)  # the tutorial has some sixty commands: half a minute on a machine that does nothing else
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    play(page, tmp_path)


@pytest.mark.parametrize(
    ("shown", "printed", "fits"),
    [
        (["ID  STATE", "a   …"], "ID    STATE\na     ready\n", True),
        (["ID  STATE", "a   dead"], "ID    STATE\na     ready\n", False),
        (["…", "last"], "one\ntwo\nlast\n", True),
        (["…", "last"], "last\nmore\n", False),
        (["all"], "all\nand more\n", False),
        ([], "unexpected\n", False),
    ],
)
def test_what_a_page_shows_is_compared_line_by_line(shown: list[str], printed: str, fits: bool) -> None:
    assert bool(pattern(shown).fullmatch(printed)) is fits
