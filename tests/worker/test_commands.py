"""Commands as jobs: how their ends are told, what they find when they start, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from millpond.errors import InvalidRequest
from millpond.worker.endings import outcome_of
from millpond.worker.executors import Outcome
from millpond.worker.orders import Report
from tests.worker.commanding import INCARNATION, Pulse, commands, leased


def one(folder: Path, command: str, *, grace: float = 5.0, lease: float = 60.0, **spec: Any) -> Outcome:
    async def main() -> Outcome:
        async with commands(folder, grace=grace) as started:
            return await started.run(command, lease=lease, **spec)

    return asyncio.run(main())


# ---- how ends are told --------------------------------------------------------------------------------------


def test_a_command_that_ends_well_has_a_result(tmp_path: Path) -> None:
    outcome = one(tmp_path, "echo out; echo err >&2")
    assert outcome.ok
    assert outcome.result["exit_code"] == 0
    assert outcome.result["output"] == "out\nerr\n"
    assert outcome.result["log"] == str(tmp_path / "logs" / f"jobs@{INCARNATION}" / "j1" / "1.log")
    assert Path(outcome.result["log"]).read_text() == "out\nerr\n"
    assert outcome.result.keys() == {"exit_code", "seconds", "output", "log", "host"}


def test_failures_say_what_happened(tmp_path: Path) -> None:
    cases = {
        "exit 3": "exit code 3",
        "echo first; echo; echo 'the reason' >&2; exit 3": "exit code 3: the reason",
        "no-such-command-anywhere --flag": "command not found: no-such-command-anywhere",
        "kill -9 $$": "killed by SIGKILL",
        "kill -TERM $$": "killed by SIGTERM",
        "printf '\\377\\303'; exit 1": "exit code 1: \ufffd\ufffd",
    }

    async def main() -> dict[str, str | None]:
        async with commands(tmp_path) as started:
            return {command: (await started.run(command)).error for command in cases}

    assert asyncio.run(main()) == cases


def test_what_cannot_be_started_is_told_and_the_supervisor_goes_on(tmp_path: Path) -> None:
    async def main() -> list[Outcome]:
        async with commands(tmp_path) as started:
            return [
                await started.run("true", cwd=str(tmp_path / "none")),
                await started.run("x" * 200_000),
                await started.run("true", env={"a": "1" * 3_000_000}),
                await started.run("true"),
            ]

    *failed, good = asyncio.run(main())
    assert good.ok
    assert [outcome.error for outcome in failed] == [
        f"the command could not be started: No such file or directory ({tmp_path / 'none'})",
        "the command could not be started: Argument list too long (/bin/sh)",
        "the command could not be started: Argument list too long (/bin/sh)",
    ]


# ---- what a command finds -----------------------------------------------------------------------------------


def test_a_command_knows_its_item_and_its_place(tmp_path: Path) -> None:
    async def main() -> Outcome:
        async with commands(tmp_path) as started:
            item = leased("job:7", deliveries=4, correlation_id="corr", attempts=2)
            command = "pwd; echo $MILLPOND_ITEM_ID $MILLPOND_QUEUE $MILLPOND_ATTEMPT $MILLPOND_FENCING_TOKEN"
            env = {"OWN": "given", "MILLPOND_QUEUE": "forged"}
            return await started.run(f"{command} $MILLPOND_CORRELATION_ID $OWN", item, cwd=str(tmp_path), env=env)

    assert asyncio.run(main()).result["output"] == f"{tmp_path}\njob:7 jobs 2 4 corr given\n"


def test_a_command_starts_as_if_from_a_clean_shell(tmp_path: Path) -> None:
    """No input, no ignored or blocked signals, none of our files, a session and a group of its own."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        outcome = one(tmp_path, "cat; grep -E 'Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd; ps -o pgid=,sid= $$")
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    lines = outcome.result["output"].split()
    assert [lines[0], int(lines[1], 16), lines[2]] == ["SigBlk:", 0, "SigIgn:"]
    assert int(lines[3], 16) & ~(0b11 << 31) == 0  # but for two of the C library's own, which it sets so itself
    assert lines[4:-2] == ["0", "1", "2", "200", "3"]  # 200 is the leash, 3 the folder that is listed
    assert lines[-1] == lines[-2]


# ---- output -------------------------------------------------------------------------------------------------


def test_a_flood_of_output_is_cut_in_the_middle(tmp_path: Path) -> None:
    async def main() -> Outcome:
        async with commands(tmp_path, head_bytes=100_000) as started:
            return await started.run("echo begin; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo end")

    outcome = asyncio.run(main())
    text = Path(outcome.result["log"]).read_bytes()
    assert text.startswith(b"begin\nxxx")
    assert text.endswith(b"xxx\nend\n")
    assert b"[millpond: 29834475 bytes were dropped here]" in text
    assert len(outcome.result["output"]) == 2_048


def test_a_command_may_close_its_output_and_go_on(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")
    outcome = one(tmp_path, f"exec >&- 2>&-; echo closed > {pulse.path}; exit 5")
    assert outcome.error == "exit code 5"
    assert pulse.line() == "closed"
    pulse.close()


def test_a_log_that_cannot_be_written_does_not_fail_a_command_and_is_told(tmp_path: Path) -> None:
    async def main() -> list[Outcome]:
        async with commands(tmp_path) as started:
            (tmp_path / "logs" / f"jobs@{INCARNATION}").touch()
            return [await started.run("echo hello"), await started.run("echo hello; exit 1")]

    good, bad = asyncio.run(main())
    assert good.ok
    assert good.result["output"] == "hello\n"
    assert "could not be made (Not a directory)" in good.result["problem"]
    assert str(bad.error).startswith("exit code 1: hello (there is no log: ")


def test_a_worker_does_not_start_without_a_place_for_logs(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(InvalidRequest, match="cannot write logs to"):
        one(tmp_path, "true")


def test_processes_that_could_not_be_ended_are_told() -> None:
    told = "processes of it run as another user and could not be ended: 7, 8"
    good = outcome_of(Report(1, 0, left=(7, 8)), None, "host")
    bad = outcome_of(Report(1, 9, left=(7, 8), problem="no log"), None, "host")
    assert (good.ok, good.result["problem"]) == (True, told)
    assert bad.error == f"killed by SIGKILL (no log; {told})"


def test_a_command_has_the_workers_environment_but_not_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_TOKEN", "mp_secret")
    monkeypatch.setenv("MILLPOND_SERVER", "http://127.0.0.1:9")
    look = "tr '\\0' '\\n' < /proc/$PPID/environ | grep -c mp_secret || true"
    told = one(tmp_path, f"echo $MILLPOND_SERVER [$MILLPOND_TOKEN]; {look}").result["output"]
    assert told == "http://127.0.0.1:9 []\n0\n"
    assert one(tmp_path, "echo $MILLPOND_TOKEN", env={"MILLPOND_TOKEN": "its own"}).result["output"] == "its own\n"
