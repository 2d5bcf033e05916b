"""How commands end: by time, by their worker, with all that they started. Nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from millpond.worker import supervised, tree
from millpond.worker.executors import Executor, Outcome, TakesBacklog
from millpond.worker.orders import Order
from millpond.worker.supervised import Line
from tests.worker.commanding import INCARNATION, PATIENCE, Commands, Pulse, commands, job_of, leased

pytestmark = pytest.mark.slow  # many processes, and some time


def one(folder: Path, command: str, *, grace: float = 5.0, lease: float = 60.0, **spec: Any) -> Outcome:
    async def main() -> Outcome:
        async with commands(folder, grace=grace) as started:
            return await started.run(command, lease=lease, **spec)

    return asyncio.run(main())


# ---- time ---------------------------------------------------------------------------------------------------


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")
    outcome = one(tmp_path, f"exec 3>{pulse.path}; setsid sleep 1000 & sleep 1000", timeout=0.1)
    assert outcome.error == "timed out after 0.1s"
    assert not pulse.is_held()
    pulse.close()


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")
    command = f"trap '' TERM; exec 3>{pulse.path}; while :; do sleep 1000; done"
    assert one(tmp_path, command, timeout=0.1, grace=0.1).error == "timed out after 0.1s"
    assert not pulse.is_held()
    pulse.close()


def test_a_stopped_command_is_ended_by_sigterm(tmp_path: Path) -> None:
    assert one(tmp_path, "kill -STOP $$", timeout=0.1, grace=60).error == "timed out after 0.1s"


def test_a_command_does_not_outlive_its_lease(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")
    outcome = one(tmp_path, f"trap '' TERM; exec 3>{pulse.path}; while :; do sleep 1000; done", lease=0.2)
    assert outcome.error == "ended, because its lease ran out"
    assert not pulse.is_held()
    pulse.close()


@pytest.mark.slow
def test_a_command_is_asked_to_end_before_its_lease_is_over(tmp_path: Path) -> None:
    one(tmp_path, "trap 'echo asked; exit 0' TERM; sleep 1000 & wait", lease=4.0)
    assert (tmp_path / "logs" / f"jobs@{INCARNATION}" / "j1" / "1.log").read_text() == "asked\n"


def test_a_command_whose_lease_is_over_before_it_begins_is_not_run(tmp_path: Path) -> None:
    outcome = one(tmp_path, f"touch {tmp_path}/ran", lease=-1.0)
    assert outcome.error == "ended, because its lease ran out"
    assert not (tmp_path / "ran").exists()


def test_an_extended_lease_lets_the_command_go_on(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")
    go = tmp_path / "go"
    os.mkfifo(go)

    async def main() -> Outcome:
        async with commands(tmp_path) as started:
            job = job_of(f"echo up > {pulse.path}; read word < {go}; echo $word", lease=0.5)
            ended = started.begin(job)
            await asyncio.to_thread(pulse.line)
            old, job.deadline = job.deadline, job.deadline + 60
            started.executor.extended(job)
            await asyncio.sleep(max(0.0, old - asyncio.get_running_loop().time()))  # the old deadline is what is tested
            await asyncio.to_thread(go.write_text, "done\n")
            return await asyncio.wait_for(ended, PATIENCE)

    assert asyncio.run(main()).result["output"] == "done\n"
    pulse.close()


# ---- nothing is left ----------------------------------------------------------------------------------------

ESCAPES = {
    "in the background": "sleep 1000 &",
    "in a session of its own": "setsid sleep 1000 &",
    "forked away twice": "(setsid sh -c 'sleep 1000 & sleep 1000 &' &);",
    "without hangups": "nohup sleep 1000 > /dev/null 2>&1 &",
    "without our variables": "env -i setsid sleep 1000 &",
    "ignoring SIGTERM": "(trap '' TERM; sleep 1000) &",
    "stopped": "(sh -c 'kill -STOP $$') &",
}


@pytest.mark.parametrize("escape", ESCAPES.values(), ids=ESCAPES.keys())
def test_what_a_command_leaves_behind_is_ended_with_it(tmp_path: Path, escape: str) -> None:
    pulse = Pulse(tmp_path / "pulse")
    outcome = one(tmp_path, f"exec 3>{pulse.path}; echo up >&3; {escape} echo main is done", grace=0.2)
    assert outcome.ok
    assert outcome.result["output"] == "main is done\n"
    pulse.line()
    assert not pulse.is_held()
    pulse.close()


def test_a_mild_fork_bomb_is_ended(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")
    bomb = "while :; do setsid sh -c 'sleep 0.01; sleep 1000' & sleep 0.005; done"
    outcome = one(tmp_path, f"trap '' TERM; exec 3>{pulse.path}; ({bomb}) & {bomb}", timeout=0.3, grace=0)
    assert outcome.error == "timed out after 0.3s"
    assert not pulse.is_held()
    pulse.close()


# ---- ended by the worker ------------------------------------------------------------------------------------


async def ended_while_it_runs(started: Commands, pulse: Pulse, why: str) -> Outcome:
    job = job_of(f"exec 3>{pulse.path}; echo up >&3; setsid sleep 1000 & sleep 1000")
    ended = started.begin(job)
    await asyncio.to_thread(pulse.line)
    started.executor.end(job, why)  # type: ignore[arg-type]
    return await asyncio.wait_for(ended, PATIENCE)


@pytest.mark.parametrize(
    ("why", "error"),
    [
        ("cancelled", "cancelled while it ran"),
        ("stopping", "ended, because its worker stops"),
        ("lease_lost", "ended, because its lease was lost"),
    ],
)
def test_a_command_is_ended_when_its_worker_says_so(tmp_path: Path, why: str, error: str) -> None:
    pulse = Pulse(tmp_path / "pulse")

    async def main() -> Outcome:
        async with commands(tmp_path) as started:
            return await ended_while_it_runs(started, pulse, why)

    assert asyncio.run(main()).error == error
    assert not pulse.is_held()
    pulse.close()


def test_a_cancelled_command_has_time_to_clean_up(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")

    async def main() -> Outcome:
        async with commands(tmp_path) as started:
            job = job_of(f"trap 'echo cleaned; exit 0' TERM; echo up > {pulse.path}; sleep 1000 & wait")
            ended = started.begin(job)
            await asyncio.to_thread(pulse.line)
            started.executor.end(job, "cancelled")
            return await asyncio.wait_for(ended, PATIENCE)

    assert not asyncio.run(main()).ok
    assert (tmp_path / "logs" / f"jobs@{INCARNATION}" / "j1" / "1.log").read_text() == "cleaned\n"
    pulse.close()


def test_zombies_of_a_command_are_reaped(tmp_path: Path) -> None:
    """The child of a program that never waits for it."""
    pulse = Pulse(tmp_path / "pulse")
    forks = "import os, signal\nos.fork() or os._exit(0)"
    program = f"{forks}\nprint(os.getpid(), file=open('{pulse.path}', 'w'))\nsignal.pause()"

    async def main() -> int:
        async with commands(tmp_path) as started:
            job = job_of(f'exec python3 -ISc "{program}"')
            ended = started.begin(job)
            pid = int(await asyncio.to_thread(pulse.line))
            assert len(tree.below([pid], tree.processes())) == 1
            started.executor.end(job, "cancelled")
            await asyncio.wait_for(ended, PATIENCE)
            return pid

    pid = asyncio.run(main())
    assert pid not in tree.processes()
    assert not tree.below([pid], tree.processes())
    pulse.close()


def test_a_lost_lease_gives_no_time_to_clean_up(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")

    async def main() -> None:
        async with commands(tmp_path, grace=600) as started:
            job = job_of(f"trap '' TERM; echo up > {pulse.path}; while :; do sleep 1000; done")
            ended = started.begin(job)
            await asyncio.to_thread(pulse.line)
            started.executor.end(job, "lease_lost")
            await asyncio.wait_for(ended, PATIENCE)

    asyncio.run(main())
    pulse.close()


def test_more_commands_than_slots_wait_and_can_be_taken_back(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")
    go = tmp_path / "go"
    os.mkfifo(go)

    async def main() -> list[object]:
        async with commands(tmp_path) as started:
            first = started.begin(job_of(f"echo up > {pulse.path}; read x < {go}"))
            second, third = job_of("echo second", leased("j2")), job_of("echo third", leased("j3"))
            waits = started.begin(second)
            started.begin(third)
            await asyncio.to_thread(pulse.line)
            started.executor.end(second, "cancelled")
            before = await waits
            back = started.executor.take_back()
            await asyncio.to_thread(go.write_text, "x\n")
            return [before.defer, list(back) == [third], (await first).ok]

    assert asyncio.run(main()) == [True, True, True]
    pulse.close()


def test_slots_run_side_by_side_and_are_used_again(tmp_path: Path) -> None:
    async def main() -> set[str]:
        async with commands(tmp_path, slots=3) as started:
            run = [started.begin(job_of("echo $PPID", leased(f"j{n}"))) for n in range(20)]
            return {outcome.result["output"] for outcome in await asyncio.gather(*run)}

    assert len(asyncio.run(main())) <= 3


def test_stopping_waits_for_what_runs(tmp_path: Path) -> None:
    async def main() -> Outcome:
        async with commands(tmp_path) as started:
            ended = started.begin(job_of("sleep 0.05; echo whole"))
            await started.executor.stop(force=False)
            return ended.result()

    assert asyncio.run(main()).result["output"] == "whole\n"


def test_it_is_an_executor_that_takes_a_backlog(tmp_path: Path) -> None:
    async def main() -> None:
        async with commands(tmp_path) as started:
            executor: Executor = started.executor
            assert isinstance(executor, TakesBacklog)
            assert executor.accepts(job_of("true"))
            job = job_of("true")
            job.spec = None
            assert not executor.accepts(job)

    asyncio.run(main())


def test_an_attempt_that_ended_here_is_not_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = Line.run

    def spied(line: Line, order: Order) -> None:
        asked.append(order.names is not None)
        real(line, order)

    monkeypatch.setattr(Line, "run", spied)

    async def main() -> None:
        async with commands(tmp_path) as started:
            for delivery in (1, 2, 4, 5):  # another worker had the third
                await started.run("false", leased(deliveries=delivery))

    asyncio.run(main())
    assert asked == [False, False, True, False]


# ---- in odd surroundings ------------------------------------------------------------------------------------


def test_commands_run_where_few_files_may_be_open(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    try:
        assert one(tmp_path, "ulimit -n; ls /proc/self/fd").result["output"].split() == [
            "100",
            "0",
            "1",
            "2",
            "3",
            "99",
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_another_process_that_has_our_files_does_not_keep_supervisors_alive(tmp_path: Path) -> None:
    """As one that was forked by a pool of processes."""

    async def main() -> None:
        async with commands(tmp_path) as started:
            await started.run("true")
            links = {int(name): Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
            sockets = [file for file, link in links.items() if link.is_socket()]
            copies = [os.dup(file) for file in sockets]
            try:
                await asyncio.wait_for(started.executor.stop(force=False), PATIENCE / 2)
            finally:
                for copy in copies:
                    os.close(copy)

    asyncio.run(main())


NO_ROOM = """
import errno

