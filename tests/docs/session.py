"""A page as a session: its files are written and its commands typed into one bash, in the order of the page."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w./-]+\.py)\n")  # the first line of a block that is a file
PROMPT = "$ "
ANY = "…"
COMMAND_S = 60  # for one command, on a machine that does other things too
GONE_S = 15  # for what a session has started to end after it


class Step(NamedTuple):
    command: str
    shown: list[str]

    @property
    def fails(self) -> bool:
        return any(line.startswith("millpond: ") for line in self.shown)


def steps(block: str) -> list[Step]:
    """Of a console block: commands after a prompt, and what the page shows of their output."""
    found: list[Step] = []
    for line in block.splitlines():
        if line.startswith(PROMPT):
            found.append(Step(line.removeprefix(PROMPT), []))
        else:
            found[-1].shown.append(line)
    return found


def pattern(shown: list[str]) -> re.Pattern[str]:
    """`…` is anything within a line, or any lines if it stands alone; columns may be as wide as they are."""
    lines = [".*" if line == ANY else f"{_line(line)}\n" for line in shown]
    return re.compile("".join(f"(?s:{line})" if line == ".*" else line for line in lines))


def _line(line: str) -> str:
    words = [".*".join(re.escape(part) for part in word.split(ANY)) for word in line.split()]
    return " *" + " +".join(words) + " *"


class Session:
    """A bash in `folder`, whose home is there too and whose `python` and `millpond` are those of the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "home").mkdir()
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._mark = f"HOME={folder / 'home'}"
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env={**kept, "HOME": str(folder / "home"), "PATH": path, "LANG": "C.UTF-8", "COLUMNS": "200"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.close()
        left = self._left() if kind is None else []
        for process in self._processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._bash.stdout.close()
        self._bash.wait()
        assert not left, f"left behind: {left}"

    def type(self, command: str) -> tuple[int, str]:
        """Its exit code and all that it prints, errors too."""
        assert self._bash.stdin is not None
        end = f"--end-{time.monotonic_ns()}--"
        self._bash.stdin.write(f"{command}\n{{ _code=$?; echo {end}$_code; (exit $_code); }} 2>&1\n".encode())
        self._bash.stdin.flush()
        output, code = self._read_to(end, command)
        return code, output

    def _read_to(self, end: str, command: str) -> tuple[str, int]:
        assert self._bash.stdout is not None
        deadline, read, out = time.monotonic() + COMMAND_S, b"", self._bash.stdout.fileno()
        while not (found := re.search(rf"{end}(\d+)\n".encode(), read)):
            ready, _, _ = select.select([out], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(out, 65536) if ready else b""
            assert more, f"no end of {command!r} in {COMMAND_S} s; it printed:\n{read.decode()}"
            read += more
        return read[: found.start()].decode(), int(found[1])

    def _processes(self) -> list[int]:
        """All that have the session's home, whose children they may be."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark in environ.read_text(errors="replace").split("\0"):
                    found.append(int(environ.parent.name))
            except OSError:
                pass  # ended meanwhile, or somebody else's
        return found

    def _left(self) -> list[str]:
        """What still runs some time after the session's end."""
        left, deadline = [], time.monotonic() + GONE_S
        for process in self._processes():
            try:
                ending = os.pidfd_open(process)
            except ProcessLookupError:
                continue
            if not select.select([ending], [], [], max(0.0, deadline - time.monotonic()))[0]:
                left.append(Path(f"/proc/{process}/cmdline").read_text().replace("\0", " "))
            os.close(ending)
        return left


def play(page: Path, folder: Path) -> None:
    """Fails at the first command that does not do what the page shows."""
    with Session(folder) as session:
        for language, text in BLOCK.findall(page.read_text()):
            if language == "python" and (named := FILE.match(text)):
                (folder / named[1]).write_text(text)
            elif language == "console":
                for step in steps(text):
                    code, output = session.type(step.command)
                    told = f"{page.name}: $ {step.command}\n(exit code {code})\n{output}"
                    assert (code != 0) == step.fails, told
                    assert pattern(step.shown).fullmatch(output), f"{told}\nbut the page shows\n" + "\n".join(
                        step.shown
                    )
