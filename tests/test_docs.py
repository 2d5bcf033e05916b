"""The docs tell the truth: the README's snippets run, the error table is whole, links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millpond import errors
from millpond.http import refusals
from millpond.http.reference import EXAMPLES
from millpond.wire import CALLS, JSON

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADDRESS = "127.0.0.1:7410"  # as the docs write it
SERVE = "millpond serve"
SNIPPET = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_")},
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "MILLPOND_BIND": "127.0.0.1:0",
    "MILLPOND_LOG_FORMAT": "json",
    "PYTHONWARNINGS": "error",
}


@contextmanager
def running(command: str, folder: Path) -> Iterator[str]:
    """A server that a snippet starts, on any free port: its address, once it says that it listens."""
    server = subprocess.Popen(command.split(), cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        lines = iter(server.stderr.readline, "")
        yield next(found[1] for line in lines if (found := re.search(r"listening on ([\d.:]+)", line)))
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0


def run(language: str, text: str, folder: Path) -> None:
    if language == "python" and text.startswith("async "):
        text = f"import asyncio, millpond\nasync def main():\n{textwrap.indent(text, '    ')}\nasyncio.run(main())"
    command = [sys.executable, "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run([*command, text], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, '"error":' in done.stdout) == (0, False), f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(300)  # it starts Spark twice
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    snippets = SNIPPET.findall((ROOT / "README.md").read_text())
    [start] = [place for place, (_, text) in enumerate(snippets) if text.startswith(SERVE)]
    for language, text in snippets[:start]:
        run(language, text, tmp_path)
    with running(snippets[start][1], tmp_path) as address:
        for language, text in snippets[start + 1 :]:
            assert ADDRESS in text or "./data" in text, "a snippet that does not reach the server proves nothing"
            run(language, text.replace(ADDRESS, address), tmp_path)


def test_the_http_page_lists_every_error_that_a_server_sends() -> None:
    page = (ROOT / "docs" / "reference" / "http.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", page, re.MULTILINE)
    told = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    kinds = [kind for module in (errors, refusals) for kind in vars(module).values() if isinstance(kind, type)]
    sent = {kind for kind in kinds if issubclass(kind, errors.MillpondError)}
    assert told == {(kind.status, kind.code) for kind in sent - {errors.MillpondError, errors.BadReply}}


def test_every_built_call_has_an_example_that_can_be_read() -> None:
    assert set(EXAMPLES) == {name for name, call in CALLS.items() if call.built}
    for name, example in EXAMPLES.items():
        JSON.decode(example.encode(), CALLS[name].request)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"
