"""Whoever is killed or stopped, no process of a command is left, and an earlier run ends before the next begins."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.worker import tree
from millpond.worker.supervised import PROGRAM
from tests.worker.commanding import INCARNATION, PATIENCE, Pulse, commands, job_of, leased

ROOT = Path(__file__).parent.parent.parent
WHO = ("worker", "warden", "supervisor")
ESCAPED = "setsid sleep 1000 & sleep 1000"


class Lone:
    """A worker in a process of its own, and those below it."""

    def __init__(
        self, folder: Path, command: str, *, lease: float = 60.0, grace: float = 5.0, delivery: int = 1
    ) -> None:
        arguments = [str(folder), str(lease), str(grace), str(delivery), command]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.lone_worker", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids = {"worker": self.process.pid, "warden": int(self.line())}

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def kill(self, *who: str, number: int = signal.SIGKILL) -> None:
        """All at once, as far as that can be: nobody gets to do anything in between."""
        for name in who:
            os.kill(self.pids[name], signal.SIGSTOP)
        for name in who:
            os.kill(self.pids[name], number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()


Start = Callable[..., Lone]


@pytest.fixture
def pulse(tmp_path: Path) -> Iterator[Pulse]:
    pulse = Pulse(tmp_path / "pulse")
    yield pulse
    pulse.close()


@pytest.fixture
def start(tmp_path: Path, pulse: Pulse) -> Iterator[Start]:
    """Starts a worker whose command holds the pulse; returns when it runs."""
    started: list[Lone] = []

    def begin(rest: str, **options: float) -> Lone:
        log = f"{tmp_path}/logs/jobs@{INCARNATION}/j1/1.log"
        seen = f"echo seen; until [ -s {log} ]; do sleep 0.01; done"  # by its supervisor
        command = f"{seen}; exec 3>{pulse.path}; echo $PPID $$ >&3; {rest}"
        lone = Lone(tmp_path, command, **options)  # type: ignore[arg-type]
        started.append(lone)
        supervisor, command = pulse.line().split()
        lone.pids |= {"supervisor": int(supervisor), "command": int(command)}
        return lone

    yield begin
    for lone in started:
        lone.end()


async def run_next(folder: Path, command: str, deliveries: int = 2) -> str:
    async with commands(folder) as started:
        outcome = await started.run(command, leased(deliveries=deliveries))
        return str(outcome.result["output"] if outcome.ok else outcome.error)


SOME = [who for count in (1, 2) for who in itertools.combinations(WHO, count)]
pytestmark = pytest.mark.slow  # each starts a worker of its own


@pytest.mark.parametrize("who", SOME, ids="+".join)
def test_the_whole_tree_ends_whoever_is_killed(start: Start, pulse: Pulse, who: tuple[str, ...]) -> None:
    if who == ("warden", "supervisor"):
        lone = start(ESCAPED)  # the worker finds it by its environment
    else:
        lone = start(f"env -i setsid sleep 1000 3>&3 & {ESCAPED}")
    lone.kill(*who)
    pulse.wait_for_end()


@pytest.mark.parametrize("who", SOME, ids="+".join)
def test_a_command_that_ignores_sigterm_ends_too(start: Start, pulse: Pulse, who: tuple[str, ...]) -> None:
    lone = start("trap '' TERM; while :; do setsid sleep 1000; done", grace=0.2)
    lone.kill(*who)
    pulse.wait_for_end()


@pytest.mark.parametrize("who", [["warden"], ["supervisor"], ["warden", "supervisor"]], ids="+".join)
def test_a_worker_that_lives_on_tells_of_it_and_runs_the_next(start: Start, pulse: Pulse, who: list[str]) -> None:
    lone = start(ESCAPED)
    lone.kill(*who)
    assert "supervisor" in lone.line()
    assert not pulse.is_held()
    assert lone.process.wait(PATIENCE) == 0


def test_all_killed_at_once_the_system_kills_the_commands_group(start: Start, pulse: Pulse) -> None:
    lone = start("nohup sleep 1000 & sleep 1000")
    lone.kill(*WHO)
    pulse.wait_for_end()


def test_what_outlives_all_of_them_is_ended_by_the_next_worker(start: Start, pulse: Pulse, tmp_path: Path) -> None:
    """Also if that one has other jobs."""
    lone = start(f"setsid sh -c 'echo away >&3; exec sleep 1000' & {ESCAPED}")
    pulse.line()
    lone.kill(*WHO)
    asyncio.run(run_next(tmp_path, "true", deliveries=1))
    pulse.wait_for_end()


def test_an_earlier_run_is_ended_before_the_next_begins(start: Start, pulse: Pulse, tmp_path: Path) -> None:
    """Though its supervisor is alive, and stopped: it neither sees the lease run out nor the next worker come."""
    lock = tmp_path / "lock"
    lone = start(f"exec 9>{lock}; flock 9; echo locked >&3; {ESCAPED}", lease=5.0)
    pulse.line()
    lone.kill(*WHO, number=signal.SIGSTOP)
    assert asyncio.run(run_next(tmp_path, f"flock --nonblock {lock} echo it is mine")) == "it is mine\n"
    pulse.wait_for_end()
    lone.kill("supervisor", "warden", number=signal.SIGCONT)


def test_a_stopped_supervisor_whose_worker_is_gone_is_ended_by_the_next_worker(
    start: Start, pulse: Pulse, tmp_path: Path
) -> None:
    lone = start(ESCAPED)
    os.kill(lone.pids["supervisor"], signal.SIGSTOP)
    lone.kill("worker", "warden")
    lone.process.wait(PATIENCE)
    handle = os.pidfd_open(lone.pids["supervisor"])
    asyncio.run(run_next(tmp_path, "true", deliveries=1))
    assert select.select([handle], [], [], 0)[0], "it has ended"
    os.close(handle)
    pulse.wait_for_end()


def test_a_job_of_the_same_id_elsewhere_is_left_alone(start: Start, pulse: Pulse, tmp_path: Path) -> None:
    lone = start("read x < /dev/null; sleep 1000")

    async def other() -> None:
        async with commands(tmp_path / "other") as started:
            await started.run("true", leased(deliveries=2, correlation_id="another"))

    asyncio.run(other())
    assert pulse.is_held()
    lone.kill("worker")
    pulse.wait_for_end()


def test_a_stopped_worker_does_not_let_a_command_outlive_its_lease(start: Start, pulse: Pulse) -> None:
    lone = start(f"trap '' TERM; {ESCAPED}", lease=1.5)
    lone.kill("worker", number=signal.SIGSTOP)
    pulse.wait_for_end()
    os.kill(lone.pids["worker"], signal.SIGCONT)
    assert lone.line() == "ended, because its lease ran out"


def test_supervisors_ignore_the_signals_that_drain_a_worker(start: Start, pulse: Pulse) -> None:
    lone = start("sleep 1000")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(lone.pids["supervisor"], number)
        os.kill(lone.pids["warden"], number)
    assert pulse.is_held()
    lone.kill("worker")
    pulse.wait_for_end()


@pytest.mark.parametrize("by", ["its worker", "its timeout"])
def test_a_supervisor_that_hangs_is_killed_when_its_command_must_end(
    tmp_path: Path, pulse: Pulse, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr("millpond.worker.commands.PREPARING", 0.5)

    async def main() -> str | None:
        async with commands(tmp_path, grace=0.1) as started:
            timeout = 1.0 if by == "its timeout" else None
            job = job_of(f"exec 3>{pulse.path}; echo $PPID >&3; sleep 1000", timeout=timeout)
            ended = started.begin(job)
            supervisor = int(await asyncio.to_thread(pulse.line))
            os.kill(supervisor, signal.SIGSTOP)
            if by == "its worker":
                started.executor.end(job, "lease_lost")
            outcome = await asyncio.wait_for(ended, PATIENCE)
            assert (await started.run("echo again")).result["output"] == "again\n"
            return outcome.error

    assert "supervisor" in str(asyncio.run(main()))
    assert not pulse.is_held()


def test_no_process_of_ours_is_left_when_a_worker_stops(tmp_path: Path) -> None:
    async def main() -> int:
        async with commands(tmp_path, slots=2) as started:
            await asyncio.gather(started.run("true"), started.run("true", leased("j2")))
            assert started.executor.supervisors is not None
            return started.executor.supervisors.pid

    pid = asyncio.run(main())
    assert pid not in tree.processes()
    assert not [
        one
        for one in tree.processes()
        if str(PROGRAM) in _command_line(one) and f" {os.getpid()} " in _command_line(one)
    ]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
