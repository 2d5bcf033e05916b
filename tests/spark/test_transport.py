"""The connector's calls: what is tried again and for how long, what is not, and what the caller is told."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import trustme

from millpond.spark.sink import ipc_stream
from millpond.spark.transport import ARROW_TYPE, NoAnswer, Refused, Secret, Transport
from tests.spark.server import Pond, pond_in

Answer = tuple[int, dict[str, str], bytes] | None
"""Status, headers and body; None: the connection is cut."""


def refusal(status: int, code: str, **headers: str) -> Answer:
    return status, headers, json.dumps({"error": {"code": code, "message": "no; never mind"}}).encode()


GOOD: Answer = (200, {}, b'{"well": 1}')


class Scripted(ThreadingHTTPServer):
    """Gives these answers in turn, and the last one for ever: what a real server does once a year."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, dict(self.headers), body))
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            self.close_connection = True
            return
        status, headers, reply = answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(reply)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def scripted(*answers: Answer) -> Iterator[Scripted]:
    server = Scripted(list(answers))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def to(url: str, **more: Any) -> Transport:
    return Transport(url, **{"timeout_s": 5.0, "retry_s": 5.0, **more})


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(None, id="a cut connection"),
        pytest.param((200, {"Content-Length": "100", "Connection": "close"}, b"half"), id="half a reply"),
        pytest.param(refusal(503, "unavailable"), id="503"),
        pytest.param(refusal(503, "outcome_unknown"), id="an unknown outcome"),
        pytest.param(refusal(429, "too_many_requests", Retry_After="0"), id="429"),
        pytest.param(refusal(507, "disk_full"), id="a full disk"),
        pytest.param((502, {}, b"no!"), id="a proxy's 502"),
    ],
)
def test_a_fault_that_passes_is_waited_out(fault: Answer) -> None:
    with scripted(fault, fault, GOOD) as server, to(server.url) as transport:
        assert transport.call("queues.info", name="q") == {"well": 1}
        assert len(server.asked) == 3
        assert len({body for _, _, body in server.asked}) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid"),
        (401, "unauthorized"),
        (403, "forbidden"),
        (404, "not_found"),
        (409, "fenced"),
        (500, "internal"),
    ],
)
def test_the_servers_no_is_told_at_once(status: int, code: str) -> None:
    with scripted(refusal(status, code)) as server, to(server.url) as transport:
        with pytest.raises(Refused) as caught:
            transport.call("queue.claim")
        assert len(server.asked) == 1
    assert (caught.value.code, caught.value.status, str(caught.value)) == (code, status, f"no; never mind ({code})")


def test_a_server_that_stays_away_is_given_up_in_time() -> None:
    with scripted(GOOD) as server:
        url = server.url
    with to(url, retry_s=0.2) as transport, pytest.raises(NoAnswer) as caught:
        transport.call("queue.claim")
    assert f"no answer from {url} to queue.claim in 0.2 s" in str(caught.value)
    assert "`millpond serve`" in str(caught.value)
    assert "the option retryFor" in str(caught.value)


def test_a_server_that_stays_busy_has_the_last_word() -> None:
    with scripted(refusal(429, "too_many_requests")) as server, to(server.url, retry_s=0.2) as transport:
        with pytest.raises(Refused) as caught:
            transport.call("queue.claim")
        assert len(server.asked) > 1
    assert caught.value.code == "too_many_requests"


@pytest.mark.parametrize("answer", [(200, {}, b"<html>"), (200, {}, b"[1]"), (404, {}, b"<html>")])
def test_a_server_that_is_not_millponds_is_told_from_one_that_is(answer: Answer) -> None:
    with scripted(answer) as server, to(server.url) as transport:
        with pytest.raises(Refused, match="is it a millpond server of this version"):
            transport.call("queue.claim")
        with pytest.raises(Refused, match="is it a millpond server of this version"):
            transport.page("claim.read")


def test_what_is_not_given_is_not_sent() -> None:
    with scripted(GOOD) as server, to(f"{server.url}/behind/a/proxy", token=Secret("abc")) as transport:
        transport.call("queue.claim", queue="q", max_bytes=None)
        [(path, headers, body)] = server.asked
    assert (path, json.loads(body)) == ("/behind/a/proxy/v1/queue.claim", {"queue": "q"})
    assert headers["Authorization"] == "Bearer abc"


def test_names_in_an_address_are_quoted() -> None:
    batch = pa.RecordBatch.from_pydict({"payload": ["a"]})
    with scripted(GOOD) as server, to(server.url) as transport:
        transport.send("queue.stage", ipc_stream([batch]), queue="a/b", txn="t:1&x")
        [(path, headers, body)] = server.asked
    assert path == "/v1/queue.stage?queue=a%2Fb&txn=t%3A1%26x"
    assert headers["Content-Type"] == ARROW_TYPE
    with pa.ipc.open_stream(body) as stream:
        assert stream.read_all().to_pylist() == [{"payload": "a"}]


def test_a_transport_travels_without_its_connection() -> None:
    with scripted(GOOD) as server, to(server.url, token=Secret("abc")) as transport:
        transport.call("queues.info", name="q")
        with pickle.loads(pickle.dumps(transport)) as other:
            assert other.call("queues.info", name="q") == {"well": 1}
        assert {headers["Authorization"] for _, headers, _ in server.asked} == {"Bearer abc"}


# ---- against a real server ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pond]:
    with pond_in(tmp_path_factory.mktemp("pond")) as served:
        yield served


def test_pages_come_as_arrow(pond: Pond) -> None:
    queue = pond.queue()
    pond.fill(queue, 5)
    with to(pond.url) as transport:
        first, after = transport.page("items.list", queue=queue, limit=3)
        assert after is not None
        second, end = transport.page("items.list", queue=queue, limit=3, after=after)
    payloads = [pa.Table.from_batches(page).column("payload").to_pylist() for page in (first, second)]
    assert (payloads, end) == ([[b"n0", b"n1", b"n2"], [b"n3", b"n4"]], None)


def test_an_arrow_call_is_refused_in_words(pond: Pond) -> None:
    with to(pond.url) as transport, pytest.raises(Refused, match="no queue 'nosuch'"):
        transport.page("items.list", queue="nosuch")


def test_a_server_with_a_certificate_of_its_own_is_trusted_by_its_authority(tmp_path: Path) -> None:
    ours, others = trustme.CA(), trustme.CA()
    issued = ours.issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o600)
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    flags = ["--tls-cert", f"{tmp_path}/cert.pem", "--tls-key", f"{tmp_path}/key.pem"]
    with pond_in(tmp_path / "data", *flags) as served:
        url = f"https://{served.server.address}"
        with to(url, ca=ours.cert_pem.bytes().decode()) as transport:
            assert transport.call("queues.list") == {"queues": []}
        with to(url, ca=others.cert_pem.bytes().decode()) as transport, pytest.raises(NoAnswer) as caught:
            transport.call("queues.list")
    assert "is not trusted" in str(caught.value)
    assert "the option caFile" in str(caught.value)
