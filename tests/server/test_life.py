"""`millpond serve` from its start to its end, by signals and without."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http.served import post, read_reply
from tests.server.process import LOOPBACK, Process, Server, command, serve, until

pytestmark = pytest.mark.slow  # a process or two a test


def refused(*arguments: str) -> tuple[int, str]:
    """How a command ended that must not have begun."""
    with command(*arguments) as process:
        return process.ended(), "".join(process.lines)


def leased(server: Server, queue: str = "q") -> str:
    """The lease of a new item in a new queue."""
    server.must("queues.create", name=queue)
    server.must("queue.produce", queue=queue, items=[{"text": "work"}])
    [item] = server.must("queue.lease", queue=queue)["items"]
    return str(item["lease"])


def draining(server: Server) -> None:
    server.process.terminate()
    until(lambda: server.ask("GET", "/ready").status == 503, "/ready to turn red")


# ---- starting ---------------------------------------------------------------------------------------------


def test_it_says_where_it_listens_and_serves_there(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with serve(tmp_path / "data", "--bind", f"unix:{path}") as server:
        assert server.addresses[1:] == [f"unix:{path}"]
        for address in server.addresses:
            server.address = address
            assert server.ask("GET", "/ready").status == 200
        assert path.stat().st_mode & 0o777 == 0o600
        server.process.terminate()
        assert server.process.ended() == 0
        assert [one["level"] for one in server.process.log] == ["info"] * 3
    assert not path.exists()


def test_by_default_it_is_for_this_machine_only(tmp_path: Path) -> None:
    code, told = refused("config", "check", "--data", str(tmp_path))
    assert (code, told) == (0, "")
    shown = subprocess.run(
        [sys.executable, "-m", "millpond.cli", "config", "check"], capture_output=True, text=True, check=True
    )
    [bind] = [line.split() for line in shown.stdout.splitlines() if line.startswith("bind")]
    assert bind == ["bind", "127.0.0.1:7410", "default"]


def taken_port(tmp_path: Path, listening: socket.socket) -> list[str]:
    return ["--bind", f"127.0.0.1:{listening.getsockname()[1]}"]


def plain_file(tmp_path: Path, _: socket.socket) -> list[str]:
    (tmp_path / "file").write_text("precious")
    return ["--bind", f"unix:{tmp_path}/file"]


def no_folder(tmp_path: Path, _: socket.socket) -> list[str]:
    return ["--bind", f"unix:{tmp_path}/gone/socket"]


def not_ours(tmp_path: Path, _: socket.socket) -> list[str]:
    return ["--bind", "192.0.2.1:0", "--insecure-no-tls"]  # of no machine; and there are no tokens


def wrong_file(tmp_path: Path, _: socket.socket) -> list[str]:
    (tmp_path / "pond.toml").write_text("[limits]\nconections = 5\n")
    return ["--config", f"{tmp_path}/pond.toml"]


def no_directory(tmp_path: Path, _: socket.socket) -> list[str]:
    (tmp_path / "flat").write_text("")
    return ["--data", f"{tmp_path}/flat", *LOOPBACK]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (taken_port, "address already in use"),
        (plain_file, "a file that is no socket is there"),
        (no_folder, "No such file or directory"),
        (not_ours, "there are no tokens"),
        (wrong_file, "pond.toml:2: limits.conections is no key of millpond; did you mean 'limits.connections'?"),
        (no_directory, "which is no directory"),
    ],
)
def test_what_cannot_begin_ends_with_two_and_a_reason(
    make: Callable[[Path, socket.socket], list[str]], words: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code, told = refused("serve", "--data", str(tmp_path / "data"), *make(tmp_path, listening))
    assert code == 2
    assert words in told
    assert "Traceback" not in told
    if make is plain_file:
        assert (tmp_path / "file").read_text() == "precious"


def test_an_address_that_is_taken_is_told_at_once_whatever_is_leased(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        leased(server)
        server.must("queue.stats", queue="q")
        server.process.kill()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code, told = refused("serve", "--data", str(tmp_path), *taken_port(tmp_path, listening))
    assert (code, "already in use" in told) == (2, True)


def test_a_unix_socket_is_taken_from_the_dead_and_not_from_the_living(tmp_path: Path) -> None:
    bind = ("--bind", f"unix:{tmp_path}/s.sock")
    with serve(tmp_path / "one", bind=bind) as server:
        code, told = refused("serve", "--data", str(tmp_path / "two"), *bind)
        assert (code, "already in use" in told) == (2, True)
        assert server.ask("GET", "/health").status == 200
        server.process.kill()
    with serve(tmp_path / "two", bind=bind) as server:
        assert server.ask("GET", "/health").status == 200


def test_a_signal_ends_it_also_while_it_waits_for_the_directory(tmp_path: Path) -> None:
    holder = "import sys, millpond; p = millpond.open(sys.argv[1], listen=False); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as silent:
        assert silent.stdout is not None
        silent.stdout.readline()
        with command("serve", "--data", str(tmp_path), *LOOPBACK, "--log-level", "debug") as process:
            until(lambda: _waits_for(process), "the signals to be ours")
            process.terminate()
            assert process.ended() == 0
        silent.kill()


def _waits_for(process: Process) -> bool:
    """Whether SIGTERM is caught, which the system tells."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


