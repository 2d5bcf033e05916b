"""What mypy knows of a task: a wrong argument is told where it is enqueued."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # mypy reads all of us

MODULE = """
import millpond
from millpond.tasks import Context

app = millpond.App(data=":memory:")

@app.task
def add(a: int, b: int = 2) -> int:
    return a + b

@app.task(max_attempts=3)
async def shout(context: Context, word: str) -> str:
    return word.upper()

@app.task
def plain(a, b):  # type: ignore[no-untyped-def]
    return a

async def go() -> None:
    total: int = add.enqueue(1, b=3).result() + add(1)
    word: str = await (await shout.enqueue_async("x"))
    shout.options(delay=1).enqueue(word="x")
    plain.enqueue(1, 2)
    add.enqueue("x")  # wrong
    add.options(delay=1).enqueue(1, c=2)  # wrong
    add.delay()  # wrong
    await shout.enqueue_async(1)  # wrong
    await shout.options(delay=1).enqueue_async()  # wrong
"""


def test_the_arguments_of_enqueue_are_those_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(MODULE)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(tmp_path / "typed.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    told = {int(line.split(":")[1]) for line in run.stdout.splitlines() if ": error:" in line}
    assert told == {n for n, line in enumerate(MODULE.splitlines(), 1) if "# wrong" in line}, run.stdout + run.stderr
