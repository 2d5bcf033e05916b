"""An app for the processes of a pool."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import millpond
from millpond.errors import InvalidRequest, LeaseLost
from millpond.model import LeasedItem
from millpond.tasks import Context, GiveUp, RetryLater

app = millpond.App(data=":memory:")
kept: list[bytes] = []
stopped: list[str] = []


@app.task
def whoami(context: Context) -> dict[str, Any]:
    context.progress(0.5, note="half")
    context.write_state({"step": context.attempt})
    if context.attempt == 1:
        raise RetryLater(delay=0)
    return {"pid": os.getpid(), "of": context.max_attempts, "state": context.state, "id": context.id}


@app.task(max_attempts=1)
def complains(word: str) -> None:
    logging.getLogger("shop").warning("%s of my own", word)
    raise ValueError(word)


@app.task
def double(n: int) -> int:
    return 2 * n


@app.task
def nested(n: int) -> list[Any]:
    handle = double.enqueue(n)
    return [handle.result(timeout=30), handle.correlation_id]


@app.task(max_attempts=1)
def fan(n: int) -> int:
    return sum(handle.result(timeout=20) for handle in double.map(range(n)))


@app.task(max_attempts=1)
def grow(megabytes: int) -> int:
    kept.append(b"x" * (megabytes << 20))
    return os.getpid()


@app.task(max_attempts=1)
def hang(path: str) -> None:
    """With a process that has left its session."""
    away = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(path).write_text(f"{os.getpid()} {away.pid}")
    try:
        time.sleep(1000)
    finally:
        Path(f"{path}.finally").touch()


@app.task(max_attempts=1)
def deaf(path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang.function(path)


@app.task(max_attempts=1)
def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@app.task(max_attempts=1)
def mark(path: str) -> None:
    """A line for each run; and waits until somebody reads it."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")


@app.task(max_attempts=1)
def mark_slowly(path: str) -> None:
    """It takes long enough to be killed in its midst, if its process is one that ends."""
    mark.function(path)
    time.sleep(0.3)


@app.task(max_attempts=1)
def crash_behind(path: str) -> None:
    """A fork that has left the session keeps all files of the process open."""
    away = os.fork()
    if away == 0:
        os.setsid()
        time.sleep(1000)
    Path(path).write_text(f"{os.getpid()} {away}")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(max_attempts=1)
async def fork() -> int:
    """Of the worker itself, where async tasks run."""
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)  # noqa: ASYNC251 - in a process of its own
    return pid


@app.task(max_attempts=1, timeout="20s")
def wait_for_children() -> int:
    """How many there are: one of its own, which leaves another behind."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.fork()
        os._exit(0)
    os.close(writing)
    os.read(reading, 1)  # both have ended
    os.close(reading)
    ended = 0
    try:
        while True:
            os.wait()
            ended += 1
    except ChildProcessError:
        return ended


@app.task(max_attempts=1)
def come_back(context: Context, how: str) -> list[Any]:
    """In a fork too; what that exits with, and what it was told of the context."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            context.write_state({"by": "the fork"})
        except InvalidRequest as error:
            os.write(writing, error.message.encode())
        if how == "exit":
            sys.exit(3)
        if how == "raise":
            raise ValueError(how)
        return ["the fork"]
    os.close(writing)
    with open(reading) as told:
        words = told.read()
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), words]


@app.task(max_attempts=1)
async def come_back_async(how: str) -> int:
    if (pid := os.fork()) == 0:
        if how == "raise":
            raise ValueError(how)
        return 42
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    return os.waitstatus_to_exitcode(status)


@app.task(max_attempts=1)
def end_others() -> list[int]:
    """By signals, and what that did: programs, and a fork."""
    codes = []
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        with subprocess.Popen(["sleep", "3"]) as other:
            other.send_signal(number)
        codes.append(other.returncode)
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
    forked.start()
    forked.terminate()
    forked.join(5)
    return [*codes, forked.exitcode or 0]


@app.task(max_attempts=1)
def talk_on(context: Context) -> None:
    """By a thread that is still there when the next jobs run."""

    def talk() -> None:
        while True:
            context.progress(0.1, note="talked on")
            try:
                context.write_state({"by": "talk_on"})
            except LeaseLost as error:
                stopped.append(error.message)
                return

    threading.Thread(target=talk, daemon=True).start()


@app.task(max_attempts=1)
def listen(context: Context) -> list[Any]:
    """What the thread of `talk_on` heard; whose state this is, after some writes."""
    for n in range(50):
        context.write_state({"by": "listen", "n": n})
    return [context.state, stopped]


@app.task(max_attempts=1)
def leave_behind(path: str) -> None:
    away = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(path).write_text(f"{os.getpid()} {away.pid}")


@app.task(max_attempts=1)
def odd(context: Context, what: str) -> int:
    """What cannot be sent as it is: lone surrogates, as names of files may hold, and keys that are no text."""
    if what == "note":
        context.progress(0.5, note="\udcff")
        raise RetryLater("noted")
    if what == "state":
        context.write_state({(1, 2): 3})  # type: ignore[dict-item]
    elif what == "give up":
        raise GiveUp("\udcff")
    logging.getLogger("shop").warning("\udcff")
    raise FileNotFoundError("\udcff")


@app.consumer("orders")
def order(item: LeasedItem) -> str:
    return item.text.upper()