# ---- ending -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(number: signal.Signals, tmp_path: Path) -> None:
    with serve(tmp_path) as server, server.connect():
        server.process.signal(number)
        assert server.process.ended() == 0
        assert server.process.said("ended")


def test_a_drain_takes_completes_and_gives_no_leases(tmp_path: Path) -> None:
    with serve(tmp_path) as server, ThreadPoolExecutor() as threads:
        lease = leased(server)
        server.must("queues.create", name="idle")
        parked = threads.submit(server.call, "queue.lease", queue="idle", wait="10m")
        server.until_parked("idle")
        draining(server)
        assert parked.result().value == {"items": []}
        for fields in ({"wait": "1m"}, {}):
            reply = server.call("queue.lease", queue="q", **fields)
            assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "closed", "1")
        assert server.ask("GET", "/health").status == 200
        assert server.call("queue.produce", queue="q", items=[{"text": "late"}]).status == 200
        assert server.must("queue.extend", queue="q", leases=[lease])["results"][0]["ok"]
        assert server.process.popen.poll() is None
        assert server.must("queue.complete", queue="q", leases=[lease])["results"][0]["ok"]
        assert server.process.ended() == 0
    with serve(tmp_path) as server:
        assert server.must("queue.stats", queue="q")["counts"]["ready"] == 1


def test_a_drain_does_not_wait_for_ever(tmp_path: Path) -> None:
    with serve(tmp_path, "--timeouts-shutdown", "200ms") as server:
        leased(server)
        server.process.terminate()
        assert server.process.ended() == 0
        assert server.process.said("after 0.2 s")


def test_a_second_signal_hurries(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        lease = leased(server)
        draining(server)
        server.process.terminate()
        assert server.process.ended() == 0
    with serve(tmp_path) as server:
        assert server.must("queue.complete", leases=[lease])["results"][0]["ok"]


def test_a_request_that_a_second_signal_cuts_is_no_error_of_the_server(tmp_path: Path) -> None:
    head = b"POST /v1/queues.create HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serve(tmp_path) as server, server.connect() as sock:
        sock.sendall(head + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 100")  # the body is waited for
        assert server.process.hurry() == 0
        assert {one["level"] for one in server.process.log} == {"info"}


def test_a_reply_that_is_under_way_is_written_to_its_end(tmp_path: Path) -> None:
    """A client that is slow to read a large reply has it whole."""
    with serve(tmp_path) as server:
        server.must("queues.create", name="q")
        server.must("queue.produce", queue="q", items=[{"text": "x" * (1 << 20)}] * 12)
        with server.connect() as sock:
            sock.sendall(post("/v1/items.list", b'{"queue": "q"}', "Content-Type: application/json"))
            begun = sock.recv(1)
            server.process.terminate()
            until(lambda: server.process.said("ending"), "the end to begin")
            reply = begun + read_reply(sock)
        assert reply.startswith(b"HTTP/1.1 200")
        assert reply.count(b"x" * (1 << 20)) == 12
        assert server.process.ended() == 0


def test_guests_of_the_directory_are_drained_too(tmp_path: Path) -> None:
    """Else a busy neighbour would keep the owner from ending; it goes on when it has the directory itself."""
    with serve(tmp_path) as owner, serve(tmp_path) as guest, ThreadPoolExecutor() as threads:
        lease = leased(owner)
        owner.must("queue.produce", queue="q", items=[{"text": "next"}])
        draining(owner)
        asked: Any = threads.submit(guest.call, "queue.lease", queue="q", wait="1m")
        owner.must("queue.complete", leases=[lease])
        assert owner.process.ended() == 0
        assert [item["text"] for item in asked.result().value["items"]] == ["next"]


# ---- dying ------------------------------------------------------------------------------------------------


def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Producers and consumers at full tilt until it is killed; the next start knows what each of them was told."""
    produced: list[str] = []
    completing: list[str] = []
    completed: list[str] = []

    def produce(server: Server) -> None:
        while True:
            reply = server.must("queue.produce", queue="q", items=[{"text": "x"}] * 3)
            produced.extend(item["id"] for item in reply["items"])

    def consume(server: Server) -> None:
        while True:
            for item in server.must("queue.lease", queue="q", wait="1s")["items"]:
                completing.append(item["id"])
                [result] = server.must("queue.complete", queue="q", leases=[item["lease"]])["results"]
                assert result["ok"]
                completed.append(item["id"])

    with ThreadPoolExecutor() as threads:
        with serve(tmp_path) as server:
            server.must("queues.create", name="q")
            doing = [threads.submit(work, server) for work in (produce, produce, consume)]
            until(lambda: len(completed) > 50, "some work to be done")
            server.process.kill()
        for one in doing:
            assert isinstance(one.exception(), OSError | ValueError)
    with serve(tmp_path) as server:
        left = {item["id"] for item in server.must("items.list", queue="q", limit=1000)["items"]}
    assert left >= set(produced) - set(completing)
    assert len(set(completing) - set(completed)) <= 1, "there was one consumer"
    assert not left & set(completed)
