"""Connections of other kinds: TLS, streams, forks, and clients that are closed while they wait."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from millpond import AsyncClient, Client
from millpond.errors import BadReply, Closed, InvalidRequest, NotFound, Unavailable
from tests.client.scripted import cut, raw, scripted, silent
from tests.client.served import Served, serve

Make = Callable[..., Any]


# ---- TLS --------------------------------------------------------------------------------------------------


class Certificates:
    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca, self.mine = folder / "ca.pem", folder / "mine.pem"
        authority.cert_pem.write_to_path(self.ca)
        authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(self.mine)
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(self.server)
        authority.configure_trust(self.server)
        self.server.verify_mode = ssl.CERT_OPTIONAL


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def guarded(certificates: Certificates) -> Iterator[str]:
    with serve(tls=certificates.server) as served:
        yield f"https://localhost:{served.port}"


def test_tls_with_an_authority_and_a_certificate_of_our_own(
    make: Make, guarded: str, certificates: Certificates
) -> None:
    with make(guarded, ca=certificates.ca, cert=certificates.mine) as client:
        for _ in range(3):
            assert client.list_queues().queues == []


def test_a_server_that_is_not_trusted_is_not_talked_to(make: Make, guarded: str) -> None:
    with make(guarded) as client, pytest.raises(BadReply, match="ca="):
        client.list_queues()


def test_certificates_that_cannot_be_read_are_refused(make: Make, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="ca= and cert="):
        make("https://localhost", ca=tmp_path / "none.pem")


# ---- streams ----------------------------------------------------------------------------------------------


def test_a_subscription_brings_items_as_they_come(server: Served, queue: str) -> None:
    with Client(server.url) as client:
        client.produce(queue, [b"1", b"2"])
        seen = []
        for item in client.subscribe(queue, prefetch=1):
            with item:
                seen.append(item.payload)
                item.complete()
            if item.payload == b"2":
                client.produce(queue, [b"3"])
            if len(seen) == 3:
                break
        assert seen == [b"1", b"2", b"3"]


def test_a_subscription_on_the_event_loop(server: Served, queue: str) -> None:
    async def main() -> list[bytes]:
        seen = []
        async with AsyncClient(server.url) as client:
            await client.produce(queue, [b"1", b"2"])
            async for item in client.subscribe(queue, prefetch=1):
                async with item:
                    seen.append(item.payload)
                    await item.complete()
                if len(seen) == 2:
                    break
            await client.produce(queue, [b"3"])
            async with client.subscribe(queue) as items:
                await items.__anext__()
        return seen

    assert asyncio.run(main()) == [b"1", b"2"]
    server.until_count(queue, "ready", 1)  # the unfinished one is back as soon as the stream is closed


def test_a_subscription_to_no_queue_fails(server: Served) -> None:
    async def main() -> None:
        async with AsyncClient(server.url) as client:
            await client.subscribe("nowhere").__anext__()

    with Client(server.url) as client, pytest.raises(NotFound):
        next(iter(client.subscribe("nowhere")))
    with pytest.raises(NotFound):
        asyncio.run(main())


HEAD = b"HTTP/1.1 200 X\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
LINE = (
    b'{"id":"%b","lease":"t","correlation_id":"c","attempts":1,"deliveries":1,"fencing_token":1,'
    b'"lease_deadline":"2026-01-01T00:00:00Z","created_at":"2026-01-01T00:00:00Z","text":"x"}\n'
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


BREAKS = [
    raw(HEAD + chunk(b"{}\n" + LINE % b"1") + b"0\r\n\r\n"),  # ended by the server
    cut(HEAD + chunk(LINE % b"2") + chunk(LINE[:20])),  # in the middle of a line
    cut(HEAD + chunk(b'{"error":{"code":"unavailable","message":"m","details":{}}}\n')),
    cut(b"HTTP/1.1 50"),
    cut(HEAD + chunk(LINE % b"3")),
]


def test_a_broken_subscription_is_opened_again() -> None:
    with scripted(*BREAKS) as server, Client(server.url) as client:
        items = client.subscribe("q")
        assert [next(items).id for _ in range(3)] == ["1", "2", "3"]


def test_a_broken_subscription_is_opened_again_on_the_event_loop() -> None:
    async def main(url: str) -> list[str]:
        async with AsyncClient(url) as client, client.subscribe("q") as items:
            return [(await items.__anext__()).id for _ in range(3)]

    with scripted(*BREAKS) as server:
        assert asyncio.run(main(server.url)) == ["1", "2", "3"]


# ---- closing and forking ----------------------------------------------------------------------------------


def test_close_ends_calls_that_wait() -> None:
    caught: list[BaseException] = []
    with scripted(silent) as server:
        client = Client(server.url)

        def poll() -> None:
            try:
                client.lease("q", wait="10m")
            except Unavailable as error:
                caught.append(error)

        thread = threading.Thread(target=poll)
        thread.start()
        assert server.came.acquire(timeout=10)
        client.close()
        client.close()
        thread.join(10)
    assert isinstance(caught[0], Closed)
    with pytest.raises(Closed):
        client.stats("q")


def test_close_ends_tasks_that_wait() -> None:
    async def main(url: str, came: threading.Semaphore) -> None:
        client = AsyncClient(url)
        task = asyncio.create_task(client.lease("q", wait="10m"))
        assert await asyncio.to_thread(came.acquire, timeout=10)
        await client.close()
        await client.close()
        with pytest.raises(Closed):
            await task
        with pytest.raises(Closed):
            await client.stats("q")

    with scripted(silent) as server:
        asyncio.run(main(server.url, server.came))


def test_a_cancelled_call_leaves_no_connection_behind() -> None:
    async def main(url: str, came: threading.Semaphore) -> None:
        async with AsyncClient(url, connections=1) as client:
            for _ in range(2):  # the one place is free again
                task = asyncio.create_task(client.lease("q", wait="10m"))
                assert await asyncio.to_thread(came.acquire, timeout=10)
                task.cancel()
                await asyncio.wait({task})

    with scripted(silent, silent) as server:
        asyncio.run(main(server.url, server.came))


def test_more_calls_than_connections_wait_for_their_turn(server: Served, queue: str) -> None:
    with Client(server.url, connections=2) as client:
        threads = [threading.Thread(target=client.stats, args=(queue,)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(client._core.pool._idle) <= 2


def test_a_forked_child_opens_connections_of_its_own(server: Served, queue: str) -> None:
    with Client(server.url) as client:
        client.produce(queue, [b"parent"])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with client:
                    client.produce(queue, [b"child"])
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        client.produce(queue, [b"parent again"])
        assert client.stats(queue).counts["ready"] == 3
