"""`millpond worker` as a process: jobs run, are stopped, and come back; on a data directory and on a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millpond.cli import worker_start
from millpond.errors import Unavailable
from tests.cli.calls import Cli
from tests.cli.dead import clean
from tests.client.scripted import cut, scripted
from tests.server.process import serve, token, until

pytestmark = pytest.mark.slow  # each starts processes of its own


class Started:
    """A worker's process; `said` is all of its stderr so far."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.said += line

    def runs(self) -> Started:
        until(lambda: "worker started" in self.said or self.popen.poll() is not None, "the worker to start")
        assert self.popen.poll() is None, self.said
        return self

    def ended(self) -> int:
        code = self.popen.wait(30)
        self._reader.join()
        return code


@contextmanager
def worker(cli: Cli, *flags: str, **environment: str) -> Iterator[Started]:
    """On the directory of `cli`, unless the flags say otherwise. It is gone afterwards, with its supervisors."""
    place = {} if "--server" in flags else {"MILLPOND_DATA": str(cli.data)}
    with subprocess.Popen(
        [sys.executable, "-m", "millpond.cli", "worker", "start", *flags],
        env=clean({"HOME": str(cli.data.parent), **place, **environment}),
        cwd=cli.data.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as popen:
        started = Started(popen)
        try:
            yield started
        finally:
            popen.kill()
            started.ended()


def state_of(cli: Cli, id: str) -> str:
    return str(json.loads(cli("job", "result", id, "--json").out)["state"])


def has_ended(cli: Cli, id: str, state: str = "completed") -> Any:
    """Once it is in that state."""
    return until(lambda: state_of(cli, id) == state, f"job {id} to be {state}")


def test_jobs_run_while_other_commands_work_on_the_same_directory(cli: Cli) -> None:
    cli.ok("enqueue", "echo $MILLPOND_ITEM_ID $MILLPOND_ATTEMPT", "--id", "a")
    cli.ok("enqueue", "exit 3", "--id", "bad", "--max-retries", "2", "--backoff-base", "0")
    with worker(cli, "--count", "2") as started:
        started.runs()
        has_ended(cli, "a")
        assert cli.ok("job", "logs", "a") == "a 1\n"
        cli.ok("enqueue", "echo later", "--id", "b")
        assert cli.ok("job", "result", "b", "--wait", "20s").count("later") == 1
        has_ended(cli, "bad", "dead")
        assert [one["last_error"] for one in cli.value("dlq", "list")] == ["exit code 3"]
        [listed] = cli.value("worker", "list")
        assert (listed["pid"], listed["slots"], listed["status"]) == (started.popen.pid, 2, "running")
        found = cli.value("status")
        assert (found["active_workers"], found["active_slots"]) == (1, 2)
        assert "2 slots in 1 active worker, 0 running" in cli.ok("status")
        started.popen.send_signal(signal.SIGINT)
        assert started.ended() == 0
    assert cli.value("worker", "list") == []


def test_stop_waits_until_running_jobs_have_ended(cli: Cli) -> None:
    cli.ok("enqueue", f"touch {cli.data}/begun; while [ ! -e {cli.data}/go ]; do sleep 0.02; done", "--id", "a")
    cli.ok("enqueue", "true", "--id", "next")
    with worker(cli) as started:
        until((cli.data / "begun").exists, "the job to begin")
        failed = cli("worker", "stop", "--timeout", "0.3")
        assert failed.code == 1
        assert "still has" in failed.err
        assert cli("worker", "stop", "gone").code == 3
        (cli.data / "go").touch()
        assert len(cli.value("worker", "stop")["stopped"]) in (0, 1)  # it may be gone before we look
        assert started.ended() == 0
    assert (state_of(cli, "a"), state_of(cli, "next")) == ("completed", "pending")
    assert cli("worker", "stop").err == "no worker is running\n"


def test_stop_by_force_ends_jobs_which_run_again(cli: Cli) -> None:
    cli.ok("enqueue", f"touch {cli.data}/begun; sleep 1000", "--id", "a")
    with worker(cli) as started:
        until((cli.data / "begun").exists, "the job to begin")
        until(lambda: cli.value("worker", "list"), "the worker to be listed")
        stopped = cli.value("worker", "stop", "--force")
        assert len(stopped["stopped"]) == 1
        assert started.ended() == 0
    [job] = cli.value("list")
    assert (job["state"], job["attempts"]) == ("pending", 0)


def test_a_worker_that_was_killed_is_lost_at_once(cli: Cli) -> None:
    with worker(cli) as started:
        started.runs()
        until(lambda: cli.value("worker", "list"), "the worker to be listed")
        started.popen.kill()
        started.ended()
        [listed] = cli.value("worker", "list")
        assert listed["status"] == "lost"
        assert cli.value("worker", "stop", listed["incarnation"])["stopped"] == []
        found = cli.value("status")
        assert (found["active_workers"], found["active_slots"], len(found["workers"])) == (0, 0, 1)
        shown = cli.ok("status")
        assert "no worker is running" in shown
        assert "lost" in shown
        assert cli("worker", "stop").err == "no worker is running\n"
        cli.ok("enqueue", "true", "--id", "a")
        assert "no worker runs on queue jobs" in cli.ok("job", "explain", "a")


def test_a_worker_begins_afresh_after_so_many_jobs(cli: Cli) -> None:
    for number in range(4):
        cli.ok("enqueue", "true", "--id", f"job{number}")
    with worker(cli, "--max-jobs", "2") as started:
        with cli.open() as pond:  # it takes the directory over while there is no worker
            for number in range(4):
                assert pond.get_item("jobs", f"job{number}", wait=20).state == "completed"
        until(lambda: started.said.count("worker started") >= 2, "another worker in the same process")
        started.popen.terminate()
        assert started.ended() == 0


def test_commands_of_a_server_run_only_where_that_is_allowed(cli: Cli, tmp_path: Path) -> None:
    with serve(cli.data) as server:
        flags = ("--server", server.url)
        cli._patch.delenv("MILLPOND_DATA")
        cli.setenv("MILLPOND_SERVER", server.url)
        cli.ok("enqueue", "echo remote", "--id", "a")
        refused = cli("worker", "start")
        assert refused.code == 2
        assert "--allow-commands" in refused.err
        with worker(cli, *flags, "--allow-commands", "--logs", str(tmp_path / "logs")) as started:
            started.runs()
            assert "remote" in cli.ok("job", "result", "a", "--wait", "20s")
            assert cli.ok("job", "logs", "a", "--logs", str(tmp_path / "logs")) == "remote\n"
            until(lambda: len(cli.value("worker", "list")) == 1, "the worker to be listed")
            cli.ok("worker", "stop")
            assert started.ended() == 0


def test_a_token_of_one_queue_sees_and_does_what_it_may(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--id", "a")
    viewer, producer = token(cli.data, "viewer", "jobs"), token(cli.data, "producer", "jobs", "--commands")
    with serve(cli.data) as server:
        flags = ("--server", server.url)
        cli.setenv("MILLPOND_TOKEN", viewer)
        found = cli.value("status", *flags)
        assert (found["counts"]["pending"], found["workers"]) == (1, None)
        assert "workers are not shown" in cli.ok("status", *flags)
        assert [one["id"] for one in cli.value("list", *flags)] == ["a"]
        assert "it is the next" in cli.ok("job", "explain", "a", *flags)
        refused = cli("enqueue", "true", *flags)
        assert (refused.code, refused.out) == (1, "")
        for given, words in (
            ("", "set MILLPOND_TOKEN"),
            (viewer[:-1] + ("y" if viewer.endswith("x") else "x"), "the token in MILLPOND_TOKEN"),
        ):
            cli.setenv("MILLPOND_TOKEN", given)
            refused = cli("list", *flags)
            assert (refused.code, words in refused.err) == (1, True), refused
        cli.setenv("MILLPOND_TOKEN", producer)
        assert cli.ok("enqueue", "true", "--id", "b", *flags) == "b\n"


def test_tasks_of_an_app_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "import millpond\napp = millpond.App()\n\n@app.task(queue='mail')\ndef send(to: str) -> str:\n"
        "    return 'sent to ' + to\n"
        "\n@app.on_start\ndef ready(worker):\n    print('hook:', worker.slots, file=__import__('sys').stderr)\n"
    )
    with worker(cli, "--app", "shop:app") as started:
        started.runs()
        assert "hook: 1" in started.said
        cli.ok("enqueue", '{"id": "a", "task": "shop.send", "args": ["you"], "queue": "mail"}')
        assert cli.ok("job", "result", "a", "--wait", "20s") == '"sent to you"\n'
        [listed] = cli.value("worker", "list")
        assert list(listed["queues"]) == ["mail"]


def placed(folder: Path, place: str) -> str:
    """An app there that names its place; a job for it."""
    lines = ["import millpond", f"app = millpond.App({place})", "@app.task", "def double(n: int) -> int: return 2 * n"]
    (folder / "placed.py").write_text("\n".join(lines))
    return '{"id": "a", "task": "placed.double", "args": [21]}'


def test_a_worker_works_where_its_app_says_unless_it_is_told_another_place(cli: Cli, tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    job = placed(tmp_path, f"data={own!r}")
    for flags, place in (([], own), (["--data", str(cli.data)], str(cli.data))):
        with worker(cli, "--app", "placed:app", *flags) as started:
            started.runs()
            cli.ok("enqueue", job, "--data", place)
            assert cli.ok("job", "result", "a", "--wait", "20s", "--data", place) == "42\n"


def test_a_worker_works_where_it_is_told_also_if_its_app_goes_to_another_directory(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (config := cli.data.parent / "config.toml").write_text("[log]\nlevel = 'info'\n")
    job = placed(cli.data.parent, f"data={str(tmp_path / 'own')!r}")
    with (cli.data.parent / "placed.py").open("a") as file:
        file.write(f"\nimport os; os.chdir({str(tmp_path / 'elsewhere')!r})\n")
    with worker(cli, "--app", "placed:app", "--data", cli.data.name, "--config", config.name, "--logs", "l") as started:
        started.runs()
        cli.ok("enqueue", job)
        assert cli.ok("job", "result", "a", "--wait", "20s") == "42\n"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_worker_on_the_server_of_its_app_has_the_token_of_the_app(cli: Cli, tmp_path: Path) -> None:
    data = tmp_path / "served"
    secret = token(data, "operator", "*", "--commands")
    with serve(data) as server:
        cli.ok("enqueue", placed(tmp_path, f"server={server.url!r}, token={secret!r}"), "--data", str(data))
        with worker(cli, "--app", "placed:app") as started:
            started.runs()
            assert cli.ok("job", "result", "a", "--wait", "20s", "--data", str(data)) == "42\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--app", "nowhere:app"], 3, "there is no module nowhere"),
        (["--app", "not a place"], 2, "MODULE:APP"),
        (["--app", "broken:app"], 2, "millpond: broken:app cannot be loaded: ZeroDivisionError: division by zero ("),
        (["--app", "unreadable:app"], 2, "SyntaxError: '(' was never closed ("),
        (["--app", "unreadable:app"], 2, "unreadable.py:2)"),
        (["--count", "0"], 2, "from 1 to"),
        (["--count", "-3"], 2, "from 1 to"),
        (["--queue", "mail=none"], 2, "QUEUE=WEIGHT"),
        (["--max-rss", "much"], 2, "512M"),
        (["--max-jobs", "0"], 2, "1 or more"),
        (["--lease-timeout", "0"], 2, "lease_timeout"),
        (["--no-commands"], 2, "would run nothing"),
        (["--data", "file"], 2, "no directory"),
    ],
)
def test_a_worker_that_cannot_start_says_why(cli: Cli, arguments: list[str], code: int, words: str) -> None:
    (cli.data.parent / "file").touch()
    (cli.data.parent / "broken.py").write_text("1 / 0\n")
    (cli.data.parent / "unreadable.py").write_text("1\nprint(\n")
    ran = cli("worker", "start", *arguments)
    assert (ran.code, ran.out) == (code, ""), ran
    assert "Traceback" not in ran.err
    assert words in ran.err


