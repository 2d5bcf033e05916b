"""Finding processes: below others, by their environment, and ending them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.worker import tree
from millpond.worker.tree import Process
from tests.worker.commanding import PATIENCE, Pulse

NAMES = ("jobs", f"tree-{os.getpid()}", "c1")
OURS = f"{tree.supervisor_name()}-1"  # others that run at the same time leave it alone
VARIABLES = {"MILLPOND_QUEUE": "jobs", "MILLPOND_ITEM_ID": NAMES[1], "MILLPOND_CORRELATION_ID": "c1"}


@pytest.fixture
def pulse(tmp_path: Path) -> Iterator[Pulse]:
    pulse = Pulse(tmp_path / "pulse")
    yield pulse
    pulse.close()


def sleeper(pulse: Pulse, run: str, **variables: str) -> subprocess.Popen[bytes]:
    """Of that run; it holds the pulse, and so does a child that knows nothing of it."""
    command = f"exec 3>{pulse.path}; env -i sleep 1000 & echo up >&3; wait"
    environment = {**os.environ, **VARIABLES, **variables, "MILLPOND_RUN": run}
    process = subprocess.Popen(["sh", "-c", command], env=environment, start_new_session=True)
    pulse.line()
    return process


def ended(process: subprocess.Popen[bytes]) -> int:
    return process.wait(PATIENCE)


def killed(process: subprocess.Popen[bytes], pulse: Pulse) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    ended(process)
    pulse.wait_for_end()


# ---- below --------------------------------------------------------------------------------------------------


def test_all_below_a_process_are_found_but_for_those_left_out() -> None:
    parents = {2: 1, 3: 2, 4: 3, 5: 2, 6: 5, 7: 1, 8: 99}
    among = {pid: Process(parent, pid, False) for pid, parent in parents.items()}
    assert sorted(tree.below([2], among)) == [3, 4, 5, 6]
    assert sorted(tree.below([2], among, but=[5])) == [3, 4]
    assert sorted(tree.below([3, 5], among)) == [4, 6]
    assert tree.below([42], among) == []


def test_processes_that_name_each_other_as_parents_do_not_hang_the_search() -> None:
    """As a look at a tree that changes meanwhile may have it."""
    among = {2: Process(3, 2, False), 3: Process(2, 2, False)}
    assert sorted(tree.below([2], among)) == [2, 3]


def test_a_name_with_brackets_and_spaces_is_read_past(tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 (b c"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "1000"])
    try:
        found = tree.processes()[process.pid]
        assert (found.parent, found.group, found.zombie) == (os.getpid(), os.getpgrp(), False)
    finally:
        process.kill()
        process.wait()


def test_when_a_process_started_tells_it_from_a_later_one() -> None:
    assert tree.started(os.getpid()) > 0
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert tree.started(process.pid) == 0  # a zombie
    process.wait()
    assert tree.started(process.pid) == 0


# ---- leftovers ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_earlier_runs_of_an_item_are_killed_with_all_below_them(pulse: Pulse) -> None:
    process = sleeper(pulse, OURS)
    assert tree.end_leftovers(tree.of_item(*NAMES), PATIENCE) == []
    assert ended(process) == -signal.SIGKILL
    pulse.wait_for_end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble", [OSError(errno.ENOSYS, "not here"), OSError(errno.EMFILE, "full"), AttributeError()]
)
def test_leftovers_are_killed_where_the_system_has_no_handles(
    pulse: Pulse, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    def refused(pid: int) -> int:
        raise trouble

    monkeypatch.setattr(os, "pidfd_open", refused)
    process = sleeper(pulse, OURS)
    assert tree.end_leftovers(tree.of_item(*NAMES), PATIENCE) == []
    assert ended(process) == -signal.SIGKILL
    pulse.wait_for_end()


@pytest.mark.slow
@pytest.mark.parametrize("other", ["MILLPOND_QUEUE", "MILLPOND_ITEM_ID", "MILLPOND_CORRELATION_ID"])
def test_runs_of_other_items_are_left_alone(pulse: Pulse, other: str) -> None:
    process = sleeper(pulse, OURS, **{other: "another"})
    assert tree.end_leftovers(tree.of_item(*NAMES), PATIENCE) == []
    assert process.poll() is None
    killed(process, pulse)


@pytest.mark.slow
def test_a_run_whose_supervisor_lives_is_left_alone(pulse: Pulse) -> None:
    alive = sleeper(pulse, OURS, MILLPOND_ITEM_ID="of this test")
    assert tree.end_leftovers(tree.unsupervised, PATIENCE) == []
    assert alive.poll() is None
    killed(alive, pulse)


@pytest.mark.slow
def test_a_run_whose_supervisor_is_gone_is_ended(pulse: Pulse) -> None:
    pid = os.getpid()
    process = sleeper(pulse, f"{pid}-{tree.started(pid) - 1}-7")
    assert tree.end_leftovers(tree.unsupervised, PATIENCE) == []
    assert ended(process) == -signal.SIGKILL
    pulse.wait_for_end()


@pytest.mark.parametrize("run", [b"", b"-", b"x-y-z", b"12", b"99999999999999999999-1-1", b"1-x-1"])
def test_a_run_that_is_not_of_our_making_is_no_leftover(run: bytes) -> None:
    assert not tree.unsupervised(os.getpid(), {tree.RUN: run})


@pytest.mark.slow
def test_a_process_that_cannot_be_ended_is_told(pulse: Pulse, monkeypatch: pytest.MonkeyPatch) -> None:
    process = sleeper(pulse, OURS)

    def refused(handle: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refused)
    assert process.pid in tree.end_leftovers(tree.of_item(*NAMES), 0.01)
    monkeypatch.undo()
    killed(process, pulse)


# ---- signals ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_may_not_be_signalled_is_told(pulse: Pulse, monkeypatch: pytest.MonkeyPatch) -> None:
    process = sleeper(pulse, OURS)
    real = os.kill

    def refused(pid: int, number: int) -> None:
        if number:
            raise PermissionError
        real(pid, number)

    monkeypatch.setattr(os, "kill", refused)
    found = tree.signal_below(os.getpid(), signal.SIGTERM)
    monkeypatch.undo()
    assert process.pid in found.living
    assert set(found.refused) == set(found.living)
    killed(process, pulse)


@pytest.mark.slow
def test_a_process_in_our_own_group_is_signalled_alone() -> None:
    """One that has not begun its session yet: its group is ours, and must not be signalled."""
    program = (
        "import os, signal, subprocess, sys\n"
        "from millpond.worker import tree\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "tree.signal_below(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(child.wait() != -signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], start_new_session=True, timeout=PATIENCE).returncode == 0
