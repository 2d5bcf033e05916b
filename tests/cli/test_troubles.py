"""What a command meets that it cannot help: a token that may not, a full disk, an owner that is silent, no stdout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import millpond
from millpond.errors import DiskFull
from millpond.service.lean import LeanService
from millpond.service.service import Service
from tests.cli.calls import Cli
from tests.cli.dead import clean
from tests.cli.test_worker import worker
from tests.server.process import serve, token, until

pytestmark = pytest.mark.slow  # each starts a process, or opens a directory again and again


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_token_that_may_not_look_sees_no_zeros(cli: Cli, role: str) -> None:
    cli.ok("enqueue", "true", "--id", "a")
    secret = token(cli.data, role)
    with serve(cli.data) as server:
        cli.setenv("MILLPOND_TOKEN", secret)
        for words in ("status", "list", "status --queue jobs", "dlq list", "job explain a"):
            ran = cli(*words.split(), "--server", server.url)
            assert (ran.code, ran.out) == (1, ""), ran
            assert f"has role {role}, which may not" in ran.err


def test_a_full_disk_is_told_at_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.ok("enqueue", "true", "--id", "a")

    async def full(*_: object, **__: object) -> None:
        raise DiskFull("there is no room on the disk; make some")

    monkeypatch.setattr(Service, "produce", full)
    monkeypatch.setattr(LeanService, "begin_produce", lambda *_: None)
    with millpond.open(cli.data):  # the owner; the command is its guest
        began = time.monotonic()
        for arguments in (["enqueue", "true"], ["produce", "jobs", "x"]):
            ran = cli(*arguments)
            assert (ran.code, ran.out) == (1, ""), ran
            assert "no room on the disk" in ran.err
        assert time.monotonic() - began < 5


def test_an_owner_that_is_silent_is_four(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.sharing.PERSON_S", 0.3)
    monkeypatch.setattr("millpond.sharing.ANSWER_S", 0.2)
    with worker(cli) as started:
        started.runs()
        os.kill(started.popen.pid, signal.SIGSTOP)
        try:
            ran = cli("status")
        finally:
            os.kill(started.popen.pid, signal.SIGCONT)
    assert (ran.code, ran.out) == (4, ""), ran
    assert f"process {started.popen.pid}, which does not answer" in ran.err


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_stream_that_is_closed_is_no_bug(cli: Cli, closed: str) -> None:
    cli.ok("enqueue", "true", "--id", "a")
    ran = subprocess.run(
        ["sh", "-c", f'exec "$0" -m millpond.cli list --json {closed}', sys.executable],
        env=clean({"MILLPOND_DATA": str(cli.data), "HOME": str(cli.data.parent)}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [one["id"] for one in cli.value("list")] == ["a"]


def test_a_word_that_nobody_can_hear_does_not_change_what_is_done(cli: Cli) -> None:
    ran = subprocess.run(
        ["sh", "-c", 'exec "$0" -m millpond.cli config set max-retries 7 2>/dev/full', sys.executable],
        env=clean({"MILLPOND_DATA": str(cli.data), "HOME": str(cli.data.parent)}),
        check=False,
    )
    assert ran.returncode == 0
    assert cli.value("config", "get", "max-retries")["max_retries"] == 7


@pytest.mark.parametrize("text", ["[]", '[{"command": "true"}]', "null", "12"])
def test_json_that_is_no_object_is_no_command(cli: Cli, text: str) -> None:
    for ran in (cli("enqueue", text), cli("enqueue", "--file", "-", stdin=text)):
        assert (ran.code, ran.out) == (2, ""), ran
        assert "no object" in ran.err
    assert cli.ok("enqueue", "[ -e x ] && true", "--id", "a") == "a\n"


@pytest.mark.parametrize("words", ["enqueue true", "schedule add a --every 1m true", "worker start"])
def test_a_queue_of_our_own_holds_no_jobs(cli: Cli, words: str) -> None:
    ran = cli(*words.split(), "--queue", "millpond/schedules")
    assert (ran.code, ran.out) == (2, ""), ran
    assert "one of millpond's own" in ran.err


def test_an_attempt_that_was_never_made_has_no_log(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--id", "a")
    with cli.open() as pond:
        pond.complete(pond.lease("jobs"))
    ran = cli("job", "logs", "a", "--attempt", "9")
    assert (ran.code, ran.out, ran.err) == (3, "", "millpond: job a has no attempt 9: it was begun 1 time\n")


def test_the_exit_code_of_a_failed_command_is_shown(cli: Cli) -> None:
    for id, error in (("a", "exit code 3: boom"), ("b", "command not found: nope"), ("c", "killed by SIGKILL")):
        cli.ok("enqueue", "x", "--id", id, "--max-retries", "1" if id == "a" else "2")
        with cli.open() as pond:
            [item] = pond.lease("jobs")
            pond.retry([millpond.Retry(lease=item.lease, error=error)])
    told = {one["id"]: (one["state"], one["exit_code"]) for one in cli.value("list")}
    assert told == {"a": ("dead", 3), "b": ("failed", 127), "c": ("failed", None)}
    assert cli.value("job", "show", "a")["exit_code"] == 3
    assert cli.value("job", "result", "a", code=1)["exit_code"] == 3


def test_a_held_job_shows_when_it_is_due(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--id", "p")
    cli.ok("enqueue", "true", "--id", "a", "--after", "p", "--run-at", "2100-01-01T00:00:00Z")
    assert cli.value("job", "show", "a")["run_at"] == "2100-01-01T00:00:00Z"


def test_a_worker_with_a_consumers_token_is_listed_and_can_be_stopped(cli: Cli) -> None:
    cli.ok("enqueue", "echo done", "--id", "a")
    consumer, admin = token(cli.data, "consumer", "jobs"), token(cli.data, "admin")
    with serve(cli.data) as server:
        cli.setenv("MILLPOND_TOKEN", admin)
        place = ("--server", server.url)
        with worker(cli, *place, "--allow-commands", MILLPOND_TOKEN=consumer) as started:
            assert "done" in cli.ok("job", "result", "a", "--wait", "20s", *place)
            [listed] = until(lambda: cli.value("worker", "list", *place), "the worker to be listed")
            assert listed["pid"] == started.popen.pid
            assert len(cli.value("worker", "stop", *place)["stopped"]) == 1
            assert started.ended() == 0
            assert started.said.count("left to other workers") == 2
        assert cli.value("worker", "list", *place) == []


def test_an_operators_worker_does_all_on_a_server_that_no_admin_has_prepared(cli: Cli) -> None:
    cli.ok("queue", "create", "jobs", "--completed-retention", "1d")
    secret = token(cli.data, "operator", "jobs", "--queues", "millpond/*", "--commands")
    with serve(cli.data) as server:
        cli.setenv("MILLPOND_TOKEN", secret)
        place = ("--server", server.url)
        with worker(cli, *place, "--allow-commands", MILLPOND_TOKEN=secret) as started:
            until(lambda: cli.value("worker", "list", *place), "the worker to be listed")
            cli.ok("enqueue", "sleep 0.1", "--id", "a", *place)
            cli.ok("enqueue", "echo after", "--id", "b", "--after", "a", *place)
            cli.ok("schedule", "add", "soon", "--every", "1s", "true", *place)
            assert "after" in cli.ok("job", "result", "b", "--wait", "20s", *place)
            until(lambda: len(cli.value("list", "--state", "completed", *place)) > 2, "the schedule to be fired")
            assert "left to other workers" not in started.said