SCRIPT = """
set -eu
millpond() { "$PYTHON" -m millpond.cli "$@"; }
while leased=$(millpond lease orders --export --payload-file order.txt $FLAGS) && eval "$leased"; do
    if grep -q bad order.txt; then
        millpond retry --dead --error "bad order"
    else
        cat order.txt >> done.txt; echo " $MILLPOND_ATTEMPT" >> done.txt
        millpond complete
    fi
done
"""


def test_a_shell_script_is_a_worker_too(cli: Cli, tmp_path: Path) -> None:
    cli.ok("queue", "create", "orders")
    cli.ok("produce", "orders", "--lines", stdin="one\nbad\nit's $HOME\n")
    ran = _script(cli, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "done.txt").read_text() == "one 1\nit's $HOME 1\n"
    assert cli.value("queue", "stats", "orders")["counts"]["dead"] == 1


def test_a_shell_script_ends_where_its_lease_cannot_be_had(cli: Cli, tmp_path: Path) -> None:
    """An `eval` of nothing succeeds: only the exit code tells that a lease was refused or killed."""
    ran = _script(cli, tmp_path, "--wait never")
    assert ran.returncode == 0, ran
    assert "'never'" in ran.stderr
    assert not (tmp_path / "done.txt").exists()


def _script(cli: Cli, place: Path, flags: str = "") -> subprocess.CompletedProcess[str]:
    given = {"PYTHON": sys.executable, "MILLPOND_DATA": str(cli.data), "HOME": str(place), "FLAGS": flags}
    return subprocess.run(
        ["bash", "-c", SCRIPT], env=clean(given), cwd=place, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_server_that_is_away_is_four(cli: Cli) -> None:
    """Once, for all commands that ask one: it takes as long as a person waits."""
    cli._patch.setattr("millpond.cli.pond.ANSWER_S", 0.2)
    for arguments in (["list"], ["enqueue", "true"], ["queue", "list"], ["worker", "start", "--allow-commands"]):
        ran = cli(*arguments, "--server", "http://127.0.0.1:9")
        assert (ran.code, ran.out) == (4, ""), ran
        assert "is the server up" in ran.err  # "cannot connect", or under load "no connection in time"


class Away:
    """A server that answers when it is asked for the third time."""

    def __init__(self) -> None:
        self.asked = 0

    async def queue_info(self, name: str) -> None:
        self.asked += 1
        if self.asked < 3:
            raise Unavailable("the server is away; ask again")


@pytest.mark.parametrize(("replaces", "draining", "asked"), [("", False, 1), ("w-1", False, 3), ("w-1", True, 0)])
def test_a_server_that_is_away_is_waited_for_by_a_worker_that_has_replaced_itself(
    monkeypatch: pytest.MonkeyPatch, replaces: str, draining: bool, asked: int
) -> None:
    monkeypatch.setattr(worker_start, "KNOCK_S", 0.0)
    server = Away()
    fresh: Any = SimpleNamespace(queues={"jobs": 1.0}, replaces=replaces, draining=draining)
    with nullcontext() if replaces else pytest.raises(Unavailable):
        asyncio.run(worker_start._knock(cast(Any, server), fresh))
    assert server.asked == asked


def test_what_is_no_millpond_server_is_four_and_told(cli: Cli) -> None:
    """A web server says 404 to a call that it does not know: that is not a job that is not found."""
    answer = cut(b"HTTP/1.1 404 X\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>")
    with scripted(*[answer] * 4) as server:
        for arguments in (["list"], ["job", "show", "x"], ["enqueue", "true"], ["worker", "start", "--allow-commands"]):
            ran = cli(*arguments, "--server", server.url)
            assert (ran.code, ran.out) == (4, ""), ran
            assert "not a millpond server" in ran.err


AS_NOBODY = """
import os, sys, tempfile
from millpond.cli.main import main
with tempfile.TemporaryDirectory() as place:  # for what is imported on the way: not everybody can read our packages
    main(["enqueue", "true", "--data", place])
    main(["list", "--data", place])
os.setegid(65534)
os.seteuid(65534)
sys.exit(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become somebody else")
def test_a_directory_of_somebody_else_is_told_in_a_line(cli: Cli, tmp_path: Path) -> None:
    cli.ok("enqueue", "true")
    os.chmod(cli.data, 0o700)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        os.chmod(folder, os.stat(folder).st_mode | 0o055)
    for arguments in (["list"], ["enqueue", "true"]):
        ran = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, *arguments, "--data", str(cli.data)],
            env=clean({"HOME": "/nonexistent"}),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode in (1, 2), ran
        assert "Permission denied" in ran.stderr
        assert "Traceback" not in ran.stderr
    assert len(cli.value("list")) == 1
