"""How things look: tables on a terminal and in a pipe, progress, and the words that a shell completes."""

from __future__ import annotations

import io
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from millpond.cli.drawing import draw, fitted
from millpond.cli.output import print_fields, print_table
from millpond.cli.progress import Progress
from millpond.cli.text import first_line, one_line, span
from tests.cli.calls import Cli


def drawn(width: int, head: list[str], rows: list[list[str]]) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    draw(head, rows, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_pipe_gets_all_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["ID", "COMMAND"], [["a", "x" * 500], ["long-id", "[red]y[/red]"]])
    assert capsys.readouterr().out == f"ID       COMMAND\na        {'x' * 500}\nlong-id  [red]y[/red]\n"


def test_a_terminal_gets_as_much_as_it_has_room_for() -> None:
    shown = drawn(
        40, ["ID", "COMMAND", "N"], [["an-id-that-is-long", "x" * 100, "7"], ["b", "[red]\u6771\u4eac[/red]", "12"]]
    )
    assert shown == (
        "ID                  COMMAND            N\n"
        "an-id-that-is-long  xxxxxxxxxxxxxxx…   7\n"
        "b                   [red]\u6771\u4eac[/red]   12\n"
    )


def test_what_people_copy_is_never_cut() -> None:
    assert fitted([50, 100, 70], [24, 10, 0], 80) == [50, 10, 70]
    assert drawn(20, ["ID"], [["i" * 50]]).splitlines()[1] == "i" * 50


def test_text_of_others_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    print_fields({"a": "x\x1b[2J", "two lines": "one\n\x07two"})
    assert capsys.readouterr().out == "a          x\\x1b[2J\ntwo lines  one\n           \\x07two\n"
    assert one_line("grün €") == "grün €"
    assert first_line("one\ntwo") == "one…"
    assert first_line(None) == "-"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0s"), (0.25, "250ms"), (1.5, "1.5s"), (90, "1m30s"), (3600, "1h"), (90_061, "1d1h")],
)
def test_spans_read_well(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


def test_progress_is_silent_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, "done") as progress:
        for done in range(10):
            progress(done)
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(10, "done") as progress:
        progress(10)
    assert "10/10" in capsys.readouterr().err


# ---- completion ---------------------------------------------------------------------------------------------------

TRY = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_millpond
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(script: Path, words: str) -> list[str]:
    program = TRY.format(script=script, words=words)
    ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd=script.parent)
    return ran.stdout.splitlines()


def test_bash_completes_nouns_verbs_flags_values_and_files(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "script.bash"
    script.write_text(cli.ok("completion", "bash"))
    assert completed(script, "millpond qu") == ["queue"]
    assert completed(script, "millpond queue del") == ["delete"]
    assert set(completed(script, "millpond queue delete orders --d")) == {"--data", "--dry-run"}
    assert completed(script, "millpond list --state d") == ["dead"]
    for split in ("--state = d", "--state=d"):
        [found] = completed(script, f"millpond list {split}")
        assert found.removeprefix("--state=") == "dead"
    assert "dead" in completed(script, "millpond list --state =")
    for verb in ("get", "set"):
        assert completed(script, f"millpond config {verb} max") == ["max-retries"]
    assert completed(script, "millpond worker start --pool ''") == ["threads", "processes"]
    assert completed(script, "millpond produce orders --file scr") == ["script.bash"]
    (tmp_path / "my orders.txt").touch()
    assert completed(script, "millpond produce orders --file my") == ["my orders.txt"]
    assert completed(script, "millpond produce list --li") == ["--lines"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_all_the_words(cli: Cli, tmp_path: Path, shell: str) -> None:
    script = tmp_path / "script"
    script.write_text(cli.ok("completion", shell))
    for word in ("enqueue", "redrive", "dry-run"):
        assert word in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(script)], check=True)
