"""TLS is tried at the start, and mutual TLS really demands a certificate."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from millpond.config.certificates import tls_context
from millpond.config.settings import Tls
from millpond.errors import InvalidRequest

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def certify(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """Self-signed, and so its own authority."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    subject = [
        "-subj",
        f"/CN={name}",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run([*command, *subject, *(more or ("-nodes",))], check=True, capture_output=True, timeout=60)
    return cert, key


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """A handshake and a byte in memory; the protocol that they agreed on."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return ends[1].version()


def test_without_files_there_is_no_tls() -> None:
    assert tls_context(Tls()) is None


def test_mutual_tls_lets_in_only_those_with_a_certificate(tmp_path: Path) -> None:
    cert, key = certify(tmp_path, "server")
    own, own_key = certify(tmp_path, "client")
    server = tls_context(Tls(cert=cert, key=key, client_ca=own))
    assert server is not None
    client = ssl.create_default_context(cafile=cert)
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shake(server, client)
    client.load_cert_chain(own, own_key)
    assert shake(server, client) == "TLSv1.3"


def test_plain_tls_needs_no_certificate_of_the_caller(tmp_path: Path) -> None:
    cert, key = certify(tmp_path, "server")
    server = tls_context(Tls(cert=cert, key=key))
    assert server is not None
    assert shake(server, ssl.create_default_context(cafile=cert)) == "TLSv1.3"


def test_files_that_do_not_work_are_told(tmp_path: Path) -> None:
    cert, key = certify(tmp_path, "server")
    _, other = certify(tmp_path, "other")
    _, locked = certify(tmp_path, "locked", "-passout", "pass:hidden")
    junk = tmp_path / "junk.pem"
    junk.write_text("no PEM at all")
    for tls, word in [
        (Tls(cert=cert, key=other), "key values mismatch"),
        (Tls(cert=junk, key=key), "no start line|do not work"),
        (Tls(cert=locked.with_suffix(".pem"), key=locked), "the key has a password"),
        (Tls(cert=cert, key=key, client_ca=junk), "tls.client_ca .* does not work"),
        (Tls(cert=tmp_path / "gone", key=key), "no such file"),
    ]:
        with pytest.raises(InvalidRequest, match=word):
            tls_context(tls)
