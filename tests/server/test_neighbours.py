"""One data directory, several processes of which one or two are servers: who answers, and who goes on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import millpond
from millpond.directory import LOCK
from tests.server.process import Server, serve, token, until

pytestmark = pytest.mark.slow  # a process or two a test

SCRIPT = """
import sys, millpond
with millpond.open(sys.argv[1]) as pond:
    print(flush=True)
    sys.stdin.read()
"""


@contextmanager
def script(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that owns the directory until its stdin is closed, or it is killed."""
    command = [sys.executable, "-c", SCRIPT, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def owner_of(path: Path) -> int:
    return int((path / LOCK).read_text().split()[0])


def end(process: subprocess.Popen[bytes], how: str) -> None:
    if how == "kill":
        process.kill()
    else:
        assert process.stdin is not None
        process.stdin.close()
    process.wait()


@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_server_is_the_guest_of_a_script_and_takes_over_when_it_ends(how: str, tmp_path: Path) -> None:
    with script(tmp_path) as process, serve(tmp_path) as server:
        assert owner_of(tmp_path) == process.pid
        server.must("queues.create", name="q")
        server.must("queue.produce", queue="q", items=[{"text": "a"}, {"text": "b"}])
        [item] = server.must("queue.lease", queue="q")["items"]
        assert server.ask("GET", "/ready").status == 200
        assert server.ask("GET", "/metrics").status == 404
        end(process, how)
        assert server.must("queue.complete", queue="q", leases=[item["lease"]])["results"][0]["ok"]
        assert owner_of(tmp_path) == server.process.pid
        assert [item["text"] for item in server.must("queue.lease", queue="q")["items"]] == ["b"]
        assert b"millpond_queue_paused" in server.ask("GET", "/metrics").body


def test_a_poll_that_waits_at_a_guest_outlives_the_owner(tmp_path: Path) -> None:
    with script(tmp_path) as process, serve(tmp_path) as server, ThreadPoolExecutor() as threads:
        server.must("queues.create", name="q")
        parked = threads.submit(server.must, "queue.lease", queue="q", wait="1m")
        server.until_parked("q")
        end(process, "kill")
        server.must("queue.produce", queue="q", items=[{"text": "a"}])
        assert [item["text"] for item in parked.result()["items"]] == ["a"]


def test_a_script_uses_the_servers_directory_and_no_token_is_asked_of_it(tmp_path: Path) -> None:
    token(tmp_path, "viewer")
    with serve(tmp_path) as server:
        assert server.call("queues.list").status == 401
        with millpond.open(tmp_path) as pond:
            pond.create_queue("q")
            pond.produce("q", ["a"])
            [item] = pond.lease("q")
            assert owner_of(tmp_path) == server.process.pid
            server.process.kill()
            assert [result.ok for result in pond.complete([item])] == [True]


def test_a_guest_guards_its_own_door(tmp_path: Path) -> None:
    """It cannot read a lease token, so a caller of some queues must name the queue; tokens are checked as ever."""
    with script(tmp_path), serve(tmp_path) as server:
        server.must("queues.create", name="team/q")
        server.must("queues.create", name="other/q")
        server.must("queue.produce", queue="team/q", items=[{"text": "a"}])
        secret = token(tmp_path, "consumer", "team/*")
        until(lambda: server.call("queues.list").status == 401, "the token to be seen")
        server.token = secret
        [item] = server.must("queue.lease", queue="team/q")["items"]
        assert server.call("queue.lease", queue="other/q").status == 403
        assert server.call("queue.complete", leases=[item["lease"]]).status == 403
        assert server.must("queue.complete", queue="team/q", leases=[item["lease"]])["results"][0]["ok"]


def test_a_guest_is_ready_while_its_owner_answers(tmp_path: Path) -> None:
    with script(tmp_path) as process, serve(tmp_path) as server:
        assert server.ask("GET", "/ready").value["checks"]["owner"] == {"status": "ok"}
        process.send_signal(signal.SIGSTOP)
        until(lambda: server.ask("GET", "/ready").status == 503, "/ready to turn red")
        assert server.ask("GET", "/ready").value["checks"]["owner"]["status"] == "failed"
        assert server.ask("GET", "/health").status == 200  # a restart of the guest would not help
        process.send_signal(signal.SIGCONT)
        until(lambda: server.ask("GET", "/ready").status == 200, "/ready to turn green")
        end(process, "kill")
        until(lambda: "disk" in server.ask("GET", "/ready").value["checks"], "the engine to be here")


def test_a_server_whose_directory_was_removed_says_so(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with serve(path) as first:
        shutil.rmtree(path)
        ready = first.ask("GET", "/ready")
        assert (ready.status, ready.value["checks"]["directory"]) == (
            503,
            {"status": "failed", "detail": "the data directory was removed or replaced; stop this server"},
        )
        with serve(path) as second:
            assert owner_of(path) == second.process.pid
            assert first.ask("GET", "/ready").status == 503
            assert second.ask("GET", "/ready").status == 200
            first.process.terminate()
            assert first.process.ended() == 0
            with millpond.open(path) as pond:
                pond.create_queue("q")
            assert [queue["name"] for queue in second.must("queues.list")["queues"]] == ["q"]


def test_two_servers_share_a_directory_and_the_second_inherits(tmp_path: Path) -> None:
    with serve(tmp_path) as first, serve(tmp_path) as second:
        first.must("queues.create", name="q")
        ids = {one["id"] for server in (first, second) for one in _produce(server, 50)}
        assert len(ids) == 100
        first.process.kill()
        ids |= {one["id"] for one in _produce(second, 50)}
        assert owner_of(tmp_path) == second.process.pid
        with serve(tmp_path) as third:
            items = third.must("queue.lease", queue="q", batch=200)["items"]
            assert {item["id"] for item in items} == ids
            second.process.kill()
            results = third.must("queue.complete", queue="q", leases=[item["lease"] for item in items])["results"]
            assert all(result["ok"] for result in results)
            assert owner_of(tmp_path) == third.process.pid


def _produce(server: Server, count: int) -> list[dict[str, str]]:
    items: list[dict[str, str]] = server.must("queue.produce", queue="q", items=[{"text": "x"}] * count)["items"]
    return items


def test_a_client_that_leaves_a_guest_frees_its_place_at_the_owner(tmp_path: Path) -> None:
    with serve(tmp_path) as owner, serve(tmp_path) as guest:
        owner.must("queues.create", name="q")
        with guest.connect() as sock:
            sock.sendall(
                b"POST /v1/queue.lease HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b'Content-Length: 29\r\n\r\n{"queue": "q", "wait": "10m"}'
            )
            owner.until_parked("q")
        owner.until_parked("q", 0)
        owner.must("queue.produce", queue="q", items=[{"text": "a"}])
        assert owner.must("queue.stats", queue="q")["counts"]["ready"] == 1
