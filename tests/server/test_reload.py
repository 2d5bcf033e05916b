"""A running server reads its configuration again: by a signal, or told to from another terminal."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.served import post, read_reply
from tests.server.process import LOOPBACK, Server, command, until

pytestmark = pytest.mark.slow  # a process or two a test


class World:
    """A server with a configuration file, which tests rewrite."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "pond.toml"
        self.server: Server = None  # type: ignore[assignment]  # once it has started

    def write(self, *stores: str, more: str = "") -> None:
        tables = "".join(f"[[stores]]\n{store}\n" for store in stores)
        self.file.write_text(f"data = {str(self.folder / 'data')!r}\n{more}\n{tables}")

    def disk(self, name: str, affinity: float = 1.0) -> str:
        return f"name = {name!r}\ndriver = 'sqlite'\npath = {str(self.folder / name)!r}\naffinity = {affinity}"

    def reload(self, *arguments: str) -> tuple[int, Any, str]:
        """The exit code, what is told as JSON, and what is said."""
        words = [sys.executable, "-m", "millpond.cli", "config", "reload", "--json", "--config", str(self.file)]
        done = subprocess.run([*words, *arguments], capture_output=True, text=True, timeout=30)
        return done.returncode, json.loads(done.stdout or "null"), done.stderr

    def stores(self, queue: str) -> list[str]:
        return [one["store"] for one in self.server.must("queues.create", name=queue, partitions=2)["partitions"]]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.write()
    with command("serve", "--config", str(made.file), *LOOPBACK) as process:
        made.server = process.started()
        yield made
        process.terminate()
        assert process.ended() == 0


def test_stores_are_added_changed_and_removed_by_config_reload(world: World) -> None:
    assert world.stores("a") == ["default", "default"]
    world.write(world.disk("b"))
    assert world.reload() == (
        0,
        {"ok": True, "changed": ["store 'b' is new, affinity 1"], "restart": [], "problems": []},
        "",
    )
    assert world.stores("b") == ["default", "b"]
    assert world.reload()[1]["changed"] == []
    world.write()
    code, told, said = world.reload()
    [problem] = told["problems"]
    assert (code, told["ok"]) == (2, False)
    assert problem.startswith("store 'b' cannot be removed, as it has partitions of 'b'; set its affinity to 0,")
    assert problem in said
    assert world.stores("c") == ["default", "b"], "nothing has changed"
    for queue in "bc":
        world.server.must("queues.delete", name=queue)
    assert world.reload()[1]["changed"] == ["store 'b' is removed"]
    entries = world.server.must("queue.audit", queue="b")["entries"]
    assert [(one["action"], one["who"]) for one in entries] == [("delete", "local"), ("create", "local")]


def test_a_signal_does_the_same_and_the_log_tells(world: World) -> None:
    world.write(world.disk("b"), more="log.level = 'debug'\ninsecure_no_tls = true")
    world.server.process.signal(signal.SIGHUP)
    until(lambda: world.server.process.said("store 'b' is new"), "the store")
    until(lambda: world.server.process.said("insecure_no_tls has another value"), "what needs a restart")
    assert world.server.process.said("log.level is debug")
    world.write(world.disk("b"), world.disk("b"))
    world.server.process.signal(signal.SIGHUP)
    until(lambda: world.server.process.said("stores.name is 'b' a second time"), "the problem")
    assert world.stores("q") == ["default", "b"]


def test_what_needs_a_restart_is_named_and_a_wrong_file_changes_nothing(world: World) -> None:
    world.write(world.disk("b"), more="insecure_no_tls = true")
    code, told, said = world.reload()
    assert (code, told["restart"]) == (0, ["insecure_no_tls"])
    assert "restart the server to use it" in said
    good = world.file.read_text()
    for wrong, expected in [
        ("this is no toml", "this is no TOML"),
        (good.replace("'sqlite'", "'oracle'"), "stores.driver is 'oracle'; use sqlite"),
        (good.replace("affinity = 1.0", "affinity = 'x'"), "stores.affinity is 'x'; use a number"),
    ]:
        world.file.write_text(wrong)
        code, told, said = world.reload("--data", str(world.folder / "data"))
        assert (code, told) == (2, None), "the command reads the same file, and finds it out by itself"
        assert expected in said
        words = [sys.executable, "-m", "millpond.cli", "config", "reload", "--data", str(world.folder / "data")]
        other = {"PATH": "", "HOME": str(world.folder)}  # and without it, the server tells
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, env=other)
        assert done.returncode == 2
        assert expected in done.stderr
    assert world.stores("q") == ["default", "b"]


def test_limits_timeouts_and_names_hold_from_then_on(world: World) -> None:
    world.server.must("queues.create", name="q")
    large = {"queue": "q", "items": [{"text": "x" * 2_000}]}
    world.server.must("queue.produce", **large)
    more = "allowed_hosts = ['pond.example.org']\nlimits = {body_bytes = '1KiB', parked_leases = 0}\ntimeouts.body = 5"
    world.write(more=more)
    code, told, _ = world.reload()
    assert (code, told.get("restart", [])) == (0, [])
    assert told["changed"] == [
        "allowed_hosts is pond.example.org",
        "limits.body_bytes is 1024",
        "limits.parked_leases is 0",
        "timeouts.body is 5.0",
    ]
    assert world.server.call("queue.produce", **large).status == 413
    assert world.server.call("queue.lease", queue="q", wait="1s").status == 429
    assert world.server.ask("GET", "/health", Host="pond.example.org").status == 200
    world.write()
    world.reload()
    assert world.server.must("queue.produce", **large)
    assert world.server.ask("GET", "/health", Host="pond.example.org").status != 200


def test_limits_hold_on_a_connection_that_has_sent_the_same_all_along(world: World) -> None:
    world.server.must("queues.create", name="q")
    large = json.dumps({"queue": "q", "items": [{"text": "x" * 2_000}]}).encode()
    produce, complete = (
        post(f"/v1/{call}", body, "Content-Type: application/json")
        for call, body in (("queue.produce", large), ("queue.complete", b'{"queue": "q", "leases": ["x"]}'))
    )
    with world.server.connect() as sock:
        for request in (produce, complete) * 4:
            sock.sendall(request)
            assert read_reply(sock).startswith(b"HTTP/1.1 200")
        world.write(more="limits = {body_bytes = '1KiB'}")
        world.reload()
        sock.sendall(produce)
        assert read_reply(sock).startswith(b"HTTP/1.1 413")


def test_where_no_server_is_the_command_says_so(tmp_path: Path) -> None:
    for data in (tmp_path, tmp_path / "none"):
        words = [sys.executable, "-m", "millpond.cli", "config", "reload", "--data", str(data)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        assert done.returncode == 4
        assert done.stderr == (
            f"millpond: no server runs on {data}; start one with `millpond serve`, or name its --data\n"
        )


def test_nobody_reloads_over_the_network(world: World) -> None:
    assert world.server.call("config.reload").status == 404


def test_a_server_whose_terminal_is_closed_ends(tmp_path: Path) -> None:
    outside, inside = os.openpty()
    words = [sys.executable, "-m", "millpond.cli", "serve", "--data", str(tmp_path), *LOOPBACK]
    child = subprocess.Popen(words, stdin=inside, stdout=inside, stderr=inside, preexec_fn=_take_terminal)
    os.close(inside)
    said = b""
    while b"listening on" not in said:
        said += os.read(outside, 4096)
    os.close(outside)
    try:
        assert child.wait(30) == 0
    finally:
        child.kill()


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