def with_room(name):
    call = getattr(os, name)
    def tried(*args, **options):
        if os.path.exists("FOLDER/no-" + name):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return call(*args, **options)
    return tried

for name in ("fork", "posix_spawn"):
    setattr(os, name, with_room(name))
"""
NO_HANDLES = """
def refused(pid):
    raise OSError(38, "Function not implemented")

os.pidfd_open = refused
"""
NO_PROC = """
def without_proc(call):
    def tried(path, *args):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return call(path, *args)
    return tried

os.open, os.listdir = without_proc(os.open), without_proc(os.listdir)
"""
NO_HOME = """
fchdir = os.fchdir

def tried(folder):
    if not os.path.exists("FOLDER/home"):
        raise OSError(116, "Stale file handle")
    fchdir(folder)

os.fchdir = tried
"""


def surround(folder: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """The program of wardens and supervisors, in a system that is changed so."""
    real = str(supervised.PROGRAM)
    run = f"sys.argv[0] = {real!r}\nrunpy.run_path({real!r}, run_name='__main__')"
    program = folder / "supervisor.py"
    program.write_text(f"import os, runpy, sys\n{change.replace('FOLDER', str(folder))}\n{run}")
    monkeypatch.setattr(supervised, "PROGRAM", program)


@pytest.mark.parametrize("change", [NO_HANDLES, NO_PROC], ids=["no pidfd", "no /proc"])
def test_commands_run_and_end_on_systems_that_tell_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    surround(tmp_path, monkeypatch, change)
    assert one(tmp_path, "echo out").result["output"] == "out\n"
    assert one(tmp_path, "sleep 1000 & sleep 1000", timeout=0.1).error == "timed out after 0.1s"


def test_a_command_is_kept_when_its_supervisor_cannot_go_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    surround(tmp_path, monkeypatch, NO_HOME)

    async def main() -> list[Outcome]:
        async with commands(tmp_path) as started:
            away = [await started.run("pwd", cwd=str(tmp_path)) for _ in range(2)]
            (tmp_path / "home").touch()
            return [*away, await started.run("pwd")]

    first, second, third = asyncio.run(main())
    assert first.result["output"] == f"{tmp_path}\n"
    assert second.error == "the command could not be started: Stale file handle"
    assert third.result["output"] == f"{os.getcwd()}\n"


@pytest.mark.parametrize("call", ["fork", "posix_spawn"])
def test_a_system_without_room_for_a_process_costs_no_job_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    surround(tmp_path, monkeypatch, NO_ROOM)
    os.mkfifo(tmp_path / "go")
    pulse = Pulse(tmp_path / "pulse")

    async def main() -> list[Outcome]:
        async with commands(tmp_path, slots=2) as started:
            running = started.begin(job_of(f"exec 3>{pulse.path}; echo begun >&3; read go < {tmp_path}/go"))
            await asyncio.to_thread(pulse.line)
            (tmp_path / f"no-{call}").touch()
            refused = await started.run("true", leased("j2"))
            (tmp_path / f"no-{call}").unlink()
            later = await started.run(f"echo go > {tmp_path}/go", leased("j3"))
            return [refused, later, await running]

    refused, later, running = asyncio.run(main())
    assert (refused.ok, refused.defer, refused.delay) == (False, True, 1.0)
    assert later.ok
    assert running.ok
    pulse.close()
